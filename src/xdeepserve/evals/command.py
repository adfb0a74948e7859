"""`xdeepserve eval`: perplexity, agreement and task scores of each recipe on held-out text."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from xdeepserve.cli.options import Parser
from xdeepserve.errors import InputError
from xdeepserve.progress import working


def add_options(parser: Parser) -> None:
    """Add the options: the model, checkpoints to compare, and the amount of text."""
    option = parser.add_argument
    option("--model", default="tiny", metavar="M", help="as for generate; default tiny")
    option(
        "--against",
        action="append",
        default=[],
        metavar="DIR",
        help="a quantised checkpoint of the same model to compare, in int8; may be repeated",
    )
    option("--methods", metavar="M,M|all", help="quantise the model by these methods, too, and compare")
    option(
        "--outliers",
        type=int,
        metavar="F",
        help="put outliers into the model that are F times as large, a power of two: the same bits in fp32, "
        "harder to quantise",
    )
    option("--precision", default="fp32,int8", metavar="P,P", help="recipes of the model; default fp32,int8")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--domains", metavar="D,D", help="default stories,arithmetic,recall,tools,code")
    text.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="instead, paragraphs of your own text; answers have no score",
    )
    option("--samples", type=int, default=40, metavar="N", help="per domain, or of the text; default 40")
    option("--deployment", default="monolithic", metavar="D", help="default monolithic")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure `args.model` in each recipe, and the checkpoints and methods named by options in INT8."""
    import msgspec

    from xdeepserve.corpus import EXAMINED
    from xdeepserve.evals.run import Subject, evaluate
    from xdeepserve.evals.samples import held_out, of_file
    from xdeepserve.evals.table import print_table
    from xdeepserve.model.checkpoint import open_checkpoint
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.model.weights import RECIPES
    from xdeepserve.quant.calibration import calibration_sequences
    from xdeepserve.quant.job import quantize_checkpoint
    from xdeepserve.quant.method import METHODS
    from xdeepserve.quant.outliers import WithOutliers

    if args.text is not None:
        samples = of_file(args.text, args.samples)
    else:
        samples = held_out(args.domains.split(",") if args.domains else EXAMINED, args.samples)
    checkpoint = resolve_model(args.model)
    if args.outliers is not None:
        checkpoint = WithOutliers(checkpoint, args.outliers)
    subjects = []
    for precision in args.precision.split(","):
        if precision not in RECIPES:
            raise InputError(f"unknown precision '{precision}': known are {', '.join(RECIPES)}")
        subjects.append(Subject(precision, checkpoint, precision))
    for directory in args.against:
        subjects.append(Subject(f"int8 {Path(directory).name}", resolve_model(directory), "int8"))
    with working(f"Evaluating {args.model}") as status, tempfile.TemporaryDirectory() as scratch:
        for name in chosen_methods(args.methods):
            out = Path(scratch) / name
            quantize_checkpoint(checkpoint, out, METHODS[name], calibration_sequences(checkpoint))
            subjects.append(Subject(f"int8 {name}", open_checkpoint(out), "int8"))
        results = evaluate(subjects, samples, deployment=args.deployment, progress=status.progress)
    if args.json:
        found = {"model": args.model, "samples": args.samples, "results": msgspec.to_builtins(results)}
        print(json.dumps(found))
    else:
        print_table(args.model, results)
    return 0


def chosen_methods(text: str | None) -> list[str]:
    """Names of methods, in the order of `METHODS`. Raises InputError."""
    from xdeepserve.quant.method import METHODS

    names = [] if not text else list(METHODS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise InputError(f"unknown method '{unknown[0]}': known are {', '.join(METHODS)}")
    return names
