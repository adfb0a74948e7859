"""What commands share: a parser whose errors are one line, options, checks, notes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xdeepserve.errors import InputError, meant

if TYPE_CHECKING:
    from xdeepserve.hw.faults import Fault
    from xdeepserve.model.checkpoint import Checkpoint
    from xdeepserve.model.tokenizer import Tokenizer


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line. `lists_settings`: its help ends with what --set changes."""

    lists_settings = False

    def format_help(self) -> str:
        """The help text; what --set changes is looked up only when it is asked for."""
        if self.lists_settings:
            from xdeepserve.engine.deploy.settings import help_text

            self.epilog = "settings (--set key=value, any number of times):\n" + help_text()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choice that is most like one that there is not."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += meant(value, map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def numbers(text: str) -> list[int]:
    """'32,64' -> [32, 64]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 32,64") from None


def add_deployment(parser: Parser, *, takes_configs: bool = True) -> None:
    """Options that say which model runs, and on what: --model, --deployment, --precision, --set.

    `takes_configs`: the command has a use for a model without weights.
    """
    configs = "deepseek-r1 (a configuration without weights, for what only takes time), "
    parser.add_argument(
        "--model",
        default="tiny",
        metavar="M",
        help=f"a preset (tiny, tiny-random, tiny-r1), {configs if takes_configs else ''}or a Hugging Face "
        "checkpoint directory; default tiny",
    )
    parser.add_argument(
        "--deployment",
        default="monolithic",
        metavar="D",
        help="monolithic, colocated, pd, moe-attention, transformerless, eaas, superpod, or a .toml file; "
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


def add_mtp(parser: Parser) -> None:
    """--mtp, short for the setting of that name; see `overrides_of`."""
    parser.add_argument(
        "--mtp", type=int, metavar="K", help="drafts per step from the MTP layers; same tokens"
    )


def add_faults(parser: Parser) -> None:
    """--faults, a plan of what breaks; see `hw.faults`."""
    parser.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help="break dies, links and more as this plan (TOML) says: xdeepserve docs faults",
    )


def faults_of(args: argparse.Namespace) -> tuple[Fault, ...]:
    """What --faults plans. Raises InputError."""
    from xdeepserve.hw.faults import read_faults

    return () if args.faults is None else read_faults(args.faults)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """What --set and --mtp change."""
    mtp = getattr(args, "mtp", None)
    return [*args.overrides, *([] if mtp is None else [f"mtp={mtp}"])]


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work is done. Raises InputError."""
    target = path if path.exists() else path.parent
    if path.is_dir():
        why = "it is a folder"
    elif not target.exists():
        why = f"there is no folder {target}"
    elif not os.access(target, os.W_OK):
        why = f"{target} may not be written to"
    else:
        return
    raise InputError(f"{option} {path}: cannot be written: {why}")


def note(command: str, text: str) -> None:
    """Something to know that is no error, in a line on stderr."""
    print(f"xdeepserve {command}: note: {text}", file=sys.stderr, flush=True)


def note_settings(args: argparse.Namespace) -> None:
    """Say which of the given settings have no effect in this deployment."""
    from xdeepserve.engine.deploy.no_effect import without_effect
    from xdeepserve.engine.deploy.resolve import resolve

    overrides = overrides_of(args)
    for key, reason in without_effect(resolve(args.deployment, overrides), overrides):
        note(args.command, f"{key} has no effect here: {reason}")


def note_tokenizer(args: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    """Say what clients cannot ask of a model that has no tokenizer, or no chat template."""
    if tokenizer is None:
        note(
            args.command, f"{args.model} has no tokenizer.json: it takes token ids alone, at /v1/completions"
        )
    elif not tokenizer.has_chat_template:
        note(args.command, f"{args.model} has no chat template: it completes texts, and cannot chat")


def note_rounding(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Say so if weights in floating point are about to be rounded to INT8."""
    stored = checkpoint.config.quantization
    is_int8 = stored is not None and stored.kind == "int8"
    if args.precision == "int8" and not is_int8 and Path(args.model).is_dir():
        note(
            args.command,
            f"{args.model} is not in INT8: its weights are rounded as they are loaded "
            "(--precision fp32 keeps them; xdeepserve quantize loses less)",
        )
