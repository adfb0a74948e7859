"""`xdeepserve describe`: what would be built, without building it."""

from __future__ import annotations

import argparse

from xdeepserve.cli.options import Parser, add_deployment


def add_options(parser: Parser) -> None:
    """Model and deployment."""
    add_deployment(parser)


def run(args: argparse.Namespace) -> int:
    """Plan the pod and print its dies, roles, memory and experts."""
    from xdeepserve.engine.description import describe
    from xdeepserve.llm import build_engine

    engine = build_engine(args.model, args.deployment, args.precision, overrides=args.overrides)
    print(describe(engine.plan))
    return 0
