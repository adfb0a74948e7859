"""The command line. Exit codes: 0 done, 1 a check failed, 2 bad usage or input (one line on stderr).

Each command has a file, here or in the wing that brings it (`wings.COMMANDS`). `add_options` adds the
command's options; `run` does the work and returns the exit code. Slow imports happen only inside `run`, so
that help and error messages appear at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from xdeepserve import __version__, wings
from xdeepserve.cli.options import Parser
from xdeepserve.errors import InputError, XDeepServeError

COMMANDS = {
    "demo": "serve a few prompts on a small virtual pod and prove every bit against the reference",
    "generate": "complete prompts",
    "serve": "run the OpenAI-compatible endpoint",
    "cluster": "run several endpoints as one, and start those again that are lost",
    "expert-server": "run one expert server of a deployment eaas as a process of its own",
    "place": "have Ray place expert servers, and start them again when they end",
    "monitor": "keep the list of expert server processes that are there",
    "verify": "print the bit-exactness matrix; exit 1 on any difference",
    "quantize": "write a checkpoint in INT8 (compressed-tensors, W8A8)",
    "eval": "measure perplexity, agreement and task scores on held-out text, per recipe",
    "bench": "measure or model, and show what the papers publish beside it",
    "chaos": "break dies by the hundred: the same bits or a named error, and nothing hangs or is lost",
    "sweep": "what a decode step costs for combinations of settings, batch and context (time only)",
    "replay": "serve a trace of requests: with tokens on a small pod, or time only on hundreds of dies",
    "ems": "look into the directory of a memory pool: what it holds, whether it is sound; or empty it",
    "golden": "write or check golden vectors of the communication protocols",
    "describe": "show what would be built: dies, roles, memory, experts",
    "plan": "find the deployment with most throughput under a latency bound",
    "learn": "a course of exercises: write a function of the pod yourself; pass mark: every bit equal",
    "settings": "list what --set changes: key, meaning, type, default",
    "docs": "list the documents, or print one",
}


def build_parser() -> Parser:
    """Build the parser of all commands and their options. Parsed arguments contain the command's `run` and
    `parser`."""
    if sys.platform == "win32":
        raise SystemExit(
            "xdeepserve does not run on Windows itself: use the Windows Subsystem for Linux (WSL)"
        )
    parser = Parser(
        prog="xdeepserve",
        description="The CloudMatrix384 serving stack on a laptop, bit for bit.",
        epilog="Start with: xdeepserve demo",
    )
    parser.add_argument("--version", action="version", version=f"xdeepserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module = wings.command(name)
        module.add_options(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


@contextlib.contextmanager
def _interrupts_said(command: str) -> Iterator[None]:
    """Answer Ctrl-C at once, although the compilation of a kernel cannot be stopped.

    Servers install their own handlers in place of this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(number: int, frame: Any) -> None:
        text = "interrupted: ends with what runs now; a kernel that is being compiled takes up to a minute"
        print(f"xdeepserve {command}: {text}", file=sys.stderr, flush=True)
        raise KeyboardInterrupt(text)  # which has been said

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, the entry point of `xdeepserve`; return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        with _interrupts_said(args.command):
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except InputError as error:
        return _complain(args.command, _by_option(error, args), 2)
    except XDeepServeError as error:
        return _complain(args.command, error, 1)
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:
            print(f"xdeepserve {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(args.command, error, 1)


def _by_option(error: InputError, args: argparse.Namespace) -> InputError:
    """Replace the parameter at the beginning of an error's message by the name of its option."""
    param = getattr(error, "param", None) or ""
    if param in vars(args) and str(error).startswith(f"{param} "):
        return InputError(f"--{param.replace('_', '-')}{str(error).removeprefix(param)}")
    return error


def _complain(command: str, error: Exception, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"xdeepserve {command}: error: {line}", file=sys.stderr)
    return code
