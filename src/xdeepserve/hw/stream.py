"""A kernel's stream of copies through the unified buffers of its AIV cores, chunk by chunk.

`MTE.copy` moves bytes that are all there, into memory that is all free. A protocol that must check before
each chunk (is its slot free? has it arrived?) opens a stream. Loads of MTE2 and stores of MTE3 follow each
other in ping-pong, and the kernel goes on while a store is under way. Startup is paid once; the issue of an
access hides behind the bytes of the one before. Stored bytes become visible in the order of the calls, flags
after data.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from .clock import Process
from .engines import Bytes, Copy, move, traffic_of, whole_copies, whole_pieces
from .memory import Address
from .mte import MTE


class Stream:
    """Stream of a kernel's copies on a die.

    Each of the kernel's AIV cores has one unified buffer for its chunks.
    """

    def __init__(self, mte: MTE, name: str) -> None:
        self.mte, self.name = mte, name
        self._held: deque[tuple[int, float]] = deque()  # until when, how many bytes of each buffer
        self._last: Process | None = None
        self.error: BaseException | None = None
        self.on_error: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Launch the kernel: let the time pass until its first access moves."""
        await self.mte.fabric.clock.sleep(self.mte.fabric.spec.startup_ns("mte"))

    async def copy(
        self,
        pieces: Sequence[Copy],
        cores: float,
        flags: Sequence[tuple[Address, Bytes]] = (),
        on_stored: Callable[[bool], None] | None = None,
        moves: bool = True,
    ) -> None:
        """Copy a chunk for each of `cores`, then store `flags`. Returns when MTE2 has loaded the chunks.

        `cores` may be a fraction, if the last of them has less to carry. Bytes are read when they become
        visible, so the source must not change before; `on_stored(False)` is called when the bytes are in
        place, `on_stored(True)` after the flags. All is checked before anything moves. Unless it `moves`,
        only flags are stored: the bytes take their time, and are nowhere.
        """
        self.check()
        mte, fabric, spec = self.mte, self.mte.fabric, self.mte.fabric.spec
        moved, before = whole_copies(pieces), self._last
        flags = whole_pieces(flags)
        loads, stores = traffic_of(fabric, mte.place, moved, is_checked=moves)
        for address, data in flags:
            fabric.memories[address.node].check(address.offset, len(data))
            stores.add(address.node, len(data))
        load_ns = math.ceil(spec.link_ns(loads.local, loads.near, loads.far, cores))
        store_ns = math.ceil(spec.link_ns(stores.local, stores.near, stores.far, cores))
        if mte.gate.is_shut:
            await mte.gate.passed()
        # MTE2 fills what the stores of earlier chunks have freed; MTE3 follows it.
        start = max(fabric.clock.now, mte.mte2_busy_until, self._room_at(loads.nbytes / cores))
        loaded = mte.mte2_busy_until = start + load_ns
        store_start = max(loaded + loads.latency_ns, mte.mte3_busy_until)
        stored = mte.mte3_busy_until = self._through_ports(moved, store_start, store_start + store_ns)
        self._held.append((stored, loads.nbytes / cores))
        fabric.trace.span(mte.node, "MTE2", self.name, start, loaded, {"bytes": loads.nbytes})
        fabric.trace.span(mte.node, "MTE3", self.name, store_start, stored, {"bytes": stores.nbytes})

        async def complete() -> None:
            await fabric.clock.sleep_until(stored + stores.latency_ns)
            if before is not None:
                await before  # a near chunk never overtakes a far one
            if self.error is not None:
                return
            try:
                if moves:
                    move(fabric, moved)
                if on_stored is not None:
                    on_stored(False)
                for address, data in flags:
                    fabric.memories[address.node].write_checked(address.offset, data)
                if on_stored is not None:
                    on_stored(True)
            except Exception as error:
                self.error = error
                self.on_error()

        process = fabric.clock.spawn(complete(), name=f"{self.name} of node {mte.node}")
        assert isinstance(process, Process)
        self._last = process
        await fabric.clock.sleep_until(loaded)

    def _through_ports(self, pieces: Sequence[Copy], start: int, end: int) -> int:
        """Return when a chunk is stored (virtual ns), given `end` for free ports at both ends."""
        routes = Counter[tuple[int, int]]()
        for src, dst, nbytes in pieces:
            routes[src.node, dst.node] += nbytes
        for (src_node, dst_node), nbytes in routes.items():
            if src_node != dst_node:
                end = max(end, self.mte.fabric.ports.carry(src_node, dst_node, nbytes, start))
        return end

    def _room_at(self, nbytes: float) -> int:
        """Return when a chunk of `nbytes` fits each core's unified buffer (virtual ns)."""
        at, room = 0, self.mte.fabric.spec.unified_buffer.value - sum(held for _, held in self._held)
        while self._held and (room < nbytes or self._held[0][0] <= self.mte.fabric.clock.now):
            at, held = self._held.popleft()
            room += held
        return at

    async def drain(self) -> None:
        """Wait until all copies and flags are visible."""
        if self._last is not None:
            await self._last
        self.check()

    def stop(self, error: BaseException) -> None:
        """Stop the stream because the kernel has died of `error`: nothing more moves, even if some of it is
        on its way."""
        self.error = self.error or error

    def check(self) -> None:
        """Raise the error of a callback, if any. After an error nothing moves any more: the kernel has
        died."""
        if self.error is not None:
            raise self.error
