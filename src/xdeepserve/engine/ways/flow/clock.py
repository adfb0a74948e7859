"""Ways without barriers in timing-only runs: dataflow (xDeepServe 5.3) and expert services (EaaS 3).

An attention die sends the tokens of a microbatch, and expert dies serve the tokens that have come. A sending
is back when all expert dies with its rows have answered; it waits for no other die. No row moves: how many go
where is drawn, by a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import Trampoline
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.among.clock import received
from xdeepserve.engine.ways.flow.costs import COSTS, Errand
from xdeepserve.engine.ways.routing import PlacedRouting, TimingConfig
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.clock import Waiter, Waiting
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import shape_only
from xdeepserve.step.linear import Threads

Counts = npt.NDArray[np.int64]


@dataclass
class LaneSending:
    """Tokens of an attention die's microbatch: the die's timeline, and the size of the latest sending."""

    timeline: Timeline
    sent: Errand


class FlowBatch(NamedTuple):
    """Batch for an expert die: the rows of several sendings for the same layer."""

    layer: int
    received: Received
    lanes: Counts
    clients: Sequence[int]
    slots: Sequence[int]
    sent: Sequence[Errand | None]  # what the lanes had under way


class FlowServer(NamedTuple):
    """Expert die's end, with the operations of `comm.services.server.ServiceServer`."""

    register: Callable[[], None]
    next_batch: Callable[[int], Coroutine[Any, Any, list[FlowBatch]]]
    answer: Callable[[Sequence[FlowBatch], Array], Coroutine[Any, Any, None]]


class FlowClock:
    """All sendings of a TE, or of TEs that share expert servers. A lane is a microbatch of an attention die,
    `client * num_microbatches + microbatch`; it has at most one sending under way.

    rows[:, e, lane]   rows of the sending for expert die e: for routed experts, and for the shared one
    here[e, lane]      rows have arrived there and have not been taken
    heard[e, lane]     rows have arrived, or, if clients announce that, it is known that there are none
    open[e, lane]      rows have not been answered
    arrived[lane]      rows of the sending have arrived
    """

    def __init__(
        self, team: Team, cost: CommCost, timing: TimingConfig, placed: Sequence[PlacedRouting]
    ) -> None:
        walk = team.sizes.walk
        self.team, self.placed, self.clock = team, placed, team.pod.clock
        self.cost, self.batching = COSTS[walk.turns](team, cost)
        self.num_attention, self.num_experts = len(team.dies) * team.num_tes, team.holders.num_ranks
        self.num_microbatches, self._num_layers = walk.num_microbatches, len(team.sizes.experts.order)
        num_lanes = self.num_attention * self.num_microbatches
        self.rows = np.zeros((2, self.num_experts, num_lanes), np.int64)
        self.here = np.zeros((self.num_experts, num_lanes), bool)
        self.heard, self.open = self.here.copy(), self.here.copy()
        self.arrived = np.zeros(num_lanes, bool)
        self.events, self.came_ns = np.zeros(num_lanes, np.int64), np.zeros(num_lanes, np.int64)
        self.back_share = np.ones(num_lanes)  # rows that come back for each that goes there
        # Attention dies that an expert die waits for.
        self._present = np.ones((self.num_experts, self.num_attention), bool)
        self._kinds = np.array([0, team.sizes.experts.num_slots], np.int32)
        self._sent: list[Errand | None] = [None] * num_lanes
        self._back_ns: list[int | None] = [None] * num_lanes  # when it is back, once all have answered
        self._waiters: dict[int, Waiter] = {}
        self._idle: dict[int, Waiter] = {}  # expert dies that wait for something to come

    def shared_with(self, team: Team, cost: CommCost) -> FlowClock:
        """Return the same sendings as another TE has them, whose lanes are others."""
        other = copy(self)
        other.team = team
        other.cost, _ = COSTS[team.sizes.walk.turns](team, cost)
        return other

    # ---- ends ---------------------------------------------------------------------------------------

    def attention_end(self, rank: DieRank, microbatch: int, timeline: Timeline) -> Trampoline:
        """Make an attention die's end, which waits only for the expert dies with its tokens."""
        lane = self.team.client(rank) * self.num_microbatches + microbatch
        sending = LaneSending(timeline, Errand(0, 0, 0))
        self.forget(lane)  # which a TE that is gone may have had
        return Trampoline(
            partial(self.a2e, rank, lane, sending),
            partial(self.e2a, lane, sending),
            lambda epoch: self.forget(lane),
        )

    def expert_program(
        self,
        index: int,
        mem: ExpertMemory,
        threads: Threads,
        timeline: Timeline,
        reports: Queue[msgspec.Struct],
    ) -> ExpertProgram:
        """Make an expert die's program, which serves tokens in the order they come."""
        end = FlowServer(
            partial(self.register, index), partial(self.next_batch, index), partial(self.answer, index)
        )
        return ExpertServerProgram(timeline.die, mem, end, threads, timeline, reports)

    # ---- attention dies -----------------------------------------------------------------------------

    async def a2e(
        self,
        rank: DieRank,
        lane: int,
        sending: LaneSending,
        x: Array,
        topk_idx: Array,
        topk_weights: Array,
        event: int,
    ) -> None:
        """Send tokens [T, H] of a lane; return when they have left."""
        team, count = self.team, len(x)
        routing = self.placed[rank // team.dies_per_domain]
        drawn = event, 1 + lane, count * team.config.num_experts_per_tok
        rows = np.zeros((2, self.num_experts), np.int64)
        routed = routing.counts(*drawn)
        routing.collect(*drawn)
        rows[0, : len(routed)] = routed
        shared = team.shared_expert(rank)
        if shared is not None:  # the copy of the shared expert that this die's tokens take
            rows[1, team.holders.expert_rank[shared]] = count
        sending.sent = sent = Errand(count, int(rows.sum()), int(rows.any(0).sum()))
        sending.timeline.add("XCCL", "A2E", self.cost.post_ns(sent))
        await sending.timeline.catch_up()
        self.send(lane, event, sent, rows)

    async def e2a(self, lane: int, sending: LaneSending, event: int) -> Array:
        """Wait for the answers to a lane's tokens; return their shape [T, H]."""
        start = await sending.timeline.catch_up()
        await self.back(lane, self.team.sizes.walk.timeout_ns)
        sending.timeline.waited("XCCL", "E2A", start)
        sending.timeline.add("XCCL", "E2A", self.cost.read_ns(sending.sent))
        return shape_only(np.float32, sending.sent.num_tokens, self.team.config.hidden_size)

    def send(self, lane: int, event: int, sent: Errand, rows: Counts) -> None:
        """Send tokens from an attention die now, with `rows` [2, experts]."""
        self.rows[:, :, lane], self.open[:, lane], self.events[lane] = rows, rows.any(0), event
        self._sent[lane], self._back_ns[lane], self.arrived[lane] = sent, None, False
        self.back_share[lane] = self.cost.back_share(sent)
        self.clock.detach(self._carry(lane, sent), f"tokens of lane {lane}")

    async def _carry(self, lane: int, sent: Errand) -> None:
        await self.clock.sleep(round(self.cost.there_ns(sent)))
        if self._sent[lane] is not sent:
            return  # it was called back
        has_rows, self.arrived[lane] = self.open[:, lane].copy(), True
        self.here[:, lane], self.heard[:, lane], self.came_ns[lane] = has_rows, has_rows, self.clock.now
        if self.batching.clients > 1:  # clients announce what they send
            self.heard[:, lane] = True
        if not sent.num_experts:
            self._end(lane)
        for expert in np.flatnonzero(self.heard[:, lane]).tolist():
            if expert in self._idle:
                self._idle.pop(expert).wake()

    def forget(self, lane: int) -> None:
        """Forget the sending under way on a lane, as if it had not been sent."""
        self.here[:, lane], self.open[:, lane], self._sent[lane] = False, False, None

    # ---- expert dies --------------------------------------------------------------------------------

    def register(self, expert: int) -> None:
        """Forget unanswered arrivals at an expert die, after a rollback; attention dies send them again.

        Those of TEs that share expert servers are served again instead: only one of them rolls back.
        """
        is_shared = self.team.num_tes > 1
        self.here[expert] = self.open[expert] & self.arrived if is_shared else False
        self.heard[expert] = self.here[expert]

    async def next_batch(self, expert: int, room: int) -> list[FlowBatch]:
        """Wait, without a deadline, for tokens; take all of them for the layer of the oldest."""
        here = self.here[expert]
        while not here.any():
            await self._news(expert, None)
        deadline_ns = self.clock.now + self.batching.timeout_ns
        while not self._has_enough(expert):
            try:
                await self._news(expert, deadline_ns)
            except DeadlineError:
                self._present[expert] = self._heard(expert)
        lanes = np.flatnonzero(here)
        layers = (self.events[lanes] - 1) % self._num_layers
        layer = int(layers[self.came_ns[lanes].argmin()])
        lanes = lanes[layers == layer]
        here[lanes], self.heard[expert] = False, False
        counts = self.rows[:, expert, lanes].sum(1)
        hidden = self.team.config.hidden_size
        rows = received(int(counts.sum()), hidden, np.repeat(self._kinds, counts))
        clients, slots = np.unique(lanes // self.num_microbatches), np.unique(lanes % self.num_microbatches)
        sent = [self._sent[lane] for lane in lanes.tolist()]
        return [FlowBatch(layer, rows, lanes, clients.tolist(), slots.tolist(), sent)]

    def _heard(self, expert: int) -> npt.NDArray[np.bool_]:
        """Return which attention dies an expert die has heard of."""
        lanes = self.heard[expert] | self.here[expert]
        return lanes.reshape(self.num_attention, -1).any(1)

    def _has_enough(self, expert: int) -> bool:
        """Whether an expert die has enough clients' tokens for a batch."""
        if self.batching.clients <= 1:
            return True
        heard = self._heard(expert)
        present = int((self._present[expert] | heard).sum())
        return int(heard.sum()) >= min(self.batching.clients, present)

    async def answer(self, expert: int, batch: Sequence[FlowBatch], expert_out: Array) -> None:
        """Answer a batch; return when the die can go on."""
        (one,) = batch
        num_back = float(self.rows[:, expert, one.lanes].sum(0) @ self.back_share[one.lanes])
        await self.clock.sleep(round(self.cost.answer_ns(len(one.received), len(one.lanes), num_back)))
        lanes = one.lanes
        if self.team.num_tes > 1:  # a lane may have been called back since, and have sent again
            pairs = zip(lanes.tolist(), one.sent, strict=True)
            lanes = lanes[[self._sent[lane] is sent for lane, sent in pairs]]
        self.open[expert, lanes] = False
        for lane in lanes[~self.open[:, lanes].any(0)].tolist():
            self._end(lane)

    async def _news(self, expert: int, deadline_ns: int | None) -> None:
        """Wait until an expert die hears of tokens; DeadlineError if it does not."""
        waiter = self._idle[expert] = self.clock.waiter(
            lambda: Waiting("A2E", f"expert {expert}", "any attention die", "tokens", "some", "none")
        )
        try:
            await self.clock.wait(waiter, deadline_ns, idle=deadline_ns is None)
        finally:
            if self._idle.get(expert) is waiter:
                del self._idle[expert]

    # ---- and back -----------------------------------------------------------------------------------

    def _end(self, lane: int) -> None:
        sent = self._sent[lane]
        if sent is None:
            return
        delay = round(self.cost.back_ns(sent))
        self._back_ns[lane] = self.clock.now + delay
        if lane in self._waiters:
            self._waiters.pop(lane).wake(delay_ns=delay)

    async def back(self, lane: int, timeout_ns: int) -> None:
        """Wait until all answers to a lane's sending are summed; DeadlineError names the silent expert
        dies."""
        end = self._back_ns[lane]
        if end is not None:
            await self.clock.sleep_until(end)
            return
        waiter = self._waiters[lane] = self.clock.waiter(lambda: self._describe(lane))
        try:
            await self.clock.wait(waiter, self.clock.now + timeout_ns)
        finally:
            if self._waiters.get(lane) is waiter:
                del self._waiters[lane]

    def _describe(self, lane: int) -> Waiting:
        rank, microbatch = divmod(lane, self.num_microbatches)
        late = np.flatnonzero(self.open[:, lane]).tolist()
        names = ", ".join(f"expert {expert}" for expert in late[:8])
        total = self.rows[:, :, lane].any(0).sum()
        who, event = f"attention {rank}, microbatch {microbatch}", f"answers of event {self.events[lane]}"
        return Waiting("E2A", who, names, event, total, total - len(late))
