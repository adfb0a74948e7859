"""`xdeepserve describe`: show the pod that a deployment would have, without building it."""

from __future__ import annotations

import argparse

from xdeepserve.cli.options import Parser, add_deployment, note_priced, note_settings


def add_options(parser: Parser) -> None:
    """Add the options: model and deployment."""
    add_deployment(parser)


def run(args: argparse.Namespace) -> int:
    """Plan the pod and print its dies, roles, memory and experts."""
    from xdeepserve.engine.description import describe
    from xdeepserve.llm import build_engine
    from xdeepserve.model.presets import resolve_model

    checkpoint = resolve_model(args.model)
    engine = build_engine(
        checkpoint,
        args.deployment,
        args.precision,
        overrides=args.overrides,
        timing_only=not checkpoint.has_weights,
    )
    note_settings(args)
    if not checkpoint.has_weights:
        note_priced(args)
    print(describe(engine.plan))
    return 0
