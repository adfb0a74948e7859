"""A dispatch while KV caches arrive at the same dies, over UB and over RoCE (CM 4.3.3).

CloudMatrix sends KV from prefill to decode over RoCE, so that it does not disturb the exchanges of decode on
UB. Here eight dies dispatch DeepSeek-R1's tokens while each pulls a request's KV of one layer from a die of
another server. Tokens are those of `comm.simulate_exchange`, at full length.
"""

from __future__ import annotations

import asyncio

import numpy as np

from xdeepserve.bench.papers.sizes import HIDDEN, TOP_K, quantize
from xdeepserve.bench.report import Row
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Plane

RANKS, BATCH = 8, 8
KV_NBYTES = 4096 * 1152  # BF16 latents and keys of a prompt, of one layer
PLANES: dict[str, Plane | None] = {"none": None, "ub": Plane.UB, "roce": Plane.ROCE}


def rows() -> list[Row]:
    """Compute the slowest rank's dispatch without KV, and with KV over either plane."""
    return [
        Row(f"interference/{name}/dispatch", dispatch_ns(plane) / 1000, "us", "predicted")
        for name, plane in PLANES.items()
    ]


def dispatch_ns(plane: Plane | None, spec: Spec | None = None) -> int:
    """Simulate a dispatch while KV comes over a plane; return the slowest rank's virtual time [ns]."""
    pod, group = Pod(spec=spec or Spec()), Group(tuple(range(RANKS)), tuple(range(RANKS)))
    layout = Layout.for_group(group, max_tokens=BATCH, top_k=TOP_K, hidden=HIDDEN)
    far = pod.topology.dies_per_server
    for die in group.dies:
        layout.plan(pod.plan(die))
        for node in (die, far + die):
            pod.plan(node).app.alloc("kv", KV_NBYTES)
    pod.materialise()

    async def bring(die: int) -> None:
        src, dst = (pod.memory(node).app.regions["kv"].address for node in (far + die, die))
        copies = [Copy(src, dst, KV_NBYTES)]
        if plane is Plane.UB:
            await pod.dies[die].dma.copy(copies)
        elif plane is not None:
            await pod.cards(plane).move(copies, "KV")

    async def dispatch(rank: int) -> int:
        xccl = XCCL(pod.dies[rank], rank, group, layout, quantize)
        topk_idx = np.tile(np.arange(TOP_K, dtype=np.int32), (BATCH, 1))
        await xccl.dispatch(np.zeros((BATCH, HIDDEN), np.float32), topk_idx, 1)
        return pod.clock.now

    async def main() -> int:
        transfers = [pod.dies[die].spawn(bring(die)) for die in group.dies]
        ends = await asyncio.gather(*[pod.dies[rank].spawn(dispatch(rank)) for rank in group.dies])
        await asyncio.gather(*transfers)
        return max(ends)

    return asyncio.run(main())
