"""`xdeepserve cluster`: run job executors as processes, watched and behind one door, until a signal."""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from xdeepserve.cli.options import Parser
from xdeepserve.errors import InputError

MAX_JES = 64
MAX_STATE = 90  # bytes of a path, of which a Unix socket's has 107, its own name included
JES_OF_A_POD = "scheduler.job_executors"


def add_options(parser: Parser) -> None:
    """Add the options: the number of job executors, their state directory, and the door's address."""
    parser.epilog = (
        "Run it twice on one directory: the second one stands by. What follows -- goes to each serve."
    )
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="as of serve; shared by all")
    parser.add_argument(
        "--jes",
        type=_count,
        default=(2, 2),
        metavar="N|LEAST:MOST",
        help="job executors; with --shared a range, by the requests in flight; default 2",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="the job executors share one pod, a process of its own; default: each has a pod",
    )
    parser.add_argument("--host", default="127.0.0.1", help="of the door; default 127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=8000, help="of the door; default 8000; 0 picks a free one"
    )
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="of xdeepserve serve, for each of them")


def _count(text: str) -> tuple[int, int]:
    """Read the least and the most number of job executors: "3", or "1:4"."""
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected N or LEAST:MOST, found {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Start the job executors, and pass requests on to them."""
    import asyncio

    from xdeepserve.cli import build_parser
    from xdeepserve.cli.serve import made
    from xdeepserve.jobs.cluster_manager import MEMBER, ClusterManager
    from xdeepserve.jobs.door.front_door import serve_door
    from xdeepserve.jobs.job_store import JobStore
    from xdeepserve.jobs.member_table import POD

    least, most = args.jes
    if not 1 <= least <= most <= MAX_JES:
        raise InputError(f"--jes must lie in [1, {MAX_JES}], the least number first, found {least}:{most}")
    if least < most and not args.shared:
        raise InputError(
            f"--jes {least}:{most} needs --shared: each job executor would load a pod of its own"
        )
    own = {"--state", "--port", "--host", "--uds", "--share", "--pod", MEMBER} & {
        each.split("=")[0] for each in args.serve
    }
    if own:
        raise InputError(f"{', '.join(sorted(own))} is the cluster's own, and cannot be given for each serve")
    # What every member would refuse is said now, and not in the log of one that is started again for ever.
    member = build_parser().parse_args(["serve", "--state", str(args.state), *args.serve])
    _, options = made(member, "127.0.0.1", 0)
    store = JobStore(args.state, time.monotonic)

    place = args.state.resolve()
    if args.shared and len(os.fsencode(place)) > MAX_STATE:
        raise InputError(
            f"--state {place}: a path for sockets has {MAX_STATE} bytes at most; use a shorter one"
        )
    shared = ["--share", f"{place}/{POD}.sock"]
    if not any(each.partition("=")[0].strip() == JES_OF_A_POD for each in member.overrides):
        shared += ["--set", f"{JES_OF_A_POD}={most}"]

    def options_of(name: str) -> list[str]:
        """Where a member listens, and where its TEs are."""
        if not args.shared:
            return ["--port", "0"]
        if name == POD:
            return ["--port", "0", *shared]
        return ["--uds", f"{place}/{name}.sock", "--pod", f"{place}/{POD}.sock"]

    def boot(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "xdeepserve", "serve", "--state", str(args.state)]
        with (args.state / f"{name}.log").open("ab") as said:
            # A session of its own: it outlives its manager, and a signal at the terminal is not its own.
            return subprocess.Popen(
                [*command, *options_of(name), MEMBER, name, *args.serve],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    names = [POD] * args.shared + [f"je-{number}" for number in range(least)]
    manager = ClusterManager(store, f"{os.getpid()}-{secrets.token_hex(4)}", names, boot, least < most)
    try:
        asyncio.run(serve_door(store.members, manager, args.host, args.port, options, most))
    finally:
        store.close()
    return 0
