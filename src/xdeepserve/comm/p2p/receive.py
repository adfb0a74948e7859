"""Receive kernel: steps 5 to 7 of XDS 3.1."""

from __future__ import annotations

from typing import Any

from xdeepserve.comm.p2p.layout import Mode, RingField
from xdeepserve.comm.p2p.message_end import Ask, Cargo, MessageEnd, copies
from xdeepserve.comm.p2p.ring_memory import RingMemory
from xdeepserve.comm.p2p.rules import Move, PairEnd, Progress
from xdeepserve.comm.steps import Steps
from xdeepserve.comm.wire import ROW_ALIGNMENT
from xdeepserve.errors import FieldError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address


class Receiving(MessageEnd):
    """Incoming message of a pair of ranks.

    `look` copies the chunks that have arrived and says whether the message is complete.
    """

    op = "receive"

    def __init__(self, memory: RingMemory, steps: Steps, timeout_ns: int, side: PairEnd, ask: Ask) -> None:
        super().__init__(memory, steps, timeout_ns, side, ask)
        self.area = memory.tails
        self.mode, self.pointer = Mode.RING, 0
        self.offered: Cargo | None = None  # pieces of the peer's app area, if a handshake has told them
        self.num_copied = 0

    async def copy_all(self) -> None:
        """Run steps 5 to 7 until the last chunk is acknowledged."""
        await self.stream.open()
        while not self.is_complete:
            await self.wait_until(
                lambda: self.num_arrived > self.num_copied, "tail chunk ID", self.num_copied + 1
            )
            await self.step()

    async def step(self) -> None:
        """Copy and acknowledge all chunks that have arrived."""
        self.look_at_fields()
        if self.num_arrived == self.num_copied:
            return
        self.steps.done("receive", 5)
        self.side.move(Move.ARRIVED)
        while self.num_copied < self.num_arrived:
            await self._copy()
            self.look_at_fields()
        if self.num_copied < self.num_chunks:
            self.side.move(Move.DRAINED)
            return
        await self.stream.drain()
        self.finish(Move.COPIED)

    @property
    def num_arrived(self) -> int:
        return self.progress.next if self.progress is not None else 0

    def see(self, core: int, field: RingField) -> None:
        if self.progress is None:
            # Core 0 carries the first chunk of any message: its field tells how the others are used.
            if field.event_id <= self.event_before:
                return
            num_cores = field.num_cores if field.event_id == self.event_id else 1
            if not 1 <= num_cores <= self.layout.num_cores:
                message = (
                    f"receive: rank {self.memory.rank} has fields of {self.layout.num_cores} AIV cores, "
                    f"but peer {self.peer} sends with {num_cores}"
                )
                raise self._error_in("AIV cores", f"1..{self.layout.num_cores}", num_cores, message)
            if field.event_id == self.event_id:
                self._check_field(field)
                self.mode, self.pointer = Mode(field.mode), field.pointer
            if self.mode is Mode.ZERO_COPY:
                self.num_chunks = 1
            self.progress = Progress(
                self.side, self.event_id, self.event_before, self.num_chunks, self.nbytes, num_cores
            )
            if num_cores > 1:
                self.look_at_fields()
                return
        super().see(core, field)

    def _check_field(self, field: RingField) -> None:
        """Check a field's mode, and for zero copy its range in the peer's app area. Raises FieldError if one
        is impossible."""
        where = f"receive: rank {self.memory.rank}: the field of peer {self.peer}, core 0,"
        if field.mode not in (Mode.RING, Mode.ZERO_COPY):
            message = f"{where} says mode {field.mode}: there are 0 (ring) and 1 (zero copy)"
            raise self._error_in("mode", "0 or 1", field.mode, message)
        if self.offered is not None:
            if (field.mode, field.pointer) != (Mode.ZERO_COPY, self.offered.offset):
                message = (
                    f"{where} says mode {field.mode} and offset {field.pointer}, but zero copy of "
                    f"pieces from {self.offered.offset} on was agreed"
                )
                raise self._error_in("pointer", self.offered.offset, field.pointer, message)
        elif field.mode == Mode.ZERO_COPY:
            app = self.die.fabric.memories[self.memory.dies[self.peer]].app
            start, stop = field.pointer, field.pointer + field.nbytes
            if start < app.base or stop > app.end or start % ROW_ALIGNMENT:
                message = (
                    f"{where} says zero copy of [{start}, {stop}), which is no aligned part of the peer's "
                    f"app area [{app.base}, {app.end})"
                )
                raise self._error_in("pointer", f"{app.base}..{app.end}", start, message)

    def _error_in(self, field: str, expected: object, seen: object, message: str) -> FieldError:
        """Make the error about a wrong value in the tail of core 0."""
        at: dict[str, Any] = {"op": self.op, "rank": self.memory.rank, "peer": self.peer}
        return FieldError(message, **at, field=f"tail {field}, core 0", expected=expected, seen=seen)

    async def _copy(self) -> None:
        """Steps 6 and 7 for the next chunks: copy to the app area, then store the acks at the sender."""
        assert self.progress is not None
        memory, first = self.memory, self.num_copied
        stop = self.num_arrived
        if self.engine == "mte" and self.mode is Mode.RING:
            stop = min(stop, first + self.cores)
        acks = self.flags(memory.peer_acks, first, stop, self.progress.num_cores, self.mode)
        if self.mode is Mode.ZERO_COPY:
            acks = self.flags(memory.peer_acks, 0, 1, 1, self.mode, self.cargo.offset)
        if self.mode is Mode.ZERO_COPY and self.engine == "mte":
            await self._take(acks)
            self.num_copied = stop
            return
        pieces = self._pieces(first, stop)
        if self.engine != "mte":
            carrier = self.die.dma if self.engine == "dma" else self.die.urma
            await carrier.copy(pieces, name="receive 6")
            await self.stream.copy([], 1, acks, self._stored)
        else:
            nbytes = sum(piece.nbytes for piece in pieces)
            largest = min(self.layout.slot_nbytes, max(nbytes, 1))
            cores = max(1, nbytes / largest)
            await self.stream.copy(pieces, cores, acks, self._stored, moves=self.layout.has_bytes)
        self.num_copied = stop

    async def _take(self, acks: list[tuple[Address, bytes]]) -> None:
        """Zero copy: read the sender's app area, slot by slot for each core, and acknowledge at the end."""
        step, src, moves = self.layout.slot_nbytes * self.cores, self._source(), self.layout.has_bytes
        for at in range(0, max(self.nbytes, 1), step):
            nbytes = min(step, self.nbytes - at)
            part = copies(src.part(at, nbytes), self.cargo.part(at, nbytes))
            is_last = at + nbytes >= self.nbytes
            cores = max(1, nbytes / self.layout.slot_nbytes)
            if is_last:
                await self.stream.copy(part, cores, acks, self._stored, moves=moves)
            else:
                await self.stream.copy(part, cores, moves=moves)

    def _source(self) -> Cargo:
        """Return the pieces of the sender's app area that hold the message, for zero copy."""
        whole = ((self.pointer, self.nbytes),)
        return self.offered or Cargo(self.memory.dies[self.peer], whole, self.layout.weight)

    def _pieces(self, first: int, stop: int) -> list[Copy]:
        """List the copies of chunks [first, stop) from ring or sender to the app area."""
        if self.mode is Mode.ZERO_COPY:
            return copies(self._source().part(0, self.nbytes), self.cargo.part(0, self.nbytes))
        start = first * self.layout.slot_nbytes
        nbytes = min(stop * self.layout.slot_nbytes, self.nbytes) - start
        ring = self.memory.rings.address
        slots = self.layout.slots(self.peer, self.base + first, nbytes)
        return copies([(ring.plus(offset), size) for offset, size in slots], self.cargo.part(start, nbytes))

    def _stored(self, are_acks: bool) -> None:
        self.steps.done("receive", 7 if are_acks else 6)
