"""`xdeepserve expert-server`: run the process of an expert server until the monitor lets it go."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from xdeepserve.cli.options import Parser, add_deployment, add_mtp, overrides_of
from xdeepserve.errors import InputError

if TYPE_CHECKING:
    from xdeepserve.model.weights import Recipe
    from xdeepserve.remote.children import ServerTask


def add_options(parser: Parser) -> None:
    """Add the options: model, deployment and precision as the clients have them, and seat, name and
    addresses."""
    add_deployment(parser, takes_configs=False)
    add_mtp(parser)
    parser.set_defaults(deployment="eaas")
    parser.add_argument(
        "--monitor", metavar="HOST:PORT", help="where it registers; default experts.monitor, 127.0.0.1:7300"
    )
    parser.add_argument("--seat", type=int, metavar="N", help="which server; default the first free one")
    parser.add_argument("--name", help="among the monitor's servers; default the computer's and a number")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="for clients, with experts.transport=tcp; default 127.0.0.1:0, a free port",
    )
    parser.add_argument("--of-parent", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Load a seat's experts and serve."""
    import msgspec

    from xdeepserve.loop import run as run_loop
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.remote.children import ServerTask
    from xdeepserve.remote.expert_process import ExpertProcess, end_with_parent

    if args.of_parent:
        task = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerTask)
        end_with_parent()
    else:
        task = task_of(args)
    recipe: Recipe = "fp32" if task.precision == "fp32" else "int8"

    def tell(text: str) -> None:
        if not args.of_parent:
            print(f"xdeepserve expert-server: {text}", flush=True)

    run_loop(ExpertProcess(task, resolve_model(task.model), recipe, tell).run())
    return 0


def check_comes_there(option: str, host: str) -> None:
    """Raise InputError for an address like 0.0.0.0: other processes are told to connect to it, so it must be
    a single address."""
    if host in ("0.0.0.0", "::", "[::]"):
        raise InputError(f"{option} {host}: others are told to come there, so it has to be one address")


def task_of(args: argparse.Namespace) -> ServerTask:
    """Make a server's task from the command line's options."""
    import msgspec

    from xdeepserve.engine.deploy.deployment import ExpertConfig
    from xdeepserve.engine.deploy.expert_services import HOST_PORT
    from xdeepserve.engine.deploy.resolve import resolve
    from xdeepserve.remote.children import ServerTask
    from xdeepserve.remote.servers_outside import given_token

    deployment = resolve(args.deployment, overrides_of(args))
    experts = deployment.experts or ExpertConfig()
    for option, value in (("--monitor", args.monitor), ("--listen", args.listen)):
        if value is not None and not HOST_PORT.fullmatch(value):
            raise InputError(f"{option} must be HOST:PORT, found {value!r}")
    if args.listen is not None and experts.transport != "tcp":
        raise InputError("--listen is for experts.transport=tcp")
    if args.listen is not None:
        check_comes_there("--listen", args.listen.rpartition(":")[0])
    address = f"unix:xdeepserve-{os.getpid()}"
    if experts.transport == "tcp":
        address = f"tcp:{args.listen or '127.0.0.1:0'}"
    return ServerTask(
        args.model,
        args.precision,
        msgspec.to_builtins(deployment),
        args.monitor or experts.monitor or "127.0.0.1:7300",
        address,
        given_token(experts.transport),
        args.seat,
        args.name,
    )
