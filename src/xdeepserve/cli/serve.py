"""`xdeepserve serve`: the OpenAI-compatible endpoint, until a signal."""

from __future__ import annotations

import argparse

from xdeepserve.cli.options import Parser, add_deployment, note_rounding, note_settings
from xdeepserve.cli.status import working


def add_options(parser: Parser) -> None:
    """Model and deployment, and where to listen."""
    add_deployment(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 picks a free one")
    parser.add_argument(
        "--admin",
        action="store_true",
        help="let clients list, add and remove task executors: /admin/tes (no password protects it)",
    )


def run(args: argparse.Namespace) -> int:
    """Load the model and answer requests until SIGINT or SIGTERM."""
    from xdeepserve.api.server import bind, run_server
    from xdeepserve.llm import build_engine
    from xdeepserve.model.presets import resolve_model

    bind(args.host, args.port).close()  # a port in use is said before a large model is loaded
    engine = build_engine(args.model, args.deployment, args.precision, overrides=args.overrides, warm_up=True)
    note_settings(args)
    note_rounding(args, resolve_model(args.model))
    with working(f"Loading {args.model}") as status:
        engine.load(status.progress)
    run_server(lambda: engine, args.host, args.port, args.admin)
    return 0
