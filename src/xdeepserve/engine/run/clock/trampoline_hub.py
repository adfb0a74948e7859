"""A2E and E2A of a timing-only run: meetings of a DP domain's attention dies with all expert dies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import get_args

import numpy as np

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.means import Carrier
from xdeepserve.comm.trampoline.layout import Sides
from xdeepserve.engine.lanes import RECEIVE, SEND
from xdeepserve.engine.run.clock.exchange_hub import ExchangeLoad, received
from xdeepserve.engine.run.clock.meeting import Meeting
from xdeepserve.engine.run.clock.routing import PlacedRouting, Routing, TimingConfig
from xdeepserve.engine.run.clock.timeline import Timeline
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.die import Die
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import shape_only


class TrampolineHub:
    """A2E and E2A of a microbatch of a DP domain, between its `attention` and `experts` dies.

    An attention die posts its tokens in bulk at its trampoline and goes on; expert dies exchange them.
    Answers come back through an exchange and in bulk: the attention die only waits (XDS 3.3).
    `config.of_dies` bills as if all these dies were a sample of a pod with so many expert dies.
    """

    def __init__(
        self,
        clock: Clock,
        cost: CommCost,
        model: ModelConfig,
        attention: tuple[int, ...],
        experts: tuple[int, ...],
        num_routed: int,
        stream: int,
        config: TimingConfig,
        timeout_ns: int,
        placed: PlacedRouting | None = None,
        first_copy: int = 0,
        carrier: Carrier = "mte",
    ) -> None:
        """Create the meetings' hub with its routing and its costs.

        `carrier` carries pulled rows; among expert dies, too, unless they push. `placed` knows the places of
        experts and replicas, if these are given. `first_copy` is the first physical expert that is a copy of
        the shared one.
        """
        self.clock, self.cost, self.model, self.stream = clock, cost, model, stream
        self.timeout_ns = timeout_ns
        self._experts = [f"expert {index}" for index in range(len(experts))]
        self._all = [*(f"attention {rank}" for rank in range(len(attention))), *self._experts]
        self.sides = Sides(attention, Group(experts, ()))
        # Dies that are here, routed and shared, may be a sample of more.
        self.sampled = num_routed
        self.num_routed, self.num_shared = num_routed, len(experts) - num_routed
        if config.of_dies is not None:
            self.num_routed = config.routed_dies or config.of_dies - self.num_shared
            self.num_shared = config.of_dies - self.num_routed
        self.copies = model.num_experts_per_tok + (self.num_shared > 0)
        self.routing = placed or Routing(self.num_routed, config.skew, config.seed)
        self.first_copy = first_copy
        self.carrier: Carrier = carrier
        self._a2e: dict[int, Meeting[ExchangeLoad]] = {}
        self._e2a: dict[int, Meeting[None]] = {}
        self.tally = Tally(cost.spec, num_routed, model.num_experts_per_tok)
        self._batch = 0.0  # tokens of the attention die that has most, at the latest A2E

    def a2e(self, event: int) -> Meeting[ExchangeLoad]:
        """Return the A2E meeting of an event.

        Its members are attention dies (0 and up), which post, then expert dies, which wait.
        """
        meeting = self._a2e.get(event)
        if meeting is None:
            meeting = Meeting(self.clock, "A2E", event, self._all, self.timeout_ns, self._settle_a2e)
            self._a2e[event] = meeting
        return meeting

    def e2a(self, event: int) -> Meeting[None]:
        """Return the E2A meeting of an event.

        Its members are expert dies. Attention dies wait for it too, and then for the bulk transfer.
        """
        meeting = self._e2a.get(event)
        if meeting is None:
            meeting = Meeting(self.clock, "E2A", event, self._experts, self.timeout_ns, self._settle_e2a)
            self._e2a[event] = meeting
        return meeting

    @property
    def num_attention(self) -> int:
        return len(self.sides.attention)

    @property
    def num_experts(self) -> int:
        return self.num_routed + self.num_shared

    def _settle_a2e(self, meeting: Meeting[ExchangeLoad]) -> tuple[float, ExchangeLoad]:
        del self._a2e[meeting.event]
        top_k = self.model.num_experts_per_tok
        total = sum(meeting.came.values()) * self.num_routed / self.sampled
        self._batch = max(meeting.came.values())
        drawn = meeting.event, 1 + self.stream, round(total * top_k)
        routed = self.routing.counts(*drawn)
        self.routing.collect(*drawn)
        shared = total / self.num_shared if self.num_shared else 0.0
        return self._exchange_ns("dispatch"), ExchangeLoad(routed, total * top_k / self.num_routed, shared)

    def _settle_e2a(self, meeting: Meeting[None]) -> tuple[float, None]:
        # Attention dies have all been here when they post the next event, so the one before is history.
        self._e2a.pop(meeting.event - 2, None)
        return self._exchange_ns("combine"), None

    def _exchange_ns(self, op: Op) -> float:
        sizes = self.num_experts, self._batch, self.copies
        return self.cost.among_ns(op, *sizes, self.carrier, self.num_attention)


class ClockAttentionSide:
    """An attention die's end, with the operations of `comm.trampoline.a2e.AttentionSide`."""

    def __init__(self, timeline: Timeline, rank: int, hub: TrampolineHub) -> None:
        self.timeline, self.rank, self.hub = timeline, rank, hub
        self._num_tokens, self._hidden = 0, hub.model.hidden_size

    def reset(self, epoch: int) -> None:
        """Do nothing: exchanges after a rollback have new event IDs, so they are new meetings."""

    async def a2e(self, x: Array, topk_idx: Array, topk_weights: Array, event_id: int) -> None:
        """Send tokens in bulk to the trampoline (stage 1); return when they are posted."""
        self._num_tokens = len(x)
        self.timeline.add("XCCL", "A2E", self.hub.cost.post_ns(len(x), self.hub.carrier))
        now, die = await self.timeline.catch_up(), self.timeline.die
        die.trace.depart(("A2E", die.index, self.hub, event_id), "A2E", die.index, "XCCL", now - 1)
        self.hub.tally.come(event_id, len(x))
        self.hub.a2e(event_id).come(self.rank, len(x))

    async def e2a(self, event_id: int) -> Array:
        """Wait for the answers; return their shape [T, H]."""
        start, meeting = await self.timeline.catch_up(), self.hub.e2a(event_id)
        hub = self.hub
        back_ns = round(hub.cost.return_ns(self._num_tokens, hub.copies, hub.carrier))
        await meeting.wait(f"attention {self.rank}", back_ns)
        self.timeline.waited("XCCL", "E2A", start, "E2A'")
        die = self.timeline.die
        key = "E2A'", die.index, self.hub, event_id
        die.trace.arrive(key, "E2A'", die.index, "XCCL", die.clock.now - 1)
        return shape_only(np.float32, self._num_tokens, self._hidden)


class ClockExpertSide:
    """An expert die's end, with the operations of `comm.trampoline.a2e.ExpertSide`."""

    def __init__(self, die: Die, index: int, hub: TrampolineHub) -> None:
        self.die, self.index, self.hub = die, index, hub

    def reset(self) -> None:
        """Do nothing: exchanges after a rollback have new event IDs, so they are new meetings."""

    async def a2e(self, event_id: int) -> Received:
        """Wait for the tokens; return shapes of the rows for this die's experts."""
        meeting = self.hub.a2e(event_id)
        meeting.come(self.hub.num_attention + self.index, 0)
        load = await meeting.wait(f"expert {self.index}")
        self._draw("A2E", RECEIVE, event_id, self.die.trace.arrive)
        num_routed = int(load.routed[self.index]) if self.index < self.hub.sampled else 0
        num_shared = math.ceil(load.shared) if self.index >= self.hub.sampled else 0
        kinds = np.array([0, self.hub.first_copy], np.int32)
        expert_idx = np.repeat(kinds, [num_routed, num_shared])
        return received(num_routed + num_shared, self.hub.model.hidden_size, expert_idx)

    async def e2a(self, expert_out: Array, event_id: int) -> None:
        meeting = self.hub.e2a(event_id)
        meeting.come(self.index, len(expert_out))
        await meeting.wait(f"expert {self.index}")
        self._draw("E2A'", SEND, event_id, self.die.trace.depart)

    def _draw(
        self, op: str, lane: str, event: int, end: Callable[[Hashable, str, int, str, int], None]
    ) -> None:
        """Draw the trampoline's end of a trace arrow for each attention die that it serves."""
        die, sides = self.die, self.hub.sides
        if die.trace.is_on:
            for attention in sides.served(self.index):
                key = op, sides.attention[attention], self.hub, event
                end(key, op, die.index, lane, die.clock.now - 1)


def way_back_ns(model: ModelConfig, rows: float, has_shared: bool) -> float:
    """Return the time in ns of E2A's second stage, from a trampoline to its attention die.

    `rows` is the number of a microbatch's rows.
    """
    return CommCost(hidden=model.hidden_size).return_ns(rows, model.num_experts_per_tok + has_shared)


def slower_way(model: ModelConfig, num_experts: int, rows: float, has_shared: bool) -> float:
    """Return the time of the slower way among expert dies over the mean of both ways."""
    cost, top_k = CommCost(hidden=model.hidden_size), model.num_experts_per_tok + has_shared
    times = [cost.among_ns(op, num_experts, rows, top_k) for op in get_args(Op)]
    return 2 * max(times) / sum(times)
