"""The gain of EPLB at full size (xDeepServe 4.5, Figure 11).

The paper publishes two numbers of the spread of tokens over a layer's experts. A power law of the experts'
ranks has one parameter, which the first number fixes: the hottest expert has 30 times the mean. The second
number follows. Then `engine/balance/eplb.py` chooses and places replicas, in one slot on each of 288 dies
(7.1), and a layer of decode takes the time of its hottest die. The batch is not published; it is that of 7.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.bench.papers.paper_rows import EP288
from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.papers.superpod import BATCH_288
from xdeepserve.bench.report import Row
from xdeepserve.comm.cost import OPS, CommCost
from xdeepserve.engine.balance.eplb import hottest_die, place, select
from xdeepserve.engine.ways.routing import generator
from xdeepserve.hw.spec import Param
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import EP, LayerCost, Load, PrefillCost
from xdeepserve.step.stage import Counts

HOTTEST, CONTEXT = 30.0, 1024  # times the mean; positions (XDS Figure 11)
EXPONENT = Param(0.877, "", "fitted: XDS Figure 11a, the hottest expert of 256 has 30 times the mean")
TOKENS = 1_000_000  # that experts are counted by


def loads(num_experts: int, hottest: float) -> npt.NDArray[np.float64]:
    """Compute expert loads [experts] of mean 1: powers of the rank, with the first `hottest` times the
    mean."""
    low, high = 0.0, 8.0
    ranks = np.arange(1, num_experts + 1, dtype=np.float64)
    for _ in range(100):
        power = (low + high) / 2
        found = ranks**-power
        found /= found.mean()
        low, high = (power, high) if found[0] < hottest else (low, power)
    return found


def rows() -> list[Row]:
    """Compute the rows: experts above the mean, and the gain of replicas."""
    load = loads(EP288.routed, HOTTEST)
    native, balanced = hottest()
    return [
        Row("xds.eplb.skew", 100 * float(np.mean(load > 1)), "%", "predicted"),
        gain(),
        Row("experts/hottest die/primaries", native, "x", "predicted", "over the mean of dies with experts"),
        Row("experts/hottest die/one slot a die", balanced, "x", "predicted"),
    ]


@functools.cache
def hottest() -> tuple[float, float]:
    """Compute the hottest die's load over the mean, without replicas and with one slot for them on each
    die."""
    load = loads(EP288.routed, HOTTEST)
    return hottest_over_mean(load, 0), hottest_over_mean(load, 1)


def gain(cost: LayerCost | None = None) -> Row:
    """Compute how much less time a layer takes with replicas, in percent."""
    native, balanced = (layer_ns(each, slots, cost) for slots, each in enumerate(hottest()))
    return Row("xds.eplb.gain", 100 * (1 - balanced / native), "%", "predicted")


def hottest_over_mean(load: npt.NDArray[np.float64], slots: int) -> float:
    """Compute the hottest die's load over the mean of dies with routed experts, with `slots` redundant slots
    on each."""
    shared = 1 / (resolve_model(MODEL).config.num_experts_per_tok * EP288.shared)
    return hottest_of(load, EP288.routed, slots, [0.0] * EP288.routed + [shared] * EP288.shared)


def hottest_of(load: npt.NDArray[np.float64], dies: int, slots: int, base: list[float]) -> float:
    """Compute the hottest die's load over the mean of `dies`, among which experts are dealt out in order.
    `base` has the load besides of each die that has redundant slots."""
    counts = np.round(load * TOKENS / len(load)).astype(np.int64)[:, None]
    primary, free = [expert * dies // len(load) for expert in range(len(load))], [slots] * len(base)
    held = place(counts, select(counts, sum(free), len(base)), primary, free, base)
    return hottest_die(counts, primary, held, base) / float(counts.sum() / dies)


def perfect_eplb(cost: PrefillCost | None = None) -> Iterator[Row]:
    """Compute prefill with even loads, as perfect replicas would make them (CM Table 2, Perfect EPLB).

    Its loads are divided by those of the hottest dies, with loads as in xDeepServe's Figure 11a.
    """
    even = msgspec.structs.replace(
        cost or PrefillCost(resolve_model(MODEL).config), evened=hottest_of_prefill()
    )
    yield Row("cm.t2/perfect EPLB", even.throughput(), "tok/s", "predicted")


@functools.cache
def hottest_of_prefill() -> float:
    """Compute the hottest die's load over the mean in prefill, on average over the layers.

    In each layer experts are on dies in another order, and every die has a redundant expert (CM 4.1).
    """
    load, layers = loads(EP288.routed, HOTTEST), range(resolve_model(MODEL).config.num_hidden_layers)
    orders = (generator(layer, 0, 0).permutation(load) for layer in layers)
    return float(np.mean([hottest_of(in_order, EP, 1, [0.0] * EP) for in_order in orders]))


def layer_ns(hottest: float, slots: int = 0, cost: LayerCost | None = None) -> float:
    """Compute a decode layer [ns] if one die receives `hottest` times the mean: at its port, and for its
    experts, of which `slots` are redundant."""
    cost = cost or LayerCost(resolve_model(MODEL).config, comm=CommCost())
    load, c = Load(requests=BATCH_288, rows=2, context=CONTEXT), cost.config
    received = load.requests * load.rows * c.num_experts_per_tok * EP288.total / EP288.routed
    even = cost.spec.barrier_stretch.value  # what ordinary imbalance is billed as
    exchanges = (
        cost.comm.exchange_ns(
            op, EP288.total, load.requests * load.rows, c.num_experts_per_tok + 1, max(even, hottest)
        )
        for op in OPS
    )
    copies = cost.spec.billed_copies(hottest * received, received)
    experts = cost.stage_ns("Experts", Counts(0, copies=copies, touched=1 + slots))
    dies = msgspec.structs.replace(EP288, redundant=slots)
    routing = cost.routing_ns(load.requests * load.rows, dies)
    return cost.stream0_ns(load) + routing + sum(exchanges) + experts
