"""Two endpoints of DistFlow, and requests cut in parts of several spans."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from xdeepserve.comm.distflow import DistFlow, Endpoint, Span
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace

TOPOLOGY = Topology(servers=2, chips_per_server=2)  # dies 0..7, hosts 8 and 9
NBYTES = 64 * 32
SOURCE, DESTINATION = 0, 4


def run(
    program: Callable[[Pod, DistFlow, Endpoint, Endpoint], Any], seed: int | None = None, **flow: Any
) -> None:
    async def main() -> None:
        pod = Pod(TOPOLOGY, clock=Clock(seed), trace=Trace(is_on=True))
        for node in range(TOPOLOGY.num_nodes):
            pod.plan(node).app.alloc("data", NBYTES)
        pod.materialise()
        pod.memory(SOURCE).buffer[:] = np.random.default_rng(1).bytes(NBYTES)

        async def body() -> None:
            made = DistFlow(pod, **flow)
            one, two = made.link_cluster({"prefill": [SOURCE], "decode": [DESTINATION]})
            await program(pod, made, one, two)
            assert (one.num_open, two.num_open) == (0, 0)
            assert not len(pod.memory(SOURCE).claims) + len(pod.memory(DESTINATION).claims)
            made.close()

        await pod.clock.spawn(body())

    asyncio.run(main())


def span(node: int, first: int, count: int) -> Span:
    """In units of 32 bytes."""
    return Span(Address(node, 32 * first), 32 * count)


def parts_of(sizes: list[int]) -> list[list[Span]]:
    """Parts of so many units, each cut in spans of one or two; the source's memory from its start."""
    parts, at = [], 0
    for size in sizes:
        part = []
        while size:
            part.append(span(SOURCE, at, min(2, size)))
            at, size = at + min(2, size), size - min(2, size)
        parts.append(part)
    return parts
