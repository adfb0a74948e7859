"""Common parts of a send and a receive: a transfer that is under way."""

from __future__ import annotations

import abc
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from xdeepserve.comm.p2p.layout import RING_FIELD, Mode, RingField, last_chunks
from xdeepserve.comm.p2p.ring_memory import PairOp, RingMemory
from xdeepserve.comm.p2p.rules import Move, PairEnd, Progress
from xdeepserve.comm.steps import Steps
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, Region
from xdeepserve.hw.stream import Stream

# A message's bytes in the app area of one rank: one piece, or many that travel as one.

Piece = tuple[Address, int]


class Cargo:
    """Pieces (offset, size) of a rank's app area, in order: gathered by its send, filled by its receive.

    With a `weight` other than 1, each byte stands for that many and none moves: such bytes have no place in
    memory, so their offset is given as 0.
    """

    def __init__(self, node: int, pieces: Sequence[tuple[int, int]], weight: float = 1.0) -> None:
        self.node, self.pieces, self._moves = node, tuple(pieces), weight == 1.0
        self._ends = list(accumulate(nbytes for _, nbytes in self.pieces))
        self.nbytes = round(weight * (self._ends[-1] if self._ends else 0))

    @property
    def offset(self) -> int:
        """Offset in the app area at which the first piece begins."""
        return self.pieces[0][0]

    def part(self, start: int, nbytes: int) -> list[Piece]:
        """Return the pieces with `nbytes` of the message from `start` on."""
        if not nbytes:
            return [(Address(self.node, self.offset), 0)]
        if not self._moves:
            return [(Address(self.node, 0), nbytes)]
        found, at, stop = [], bisect_right(self._ends, start), start + nbytes
        while start < stop:
            offset, size = self.pieces[at]
            done = size - (self._ends[at] - start)
            count = min(size - done, stop - start)
            found.append((Address(self.node, offset + done), count))
            start, at = start + count, at + 1
        return found


def copies(src: Sequence[Piece], dst: Sequence[Piece]) -> list[Copy]:
    """List the copies from `src`, in order, to `dst`, in order; both have as many bytes."""
    found, sources, targets = [], list(reversed(src)), list(reversed(dst))
    while sources and targets:
        (source, left), (target, room) = sources.pop(), targets.pop()
        nbytes = min(left, room)
        found.append(Copy(source, target, nbytes))
        if left > nbytes:
            sources.append((source.plus(nbytes), left - nbytes))
        if room > nbytes:
            targets.append((target.plus(nbytes), room - nbytes))
    return found


Engine: TypeAlias = Literal["mte", "dma", "urma"]


class Ask(NamedTuple):
    """Arguments of a call, checked, with all numbers Python's."""

    cargo: Cargo
    peer: int
    event_id: int
    cores: int
    engine: Engine
    is_claimed: bool  # by the caller, who looks after the cargo's memory; else it is ours to claim


class MessageEnd(abc.ABC):
    """A message as seen from an end. `progress` holds the peer's reports about it."""

    op: PairOp
    area: Region  # where the peer's fields are

    def __init__(self, memory: RingMemory, steps: Steps, timeout_ns: int, side: PairEnd, ask: Ask) -> None:
        self.memory, self.steps, self.timeout_ns, self.side = memory, steps, timeout_ns, side
        self.event_id, self.event_before = ask.event_id, side.event_before
        self.cargo, self.nbytes, self.cores, self.engine = ask.cargo, ask.cargo.nbytes, ask.cores, ask.engine
        self.die, self.layout, self.peer = memory.die, memory.layout, side.peer
        self.num_chunks = self.layout.num_chunks(self.nbytes)
        self.base = side.position
        self.stream = Stream(self.die.mte, f"{self.op} rank {memory.rank}")
        self.progress: Progress | None = None
        self.is_complete = False
        self._error: BaseException | None = None
        self._is_looking = False

    async def run(self, *parts: Callable[[], Awaitable[None]]) -> None:
        """Run parts of the protocol. After an error the pair is failed and the buffer given back."""
        try:
            for part in parts:
                await part()
        except BaseException as error:
            self._error = error
            self.stream.stop(error)
            if self.is_current:
                self.side.move(Move.FAIL)
                self.memory.release(self.op, self.peer)
            raise
        if self.is_complete:
            self.memory.release(self.op, self.peer)

    @property
    def is_current(self) -> bool:
        """Whether the pair still works on this transfer: not reset, and no other begun since."""
        return self.side.transfer == self.event_id

    @abc.abstractmethod
    async def step(self) -> None:
        """Advance the transfer as far as possible by a single look."""

    async def look(self) -> bool:
        """Look at the local metadata once, for asynchronous transfers; return whether the transfer is
        complete.

        Raises ProtocolError if the peer did something else, or if the pair has been reset since; after an
        error, that error again. A second look meanwhile raises ProtocolError.
        """
        if self._is_looking:
            raise ProtocolError(
                f"{self.op}: rank {self.side.rank} is looking at event {self.event_id} with peer {self.peer} "
                "already: one look at a time"
            )
        self._is_looking = True
        try:
            return await self._look()
        finally:
            self._is_looking = False

    async def _look(self) -> bool:
        if self.is_complete:
            return True
        if self._error is not None:
            raise self._error
        self._check_current()
        await self.die.clock.sleep(self.die.spec.poll_ns())
        self._check_current()
        await self.run(self.step)
        return self.is_complete

    def _check_current(self) -> None:
        if not self.is_current:
            raise ProtocolError(
                f"{self.op}: event {self.event_id} of rank {self.side.rank} with peer {self.peer} was given "
                "up: the pair has been reset since"
            )

    # ---- fields -------------------------------------------------------------------------------------

    @property
    def num_fields(self) -> int:
        """Number of cores with fields to look at. Before the peer has reported, only the first is known to be
        used."""
        return self.progress.num_cores if self.progress is not None else 1

    def see(self, core: int, field: RingField) -> None:
        """Take note of a core's field."""
        assert self.progress is not None
        self.progress.look(core, field)

    def look_at_fields(self) -> None:
        """Look at all relevant fields. This costs no time, because cores look while their engines move
        bytes."""
        for core, field in enumerate(self.memory.fields(self.area.offset, self.peer, self.num_fields)):
            self.see(core, field)

    async def wait_until(self, is_over: Callable[[], object], what: str, expected: object) -> None:
        """Poll the peer's fields until `is_over`, for at most the timeout of the handle."""
        self.look_at_fields()
        if is_over():
            return
        die, size = self.die, RING_FIELD.size
        start = self.area.offset + self.layout.field(self.peer, 0)

        def observe(offset: int, nbytes: int) -> bool:
            self.stream.check()
            self.look_at_fields()
            return bool(is_over())

        def describe() -> Waiting:
            seen = self.progress.next if self.progress is not None else 0
            field = f"{what} of event {self.event_id}"
            return Waiting(self.op, self.memory.rank, self.peer, field, expected, seen)

        deadline_ns = die.clock.now + self.timeout_ns
        nbytes = self.layout.num_cores * size
        # A kernel whose store fails does not poll on.
        self.stream.on_error = lambda: die.memory.notify(start, nbytes)
        await die.wait_fields(start, nbytes, observe, deadline_ns=deadline_ns, describe=describe)

    def flags(
        self, area: list[int], first: int, stop: int, num_cores: int, mode: Mode, pointer: int | None = None
    ) -> list[tuple[Address, bytes]]:
        """Make the fields for telling the peer of chunks [first, stop): for each core concerned, its last
        chunk."""
        flags: list[tuple[Address, bytes]] = []
        for core, chunk_id, position in last_chunks(self.base, first, stop, num_cores):
            where = position if pointer is None else pointer
            raw = RING_FIELD.pack(self.event_id, chunk_id, where, self.nbytes, num_cores, mode)
            flags.append((self.memory.peer_field(area, self.peer, core), raw))
        return _joined(flags)

    def finish(self, move: Move) -> None:
        self.side.move(move)
        self.side.position = self.base + self.num_chunks
        self.is_complete = True


def _joined(flags: list[tuple[Address, bytes]]) -> list[tuple[Address, bytes]]:
    """Join neighbouring fields into single pieces, because the cores store side by side."""
    joined: list[tuple[Address, bytes]] = []
    for address, raw in flags:
        if joined and joined[-1][0].plus(len(joined[-1][1])) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + raw)
        else:
            joined.append((address, raw))
    return joined
