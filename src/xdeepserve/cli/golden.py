"""`xdeepserve golden`: write golden vectors of the communication protocols, or check a directory of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from xdeepserve.cli.options import Parser


def add_options(parser: Parser) -> None:
    """Add the options: the action, the directory, and the cases."""
    parser.add_argument("action", choices=("write", "check"), help="record to DIR, or compare what is there")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--case", action="append", dest="cases", metavar="NAME", help="only this; repeatable")


def run(args: argparse.Namespace) -> int:
    """Write or check golden vectors; return 1 if a recorded case differs."""
    from xdeepserve.golden import vectors

    if args.action == "write":
        names = vectors.write(args.directory, args.cases)
        print(f"{len(names)} cases in {args.directory}: {', '.join(names)}")
        return 0
    names, differences = vectors.check(args.directory, args.cases)
    different = {difference.case for difference in differences}
    for name in names:
        if name not in different:
            print(f"{name}: equal")
    for difference in differences:
        print(difference)
    return 1 if differences else 0
