"""How the leader of the DP groups learns their statuses before it deals requests out (xDeepServe 4.3).

"A leader scheduler (at DP-0) collects DP status via all-gather at each step", here only if requests wait.
Each group writes a row of bytes on its first die: its status, and how much of each waiting prompt it has
cached. XCCL's all-gather exchanges the rows, beside a step that may be running. The leader reads the rows on
its die, and knows nothing else of the groups.

A row, little endian: the members of `GroupStatus` in their order, 8 bytes each (i64, `queued_cost` f64) |
cached tokens i32, one for each waiting request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import CollectiveLayout
from xdeepserve.comm.means import Means
from xdeepserve.engine.balance.dp import GroupStatus
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence as Seq
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.walk.schedule import side_by_side
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import MemoryPlan

MAX_REQUESTS = 256  # that a row tells of; later ones wait for the next step
MEMBERS = GroupStatus.__struct_fields__
STATUS = np.dtype([(name, "<f8" if name == "queued_cost" else "<i8") for name in MEMBERS])
CACHED = np.dtype("<i4")
ROW = "dp.status"  # its region, in the app area of a group's first die
Bytes = npt.NDArray[np.uint8]


class Gathered(NamedTuple):
    """Status of a DP group, as known to the leader, and its cached tokens."""

    status: GroupStatus
    cached: tuple[int, ...]  # tokens of each waiting prompt


def row_nbytes(num_requests: int) -> int:
    return STATUS.itemsize + num_requests * CACHED.itemsize


def layout_of(num_groups: int) -> CollectiveLayout:
    """Return the layout of the all-gather for the statuses of `num_groups` DP groups."""
    return CollectiveLayout(num_groups, num_groups * row_nbytes(MAX_REQUESTS), name="dp.statuses")


def plan_statuses(memory: MemoryPlan, num_groups: int) -> None:
    """Reserve the row and the all-gather's buffers on the first die of a DP group.

    OutOfMemoryError if the metadata area has no room.
    """
    memory.app.alloc(ROW, row_nbytes(MAX_REQUESTS))
    layout_of(num_groups).plan(memory)


def pack(known: Gathered) -> bytes:
    """Pack a DP group's status into its row of bytes."""
    status = np.array(tuple(getattr(known.status, name) for name in MEMBERS), STATUS)
    return status.tobytes() + np.array(known.cached, CACHED).tobytes()


def unpack(row: Bytes) -> Gathered:
    """Unpack a DP group's status from its row of bytes."""
    status = row[: STATUS.itemsize].view(STATUS)[0]
    values = {name: status[name].item() for name in MEMBERS}
    values["has_long"] = bool(values["has_long"])
    return Gathered(msgspec.convert(values, GroupStatus), tuple(row[STATUS.itemsize :].view(CACHED).tolist()))


class StatusGather:
    """Runs the all-gather of statuses among the first dies of a TE's DP groups.

    Only the groups that are asked take part.
    """

    def __init__(self, groups: Sequence[DPGroup], timeout_ns: int) -> None:
        self.groups, layout = groups, layout_of(len(groups))
        self._dies = tuple(group.dies[0].index for group in groups)
        means = Means(timeout_ns=timeout_ns, lane="XCCL statuses")
        self._ends = [Collectives(group.dies[0], self._dies, layout, means) for group in groups]
        self._ranks = tuple(group.rank for group in groups)  # of those that took part in the latest one
        self._num_events = 0

    async def run(self, ranks: tuple[GroupRank, ...], prompts: Sequence[Seq]) -> list[Gathered]:
        """Gather the statuses of the groups `ranks`, in rank order; the first of them is the leader.

        DeadlineError or ProtocolError, naming the peer, if a group does not take part.
        """
        if ranks != self._ranks:
            self._ranks, dies = ranks, tuple(self._dies[rank] for rank in ranks)
            for rank in ranks:
                self._ends[rank].reset(dies)
        self._num_events += 1
        found: dict[GroupRank, list[Gathered]] = {}
        starts: list[Callable[[], Awaitable[None]]] = []
        for rank in ranks:
            group = self.groups[rank]
            cached = tuple(group.scheduler.prefixes.num_reusable(seq) for seq in prompts)
            row = pack(Gathered(group.status(), cached))
            starts.append(partial(self.exchange, rank, row, self._num_events, found))
        try:
            await side_by_side(self.groups[0].dies[0].clock, starts)
        except Exception:
            self._ranks = ()  # whoever takes part in the next one begins anew
            raise
        return found[ranks[0]]

    async def exchange(
        self, rank: GroupRank, row: bytes, event: int, found: dict[GroupRank, list[Gathered]]
    ) -> None:
        """Take part in the all-gather for one group; the leader's host reads the gathered rows."""
        die: Die = self.groups[rank].dies[0]
        await die.clock.sleep(die.spec.command_ns())  # the host's message reaches the die
        region = die.memory.app.regions[ROW]
        die.memory.write(region.offset, row)
        rows = await self._ends[rank].all_gather(die.memory.view(region, np.uint8, len(row)), event)
        if rank == self._ranks[0]:
            found[rank] = [unpack(each) for each in rows]
