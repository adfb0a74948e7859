"""`xdeepserve bench`: measure or model, and show what the papers publish beside it."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from xdeepserve.cli.options import COMPILES, Parser, check_writable, working
from xdeepserve.errors import InputError

OF_A_MODEL = ("decode", "startup", "plan")
COMPILING = ("kernels", "decode", "startup", "superpod_steps")


def add_options(parser: Parser) -> None:
    """The suite, and options that belong to one suite each."""
    option = parser.add_argument
    option(
        "suite",
        choices=("comm", "superpod", "engine", "plan", "kernels", "decode", "startup"),
        help="in virtual time: comm (communication), superpod (DeepSeek-R1 on up to 768 dies), engine "
        "(scheduling, MTP and launching against their baselines), plan (the planner against the papers, "
        "exhaustive search and runs); in wall time on this computer: kernels, "
        "decode, startup",
    )
    option(
        "--model", metavar="M", help="of decode, startup and plan --deployment, as for generate; default tiny"
    )
    option(
        "--deployment",
        metavar="D",
        help="of plan: instead, an iteration of this deployment, predicted and run time-only",
    )
    option("--context", type=int, metavar="N", help="of plan --deployment: positions of each request")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    option("--plot", type=Path, metavar="FILE", help="draw it as well (needs matplotlib)")
    option("--ranks", action="store_true", help="wall time of 32 to 768 ranks instead (needs 4 GB)")
    option(
        "--steps",
        action="store_true",
        help="of superpod: instead, wall time and memory of a decode step of the 61-layer tiny-r1 on 48 to "
        "768 dies, every bit checked (minutes; needs 4 GB)",
    )
    option(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of superpod: write the timeline of an iteration on 768 dies (Perfetto), 16 of each role",
    )


def run(args: argparse.Namespace) -> int:
    """Print the rows of one suite. Raises InputError for options of another one."""
    from xdeepserve.bench import comm
    from xdeepserve.bench.report import print_rows

    _check(args)
    if args.plot is not None:
        comm.pyplot()  # before half a minute of work
    name = "ranks" if args.ranks else "superpod_steps" if args.steps else args.suite
    suite = importlib.import_module(f"xdeepserve.bench.{name}")
    with working(f"bench {name}", COMPILES if name in COMPILING else "less than a minute or two"):
        if args.deployment is not None:
            rows = suite.of_deployment(args.model or "tiny", args.deployment, args.context)
        elif args.suite == "plan":
            rows = suite.all_rows()
        elif args.suite in OF_A_MODEL:
            rows = suite.all_rows(args.model or "tiny")
        else:
            rows = suite.all_rows(args.trace) if name == "superpod" else suite.all_rows()
    if args.plot is not None:
        comm.plot(rows, args.plot)
    if args.json:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}))
    else:
        print_rows(rows)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises InputError where an option does not belong to the suite, or a file cannot be written."""
    if args.suite != "comm" and (args.ranks or args.plot is not None):
        raise InputError(f"--ranks and --plot belong to bench comm, not to bench {args.suite}")
    if args.plot is not None:
        if args.ranks:
            raise InputError("--plot draws virtual time, and --ranks measures wall time: choose one")
        check_writable(args.plot, "--plot")
    if args.model is not None and args.suite not in OF_A_MODEL:
        raise InputError(f"--model belongs to bench decode, startup and plan, not to bench {args.suite}")
    _check_plan(args)
    if args.steps and args.suite != "superpod":
        raise InputError(f"--steps belongs to bench superpod, not to bench {args.suite}")
    if args.trace is not None:
        if args.suite != "superpod" or args.steps:
            raise InputError("--trace belongs to bench superpod without --steps")
        check_writable(args.trace, "--trace")


def _check_plan(args: argparse.Namespace) -> None:
    """Raises InputError where options of bench plan do not fit together."""
    if args.deployment is not None and args.suite != "plan":
        raise InputError(f"--deployment belongs to bench plan, not to bench {args.suite}")
    if args.deployment is None and (args.context is not None or (args.suite == "plan" and args.model)):
        raise InputError("bench plan takes --model and --context with --deployment")
    if args.context is not None and args.context < 1:
        raise InputError(f"--context must be at least 1, found {args.context}")
