"""A DP group's collectives in a timing-only run: meetings of its dies, by the formulas of `comm`.

Rows cross as programs send them: sums and hidden states in four bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.engine.run.clock.meeting import Meeting
from xdeepserve.engine.run.clock.timeline import Timeline
from xdeepserve.engine.walk.group_end import first_event
from xdeepserve.hw.clock import Clock
from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import shape_only


class CollectiveHub:
    """Collectives of a group; the cost is settled when the last rank of `dies` has come."""

    def __init__(self, clock: Clock, cost: CollectiveCost, dies: Sequence[int], timeout_ns: int) -> None:
        self.clock, self.cost, self.dies, self.timeout_ns = clock, cost, dies, timeout_ns
        self._meetings: dict[int, Meeting[list[int]]] = {}

    async def meet(
        self, op: str, rank: int, event: int, rows: int, price: Callable[[list[int]], float]
    ) -> Meeting[list[int]]:
        """Take a rank's part in a collective with `rows` rows; return the meeting after its end.

        `price` maps the row counts of all ranks to the time in ns. The meeting's value is these counts.
        """

        def settle(meeting: Meeting[list[int]]) -> tuple[float, list[int]]:
            del self._meetings[meeting.event]
            counts = [int(meeting.came[member]) for member in range(self.cost.num_ranks)]
            return price(counts), counts

        meeting = self._meetings.get(event)
        if meeting is None:
            meeting = Meeting(self.clock, op, event, range(self.cost.num_ranks), self.timeout_ns, settle)
            self._meetings[event] = meeting
        meeting.come(rank, rows)
        await meeting.wait(rank)
        return meeting


class ClockGroup:
    """A die's end of collectives in its group, with shapes for arrays."""

    def __init__(self, timeline: Timeline, rank: int, hub: CollectiveHub) -> None:
        self.timeline, self.rank, self.hub = timeline, rank, hub
        self.size, self._num_events = hub.cost.num_ranks, 0

    def reset(self, epoch: int) -> None:
        """Restart event IDs after a rollback, since ranks may have been at different meetings."""
        self._num_events = first_event(epoch)

    def _event(self) -> int:
        self._num_events += 1
        return self._num_events

    async def all_reduce(self, x: Array, reduction: Reduction) -> Array:
        """Take part in an all-reduce; return `x` in place of the sum."""
        await self._meet("all-reduce", self.hub.cost.all_reduce_ns(x.size, x.itemsize))
        return x

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        """Take part in an all-gather; return the shape [num_rows, N]."""
        await self._meet("all-gather", self.hub.cost.all_gather_ns(part.nbytes))
        return shape_only(part.dtype, num_rows, *part.shape[1:])

    async def to_slices(self, parts: Sequence[Array]) -> list[Array]:
        """Take part in an all-to-all with equal parts; return shapes of the parts sent to this die."""
        sizes = [part.nbytes for part in parts]
        await self._meet("all-to-all", self.hub.cost.all_to_all_ns([sizes] * self.size))
        mine = parts[self.rank]
        return [shape_only(mine.dtype, *mine.shape) for _ in parts]

    async def spread(self, parts: Sequence[Array]) -> list[Array]:
        """Take part in an all-to-all with different numbers of rows; return shapes of the parts sent to this
        die."""
        cost, mine = self.hub.cost, parts[self.rank]
        row_nbytes = math.prod(mine.shape[1:]) * mine.itemsize

        def price(counts: list[int]) -> float:
            return cost.all_to_all_ns([[count * row_nbytes] * self.size for count in counts])

        counts = await self._meet_with("all-to-all", len(mine), price)
        return [shape_only(mine.dtype, count, *mine.shape[1:]) for count in counts]

    async def reduce_scatter(self, x: Array, counts: Sequence[int]) -> Array:
        """Take part in a reduce-scatter; return the shape of this rank's rows."""
        elements = [count * math.prod(x.shape[1:]) for count in counts]
        await self._meet("reduce-scatter", self.hub.cost.reduce_scatter_ns(elements, x.itemsize))
        return shape_only(x.dtype, counts[self.rank], *x.shape[1:])

    async def _meet(self, op: str, duration_ns: float) -> None:
        await self._meet_with(op, 0, lambda _: duration_ns)

    async def _meet_with(self, op: str, rows: int, price: Callable[[list[int]], float]) -> list[int]:
        """Take part in a meeting with `rows` rows; return the row counts of all ranks."""
        start = await self.timeline.catch_up()
        meeting = await self.hub.meet(op, self.rank, self._event(), rows, price)
        self.timeline.waited("XCCL", op, start)
        meeting.draw(self.hub.dies, self.rank, self.timeline.die, "XCCL")
        return meeting.value
