"""The cost of adding TEs: the five steps of DeepServe's Table 2, each with its source.

The paper names steps and remedies, and gives few times: 0.3 s to make tensors, 35 % saved of starting a TE,
64 TEs "within seconds". Loading times follow from bytes and links of the timing model. `StartCosts`, which
are the engine's, mark unpublished numbers as assumed. TEs that load from DRAM are assumed not to slow each
other down, as the eight of CM Table 1 do not; storage fills the pool once for all.

NPU-fork is a chunked chain broadcast, as long as the engine's (`engine/npu_fork.py`). Die by die, a serving
TE gives its weights to the first of a chain of new TEs, which passes each chunk on while it receives the
next. So the k-th TE has all weights k - 1 chunks after the first. Between SuperPods there is RoCE, and a
chunk crosses once for all TEs of a SuperPod. From there on a chain is as slow as RoCE.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.loading import distinct_pieces, own_arrays
from xdeepserve.engine.npu_fork import CHUNK_NBYTES, copy_ns, hop_ns
from xdeepserve.engine.serving.elastic import StartCosts
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.prices.step_price import StepCounts, StepPrice, with_room

SUPERPOD = 768  # dies that UB connects (CM 3.1)


class ScaleWays(msgspec.Struct, frozen=True):
    """Remedies for slow starts; without any, a TE starts cold and reads its model from storage."""

    prewarmed: bool = True
    preloaded: bool = True
    fork: bool = True


class HeldWeights(NamedTuple):
    """Bytes of weights: of the fullest die, and of the model in storage."""

    die: int
    model: int


class StepCost(NamedTuple):
    """Cost of a step of starting a TE, in seconds, with its source."""

    name: str
    seconds: float
    source: str


class ScaleUp(msgspec.Struct, frozen=True):
    """Cost model for adding TEs of a kind.

    dummy_ns   of the request that a new TE serves to itself before others
    dies       of a TE, which says how many there are in a SuperPod
    """

    weights: HeldWeights
    dummy_ns: float
    dies: int
    ways: ScaleWays = ScaleWays()
    spec: Spec = Spec()
    costs: StartCosts = StartCosts()

    def steps(self, place: int, serving: int, is_warm: bool = True) -> tuple[StepCost, ...]:
        """Return the costs of the `place`-th new TE, from 1, of those started beside `serving` others.
        `is_warm` is False if no pre-warmed TE is left for it."""
        spec, costs = self.spec, self.costs
        is_warm = is_warm and self.ways.prewarmed
        start = costs.start.value * (1 - costs.start_saved.value)
        digest = spec.hbm_ns(self.weights.die) / 1e9
        return (
            StepCost("Scaler-Pre", *_of(costs.warm_pod if is_warm else costs.pod)),
            StepCost("TE-Pre-Load", *(_of(costs.warm_te) if is_warm else (start, costs.start.source))),
            StepCost("TE-Load", *self._load(place, serving)),
            StepCost(
                "TE-Post-Load",
                digest + self.dummy_ns / 1e9,
                "digest at the speed of HBM, and a dummy request, priced; blocks beside it (DS Table 2)",
            ),
            StepCost("Scaler-Post", *_of(costs.push)),
        )

    def seconds(self, place: int, serving: int) -> float:
        """Sum the costs of all five steps, in seconds."""
        return sum(step.seconds for step in self.steps(place, serving))

    @property
    def warming_s(self) -> float:
        """Time [s] until a pod and processes run that nobody had prepared."""
        return sum(step.seconds for step in self.steps(1, 1, is_warm=False)[:2])

    def _load(self, place: int, serving: int) -> tuple[float, str]:
        if self.ways.fork and serving:
            pod = SUPERPOD // self.dies  # TEs of a SuperPod; those that serve stand first
            crossed = (serving + place - 1) // pod - (serving - 1) // pod
            seconds = self.fork_s(-(-place // serving), crossed)
            return self.costs.link.value + seconds, f"NPU-fork: chain over {'RoCE' if crossed else 'UB'}"
        hit = self.costs.tensors.value + self.weights.model / self.spec.pool_load.value
        if self.ways.preloaded:
            return hit, "DRAM hit: DS 6.2, and CM Table 1: from the pool at 134 GB/s"
        miss = self.weights.model / self.spec.storage_bandwidth.value
        return miss + hit, "DRAM miss: CM Table 1: storage fills the pool once for all, at 2.1 GB/s"

    def fork_s(self, hop: int, crossed: int = 0, is_chunked: bool = True) -> float:
        """Compute the time [s] until the `hop`-th TE of a chain has its weights; `crossed` of the hops are
        between SuperPods."""
        spec, total, crossed = self.spec, self.weights.die, min(crossed, hop)
        whole = copy_ns(spec, total)
        ub = hop_ns(spec, total) if is_chunked else whole
        if not crossed:
            return (whole + (hop - 1) * ub) / 1e9
        chunk = min(total, CHUNK_NBYTES) if is_chunked else total
        roce = 1e9 * (spec.roce_startup.value + chunk / spec.roce_bandwidth.value)
        first = (hop - crossed) * ub + crossed * roce  # the first chunk, hop by hop
        return (first + (math.ceil(total / chunk) - 1) * roce) / 1e9


def _of(cost: Param) -> tuple[float, str]:
    return cost.value, cost.source


def held_weights(checkpoint: Checkpoint, deployment: Deployment) -> HeldWeights:
    """Compute the bytes of weights that a TE of this deployment holds."""
    plan = PodPlan(checkpoint, with_room(deployment), timing=TimingConfig())
    (te,) = plan.tes
    each = [sum(nbytes for _, nbytes in own_arrays(mem)) for _, mem in te.all_memories]
    return HeldWeights(max(each), sum(distinct_pieces(te.all_memories).values()))


def dummy_ns(price: StepPrice) -> float:
    """Price a dummy request [ns]: each DP group computes one token, in the same step."""
    return price(StepCounts(1, price.num_groups, 1, 1))
