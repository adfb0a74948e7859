"""`xdeepserve bench heatmap`: TEs with prefill and decode apart against TEs that do both (DeepServe 5.3).

DeepSeek-R1 runs on CloudMatrix384 dies, time only at the grain of a step: on a TE of 64 dies that does both,
with chunked prefill, and on a TE of the same 64 dies in halves. All requests of a run have the lengths of a
square. Arrivals are Poisson, the same for both. The mean time to the last token is compared. `--map FILE`
writes the map that `replay --heat` reads. The paper's axes are not in its text: lengths and rates are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.platform.cluster import Cluster, ClusterTE, PricedKind, fleet_tes, priced_kinds
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.traces import TracedRequest

HARDWARE = "64 dies of a CloudMatrix384, deepseek-r1"
PROMPTS = (256, 1024, 2048, 4096, 8192)
OUTPUTS = (32, 128, 256, 512, 1024)
RATES = (2.0, 10.0, 20.0)  # requests per second
NUM_REQUESTS = 200
PAIR = (ClusterTE(dies=64, mtp=0), ClusterTE(dies=64, mtp=0, apart=True))


def all_rows(map: Path | None = None) -> Iterator[Row]:
    """Yield the share of stable squares, and the gain of each square; write the map to the file `map`."""
    found = measured(priced_kinds(Cluster(PAIR), block=512))
    if map is not None:
        map.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    note = "of the paper's maps over 80 % (5.3.2), their axes unknown"
    yield Row("heatmap/stable", 100 * found.stable, "%", "predicted", note)
    for rate, rows in zip(found.rates, found.gains, strict=True):
        for prompt, row in zip(found.prompts, rows, strict=True):
            for output, gain in zip(found.outputs, row, strict=True):
                name = f"heatmap/rate={rate:g}/prompt={prompt}/output={output}"
                yield Row(name, 100 * gain, "%", "predicted", "above 0: apart is faster")


def measured(kinds: list[PricedKind]) -> HeatMap:
    """Measure the map for two kinds of TEs with prices: a TE that does both, and a TE in halves."""
    both, apart = fleet_tes(Cluster(PAIR), kinds)
    gains = []
    for rate in RATES:
        rows = []
        for prompt in PROMPTS:
            row = []
            for output in OUTPUTS:
                work = requests(rate, prompt, output)
                times = [
                    float(np.mean([each.last_ns - each.at_ns for each in Fleet([te]).run(work)]))
                    for te in (both, apart)
                ]
                row.append((times[0] - times[1]) / max(times))
            rows.append(tuple(row))
        gains.append(tuple(rows))
    return HeatMap(HARDWARE, PROMPTS, OUTPUTS, RATES, tuple(gains))


def requests(rate: float, prompt: int, output: int) -> list[TracedRequest]:
    """Make requests of equal lengths that share no prefix."""
    rng = np.random.default_rng([prompt, output])
    at = np.cumsum(rng.exponential(1e9 / rate, NUM_REQUESTS)).astype(np.int64).tolist()
    return [TracedRequest(ns, prompt, output, ()) for ns in at]
