"""Allocation rates of supernodes by the size of blocks of NPUs (CloudMatrix 6.1.2, Figure 24).

The paper replays production traces that are not published. Here blocks are powers of two up to the largest
that the smallest supernode holds; a power law of their sizes has the published mean. Blocks come in order,
each is served for an exponential time, and the next one waits until it fits. Nothing is fitted to the rates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.ways.routing import generator

CASES = ((384, 10.08), (224, 10.08), (224, 11.28))  # NPUs of a supernode, mean NPUs of a block
BLOCKS = tuple(1 << power for power in range(min(npus for npus, _ in CASES).bit_length()))
NUM_BLOCKS = 50_000


def rows() -> Iterator[Row]:
    """Compute the share of NPUs that blocks hold, in percent."""
    for npus, mean in CASES:
        yield Row(f"cm.fig24/npus={npus}/block={mean:g}", 100 * allocated(npus, mean), "%", "predicted")


def shares(mean: float) -> list[float]:
    """Compute the share of each size of BLOCKS: powers of the size, with this mean size."""
    low, high = -8.0, 8.0
    sizes = np.array(BLOCKS, np.float64)
    for _ in range(100):
        power = (low + high) / 2
        found = sizes**-power
        found /= found.sum()
        low, high = (power, high) if found @ sizes > mean else (low, power)
    return found.tolist()


def allocated(npus: int, mean: float, num_blocks: int = NUM_BLOCKS) -> float:
    """Simulate a supernode with blocks always waiting; return the share of its NPUs that are allocated, on
    average over time."""
    rng = generator(0, 0, 0)
    sizes = rng.choice(BLOCKS, num_blocks, p=shares(mean)).tolist()
    times = rng.exponential(1.0, num_blocks).tolist()
    now = busy = 0.0
    used, running = 0, list[tuple[float, int]]()
    for size, time in zip(sizes, times, strict=True):
        while used + size > npus:
            end, freed = heapq.heappop(running)
            busy += used * (end - now)
            now, used = end, used - freed
        heapq.heappush(running, (now + time, size))
        used += size
    return busy / now / npus
