"""`xdeepserve bench heatmap`: TEs with prefill and decode apart against TEs that do both (DeepServe 5.3).

DeepSeek-R1 runs on CloudMatrix384 dies, time only at the grain of a step: on a TE of 64 dies that does both,
with chunked prefill, and on a TE of the same 64 dies in halves. All requests of a run have the lengths of a
square. Arrivals are Poisson, the same for both. The mean time to the last token is compared. `--map FILE`
writes the map that `replay --heat` reads. The paper's axes are not in its text: lengths and rates are ours.
Rows `stable up to` say how much depends on the highest rate. Rows `online` compare both TEs under chats, as
DeepServe's Figure 4 does under a trace of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.platform.cluster import Cluster, ClusterTE, PricedKind, fleet_tes, priced_kinds
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.traces import TracedRequest

HARDWARE = "64 dies of a CloudMatrix384, deepseek-r1"
PROMPTS = (256, 1024, 2048, 4096, 8192)
OUTPUTS = (32, 128, 256, 512, 1024)
RATES = (2.0, 10.0, 20.0)  # requests per second
SLOWER = ((0.5, 1.0, 2.0), (1.0, 2.0, 5.0), (2.0, 5.0, 10.0))  # rates below those of the map
NUM_REQUESTS = 200
PAIR = (ClusterTE(dies=64, mtp=0), ClusterTE(dies=64, mtp=0, apart=True))
WAYS = ("both", "apart")
ONLINE = MadeTraffic(turns=5, prompt=4000, output=200, pause=10, requests=400, seed=1)
ONLINE_RATES = (1.0, 2.0, 4.0, 8.0)  # requests per second, if all turns of a chat came at once
SLO_NS = 50_000_000  # of TPOT


def all_rows(map: Path | None = None) -> Iterator[Row]:
    """Yield the share of stable squares, the gain of each square, and both TEs under chats; write the map to
    the file `map`."""
    found = here()
    if map is not None:
        map.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    yield from squares(found)
    for rates in SLOWER:
        share = 100 * measured(kinds(), rates).stable
        yield Row(f"heatmap/stable up to {rates[-1]:g}", share, "%", "predicted")
    yield from online()


def squares(found: HeatMap) -> Iterator[Row]:
    """Yield the share of stable squares, and the gain of each square."""
    note = "of the paper's maps over 80 % (5.3.2), their axes unknown"
    yield Row("heatmap/stable", 100 * found.stable, "%", "predicted", note)
    for rate, rows in zip(found.rates, found.gains, strict=True):
        for prompt, row in zip(found.prompts, rows, strict=True):
            for output, gain in zip(found.outputs, row, strict=True):
                name = f"heatmap/rate={rate:g}/prompt={prompt}/output={output}"
                yield Row(name, 100 * gain, "%", "predicted", "above 0: apart is faster")


@functools.cache
def kinds() -> list[PricedKind]:
    """Price both kinds of TEs, once."""
    return priced_kinds(Cluster(PAIR), block=512)


@functools.cache
def here() -> HeatMap:
    """Measure the heat map of both kinds of TEs, once."""
    return measured(kinds())


def online() -> Iterator[Row]:
    """Yield, by rate of chats, each TE's mean TPOT, and how many requests a second keep 50 ms (DeepServe 4.5,
    Figure 4)."""
    for rate in ONLINE_RATES:
        seconds = ONLINE.requests / rate
        work = made(msgspec.structs.replace(ONLINE, seconds=seconds))
        for way, te in zip(WAYS, fleet_tes(Cluster(PAIR), kinds()), strict=True):
            served = Fleet([te]).run(work)
            took = [each.tpot_ns for each in served if each.tpot_ns is not None]
            span_s = (max(each.last_ns for each in served) - work[0].at_ns) / 1e9
            at = f"heatmap/online/rate={rate:g}/{way}"
            yield Row(f"{at}/tpot", float(np.mean(took)) / 1e6, "ms", "predicted")
            within = sum(ns <= SLO_NS for ns in took) / span_s
            yield Row(f"{at}/within", within, "1/s", "predicted", "requests with 50 ms a token at most")


def measured(kinds: list[PricedKind], rates: Sequence[float] = RATES) -> HeatMap:
    """Measure the map for two kinds of TEs with prices: a TE that does both, and a TE in halves."""
    both, apart = fleet_tes(Cluster(PAIR), kinds)
    gains = []
    for rate in rates:
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
    return HeatMap(HARDWARE, PROMPTS, OUTPUTS, tuple(rates), tuple(gains))


def requests(rate: float, prompt: int, output: int) -> list[TracedRequest]:
    """Make requests of equal lengths that share no prefix."""
    rng = np.random.default_rng([prompt, output])
    at = np.cumsum(rng.exponential(1e9 / rate, NUM_REQUESTS)).astype(np.int64).tolist()
    return [TracedRequest(ns, prompt, output, ()) for ns in at]
