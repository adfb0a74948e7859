"""DeepServe's published values: asynchronous scheduling, PD-aware scheduling, starts of TEs, pre-loading.

Most of the paper's results are curves whose axes its text does not give. What stands here are its numbers,
most of them bounds in words, and what Figures 10 and 11 say about loading. Where a bound depends on something
that is not published, rows say for which values it would hold.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import msgspec

from xdeepserve.bench.papers import heatmap, scale, schedule
from xdeepserve.bench.papers.paper_rows import EP288
from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.papers.superpod import CONTEXT, gap_ms
from xdeepserve.bench.report import Row
from xdeepserve.comm.cost import CommCost
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.cluster import Cluster, priced_kinds, scale_up_of
from xdeepserve.platform.scale_up import ScaleUp, ScaleWays
from xdeepserve.prices.formula import LayerCost, Load

TPOT_MS = 50.0  # DS 4.1: the bound of Figure 3
HOST_MS = (5.0, 10.0, 20.0)
DRAM_NBYTES = 1.5e12  # of a server, DS 6.2
BF16 = 2  # bytes of a parameter
PER_TP = 35 * 10**9  # bytes of weights of each die of a TE, whatever its size (DS 6.2, Figure 10)
RANKS = (1, 2, 4)
AT_ONCE = 23  # TEs that come at once within a SuperPod, beside the one that serves; the paper has up to 32


def rows() -> Iterator[Row]:
    """Yield all that is not about routes."""
    yield from asynchronous()
    yield from starts()
    yield from preloading()


def asynchronous(cost: LayerCost | None = None) -> Iterator[Row]:
    """Compute how much more is decoded within a TPOT of 50 ms if the host plans while dies compute (DS 4.1).

    The host's time between two steps is taken off the bound, and so is the batch that it leaves room for.
    xDeepServe publishes 2 ms; what DeepServe's first version took is not published.
    """
    cost = cost or LayerCost(resolve_model(MODEL).config, comm=CommCost())
    yield Row("ds.v1v2", _gain(cost, gap_ms(cost.spec)), "x", "predicted")
    for host in HOST_MS:
        yield Row(f"deepserve/asynchronous/host={host:g}", _gain(cost, host), "x", "predicted")
    twice = next(host for host in range(1, int(TPOT_MS)) if _gain(cost, host) > 2)
    yield Row("deepserve/asynchronous/host for 2", twice, "ms", "predicted")


def _gain(cost: LayerCost, host_ms: float) -> float:
    return _batch(cost, TPOT_MS) / max(1, _batch(cost, TPOT_MS - host_ms))


@functools.cache
def _batch(cost: LayerCost, ms: float) -> int:
    """Return the most requests of a die whose decode iteration takes so long at most."""
    few, many = 0, 1024
    while many - few > 1:
        middle = (few + many) // 2
        load = Load(requests=middle, rows=1, context=CONTEXT)
        few, many = (middle, many) if cost.iteration_ns(load, EP288) <= ms * 1e6 else (few, middle)
    return few


def starts(up: ScaleUp | None = None) -> Iterator[Row]:
    """Compute how long TEs take to come or to come again, and what Figures 10 and 11 say of their loading."""
    up = up or _up()
    yield Row("ds.scale64", up.seconds(scale.COUNTS[-1] - 1, 1), "s", "predicted")
    for name, preloaded in (("DRAM", True), ("storage", False)):
        again = msgspec.structs.replace(up, ways=ScaleWays(False, preloaded, fork=False))
        yield Row(f"ds.recovery/{name}", again.seconds(1, 0) / 60, "min", "predicted")
    for ranks in RANKS:
        weights = up.weights._replace(die=PER_TP, model=ranks * PER_TP)
        larger = msgspec.structs.replace(up, weights=weights)
        local = msgspec.structs.replace(larger, ways=ScaleWays(True, True, fork=False))
        missed = msgspec.structs.replace(larger, ways=ScaleWays(True, False, fork=False))
        for way, seconds in (
            ("HCCS", larger.fork_s(1)),
            ("RoCE", larger.fork_s(1, 1)),
            ("DRAM hit", _loading(local)),
            ("DRAM miss", _loading(missed)),
        ):
            yield Row(f"deepserve/loading/ranks={ranks}/{way}", seconds, "s", "predicted")
    for count in (1, AT_ONCE):
        yield Row(f"deepserve/fork/tes={count}", up.fork_s(count), "s", "predicted")
    alone, during, _ = (row.value for row in scale.of_source(up))
    yield Row("deepserve/fork/tpot of its source", during / alone, "x", "predicted")


def _loading(up: ScaleUp) -> float:
    return next(step.seconds for step in up.steps(1, 1) if step.name == "TE-Load")


@functools.cache
def _up() -> ScaleUp:
    cluster = Cluster((scale.TE,))
    (kind,) = priced_kinds(cluster, block=512)
    return scale_up_of(resolve_model(cluster.model), scale.TE, kind.price, ScaleWays())


def preloading() -> Iterator[Row]:
    """Compute how many models in BF16 a server's DRAM has room for (DS 6.2)."""
    for billions in (70, 7):
        count = DRAM_NBYTES // (billions * 1e9 * BF16)
        yield Row(f"ds.dram/models_{billions}B", count, "", "predicted")


def routes() -> Iterator[Row]:
    """Compute the heat map's stable squares, and PD-aware scheduling against round robin: by rate, the
    geometric mean over traces of the quotient of mean latencies (DS 5.3.2, Figure 7). Takes minutes."""
    stable = 100 * heatmap.here().stable
    yield Row("ds.heat.stable/share", stable, "%", "predicted")
    yield Row("ds.heat.stable/uncertain", 100 - stable, "%", "predicted")
    gains = {row.name: row.value for row in schedule.claims()}
    for rate in schedule.RATES:
        found = [gains[schedule.claim(name, rate)] for name in schedule.TRACES]
        yield Row(f"ds.pdaware.rps/rate={rate:g}", statistics.geometric_mean(found), "x", "predicted")
