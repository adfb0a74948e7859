"""`xdeepserve place`: place expert servers by Ray, and keep them running until a signal."""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import TYPE_CHECKING

from xdeepserve.cli.options import Parser, add_deployment, add_mtp, numbers

if TYPE_CHECKING:
    from xdeepserve.remote.children import ServerTask
    from xdeepserve.remote.placed import Placed

LOOK_S = 0.5


def add_options(parser: Parser) -> None:
    """Add the options: the servers' task, and where Ray places them."""
    add_deployment(parser, takes_configs=False)
    add_mtp(parser)
    parser.set_defaults(deployment="eaas", seat=None, name=None, listen=None)
    option = parser.add_argument
    option(
        "--ray",
        default="local",
        metavar="HOST:PORT",
        help="the cluster, auto for one that runs here; default local, one that is started on the loopback",
    )
    option("--seats", type=numbers, metavar="N,N", help="which servers; default all of the deployment")
    option("--host", default="127.0.0.1", help="where the monitor listens; default 127.0.0.1")
    option("--port", type=int, default=7300, help="where the monitor listens; default 7300; 0: a free one")
    option("--monitor", metavar="HOST:PORT", help="one that runs already; on a signal the servers then leave")


def run(args: argparse.Namespace) -> int:
    """Start a monitor, have servers placed, and print what becomes of them."""
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.remote.expert_server_command import check_comes_there, task_of
    from xdeepserve.remote.on_ray import LOCAL, connected
    from xdeepserve.remote.placed import Placed, seats_of
    from xdeepserve.remote.servers_outside import given_token

    task = task_of(args)
    given_token("shm", args.host)
    check_comes_there("--host", args.host)
    seats, num_cpus = seats_of(task, resolve_model(args.model), args.seats)
    with connected(args.ray, num_cpus) as ray:
        placed = Placed(ray, task, "127.0.0.1" if args.ray == LOCAL else None, _tell)
        try:
            asyncio.run(_keep(args, task, placed, seats))
        finally:
            placed.close()
    return 0


async def _keep(args: argparse.Namespace, task: ServerTask, placed: Placed, seats: list[int]) -> None:
    """Place the servers and watch them until a signal."""
    from xdeepserve.errors import XDeepServeError
    from xdeepserve.remote.children import MonitorTask
    from xdeepserve.remote.handshake import joined
    from xdeepserve.remote.monitor_service import MonitorService

    ends = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    service = None
    if args.monitor is None:
        plan = MonitorTask(task.token)
        service = MonitorService(plan.token, plan.beat_s, plan.lost_beats, _tell)
        try:
            port = await service.start(args.host, args.port)
        except (OSError, OverflowError) as error:
            raise XDeepServeError(f"cannot listen on {args.host}:{args.port}: {error}") from None
        task.monitor = joined(args.host, port)
        _tell(f"the monitor listens on {task.monitor}")
    placed.place(seats)
    waiting = asyncio.ensure_future(ends.wait())
    while not ends.is_set():
        await asyncio.to_thread(placed.look)
        await asyncio.wait([waiting], timeout=LOOK_S)
    if service is None:
        await asyncio.to_thread(placed.leave)
    else:
        await service.close()


def _tell(text: str) -> None:
    print(f"xdeepserve place: {text}", flush=True)
