"""Send kernel: steps 1 to 4 and 8 of XDS 3.1."""

from __future__ import annotations

import functools

from xdeepserve.comm.p2p.layout import Mode
from xdeepserve.comm.p2p.message_end import Ask, MessageEnd, copies
from xdeepserve.comm.p2p.ring_memory import RingMemory
from xdeepserve.comm.p2p.rules import Move, PairEnd, Progress
from xdeepserve.comm.steps import Steps
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address


class Sending(MessageEnd):
    """Outgoing message. `look` says whether the peer has acknowledged all of it."""

    op = "send"

    def __init__(
        self, memory: RingMemory, steps: Steps, timeout_ns: int, side: PairEnd, ask: Ask, mode: Mode
    ) -> None:
        super().__init__(memory, steps, timeout_ns, side, ask)
        self.area, self.mode = memory.acks, mode
        if self.engine != "mte":
            self.cores = 1
        if mode is Mode.ZERO_COPY:
            self.cores = self.num_chunks = 1
        # Acks are fields of the same cores, so what they may say is known from the start.
        self.progress = Progress(
            side, self.event_id, self.event_before, self.num_chunks, self.nbytes, self.cores
        )

    async def write(self) -> None:
        """Run steps 1 to 3: chunk by chunk, as slots of the peer's ring become free."""
        memory, layout = self.memory, self.layout
        await self.stream.open()
        if self.mode is Mode.ZERO_COPY:
            # Nothing moves: the tail tells where the bytes lie, and the receiver takes them from there.
            flags = self.flags(memory.peer_tails, 0, 1, 1, self.mode, self.cargo.offset)
            await self.stream.copy([], 1, flags, self._stored)
        first = 0
        while self.mode is Mode.RING and first < self.num_chunks:
            # Back-pressure: the slot of a chunk is free when the chunk that was in it has been taken out.
            if not self._num_free(first):
                # The first chunk of this very message that must have been taken out.
                await self.wait_until(
                    functools.partial(self._num_free, first), "ack chunk ID", first + 1 - layout.num_slots
                )
            free = self._num_free(first)
            # DMA has no unified buffer to fit: half a ring at a time, so that both ends are busy.
            most = self.cores if self.engine == "mte" else max(1, layout.num_slots // 2)
            stop = min(first + min(free, most), self.num_chunks)
            flags = self.flags(memory.peer_tails, first, stop, self.cores, self.mode)
            pieces = self._pieces(first, stop)
            nbytes = sum(piece.nbytes for piece in pieces)
            if self.engine == "mte":
                # Steps 1 and 2: MTE2 fills the unified buffers, MTE3 empties them into the ring.
                # Step 3: MTE3 stores the tails after the data.
                largest = min(layout.slot_nbytes, max(nbytes, 1))
                cores = max(1, nbytes / largest)
                await self.stream.copy(pieces, cores, flags, self._stored, moves=layout.has_bytes)
                self.steps.done("send", 1)
            else:
                # Steps 1 and 2 in one: the engine reads the app area and writes the ring.
                carrier = self.die.dma if self.engine == "dma" else self.die.urma
                await carrier.copy(pieces, name="send 1-2")
                self.steps.done("send", 1)
                await self.stream.copy([], 1, flags, self._stored)
            first = stop
        await self.stream.drain()
        self.side.move(Move.WRITTEN)

    async def wait_for_ack(self) -> None:
        """Run steps 4 and 8: poll the own metadata for the ack of the last chunk."""
        assert self.progress is not None
        progress = self.progress
        self.steps.done("send", 4)
        await self.wait_until(lambda: progress.is_complete, "ack chunk ID", self.num_chunks)
        await self.step()

    async def step(self) -> None:
        """Run step 8, if the ack is there."""
        assert self.progress is not None
        self.look_at_fields()
        if self.progress.is_complete:
            self.steps.done("send", 8)
            self.finish(Move.ACKNOWLEDGED)

    def _num_free(self, first: int) -> int:
        """Return the number of ring slots free for chunks from `first` on."""
        self.look_at_fields()
        assert self.progress is not None
        return self.progress.next + self.layout.num_slots - first

    def _pieces(self, first: int, stop: int) -> list[Copy]:
        """List the copies of chunks [first, stop) from the app area to the peer's ring."""
        memory, layout = self.memory, self.layout
        start = first * layout.slot_nbytes
        nbytes = min(stop * layout.slot_nbytes, self.nbytes) - start
        ring = Address(memory.dies[self.peer], memory.peer_rings[self.peer])
        slots = layout.slots(memory.rank, self.base + first, nbytes)
        return copies(self.cargo.part(start, nbytes), [(ring.plus(offset), size) for offset, size in slots])

    def _stored(self, are_flags: bool) -> None:
        self.steps.done("send", 3 if are_flags else 2)
