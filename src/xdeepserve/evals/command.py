"""`xdeepserve eval`: from the command's arguments to a table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from xdeepserve.corpus import EXAMINED
from xdeepserve.errors import InputError
from xdeepserve.evals.run import Progress, Subject, evaluate
from xdeepserve.evals.table import print_table
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.weights import RECIPES


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Measure `args.model` in each recipe, and each checkpoint of `args.against` in INT8."""
    checkpoint = resolve_model(args.model)
    subjects = []
    for precision in args.precision.split(","):
        if precision not in RECIPES:
            raise InputError(f"unknown precision '{precision}': known are {', '.join(RECIPES)}")
        subjects.append(Subject(precision, checkpoint, precision))
    for directory in args.against:
        subjects.append(Subject(f"int8 {Path(directory).name}", resolve_model(directory), "int8"))
    results = evaluate(
        subjects,
        domains=args.domains.split(",") if args.domains else EXAMINED,
        num_samples=args.samples,
        deployment=args.deployment,
        progress=progress,
    )
    if args.json:
        print(
            json.dumps(
                {"model": args.model, "samples": args.samples, "results": msgspec.to_builtins(results)}
            )
        )
    else:
        print_table(args.model, results)
    return 0
