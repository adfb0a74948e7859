"""`xdeepserve eval`: from the command's arguments to a table."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import msgspec

from xdeepserve.calibration import calibration_sequences
from xdeepserve.corpus import EXAMINED
from xdeepserve.errors import InputError
from xdeepserve.evals.run import Progress, Subject, evaluate
from xdeepserve.evals.table import print_table
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.quant.job import quantize_checkpoint
from xdeepserve.model.quant.method import METHODS
from xdeepserve.model.weights import RECIPES


def run(args: argparse.Namespace, progress: Progress) -> int:
    """Measure `args.model` in each recipe, and what `args.against` and `args.methods` name, in INT8."""
    checkpoint = resolve_model(args.model)
    subjects = []
    for precision in args.precision.split(","):
        if precision not in RECIPES:
            raise InputError(f"unknown precision '{precision}': known are {', '.join(RECIPES)}")
        subjects.append(Subject(precision, checkpoint, precision))
    for directory in args.against:
        subjects.append(Subject(f"int8 {Path(directory).name}", resolve_model(directory), "int8"))
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen_methods(args.methods):
            out = Path(scratch) / name
            quantize_checkpoint(checkpoint, out, METHODS[name], calibration_sequences(checkpoint))
            subjects.append(Subject(f"int8 {name}", open_checkpoint(out), "int8"))
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


def chosen_methods(text: str | None) -> list[str]:
    """Names of methods, in the order of `METHODS`. Raises InputError."""
    names = [] if not text else list(METHODS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise InputError(f"unknown method '{unknown[0]}': known are {', '.join(METHODS)}")
    return names
