"""A direction of a pull-based exchange, steps 3 to 7 of XDS 3.2: writers keep blocks, readers pull them.

A rank that sends holds an `Outbox`, a rank that receives an `Inbox`. Dispatch is one direction in which every
rank is both; A2E's first stage is one from each attention die to its trampoline. Fields and pieces are
arrays, never an object for each pair of ranks: 768 ranks have 590,000 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.arrivals import Arrivals
from xdeepserve.comm.means import Means
from xdeepserve.comm.wire import FIELD, FIELD_DTYPE, Blocks, Field
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Targets

Int64: TypeAlias = npt.NDArray[np.int64]


class Names(tuple[object, ...]):
    """Names of ranks, abridged when printed."""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self[:8]))
        return f"[{shown}]" if len(self) <= 8 else f"[{shown}] and {len(self) - 8} more"


class Outbox:
    """Writer's end of a direction. `index` is its number among the writers of each of its readers."""

    def __init__(self, die: Die, blocks: Blocks, index: int | Int64, readers: Sequence[int]) -> None:
        self.die, self.blocks = die, blocks
        memory = die.memory
        self.region = memory.managed.regions[blocks.region("blocks")]
        shape = (blocks.first_row(blocks.num_readers), blocks.row_nbytes)
        self._rows: npt.NDArray[np.uint8] = memory.view(self.region, np.uint8, shape)
        self._readers = np.asarray(readers, np.int64)
        self._index = np.broadcast_to(np.asarray(index, np.int64), self._readers.shape)
        self._pointers = self.region.offset + blocks.block_offset(np.arange(len(readers)))
        self._targets: Targets | None = None  # this writer's field at each reader
        self._field = np.zeros(len(readers), FIELD_DTYPE)
        self._field["pointer"] = self._pointers

    def pointer(self, reader: int) -> int:
        """Return the offset of the block for a reader, in the writer's memory."""
        return self.region.offset + self.blocks.block_offset(reader)

    async def write(self, rows: npt.NDArray[np.uint8], counts: Int64, means: Means, name: str) -> None:
        """Step 3: store rows, grouped by reader, in the blocks for those readers.

        The store follows the load of the rows' source: chunk by chunk the two would overlap, but they share
        the die's HBM.

        rows: uint8 [N, row_nbytes]; counts: [readers], sums to N, none above rows_per_block.
        """
        if not len(rows):
            return
        await self.die.mte.store_view(rows.nbytes, None, means.cores, name)
        starts = np.cumsum(counts) - counts
        shift = self.blocks.first_row(np.arange(len(counts))) - starts
        self._rows[np.arange(len(rows)) + np.repeat(shift, counts)] = rows

    async def post(
        self,
        event_id: int,
        counts: Int64,
        means: Means,
        name: str,
        chosen: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Step 4: tell every reader, even those without rows, how many rows there are and where.

        `chosen`, a mask, leaves out readers that do not wait to be told.

        The cores meet, since a field speaks of rows that all of them have stored; then their scalar units
        make out the fields one by one.
        """
        await self.die.clock.sleep(self.die.spec.meeting_ns())
        self._field["event_id"] = event_id
        self._field["num_tokens"] = counts
        raw = self._field.view(np.uint8).reshape(-1, FIELD.size)
        if chosen is not None:
            await self.die.mte.scatter(self._fields_at(chosen), raw[chosen], means.cores, name)
            return
        if self._targets is None:
            self._targets = self._fields_at(np.ones(len(counts), bool))
        await self.die.mte.scatter(self._targets, raw.copy(), means.cores, name)

    def _fields_at(self, chosen: npt.NDArray[np.bool_]) -> Targets:
        """Return the addresses of the writer's fields at the chosen readers."""
        die, readers = self.die, self._readers[chosen]
        offsets = die.fabric.memories.offsets_of("metadata", self.blocks.region("fields"))
        at = offsets[readers] + self.blocks.field_offset(self._index[chosen])
        return Targets(die.fabric, die.mte.place, readers, at, FIELD.size)


class Inbox:
    """Reader's end of a direction. `rank` and `names` identify the reader and its writers in errors."""

    def __init__(
        self, die: Die, blocks: Blocks, writers: Sequence[int], rank: object, names: Sequence[object]
    ) -> None:
        self.die, self.blocks, self.rank, self.names = die, blocks, rank, names
        memory = die.memory
        self.region = memory.metadata.regions[blocks.region("fields")]
        self.rows_region = memory.app.regions[blocks.region("rows")]
        self._raw = memory.read(self.region.offset, blocks.field_offset(len(writers)))
        self.view: npt.NDArray[np.void] = np.frombuffer(self._raw, FIELD_DTYPE)
        self._writers = np.asarray(writers, np.int64)

    def fields(self) -> list[Field]:
        """Return the current contents of all writers' fields."""
        return [Field(*values) for values in FIELD.iter_unpack(self._raw)]

    @property
    def newest(self) -> int:
        """Greatest event ID posted by a writer; 0 if there is none."""
        return int(self.view["event_id"].max(initial=0))

    async def wait(
        self, op: str, event_id: int, event_before: int, means: Means, lane: str = "XCCL"
    ) -> Int64:
        """Step 5: poll the own metadata until all writers have posted `event_id`; return their row counts.

        The scalar units take note of one field after the other, as they arrive. `lane` is that of the steps,
        in traces.

        Raises DeadlineError naming the writers that have not, ProtocolError for one ahead or behind.
        """
        die, raw, start = self.die, self._raw, self.region.offset
        arrivals = Arrivals(op, self.rank, len(self.names), event_id, event_before, self.names)
        look, unpack_from, writer_at = arrivals.look, FIELD.unpack_from, self.blocks.writer_at
        is_first = True
        each_ns = die.spec.field_poll_ns() / (means.cores or die.spec.num_cores("aiv"))
        noted_ns = float(die.clock.now)  # until when the scalar units are at the fields that have arrived
        last: tuple[int, int] | None = None  # who kept this rank waiting, and until when

        def observe(offset: int, nbytes: int) -> bool:
            nonlocal is_first, last, noted_ns
            if is_first:
                is_first = False
                arrivals.look_at_all(self.view["event_id"])
                noted_ns += each_ns * (len(self.names) - arrivals.num_awaited)
                return arrivals.is_complete
            # One write is one field: peers post nothing else here.
            at = offset - start
            writer = writer_at(at)
            look(writer, unpack_from(raw, at)[0])
            noted_ns = max(noted_ns, die.clock.now) + each_ns
            if arrivals.num_awaited:
                return False
            last = writer, die.clock.now
            return True

        def describe() -> Waiting:
            awaited = arrivals.awaited
            seen = {self.names[writer]: int(self.view["event_id"][writer]) for writer in awaited[:8]}
            names = Names(self.names[writer] for writer in awaited)
            return Waiting(op, self.rank, names, "event ID", event_id, seen)

        deadline_ns = die.clock.now + means.timeout_ns
        await die.wait_fields(start, len(raw), observe, deadline_ns=deadline_ns, describe=describe)
        await die.clock.sleep_until(math.ceil(noted_ns))
        if die.trace.is_on and last is not None:
            # An arrow from the store that ended the wait to the wait: who held up the barrier.
            source, now = int(self._writers[last[0]]), die.clock.now
            die.trace.flow(f"{op} last field", source, "MTE3", last[1] - 1, die.index, lane, now - 1)
        return self.view["num_tokens"].astype(np.int64)

    async def pull(
        self, op: str, counts: Int64, means: Means, is_bulk: bool = False, place: int = 0
    ) -> npt.NDArray[np.uint8]:
        """Steps 6-7: read the writers' rows for this rank into the own app area; uint8 [rows, row_nbytes].

        They begin where a writer `place` would have its block, if each had one there.

        A row costs the ports what a copy of a token does; with `is_bulk` a block moves as its bytes do.
        """
        row, num_rows = self.blocks.row_nbytes, int(counts.sum())
        first = self.blocks.first_row(place)
        if first + num_rows > self.blocks.max_rows:
            raise ProtocolError(
                f"{op}: rank {self.rank} has no room for the {num_rows} rows that its peers post"
            )
        if num_rows:
            has_rows = counts > 0
            nodes, sizes = self._writers[has_rows], counts[has_rows] * row
            pointers = self.view["pointer"][has_rows].astype(np.int64)
            target, name = self.rows_region.offset + first * row, f"{op} 6-7 pull"
            copies = None if is_bulk else counts[has_rows]
            if means.carrier == "urma":
                cores = means.cores or self.die.spec.num_cores("aiv")
                await self.die.urma.gather(nodes, pointers, sizes, target, name, copies, cores)
            else:
                mte = self.die.mte
                await mte.gather(nodes, pointers, sizes, target, means.cores, name, copies, is_running=True)
        return self.die.memory.view(self.rows_region, np.uint8, (first + num_rows, row))[first:]
