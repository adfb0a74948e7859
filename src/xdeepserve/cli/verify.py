"""`xdeepserve verify`: compute and print the bit-exactness matrix."""

from __future__ import annotations

import argparse
import contextlib
import json

from xdeepserve.cli.options import Parser
from xdeepserve.progress import working


def add_options(parser: Parser) -> None:
    """Add the options: the model, and the deployments to check."""
    parser.add_argument("--model", default="tiny", metavar="M", help="as for generate; default tiny")
    parser.add_argument(
        "--deployments",
        nargs="+",
        default=["all"],
        metavar="D",
        help="deployments to check, with spaces or commas between them; default all",
    )
    parser.add_argument("--precision", choices=("int8", "fp32"), help="of these rows alone; default both")
    parser.add_argument("--quick", action="store_true", help="one row for each deployment, the plainest")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--structured",
        dest="subject",
        action="store_const",
        const="structured",
        default="plain",
        help="instead, answers that are JSON of a schema (structured output)",
    )
    other.add_argument(
        "--int8-combine",
        dest="subject",
        action="store_const",
        const="int8-combine",
        help="instead, experts' outputs are INT8 on their way back (combine=int8)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run and print the matrix; return 1 if any row differs, or has not shown its mechanism at work.

    Returns 130 after an interrupt from the keyboard, with the rows so far.
    """
    import msgspec

    from xdeepserve.model.presets import resolve_model
    from xdeepserve.verify import matrix
    from xdeepserve.verify.matrix import left_out

    given = [name for each in args.deployments for name in each.split(",") if name]
    names = None if given == ["all"] else given
    checkpoint = resolve_model(args.model)
    left = left_out(checkpoint.config, args.subject)
    without = [each for each in left if not names or each.deployment in names]
    rows: list[matrix.MatrixRow] = []
    is_whole = False
    with contextlib.suppress(KeyboardInterrupt), working("verify") as status:

        def report(row: matrix.MatrixRow, done: int, total: int) -> None:
            rows.append(row)
            status.row(f"{done}/{total} {row}")

        def begins(case: str, done: int, total: int) -> None:
            status.detail = f"{done}/{total} done, now {case}"

        rows = matrix.verify(
            checkpoint, names, report, args.subject, begins, precision=args.precision, is_quick=args.quick
        )
        is_whole = True
    is_exact = is_whole and all(row.holds for row in rows)
    if args.json:
        result = {
            "model": args.model,
            "bit_exact": is_exact if is_whole else None,
            "rows": msgspec.to_builtins(rows),
            "left_out": msgspec.to_builtins(without),
        }
        print(json.dumps(result))
    else:
        matrix.print_matrix(args.model, rows, without, is_whole)
    return 130 if not is_whole else 0 if is_exact else 1
