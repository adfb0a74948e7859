"""Block caches on traces, compared with the best possible cache; and a generator of conversations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from xdeepserve.platform.traces import TracedRequest


def generated(seed: int, num_chats: int = 400, block_tokens: int = 512) -> list[TracedRequest]:
    """Generate conversations. Each begins with a system prompt, popular ones more often, and every turn
    contains everything said before. Chats overlap in time."""
    rng = np.random.default_rng(seed)
    system = [tuple(range(1000 * n, 1000 * n + int(rng.integers(1, 12)))) for n in range(20)]
    found, fresh = [], 1_000_000
    for chat in range(num_chats):
        blocks = list(system[min(int(rng.zipf(1.5)) - 1, len(system) - 1)])
        at = int(rng.integers(0, 3_600)) * 10**9
        for _ in range(int(rng.geometric(0.35))):
            num_new = int(rng.integers(1, 8))
            blocks += range(fresh, fresh + num_new)
            fresh += num_new
            length = len(blocks) * block_tokens - int(rng.integers(0, block_tokens))
            found.append(TracedRequest(at + chat, length, int(rng.integers(20, 400)), tuple(blocks)))
            at += int(rng.exponential(60e9))
    return sorted(found, key=lambda request: request.at_ns)


def hits_of_lru(requests: list[TracedRequest], capacity: int) -> Iterator[int]:
    """Yield the blocks of each request's prompt that an LRU cache of `capacity` blocks has, from the first on
    without a gap."""
    cache: dict[int, None] = {}
    for request in requests:
        yield _run(request.blocks, cache)
        # The deepest block is the first to go: without those before it, it is of no use.
        for block in reversed(request.blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            del cache[next(iter(cache))]


def hits_of_belady(requests: list[TracedRequest], capacity: int) -> Iterator[int]:
    """Yield the blocks of each request's prompt that Belady's cache has: it knows the future and evicts the
    block needed last, or never."""
    uses: dict[int, list[int]] = {}
    for at in range(len(requests) - 1, -1, -1):
        for block in requests[at].blocks:
            uses.setdefault(block, []).append(at)
    cache: dict[int, None] = {}
    never = len(requests)
    for at, request in enumerate(requests):
        yield _run(request.blocks, cache)
        for block in request.blocks:
            while uses[block] and uses[block][-1] <= at:
                uses[block].pop()
            cache[block] = None
        if len(cache) > capacity:
            depth = {block: number for number, block in enumerate(request.blocks)}
            order = sorted(
                cache,
                key=lambda block: (uses[block][-1] if uses[block] else never, depth.get(block, 0), block),
            )
            for block in order[capacity:]:
                del cache[block]


def _run(blocks: tuple[int, ...], cache: dict[int, None]) -> int:
    return next((number for number, block in enumerate(blocks) if block not in cache), len(blocks))
