"""`xdeepserve bench`: measure or model, and print published values beside the results."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from xdeepserve.cli.options import Parser, check_writable
from xdeepserve.errors import InputError
from xdeepserve.progress import working


class Suite(NamedTuple):
    """A benchmark suite: help text, its module here, and its own options beside those of all suites.

    `all_rows` of the module takes these options by name, but for `plot` and those of INSTEAD.
    """

    text: str
    module: str
    options: tuple[str, ...] = ()


SUITES = {
    "comm": Suite(
        "communication in virtual time: send and receive, dispatch and combine, A2E and E2A",
        "papers.comm",
        ("plot", "ranks"),
    ),
    "superpod": Suite(
        "DeepSeek-R1 on up to 768 dies in virtual time; about two minutes",
        "papers.superpod",
        ("steps", "trace"),
    ),
    "engine": Suite(
        "scheduling, MTP, launching and load balancing against what they replaced, in virtual time; minutes",
        "papers.engine",
    ),
    "plan": Suite(
        "the planner beside the papers, exhaustive search and timing-only runs; minutes",
        "papers.plan",
        ("model", "deployment", "context", "plot"),
    ),
    "m2n": Suite(
        "tokens to experts by network cards, M2N and calls in groups, in virtual time; a minute",
        "papers.m2n",
        ("plot",),
    ),
    "ems": Suite(
        "the memory pool: loading models and reusing prefixes in virtual time; hit rates on a trace",
        "papers.ems",
        ("plot", "requests", "format"),
    ),
    "heatmap": Suite(
        "TEs with prefill and decode apart against TEs that do both, by lengths and load, in virtual time",
        "papers.heatmap",
        ("map",),
    ),
    "schedule": Suite(
        "which TE gets a request: DeepServe's policies, others', on three traces at three loads; minutes",
        "papers.schedule",
    ),
    "scale": Suite(
        "from 1 TE to 64: each step, with and without pre-warming, DRAM and NPU-fork, in virtual time",
        "papers.scale",
        ("plot",),
    ),
    "pdc": Suite(
        "TEs that prefill and TEs that decode: every fixed ratio, and one that follows the workload",
        "papers.pdc",
    ),
    "recovery": Suite(
        "what faults cost by stage of recovery: tokens per second around each, in virtual time",
        "papers.recovery",
        ("plot",),
    ),
    "eaas": Suite(
        "experts as services: R1 on 32 to 64 dies, and what a lost server costs, in virtual time and real",
        "papers.eaas",
    ),
    "papers": Suite(
        "every value that the papers publish: ours beside it, or why there is none; minutes",
        "papers.every_value",
        ("paper", "plot", "trends", "fits", "ablations", "constants"),
    ),
    "kernels": Suite(
        "wall time of each kernel beside this computer's limits, NumPy and PyTorch; minutes", "wall.kernels"
    ),
    "decode": Suite(
        "tokens per second on this computer; --peers: beside llama.cpp, vLLM and transformers",
        "wall.decode",
        ("model", "peers", "peer"),
    ),
    "prefill": Suite(
        "tokens of prompts per second, of 128 to 2,047 tokens each; --peers as for decode; minutes",
        "wall.prefill",
        ("model", "peers", "peer"),
    ),
    "startup": Suite(
        "wall time until the first token, cold and warm; a minute or two", "wall.startup", ("model",)
    ),
}
# Options that ask for other rows than the suite's, and for tables: the modules that have them.
ROWS_INSTEAD = {"ranks": "wall.ranks", "steps": "wall.superpod_steps"}
TABLES_INSTEAD = {name: f"papers.{name}" for name in ("trends", "fits", "ablations", "constants")}
INSTEAD = ROWS_INSTEAD | TABLES_INSTEAD
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "M", "help": "as for generate; default tiny"},
    "peers": {
        "type": Path,
        "metavar": "DIR",
        "help": "run other engines on the same checkpoint (--model DIRECTORY), too: those in virtual "
        "environments DIR/*, see xdeepserve docs costs",
    },
    "peer": {
        "action": "append",
        "metavar": "NAME",
        "help": "of these engines only this one, such as vllm; again for another",
    },
    "deployment": {
        "metavar": "D",
        "help": "instead, an iteration of this deployment (of --model), predicted and run time-only",
    },
    "context": {"type": int, "metavar": "N", "help": "with --deployment: positions of each request"},
    "requests": {
        "type": Path,
        "metavar": "FILE",
        "help": "hit rates of this trace, a JSON object a line, instead of a generated one",
    },
    "format": {"help": "whose format it has, as for replay; by default it is found"},
    "map": {"type": Path, "metavar": "FILE", "help": "write the map, for replay --heat FILE"},
    "paper": {"metavar": "P", "help": "of one paper: xds, cm, ds, eaas or ms"},
    "trends": {
        "action": "store_true",
        "help": "instead, what the papers say in words (what is faster than what), and whether it holds",
    },
    "fits": {
        "action": "store_true",
        "help": "instead, the numbers that were fitted, and each table as it would be without itself",
    },
    "ablations": {
        "action": "store_true",
        "help": "instead, which rows each mechanism of the timing model changes, by switching it off",
    },
    "constants": {
        "action": "store_true",
        "help": "instead, on which constants each row of a formula depends, and by how much; with --full of "
        "simulated pods, too (up to an hour on two cores; stderr says how long)",
    },
    "plot": {"type": Path, "metavar": "FILE", "help": "draw it as well (needs matplotlib)"},
    "ranks": {
        "action": "store_true",
        "help": "instead, wall time of exchanges of 32 to 768 ranks (needs 4 GB)",
    },
    "steps": {
        "action": "store_true",
        "help": "instead, wall time and memory of a decode step of the 61-layer tiny-r1 on 48 to 768 dies, "
        "every bit checked (minutes; needs 4 GB)",
    },
    "trace": {
        "type": Path,
        "metavar": "FILE",
        "help": "write the timeline of an iteration on 768 dies (Perfetto), 16 of each role",
    },
}


def add_options(parser: Parser) -> None:
    """Add the suites, each with its own help; a suite refuses the options of others by name."""
    suites = parser.add_subparsers(dest="suite", metavar="suite", required=True, parser_class=Parser)
    for name, suite in SUITES.items():
        sub = suites.add_parser(
            name, help=suite.text, description=suite.text[0].upper() + suite.text[1:] + "."
        )
        for option, says in OPTIONS.items():
            hidden = {} if option in suite.options else {"help": argparse.SUPPRESS}
            sub.add_argument(f"--{option}", **(says | hidden))
        sub.set_defaults(parser=sub)
        sub.add_argument("--full", action="store_true", help="print every row, not only a summary")
        sub.add_argument("--json", action="store_true", help="print one JSON object with every row")


def run(args: argparse.Namespace) -> int:
    """Print the rows of a suite. Raises InputError for options of another suite."""
    if args.suite == "kernels":
        from xdeepserve.jobs.task_process import ONE_CORE

        os.environ.update(ONE_CORE)  # which NumPy's BLAS reads once, when it is loaded
    from xdeepserve.bench.report import Row, pyplot, tell_rows

    _check(args)
    if args.plot is not None:
        pyplot()  # before half a minute of work
    instead = next((option for option in INSTEAD if getattr(args, option)), None)
    place = SUITES[args.suite].module if instead is None else INSTEAD[instead]
    module, given = importlib.import_module(f"xdeepserve.bench.{place}"), _given(args)
    if instead in TABLES_INSTEAD:
        module.tell(args.json, **given, **({"is_full": args.full} if instead == "constants" else {}))
        return 0
    name = args.suite if instead is None else place.rpartition(".")[2]
    rows: list[Row] = []
    with working(f"bench {name}") as status:
        for row in module.all_rows(**given):
            rows.append(row)
            status.row(f"{row.name} {row.value:.2f} {row.unit}")
    if args.plot is not None:
        module.plot(rows, args.plot)
    if args.suite == "papers":
        module.tell_rows(rows, args.paper, args.full, args.json)
    else:
        tell_rows(rows, args.full, args.json)
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options on which the suite's rows depend, by name, as far as they were given."""
    names = (option for option in SUITES[args.suite].options if option not in (*INSTEAD, "plot"))
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _check(args: argparse.Namespace) -> None:
    """Raise InputError if an option does not belong to the suite, or a file cannot be written."""
    for option in OPTIONS:
        owners = [f"bench {name}" for name, suite in SUITES.items() if option in suite.options]
        if getattr(args, option) not in (None, False) and option not in SUITES[args.suite].options:
            raise InputError(f"--{option} belongs to {' and '.join(owners)}, not to bench {args.suite}")
    if args.plot is not None:
        if args.ranks:
            raise InputError("--plot draws virtual time, and --ranks measures wall time: choose one")
        check_writable(args.plot, "--plot")
    if args.map is not None:
        check_writable(args.map, "--map")
    if args.trends and (args.plot is not None or args.full):
        raise InputError("--trends has no numbers: neither --plot nor --full goes with it")
    tables = [table for table in ("fits", "ablations", "constants") if getattr(args, table)]
    if len(tables) > 1:
        raise InputError(f"--{tables[0]} and --{tables[1]} are two tables: choose one")
    for table in tables:
        for other in ("trends", "plot", "full", "paper"):
            allowed = ("full", "paper") if table == "constants" else ()
            if getattr(args, other) not in (None, False) and other not in allowed:
                raise InputError(f"--{table} is of all papers: --{other} does not go with it")
    _check_plan(args)
    if args.trace is not None:
        if args.steps:
            raise InputError("--trace belongs to bench superpod without --steps")
        check_writable(args.trace, "--trace")


def _check_plan(args: argparse.Namespace) -> None:
    """Raise InputError if options of bench plan do not fit together."""
    if args.deployment is None and (args.context is not None or (args.suite == "plan" and args.model)):
        raise InputError("bench plan takes --model and --context with --deployment")
    if args.context is not None and args.context < 1:
        raise InputError(f"--context must be at least 1, found {args.context}")
