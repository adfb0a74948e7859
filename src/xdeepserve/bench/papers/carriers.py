"""A2E and E2A by the engines of AIV cores, and by URMA (xDeepServe 3.3): durations, and the use of MTE2.

The paper gives no numbers, but states the expectation: URMA starts later, takes fewer AIV cores, and leaves
MTE2, which compute kernels use as well, alone.
"""

from __future__ import annotations

import asyncio
from typing import Literal, NamedTuple

import numpy as np

from xdeepserve.bench.papers.sizes import A2E_COPIES, A2E_SHRINK, HIDDEN, quantize, slower
from xdeepserve.bench.report import Row
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.trace import Trace

ATTENTION, EXPERTS, BATCH = 10, 18, 96  # a sixteenth of the paper's dies
CARRIERS: tuple[Literal["mte", "urma"], ...] = ("mte", "urma")


class CarrierTimes(NamedTuple):
    """Times in ns: the slowest die's A2E and E2A, and MTE2's work for both.

    MTE2's work is that on the first attention die and on its trampoline.
    """

    a2e: int
    e2a: int
    attention_mte2: int
    trampoline_mte2: int


def rows() -> list[Row]:
    """Compute the rows of each carrier."""
    return [
        Row(f"carrier/{carrier}/{name}", value / 1000, "us", "predicted")
        for carrier in CARRIERS
        for name, value in simulate(carrier)._asdict().items()
    ]


def simulate(carrier: Literal["mte", "urma"]) -> CarrierTimes:
    """Simulate an A2E, and an E2A that all expert dies begin at once, at DeepSeek-R1's width (see
    `sizes.slower`)."""
    hidden, dies = HIDDEN // A2E_SHRINK, tuple(range(ATTENTION + EXPERTS))
    sides = Sides(dies[:ATTENTION], Group(dies[ATTENTION:], tuple(range(EXPERTS))))
    layout = A2ELayout(sides, BATCH, A2E_COPIES, hidden)
    pod, means = Pod(spec=slower(A2E_SHRINK), trace=Trace()), Means(carrier=carrier)
    for die in dies:
        (layout.plan_attention if die < ATTENTION else layout.plan_expert)(pod.plan(die))
    pod.materialise()
    clock, later = pod.clock, 10_000_000  # ns: all A2Es are over

    async def attend(rank: int) -> int:
        side = AttentionSide(pod.dies[rank], rank, layout, quantize, means)
        rng = np.random.default_rng(rank)
        topk_idx = np.argsort(rng.random((BATCH, EXPERTS)), axis=1)[:, :A2E_COPIES].astype(np.int32)
        await side.a2e(
            np.zeros((BATCH, hidden), np.float32), topk_idx, np.ones(topk_idx.shape, np.float32), 1
        )
        await side.e2a(1)
        return clock.now - later

    async def serve(rank: int) -> int:
        side = ExpertSide(pod.dies[ATTENTION + rank], rank, layout, quantize, means)
        received = await side.a2e(1)
        end = clock.now
        await clock.sleep_until(later)
        await side.e2a(np.zeros((len(received), hidden), np.float32), 1)
        return end

    async def main() -> tuple[int, int]:
        tasks = [pod.dies[rank].spawn(attend(rank)) for rank in range(ATTENTION)]
        tasks += [pod.dies[ATTENTION + rank].spawn(serve(rank)) for rank in range(EXPERTS)]
        ends = await asyncio.gather(*tasks)
        return max(ends[ATTENTION:]), max(ends[:ATTENTION])

    def busy(die: int) -> int:
        spans = (span for span in pod.trace.spans if span.node == die and span.lane == "MTE2")
        return sum(span.end_ns - span.start_ns for span in spans)

    return CarrierTimes(*asyncio.run(main()), busy(0), busy(ATTENTION))
