"""Exchanges with experts in lockstep, between dies whose stages are tasks.

Dies that share a layer by collectives (TP, output projections), or cut a step into microbatches, meet each
other inside a layer. Their stages are launched one by one, as in any pod. The exchanges with experts, whose
work grows with the square of the number of dies, are made for all dies at once, by the twins of `colocated`:

    dispatch   the last die to come moves every row to its experts, and runs them
    combine    the last die to come moves every answer back, adds the shared expert's and the residual

The meeting has then run the kernels of some stages (experts, shared expert, sum). These stages are launched
all the same, and only take virtual time: so dies are as busy as they would be without lockstep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from xdeepserve.comm.cost import Op
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.colocated import PUSH, AmongTwin, ColocatedLockstep
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.walk.ends import Exchange
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.engine.ways.among.clock import received
from xdeepserve.engine.ways.meeting import Meeting
from xdeepserve.hw.die import Die
from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import shape_only
from xdeepserve.step.frame import Frame
from xdeepserve.step.shard import GATHER
from xdeepserve.step.stage import LayerProgram, Meet, Stage

DISPATCHES = "dispatch", "fused_dispatch"


def has_stages_of_tasks(executor: Executor) -> bool:
    """Whether a die meets other dies inside a layer, or runs several microbatches."""
    mem = executor.mem
    return mem.groups.num_sharing > 1 or mem.walk.turns == "overlap"


def use_met_exchanges(executors: Sequence[Executor]) -> None:
    """Make stages after a dispatch take virtual time only, on all these dies: the meeting computes them."""
    for executor in executors:
        way = executor.traversal
        known = {id(program): _without_experts(program) for program in way.programs}
        executor.traversal = way._replace(programs=[known[id(program)] for program in way.programs])


def _without_experts(program: LayerProgram) -> LayerProgram:
    """Return a layer without kernels in the stages after the dispatch.

    These stages end at the layer's end, or at the gathering of a DP group's rows. The meeting has computed
    them for all dies.
    """
    feed: list[Stage | Meet] = []
    is_met = False
    for item in program.feed:
        if isinstance(item, Meet):
            is_met |= item.op in DISPATCHES
        elif item is GATHER[0]:
            is_met = False
        elif is_met:
            item = item._replace(ops=tuple(op._replace(kernel=_nothing) for op in item.ops))
        feed.append(item)
    return program._replace(feed=tuple(feed))


def _nothing(f: Frame) -> None:
    """Do nothing, in place of a stage that the meeting has run for all dies."""


class MetPlace(NamedTuple):
    """Rank's place in the exchanges of a microbatch; rows stay where the kernels find them."""

    rank: DieRank
    runner: Runner
    die: Die
    pass_at: dict[int, int]  # number of the pass through a layer, by the id of its cache

    @property
    def at(self) -> int:
        """Number of the pass through a layer that the rows are in."""
        return self.pass_at[id(self.runner.frame.cache)]


class MetExchanges(ColocatedLockstep):
    """Lockstep for dispatch, experts and combine between all dies, in one of their microbatches."""

    def __init__(
        self,
        executors: Sequence[Executor],
        exchange: tuple[Group, Layout | FusedLayout],
        num_threads: int,
        twin: AmongTwin,
        part: int,
    ) -> None:
        super().__init__(executors, exchange, num_threads, twin)
        overlaps = executors[0].mem.walk.turns == "overlap"
        if overlaps:
            self.spaces = [executor.mem.layer_workspace(part) for executor in executors]
        self.lane = f"XCCL microbatch {part}" if overlaps else "XCCL"
        self.part, self._meetings = part, dict[tuple[str, int], Meeting[None]]()
        self.cuts = [np.zeros((len(executors), 2), np.int64)]
        self.inputs = np.zeros((len(executors), a.NUM_INPUTS), np.int64)

    def join(self) -> None:
        """Make the exchanges of the dies' microbatch meet here."""
        for executor in self.executors:
            runner = executor.traversal.runners[self.part]
            pass_at = {id(cache): at for at, cache in enumerate(executor.caches)}
            place = MetPlace(executor.rank, runner, executor.die, pass_at)
            runner.exchange = Exchange(
                partial(self.dispatch, place),
                partial(self.combine, place),
                partial(self.bill, place),
                lambda epoch: self._meetings.clear(),  # all unfinished exchanges, after a rollback
            )

    # ---- a rank's part --------------------------------------------------------------------------------

    async def dispatch(self, place: MetPlace, x: Array, topk_idx: Array, event_id: int) -> Received:
        """Take a rank's part in a dispatch; return the shape of its experts' rows, computed already."""
        mine, rank = place.runner.frame.mine, place.rank
        self.cuts[0][rank, 1], self.inputs[rank, a.H] = len(mine), tables.address(mine)
        await self._meet("dispatch", place, event_id)
        return received(int(self.received[place.at, rank].sum()), mine.shape[1])

    async def combine(self, place: MetPlace, expert_out: Array, topk_weights: Array, event_id: int) -> Array:
        """Take a rank's part in a combine; return the shape of the answers [T, K, H] or of their sums [T, H].

        The answers have been added to the rank's rows already.
        """
        await self._meet("combine", place, event_id)
        num_rows, hidden = place.runner.frame.mine.shape
        copies = () if self.twin is PUSH else (self.shape.top_k,)
        return shape_only(np.float32, num_rows, *copies, hidden)

    def bill(self, place: MetPlace, received: int) -> tuple[float, float, float]:
        """Return the work to bill after a rank's latest dispatch.

        Token copies for routed experts; the number of experts with rows; rows for a copy of the shared
        expert.
        """
        copied, mem = int(self.copied()[place.rank]), self.executors[place.rank].mem
        routed, mean = (
            received - copied,
            int(self.rows.sum()) * self.shape.top_k / mem.placed.num_primary_dies,
        )
        copies = self.timetable.spec.billed_copies(routed, mean)
        return copies, min(routed, len(mem.slots)), copied

    async def _meet(self, op: Op, place: MetPlace, event: int) -> None:
        start = place.die.clock.now
        meeting = await self.take_part(op, place.rank, place.at, event)
        place.die.draw(self.lane, meeting.op, start)
        meeting.draw([die.index for die in self.dies], place.rank, place.die, self.lane)

    async def take_part(self, op: Op, rank: int, at: int, event: int) -> Meeting[None]:
        """Take a die's part in an exchange, in pass `at` of a step; return the meeting after its end."""
        key = (op, event)
        if key not in self._meetings:
            timeout_ns, name = (
                self.executors[0].mem.walk.timeout_ns,
                self.twin.ops[op == "combine"],
            )
            self._meetings[key] = Meeting(
                self.clock, name, event, range(len(self.dies)), timeout_ns, lambda met: self._settle(key, at)
            )
        meeting = self._meetings[key]
        meeting.come(rank, self.cuts[0][rank, 1])
        await meeting.wait(rank)
        return meeting

    def _settle(self, key: tuple[Op, int], at: int) -> tuple[float, None]:
        """Move all bytes when the last die has come; return the time in ns."""
        op, event = key
        del self._meetings[key]
        for die in self.dies:  # one may have been lost since it came
            die.check_alive()
        self.find_tables()
        if op == "dispatch":
            calls = [self.twin.send(self, event), self.twin.answer(self, at, event)]
        else:
            calls = [self.twin.collect(self, at, event)]
        self.spread(*([call] for call in calls))
        which = int(op == "combine")
        self.check(self.faults[at][which], self.twin.ops[which], "rank", event)
        slowness = max(die.slowness for die in self.dies)
        wait_ns = max(0, self._free_ns() - self.clock.now)
        return wait_ns + slowness * self.timetable.exchange_ns(op, int(self.rows.max())), None
