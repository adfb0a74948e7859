"""`xdeepserve quantize`: write a checkpoint in INT8, and report the loss."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdeepserve.cli.options import Parser
from xdeepserve.errors import InputError, meant
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.quant.job import Report


def add_options(parser: Parser) -> None:
    """Add the options: source, destination, method and calibration text."""
    option = parser.add_argument
    option("source", metavar="SRC", help="a preset or a Hugging Face directory: F32, BF16, F16 or FP8")
    option("destination", type=Path, metavar="DST", help="the directory to make; it must not exist")
    option(
        "--method",
        default="smoothquant+gptq",
        metavar="METHOD",
        help="rtn (rounds to the nearest, without calibration), smoothquant, gptq, smoothquant+gptq or "
        "cloudmatrix; default smoothquant+gptq",
    )
    option(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text to calibrate with, paragraph by paragraph; default: the package's own; rtn measures its "
        "errors on it, and without it only those of the weights",
    )
    option("--samples", type=int, default=64, metavar="N", help="calibration texts to begin with; default 64")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Quantise `args.source` into `args.destination`. Raises InputError with one clear line.

    Returns 0, or 130 after an interrupt from the keyboard, whose line says how to go on.
    """
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.model.tokenizer import load_tokenizer
    from xdeepserve.quant.calibration import calibration_sequences
    from xdeepserve.quant.job import quantize_checkpoint
    from xdeepserve.quant.method import METHODS

    if args.method not in METHODS:
        raise InputError(
            f"unknown method '{args.method}': known are {', '.join(METHODS)}{meant(args.method, METHODS)}"
        )
    if args.samples < 1:
        raise InputError(f"--samples must be at least 1, found {args.samples}")
    method, sequences = METHODS[args.method], None
    try:
        with working(f"Quantising {args.source}") as status:
            checkpoint = resolve_model(args.source)
            if method.needs_text or args.calibration is not None:
                sequences = calibration_sequences(checkpoint, args.calibration)

            def progress(what: str, done: int, total: int) -> None:
                status.detail = f"{what}, {done} of {total} layers done"

            report = quantize_checkpoint(
                checkpoint,
                args.destination,
                method,
                sequences,
                num_sequences=args.samples,
                progress=progress,
            )
    except KeyboardInterrupt:
        print(
            f"xdeepserve quantize: interrupted; {args.destination} was not made, "
            "and the same command goes on behind the last finished layer",
            file=sys.stderr,
        )
        return 130
    if args.json:
        print(json.dumps({"source": args.source, "destination": str(args.destination), **summary(report)}))
    else:
        is_text = load_tokenizer(checkpoint.directory) is not None
        _print_summary(report, args.samples, is_text, checkpoint.config.num_nextn_predict_layers)
        print(f"written to {args.destination}; what it lost, and how to serve it:")
        print(f"  xdeepserve eval --model {args.source} --against {args.destination}")
        print(f"  xdeepserve serve --model {args.destination}")
    return 0


def summary(report: Report) -> dict[str, Any]:
    """Return the totals of a report, without single layers, for JSON."""
    layers = [one for reports in report.layers.values() for one in reports]

    def mean(cause: str) -> float | None:
        found = [error for one in layers if (error := getattr(one, cause)) is not None]
        return sum(found) / len(layers) if found else None

    return {
        "method": report.method,
        "calibration": {"texts": report.num_sequences, "tokens": report.num_tokens},
        "rarest_expert": report.rarest_expert,
        "starved_experts": report.num_starved,
        "linears": len(layers),
        "kept_float": sum(one.is_kept_float for one in layers),
        "int8_attention": report.int8_attention,
        "mean_relative_error": {
            cause: mean(cause) for cause in ("weights", "activations", "both", "original")
        },
    }


def _print_summary(report: Report, num_asked: int, is_text: bool, num_mtp: int) -> None:
    from xdeepserve.quant.job import MIN_ROWS

    found = summary(report)
    print(f"{report.method}: {found['linears']} linear layers, {found['kept_float']} of them kept in float")
    if report.int8_attention:
        mtp = f" ({num_mtp} of them MTP's)" if num_mtp else ""
        num_layers = f"{len(report.layers)} layers{mtp}"
        print(f"attention is INT8 throughout in {len(report.int8_attention)} of {num_layers}")
    weights, activations, both, original = found["mean_relative_error"].values()
    if not report.num_sequences:
        print("without calibration, which rounding to the nearest does not need")
        print(f"mean error of weights (relative, squared): {weights:.2e}")
        return
    grown = " (more than asked, for the sake of rare experts)" if report.num_sequences > num_asked else ""
    texts = "texts" if is_text else "sequences of seeded token ids (the model has no tokenizer)"
    print(f"calibrated with {report.num_sequences} {texts}, {report.num_tokens:,} tokens{grown}")
    if report.rarest_expert is not None:
        print(f"the rarest expert saw {report.rarest_expert} tokens; at least {MIN_ROWS} are wanted")
    if report.num_starved:
        print(f"{report.num_starved} experts saw fewer and were quantised as if they saw every token")
    print(
        f"mean error of outputs (relative, squared): {weights:.2e} from weights, "
        f"{activations:.2e} from activations, {both:.2e} from both; "
        f"{original:.2e} with what the layers before have lost"
    )
