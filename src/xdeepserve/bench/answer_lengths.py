"""What knowing the length of answers is worth: Algorithm 1 with nothing, a mean, a prediction, the truth.

A predictor learns from the first half of a trace; latencies are of the requests of the second. In the first
all who are told anything are told the mean of its answers, so that the second begins alike for them.
`none` has no heat map: which kind of TE is better cannot be looked up without a length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.platform.fleet import Fleet, Predict
from xdeepserve.platform.fleet_words import FleetTE
from xdeepserve.platform.length_predictor import LengthPredictor, held_out_error, split
from xdeepserve.platform.traces import TracedRequest

PAPER = "DeepServe 5.3.3: 84.9 % of buckets, by a classifier of texts"


def rows(
    at: str, work: Sequence[TracedRequest], tes: Sequence[FleetTE], heat: HeatMap, stale_ns: int
) -> Iterator[Row]:
    """The predictor's error, and the mean latency of the held-out requests with each kind of knowledge."""
    learned, held_out = split(work)
    predictor = LengthPredictor(learned)
    mean = float(np.mean([each.output_length for each in learned]))
    begins = held_out[0].at_ns
    error = held_out_error(predictor, learned, held_out)
    yield Row(f"{at}/lengths/error", error.mean_error, "tokens", "predicted", "held out, absolute")
    yield Row(f"{at}/lengths/error of one median", error.mean_error_of_median, "tokens", "predicted")
    yield Row(f"{at}/lengths/bucket", 100 * error.same_bucket, "%", "predicted", PAPER)
    yield Row(f"{at}/lengths/bucket of one median", 100 * error.same_bucket_of_median, "%", "predicted")
    ways: dict[str, tuple[HeatMap | None, Predict]] = {
        "none": (None, lambda each: 0.0),
        "mean": (heat, lambda each: mean),
        "predicted": (heat, lambda each: predictor(each) if each.at_ns >= begins else mean),
        "told": (heat, lambda each: each.output_length if each.at_ns >= begins else mean),
    }
    for way, (known, predict) in ways.items():
        served = Fleet(tes, "deepserve", known, predict, stale_ns).run(work)
        took = [each.last_ns - each.at_ns for each in served if each.at_ns >= begins]
        yield Row(f"{at}/lengths/{way}/latency", float(np.mean(took)) / 1e6, "ms", "predicted")
