"""MoE's basic flow of three all-to-alls, which FusedDispatch and FusedCombine replace (CloudMatrix 4.2.1).

The first exchanges routing metadata, the second tokens in BF16, which are quantised where they arrive. The
third brings experts' outputs back in BF16. Firmware moves the bytes: each die's DMA engine gets a list of
pieces, one for each peer. Shapes are not known before the metadata has come, so the host waits for it, and
launches each operator by itself. The paper names these faults and gives no time; startups of DMA and launches
are assumed.
"""

from __future__ import annotations

import asyncio

import numpy as np

from xdeepserve.bench.papers.sizes import HIDDEN, TOP_K, slower
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.pod import Pod

ENTRY = 8  # bytes of metadata for a token copy: its expert, and its place


def simulate(num_ranks: int, batch: int, shrink: int) -> tuple[int, int]:
    """Simulate the basic flow; return the times [ns] until tokens have come, quantised, and until answers
    have come back, added up. Tokens are shorter and the hardware slower, by `shrink`, as in
    `comm.simulate_exchange`."""
    hidden, pod = HIDDEN // shrink, Pod(spec=slower(shrink))
    clock, spec, ranks = pod.clock, pod.spec, range(num_ranks)
    rng = np.random.default_rng(0)
    num_experts = max(num_ranks, TOP_K)
    counts = np.zeros((num_ranks, num_ranks), np.int64)  # token copies from a rank to another
    for rank in ranks:
        for _ in range(batch):
            np.add.at(counts[rank], rng.permutation(num_experts)[:TOP_K] % num_ranks, 1)
    most = int(max(counts.sum(0).max(), counts.sum(1).max()))
    for rank in ranks:
        for side in ("out", "in"):
            pod.plan(rank).app.alloc(side, most * 2 * hidden)
    pod.materialise()

    def pieces(rank: int, sent: np.ndarray, nbytes: int) -> list[Copy]:
        """List a rank's pieces, one for each peer, of `nbytes` bytes for each token copy."""
        regions = [pod.memory(peer).app.regions for peer in ranks]
        return [
            Copy(
                regions[rank]["out"].address.plus(int(sent[rank, :peer].sum()) * nbytes),
                regions[peer]["in"].address.plus(int(sent[:rank, peer].sum()) * nbytes),
                int(sent[rank, peer]) * nbytes,
            )
            for peer in ranks
            if sent[rank, peer]
        ]

    async def exchange(rank: int, sent: np.ndarray, nbytes: int) -> None:
        """Launch an all-to-all and move a rank's part; others see it once its last byte has come."""
        await clock.sleep(spec.dispatch_ns("op"))
        await pod.dies[rank].dma.copy(pieces(rank, sent, nbytes), "all-to-all")
        await clock.sleep(spec.far_latency_ns() + spec.poll_ns())

    async def operator(rank: int, operations: float) -> None:
        """Launch an operator on vectors and run it."""
        kernel = spec.kernel_ns(operations, 0, "aiv")
        await clock.sleep(spec.dispatch_ns("op") + round(kernel))

    async def everyone(sent: np.ndarray, nbytes: int) -> None:
        await asyncio.gather(*[pod.dies[rank].spawn(exchange(rank, sent, nbytes)) for rank in ranks])

    async def compute(operations: np.ndarray) -> None:
        works = [operator(rank, float(operations[rank])) for rank in ranks]
        await asyncio.gather(*[pod.dies[rank].spawn(work) for rank, work in zip(ranks, works, strict=True)])

    async def main() -> tuple[int, int]:
        await everyone(counts, ENTRY // shrink)
        await clock.spawn(clock.sleep(2 * spec.command_ns()))  # the host reads the counts, and allocates
        await everyone(counts, 2 * hidden)
        await compute(4 * counts.sum(0) * hidden)
        dispatched = clock.now
        await everyone(counts.T, 2 * hidden)
        await compute(2 * counts.sum(1) * hidden)
        return dispatched, clock.now - dispatched

    return asyncio.run(main())
