"""Common parts of commands: a parser with one-line errors, options, checks, notes."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xdeepserve.errors import InputError, meant

if TYPE_CHECKING:
    from xdeepserve.hw.faults import Fault
    from xdeepserve.model.checkpoint import Checkpoint
    from xdeepserve.model.tokenizer import Tokenizer


class Help(argparse.Action):
    """Argument action for a command's help, or for the settings with `settings` or a KEY; ends with 0."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not values:
            parser.print_help()
        else:
            from xdeepserve.engine.deploy.settings import help_text

            try:
                print(help_text(None if values == "settings" else values))
            except InputError as error:
                parser.error(f"--help: {error}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argparse parser with usage errors of one line, which says what would work."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, add_help=False)
        self._help = self.add_argument("-h", "--help", action=Help, nargs=0, help="show this, and exit")

    def take_settings(self) -> None:
        """Let `--help settings` list the settings that --set changes, and say so in the command's help."""
        self._help.nargs, self._help.metavar = "?", "settings"
        self._help.help = "show this, or with `settings` or a KEY what --set changes"
        more = f"settings: {self.prog} --help settings, or xdeepserve settings [KEY]"
        self.epilog = f"{self.epilog}\n{more}" if self.epilog else more

    @functools.cached_property
    def pod_options(self) -> argparse._ArgumentGroup:
        """Group of options for model and deployment, shown behind a command's own options."""
        return self.add_argument_group("model and deployment")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options and values. Errors come from the command's own parser, whose help is the one to
        read."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(found, "parser", self).refuse_unknown(unknown)
        return found

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error about the first of some unknown arguments."""
        option, equals, value = unknown[0].partition("=")
        if not option.startswith("-"):
            stray = " ".join(itertools.takewhile(lambda each: not each.startswith("-"), unknown))
            self.error(f"nothing takes '{stray}': a text with spaces goes in quotes")
        known = [name for name, action in self._option_string_actions.items()
                 if name.startswith("--") and action.help != argparse.SUPPRESS]  # fmt: skip
        hint = meant(option, known)
        if self._help.nargs == "?":
            from xdeepserve.engine.deploy.settings import settings

            key = option.lstrip("-").replace("-", "_")
            value = value if equals else next((each for each in unknown[1:2] if each[0] != "-"), "VALUE")
            if key in {each.key for each in settings()}:
                hint = f" (did you mean --set {key}={value}?)"
        self.error(f"unknown option {option}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(each) for each in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            hint = meant(value, names) or f": known are {', '.join(names)}"
            self.error(f"unknown {action.metavar} '{value}'{hint}")
        said = f"must be one of {', '.join(names)}, found '{value}'{meant(value, names)}"
        raise argparse.ArgumentError(action, said)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        what = "a whole number" if action.type is int else "a number" if action.type is float else None
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if what is None:
                raise
            raise argparse.ArgumentError(action, f"must be {what}, found '{arg_string}'") from None

    def error(self, message: str) -> NoReturn:
        for words, ours in WORDS:
            message = re.sub(words, ours, message)
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


# What argparse says, in plain words.
WORDS = (
    (r"^argument ([^ ]*/)?([^:]+): must", r"\2 must"),
    (r"^argument ([^ ]*/)?([^:]+): expected .*argument.*", r"\2 needs a value: \2=..."),
    (r"^argument ([^ ]*/)?([^:]+): not allowed with argument", r"\2 does not go with"),
    (r"^argument ([^ ]*/)?([^:]+): ignored explicit argument", r"\2 takes no value, found"),
    (r"^argument ([^ ]*/)?([^:]+): ", r"\2: "),
    (r"^the following arguments are required: ", "missing: "),
    (r"^ambiguous option: (.*) could match ", r"\1 may mean "),
)


def numbers(text: str) -> list[int]:
    """Parse numbers: '32,64' -> [32, 64]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 32,64") from None


def add_deployment(parser: Parser, *, takes_configs: bool = True) -> None:
    """Add the options for model and deployment: --model, --deployment, --precision, --set.

    `takes_configs`: the command has a use for a model without weights.
    """
    from xdeepserve.engine.deploy.resolve import PRESETS

    configs = "deepseek-r1, deepseek-v3 or a config.json (without weights, for what only takes time), "
    option = parser.pod_options.add_argument
    option(
        "--model",
        default="tiny",
        metavar="M",
        help=f"a preset (tiny, tiny-random, tiny-r1), {configs if takes_configs else ''}or a Hugging Face "
        "checkpoint directory; default tiny",
    )
    option(
        "--deployment",
        default="monolithic",
        metavar="D",
        help=f"{PRESETS[0]} (default), {', '.join(PRESETS[1:])}, or a .toml",
    )
    option("--precision", default="int8", choices=("int8", "fp32"), help="default int8")
    option(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of the deployment",
    )
    parser.take_settings()


def add_mtp(parser: Parser) -> None:
    """Add --mtp, short for the setting of that name; see `overrides_of`."""
    parser.pod_options.add_argument(
        "--mtp", type=int, metavar="K", help="drafts per step from the MTP layers; same tokens"
    )


def add_faults(parser: Parser) -> None:
    """Add --faults, a plan of faults; see `hw.faults`."""
    parser.pod_options.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help="break dies, links and more as this plan (TOML) says: xdeepserve docs faults",
    )


def faults_of(args: argparse.Namespace) -> tuple[Fault, ...]:
    """Read the faults planned by --faults. Raises InputError."""
    from xdeepserve.hw.faults import read_faults

    return () if args.faults is None else read_faults(args.faults)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return the changes of settings by --set and --mtp."""
    mtp = getattr(args, "mtp", None)
    return [*args.overrides, *([] if mtp is None else [f"mtp={mtp}"])]


def check_writable(path: Path, option: str) -> None:
    """Raise InputError for a file that cannot be written, before the work is done."""
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
    """Print a note, not an error, in a line on stderr."""
    print(f"xdeepserve {command}: note: {text}", file=sys.stderr, flush=True)


def note_settings(args: argparse.Namespace) -> None:
    """Print notes on the given settings that have no effect in this deployment."""
    from xdeepserve.engine.deploy.resolve import resolve
    from xdeepserve.engine.deploy.rules import without_effect

    overrides = overrides_of(args)
    for key, reason in without_effect(resolve(args.deployment, overrides), overrides):
        note(args.command, f"{key} has no effect here: {reason}")


def note_priced(args: argparse.Namespace) -> None:
    """Print a note if a run that only takes time was asked for another precision than INT8."""
    if args.precision != "int8":
        note(args.command, f"--precision {args.precision} has no effect here: time alone is priced in INT8")


def note_tokenizer(args: argparse.Namespace, tokenizer: Tokenizer | None) -> None:
    """Print a note on requests that a model without a tokenizer, or without a chat template, cannot
    answer."""
    if tokenizer is None:
        note(
            args.command, f"{args.model} has no tokenizer.json: it takes token ids alone, at /v1/completions"
        )
    elif not tokenizer.has_chat_template:
        note(args.command, f"{args.model} has no chat template: it completes texts, and cannot chat")


def note_rounding(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Print a note if floating-point weights are about to be rounded to INT8."""
    stored = checkpoint.config.quantization
    is_int8 = stored is not None and stored.kind == "int8"
    if args.precision == "int8" and not is_int8 and Path(args.model).is_dir():
        note(
            args.command,
            f"{args.model} is not in INT8: its weights are rounded as they are loaded "
            "(--precision fp32 keeps them; xdeepserve quantize loses less)",
        )
