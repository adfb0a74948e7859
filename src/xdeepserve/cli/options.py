"""What commands share: a parser whose errors are one line, options, checks, a status line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from xdeepserve.errors import InputError

if TYPE_CHECKING:
    from xdeepserve.engine.build import Progress

COMPILES = "the first run also compiles the kernels"


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line. `lists_settings`: its help ends with what --set changes."""

    lists_settings = False

    def format_help(self) -> str:
        """The help text; what --set changes is looked up only when it is asked for."""
        if self.lists_settings:
            from xdeepserve.engine.deploy.settings import help_text

            self.epilog = "settings (--set key=value, any number of times):\n" + help_text()
        return super().format_help()

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
    parser.lists_settings = True


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work is done. Raises InputError."""
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK) or path.is_dir():
        raise InputError(f"{option} {path}: cannot be written")


@contextlib.contextmanager
def working(text: str, note: str = COMPILES) -> Iterator[Progress]:
    """A status line on the terminal's stderr while work goes on; silent where stderr is no terminal.

    `note` says what to expect.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{text} ({note}) ...") as status:
        yield lambda done, total: status.update(f"{text}: {100 * done // max(total, 1)} % ...")
