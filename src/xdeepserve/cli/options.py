"""What commands share: a parser whose errors are one line, the options of models and deployments, checks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from xdeepserve.cli.settings_help import SETTINGS
from xdeepserve.errors import InputError


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_deployment(parser: Parser) -> None:
    """Options that say which model runs, and on what: --model, --deployment, --precision, --set."""
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="M",
        help="a preset (tiny, tiny-random, tiny-r1) or a Hugging Face checkpoint directory; default tiny",
    )
    parser.add_argument(
        "--deployment",
        default="monolithic",
        metavar="D",
        help="monolithic, colocated, pd, moe-attention, transformerless, superpod, or a .toml file; "
        "default monolithic",
    )
    parser.add_argument("--precision", default="int8", choices=("int8", "fp32"), help="default int8")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the deployment",
    )
    parser.epilog = SETTINGS


def add_json(parser: Parser, text: str = "print one JSON object") -> None:
    """The option --json: one JSON object on stdout, and nothing else there."""
    parser.add_argument("--json", action="store_true", help=text)


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work is done. Raises InputError."""
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK) or path.is_dir():
        raise InputError(f"{option} {path}: cannot be written")
