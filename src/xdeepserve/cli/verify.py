"""`xdeepserve verify`: the bit-exactness matrix."""

from __future__ import annotations

import argparse
import json

from xdeepserve.cli.options import Parser
from xdeepserve.cli.status import working


def add_options(parser: Parser) -> None:
    """The model, and which deployments to check."""
    parser.add_argument("--model", default="tiny", metavar="M", help="as for generate; default tiny")
    parser.add_argument(
        "--deployments", default="all", metavar="all|a,b", help="deployments to check; default all"
    )
    parser.add_argument(
        "--structured",
        action="store_true",
        help="instead, answers that are JSON of a schema (structured output)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run and print the matrix; 1 if any row differs, or has not shown what it is there for."""
    import msgspec

    from xdeepserve.model.presets import resolve_model
    from xdeepserve.verify import matrix
    from xdeepserve.verify.selection import left_out

    names = None if args.deployments == "all" else args.deployments.split(",")
    checkpoint = resolve_model(args.model)
    left = left_out(checkpoint.config, args.structured)
    without = [each for each in left if not names or each.deployment in names]
    with working("verify") as status:

        def report(row: matrix.MatrixRow, done: int, total: int) -> None:
            status.row(f"{done}/{total} {row}")

        rows = matrix.verify(checkpoint, names, report, args.structured)
    is_exact = all(row.holds for row in rows)
    if args.json:
        result = {
            "model": args.model,
            "bit_exact": is_exact,
            "rows": msgspec.to_builtins(rows),
            "left_out": msgspec.to_builtins(without),
        }
        print(json.dumps(result))
    else:
        matrix.print_matrix(args.model, rows, without)
    return 0 if is_exact else 1
