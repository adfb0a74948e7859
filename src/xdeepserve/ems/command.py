"""`xdeepserve ems`: show the content of a memory pool's directory, verify or clear it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xdeepserve.cli.options import Parser


def add_options(parser: Parser) -> None:
    """Add the options: the action and the pool's directory."""
    parser.add_argument(
        "action",
        choices=("inspect", "verify", "clear"),
        help="list values by volume and namespace; read all and compare them with their digests (exit 1 if "
        "one was damaged); or delete them",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="ems.path of a deployment that has ended")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Inspect, verify or clear the pool; return 1 if `verify` has found damage."""
    from xdeepserve.ems import directory

    look = {"inspect": directory.inspect, "verify": directory.verify, "clear": directory.clear}[args.action]
    reports = look(args.directory)
    num_bad = sum(report.num_bad for report in reports)
    if args.json:
        volumes = [report.as_dict() for report in reports]
        print(json.dumps({"path": str(args.directory), "sound": not num_bad, "volumes": volumes}))
    else:
        for report in reports:
            print(report)
        done = {"inspect": "", "verify": f": {'sound' if not num_bad else 'damaged'}", "clear": ": deleted"}
        values, nbytes = sum(each.num_values for each in reports), sum(each.nbytes for each in reports)
        print(f"{len(reports)} volumes, {values:,} values of {nbytes:,} bytes{done[args.action]}")
    return 1 if num_bad else 0
