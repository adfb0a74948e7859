"""`xdeepserve monitor`: keep the list of expert server processes and tell clients, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from typing import TYPE_CHECKING

from xdeepserve.cli.options import Parser
from xdeepserve.errors import InputError

if TYPE_CHECKING:
    from xdeepserve.remote.children import MonitorTask


def add_options(parser: Parser) -> None:
    """Add the options: where to listen, and when a server counts as lost."""
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, default=7300, help="default 7300; 0 picks a free one")
    parser.add_argument(
        "--heartbeat-ms", type=float, default=500.0, metavar="MS", help="between two of a server; default 500"
    )
    parser.add_argument(
        "--lost-heartbeats", type=int, default=10, metavar="N", help="missed, and it is lost; default 10"
    )
    parser.add_argument("--of-parent", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Listen for servers and clients, and print what happens."""
    import msgspec

    from xdeepserve.remote.children import MonitorTask
    from xdeepserve.remote.expert_process import end_with_parent
    from xdeepserve.remote.servers_outside import given_token

    if args.of_parent:
        task = msgspec.json.decode(sys.stdin.buffer.readline(), type=MonitorTask)
        end_with_parent()
    else:
        is_beat = 0 < args.heartbeat_ms < math.inf
        if not 0 <= args.port <= 65535 or not is_beat or args.lost_heartbeats < 1:
            raise InputError("--port is 0 to 65535, --heartbeat-ms more than 0, --lost-heartbeats 1 or more")
        beat_s = args.heartbeat_ms / 1e3
        task = MonitorTask(given_token("shm", args.host), args.host, args.port, beat_s, args.lost_heartbeats)
    asyncio.run(_serve(task))
    return 0


async def _serve(task: MonitorTask) -> None:
    from xdeepserve.errors import XDeepServeError
    from xdeepserve.remote.handshake import joined
    from xdeepserve.remote.monitor_service import MonitorService

    def tell(text: str) -> None:
        if not task.is_quiet:
            print(text, flush=True)

    service = MonitorService(task.token, task.beat_s, task.lost_beats, tell)
    try:
        port = await service.start(task.host, task.port)
    except OSError as error:
        raise XDeepServeError(f"cannot listen on {task.host}:{task.port}: {error.strerror}") from None
    print(f"xdeepserve monitor: listening on {joined(task.host, port)}", flush=True)
    ends = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    await ends.wait()
    await service.close()
