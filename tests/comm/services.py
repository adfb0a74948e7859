"""A small layout of expert services: servers, clients, and what an oracle expects."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.comm.tools import expert, quantize
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.services.client import ServiceClient
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.comm.services.server import ServiceServer

LAYERS = 2
LAYOUT = ServiceLayout((0, 1), Group((2, 3, 16), (0, 0, 1, 1, 2, 0)), max_tokens=3, top_k=2, hidden=8)
# Physical expert 5, on server 0, is another one of 4, on server 2; and 2 and 3, of server 1, of 0 and 1.
SAME = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3), 4: (4, 5), 5: (4, 5)}
LOGICAL = (0, 1, 0, 1, 4, 4)


def same(layer: int, physical: int) -> tuple[int, ...]:
    return SAME[physical]


def logical(physical: int, row: np.ndarray) -> np.ndarray:
    return expert(LOGICAL[physical], row)


async def serve(
    server: ServiceServer,
    delay: Callable[[int], int] = lambda batch: 0,
    compute: Callable[[int, np.ndarray], np.ndarray] = expert,
    seen: list[Any] | None = None,
) -> None:
    """Serve whoever comes, for ever; `delay(n)` ns in the n-th batch."""
    count = 0
    while True:
        batch = await server.next_batch(10**6)
        if seen is not None:
            seen.append([(each.client, each.slot, each.header) for each in batch])
        out = []
        for each in batch:
            got = each.received
            x = got.payload * got.scale[:, None]
            out += [compute(e, row) for e, row in zip(got.expert_idx, x, strict=True)]
        await server.die.clock.sleep(delay(count))
        count += 1
        await server.answer(batch, np.array(out, np.float32))


async def attend(client: ServiceClient, batches: list[Any], first_event: int = 1) -> list[np.ndarray]:
    results = []
    for event_id, (x, topk, weights) in enumerate(batches, first_event):
        await client.a2e(x, topk, weights, event_id)
        results.append(await client.e2a(event_id))
    return results


def tokens(rng: np.random.Generator, layout: ServiceLayout, count: int) -> tuple[Any, Any, Any]:
    """A batch: token rows, physical experts of which no two are the same, weights."""
    num_experts = len(layout.servers.expert_rank)
    topk = [rng.permutation(num_experts)[: layout.top_k] for _ in range(count)]
    return (
        rng.standard_normal((count, layout.hidden)).astype(np.float32),
        np.array(topk, np.int32).reshape(count, layout.top_k),
        rng.random((count, layout.top_k)).astype(np.float32),
    )


def expected(layout: ServiceLayout, batch: Any, compute: Any = expert) -> np.ndarray:
    x, topk, weights = batch
    slots = oracles.combine(x, topk, compute, quantize if layout.quantize else None)
    return oracles.weighted_sum(slots, weights)
