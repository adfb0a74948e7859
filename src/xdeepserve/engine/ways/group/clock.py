"""A group's collectives in a timing-only run: meetings of its dies, by the formulas of `comm`.

Rows cross as programs send them: sums and hidden states in four bytes an element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.engine.walk.ends import GroupEnd, first_event
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.meeting import Meeting
from xdeepserve.hw.clock import Clock
from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import shape_only


class GroupClock:
    """Collectives of a group in one of its microbatches, with shapes for arrays.

    The cost is settled when the last rank of `dies` has come.
    """

    def __init__(self, clock: Clock, cost: CollectiveCost, dies: Sequence[int], timeout_ns: int) -> None:
        self.clock, self.cost, self.dies, self.timeout_ns = clock, cost, dies, timeout_ns
        self._timelines: dict[int, Timeline] = {}  # by rank in the group
        self._num_events = Counter[int]()
        self._meetings: dict[int, Meeting[list[int]]] = {}

    def end(self, rank: int, timeline: Timeline) -> GroupEnd:
        """Make the end of a rank of the group."""
        self._timelines[rank] = timeline
        return GroupEnd(
            partial(self.all_reduce, rank),
            partial(self.all_gather, rank),
            partial(self.to_slices, rank),
            partial(self.spread, rank),
            partial(self.reduce_scatter, rank),
            partial(self.reset, rank),
        )

    def reset(self, rank: int, epoch: int) -> None:
        """Restart event IDs after a rollback, since ranks may have been at different meetings."""
        self._num_events[rank] = first_event(epoch)

    async def all_reduce(self, rank: int, x: Array, reduction: Reduction) -> Array:
        """Take part in an all-reduce; return `x` in place of the sum."""
        await self._meet(rank, "all-reduce", self.cost.all_reduce_ns(x.size, x.itemsize))
        return x

    async def all_gather(self, rank: int, part: Array, num_rows: int) -> Array:
        """Take part in an all-gather; return the shape [num_rows, N]."""
        await self._meet(rank, "all-gather", self.cost.all_gather_ns(part.nbytes))
        return shape_only(part.dtype, num_rows, *part.shape[1:])

    async def to_slices(self, rank: int, parts: Sequence[Array]) -> list[Array]:
        """Take part in an all-to-all with equal parts; return shapes of the parts sent to this die."""
        sizes, mine = [part.nbytes for part in parts], parts[rank]
        await self._meet(rank, "all-to-all", self.cost.all_to_all_ns([sizes] * self.cost.num_ranks))
        return [shape_only(mine.dtype, *mine.shape) for _ in parts]

    async def spread(self, rank: int, parts: Sequence[Array]) -> list[Array]:
        """Take part in an all-to-all with different numbers of rows; return shapes of the parts sent to this
        die."""
        cost, mine = self.cost, parts[rank]
        row_nbytes = math.prod(mine.shape[1:]) * mine.itemsize

        def price(counts: list[int]) -> float:
            return cost.all_to_all_ns([[count * row_nbytes] * cost.num_ranks for count in counts])

        counts = await self._meet_with(rank, "all-to-all", len(mine), price)
        return [shape_only(mine.dtype, count, *mine.shape[1:]) for count in counts]

    async def reduce_scatter(self, rank: int, x: Array, counts: Sequence[int]) -> Array:
        """Take part in a reduce-scatter; return the shape of this rank's rows."""
        elements = [count * math.prod(x.shape[1:]) for count in counts]
        await self._meet(rank, "reduce-scatter", self.cost.reduce_scatter_ns(elements, x.itemsize))
        return shape_only(x.dtype, counts[rank], *x.shape[1:])

    async def _meet(self, rank: int, op: str, duration_ns: float) -> None:
        await self._meet_with(rank, op, 0, lambda _: duration_ns)

    async def _meet_with(
        self, rank: int, op: str, rows: int, price: Callable[[list[int]], float]
    ) -> list[int]:
        """Take part in a meeting with `rows` rows; return the row counts of all ranks.

        `price` maps these counts to the time in ns.
        """
        timeline = self._timelines[rank]
        start = await timeline.catch_up()
        self._num_events[rank] += 1
        meeting = self._meeting(op, self._num_events[rank], price)
        await meeting.meet(rank, rows)
        timeline.waited("XCCL", op, start)
        meeting.draw(self.dies, rank, timeline.die, "XCCL")
        return meeting.value

    def _meeting(self, op: str, event: int, price: Callable[[list[int]], float]) -> Meeting[list[int]]:
        """Return the meeting of an event; the first rank to come makes it."""

        def settle(meeting: Meeting[list[int]]) -> tuple[float, list[int]]:
            del self._meetings[meeting.event]
            counts = [int(meeting.came[member]) for member in range(self.cost.num_ranks)]
            return price(counts), counts

        if event not in self._meetings:
            members = range(self.cost.num_ranks)
            self._meetings[event] = Meeting(self.clock, op, event, members, self.timeout_ns, settle)
        return self._meetings[event]
