"""Board of fields: all ranks post something for each other and wait until all have.

Each rank keeps one field a peer in its metadata area, written by that peer, in two sets that successive
rounds use in turn. A field begins with the round's event ID; the rest is the protocol's own. `fused.layout`
and `collectives.layout` argue why two sets are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.arrivals import Arrivals
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address


class BoardLayout(NamedTuple):
    """Layout of a board: `dtype` is a field (first member `event_id` u64), `num_slots` the fields in a
    set."""

    dtype: np.dtype[Any]
    num_slots: int

    @property
    def nbytes(self) -> int:
        return 2 * self.set_nbytes(self.num_slots)

    def set_nbytes(self, num_ranks: int) -> int:
        """Return the size (bytes) of the fields of the first `num_ranks` ranks."""
        return num_ranks * self.dtype.itemsize

    def field_offset(self, which: int, rank: int) -> int:
        """Return the offset in the board of a rank's field in set 0 or 1."""
        return self.set_nbytes(which * self.num_slots + rank)

    def rank_at(self, offset: int) -> int:
        """Return the owner (rank) of the field with the byte at an offset from the start of a set."""
        return offset // self.dtype.itemsize


class Board:
    """Fields of a rank on a board, and access to the peers' fields.

    `region` names the metadata region; the group `dies` may use fewer fields than the layout has.
    """

    def __init__(self, die: Die, dies: tuple[int, ...], region: str, layout: BoardLayout) -> None:
        self.die, self.dies = die, dies
        self.rank = dies.index(die.index)
        self._region, self._layout = region, layout
        self._set = 0
        self.latest_events = [0, 0]  # event ID of each set's latest round

    def begin(self, event_id: int) -> None:
        """Start a round: turn to the other set of fields."""
        newest = max(self.latest_events)
        if event_id < newest or event_id == 0:
            raise ProtocolError(
                f"rank {self.rank} was given event {event_id} after {newest}: event IDs must increase"
            )
        self._set ^= 1
        self._event_id, self._event_before = event_id, self.latest_events[self._set]
        self.latest_events[self._set] = event_id

    async def post(self, fields: npt.NDArray[Any], name: str, cores: int | None = None) -> None:
        """Write `fields[p]` to this rank's field on every peer p, its own included."""
        fields["event_id"] = self._event_id
        raw, size = memoryview(fields.tobytes()), fields.itemsize
        memories = self.die.fabric.memories
        start = self._layout.field_offset(self._set, self.rank)
        pieces = []
        for peer, die in enumerate(self.dies):
            offset = memories[die].metadata.regions[self._region].offset + start
            pieces.append((Address(die, offset), raw[peer * size : (peer + 1) * size]))
        await self.die.mte.store(pieces, cores, name=name)

    async def wait(
        self, op: str, timeout_ns: int, check: Callable[[int, Any], None] | None = None
    ) -> npt.NDArray[Any]:
        """Poll until every rank has posted in this round; return a copy of their fields.

        `check(peer, field)` is called for each and may raise. DeadlineError after `timeout_ns`, ProtocolError
        if a peer posts another event.
        """
        die, layout, num_ranks = self.die, self._layout, len(self.dies)
        region = die.memory.metadata.regions[self._region]
        start, nbytes = region.offset + layout.field_offset(self._set, 0), layout.set_nbytes(num_ranks)
        fields = np.frombuffer(die.memory.read(start, nbytes), layout.dtype)
        arrivals = Arrivals(op, self.rank, num_ranks, self._event_id, self._event_before)
        is_first = True

        def observe(offset: int, _: int) -> bool:
            nonlocal is_first
            if is_first:
                arrivals.look_at_all(fields["event_id"].tolist())
                is_first = False
            else:
                peer = layout.rank_at(offset - start)  # one write is one field
                arrivals.look(peer, int(fields["event_id"][peer]))
            return arrivals.is_complete

        def describe() -> Waiting:
            awaited = tuple(arrivals.awaited)
            seen = {peer: int(fields["event_id"][peer]) for peer in awaited[:8]}
            return Waiting(op, self.rank, awaited, "event ID", self._event_id, seen)

        deadline_ns = die.clock.now + timeout_ns
        await die.wait_fields(start, nbytes, observe, deadline_ns=deadline_ns, describe=describe)
        if check is not None:
            for peer, field in enumerate(fields):
                check(peer, field)
        return fields.copy()

    def clear(self, dies: tuple[int, ...]) -> None:
        """Forget all rounds and go on among `dies`. All ranks do so while none is in a round."""
        region = self.die.memory.metadata.regions[self._region]
        self.die.memory.write(region.offset, bytes(region.nbytes))
        self.dies, self.rank = dies, dies.index(self.die.index)
        self._set, self.latest_events = 0, [0, 0]
