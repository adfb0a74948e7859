"""A kernel's stream of copies through the unified buffers of its AIV cores, chunk by chunk.

`MTE.copy` moves bytes that are all there, into memory that is all free. A protocol that must look before each
chunk (is its slot free? has it arrived?) opens a stream: startup is paid once, then the loads of MTE2 and the
stores of MTE3 follow each other in ping-pong, and a store is under way while the kernel goes on. What a store
carries becomes visible at its completion, in the order of the calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .clock import Process
from .engines import MTE, Bytes, Copy, Fabric, _move, _traffic
from .memory import Address


class Stream:
    """The copies of one kernel on `cores` AIV cores of a die. Each core has one unified buffer, in two halves."""

    def __init__(self, mte: MTE, cores: int, name: str) -> None:
        self.mte, self.cores, self.name = mte, cores, name
        self._store_ends = [0, 0]  # of the two latest chunks: whose halves may still be read
        self._last: Process | None = None

    @property
    def fabric(self) -> Fabric:
        return self.mte.fabric

    async def copy(self, pieces: Sequence[Copy], flags: Sequence[tuple[Address, Bytes]]) -> Process:
        """Copy one chunk for each core, then store `flags`. Returns when MTE2 has loaded the chunk.

        Awaiting the process that is returned waits until bytes and flags are visible. Bytes are read then,
        so the source must not change before. All is checked before anything moves.
        """
        mte, fabric, spec = self.mte, self.fabric, self.fabric.spec
        loads, stores = _traffic(fabric, mte.node, list(pieces))
        for address, data in flags:
            fabric.memories[address.node].check(address.offset, len(data))
            stores.add(address.node, len(data))
        issue_ns = spec.issue_ns()
        load_ns = math.ceil(spec.link_ns(loads.local, loads.near, loads.far, self.cores))
        store_ns = math.ceil(spec.link_ns(stores.local, stores.near, stores.far, self.cores))
        # MTE2 fills the half whose store before last is complete; MTE3 follows it.
        start = max(fabric.clock.now, mte.mte2_busy_until, self._store_ends[0])
        loaded = mte.mte2_busy_until = start + issue_ns + load_ns
        store_start = max(loaded + loads.latency_ns, mte.mte3_busy_until)
        stored = mte.mte3_busy_until = store_start + issue_ns * (1 + bool(flags)) + store_ns
        self._store_ends = [self._store_ends[1], stored]
        fabric.trace.span(mte.node, "MTE2", self.name, start, loaded)
        fabric.trace.span(mte.node, "MTE3", self.name, store_start, stored)
        visible = stored + stores.latency_ns
        before = self._last

        async def complete() -> None:
            await fabric.clock.sleep_until(visible)
            if before is not None and not before.done():
                await before  # a near piece never overtakes a far one
            _move(fabric, list(pieces))
            for address, data in flags:
                fabric.memories[address.node].write_checked(address.offset, data)

        process = fabric.clock.spawn(complete(), name=f"{self.name} of node {mte.node}")
        assert isinstance(process, Process)
        self._last = process
        await fabric.clock.sleep_until(loaded)
        return process
