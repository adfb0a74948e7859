"""A2E and E2A of a timing-only run: meetings of a DP domain's attention dies with all expert dies.

An attention die posts its tokens in bulk at its trampoline and goes on; expert dies exchange them. Answers
come back through an exchange and in bulk: the attention die only waits (XDS 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import msgspec
import numpy as np

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.exchange_choices import Carrier
from xdeepserve.comm.trampoline.layout import Sides
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.lanes import RECEIVE, SEND
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import ExpertEnd, Trampoline
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.among.clock import ExchangeLoad, received
from xdeepserve.engine.ways.meeting import Meeting
from xdeepserve.engine.ways.routing import PlacedRouting, Routing, TimingConfig
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import shape_only
from xdeepserve.step.linear import Threads


@dataclass
class AttentionPlace:
    """Attention die's place in the exchanges of a microbatch: its number in its domain, and what it sent."""

    timeline: Timeline
    index: int
    num_tokens: int = 0


class TrampolinesClock:
    """A2E and E2A between the dies of all DP domains and the expert dies.

    A lane is a microbatch of a domain, `microbatch * num_domains + domain`; it has meetings and random
    numbers of its own. `timing.of_dies` bills as if the expert dies were a sample of so many. `placed` knows
    the places of experts and replicas in each domain, if these are given.
    """

    def __init__(
        self, team: Team, cost: CommCost, timing: TimingConfig, placed: Sequence[PlacedRouting]
    ) -> None:
        self.team, self.cost, self.model, walk = team, cost, team.config, team.sizes.walk
        self.clock, self.timeout_ns, self.num_domains = team.pod.clock, walk.timeout_ns, walk.num_domains
        # It carries pulled rows; among expert dies, too, unless they push.
        self.carrier: Carrier = "mte" if walk.carrier == "rdma" else walk.carrier
        num_experts = len(team.expert_dies)
        self.num_attention = team.dies_per_domain
        self.first_copy = team.sizes.experts.num_slots  # physical expert that is a copy of the shared one
        self._names = [f"expert {index}" for index in range(num_experts)]
        self._all = [*(f"attention {rank}" for rank in range(self.num_attention)), *self._names]
        # Dies that are here, routed and shared, may be a sample of more.
        self.sampled = self.num_routed = team.sizes.experts.num_routed
        self.num_shared = num_experts - self.num_routed
        if timing.of_dies is not None:
            self.num_routed = timing.routed_dies or timing.of_dies - self.num_shared
            self.num_shared = timing.of_dies - self.num_routed
        self.num_experts = self.num_routed + self.num_shared
        self.copies = self.model.num_experts_per_tok + (self.num_shared > 0)
        domains = range(self.num_domains)
        self.sides = [Sides(team.domain(d), Group(team.expert_dies, ())) for d in domains]
        self.routings: list[PlacedRouting | Routing] = [
            placed[d] if placed else Routing(self.num_routed, timing.skew, timing.seed) for d in domains
        ]
        lanes = range(walk.num_microbatches * self.num_domains)
        self.tallies = [Tally(cost.spec, self.sampled, self.model.num_experts_per_tok) for _ in lanes]
        self.batch = [0.0] * len(lanes)  # tokens of the attention die that has most, at the latest A2E
        self._places: dict[tuple[DieRank, int], AttentionPlace] = {}
        self._a2e: dict[tuple[int, int], Meeting[ExchangeLoad]] = {}
        self._e2a: dict[tuple[int, int], Meeting[None]] = {}

    # ---- ends ---------------------------------------------------------------------------------------

    def attention_end(self, rank: DieRank, microbatch: int, timeline: Timeline) -> Trampoline:
        """Make an attention die's end of the meetings with expert dies."""
        domain, index = divmod(rank, self.num_attention)
        lane, place = microbatch * self.num_domains + domain, AttentionPlace(timeline, index)
        # Exchanges after a rollback have new event IDs, so they are new meetings.
        return Trampoline(partial(self.a2e, lane, place), partial(self.e2a, lane, place), lambda epoch: None)

    def expert_program(
        self,
        index: int,
        mem: ExpertMemory,
        threads: Threads,
        timeline: Timeline,
        reports: Queue[msgspec.Struct],
    ) -> ExpertProgram:
        """Make an expert die's program: three persistent kernels, of which the middle one only takes time."""
        die, count = timeline.die, self.num_domains
        ends = [
            ExpertEnd(partial(self.take, *at), partial(self.give, *at), lambda: None)
            for at in ((lane, die, index) for lane in range(len(self.tallies)))
        ]
        firsts = range(0, len(ends), count)
        by_microbatch = [ends[first : first + count] for first in firsts]
        tallies = [self.tallies[first : first + count] for first in firsts]
        return ExpertProgram(die, mem, by_microbatch, tallies, threads, timeline, reports)

    # ---- attention dies -----------------------------------------------------------------------------

    async def a2e(
        self, lane: int, place: AttentionPlace, x: Array, topk_idx: Array, topk_weights: Array, event: int
    ) -> None:
        """Send tokens in bulk to the trampoline (stage 1); return when they are posted."""
        place.num_tokens = len(x)
        place.timeline.add("XCCL", "A2E", self.cost.post_ns(len(x), self.carrier))
        now, die = await place.timeline.catch_up(), place.timeline.die
        die.trace.depart(("A2E", die.index, lane, event), "A2E", die.index, "XCCL", now - 1)
        self.tallies[lane].come(event, len(x))
        self.meeting_a2e(lane, event).come(place.index, len(x))

    async def e2a(self, lane: int, place: AttentionPlace, event: int) -> Array:
        """Wait for the answers; return their shape [T, H]."""
        start, meeting = await place.timeline.catch_up(), self.meeting_e2a(lane, event)
        back_ns = round(self.cost.return_ns(place.num_tokens, self.copies, self.carrier))
        await meeting.wait(f"attention {place.index}", back_ns)
        place.timeline.waited("XCCL", "E2A", start, "E2A'")
        die = place.timeline.die
        die.trace.arrive(("E2A'", die.index, lane, event), "E2A'", die.index, "XCCL", die.clock.now - 1)
        return shape_only(np.float32, place.num_tokens, self.model.hidden_size)

    # ---- expert dies --------------------------------------------------------------------------------

    async def take(self, lane: int, die: Die, index: int, event: int) -> Received:
        """Wait for the tokens of a lane; return shapes of the rows for an expert die's experts."""
        meeting = self.meeting_a2e(lane, event)
        load = await meeting.meet(self.num_attention + index, 0)
        self.draw("A2E", RECEIVE, lane, die, index, event, die.trace.arrive)
        num_routed = int(load.routed[index]) if index < self.sampled else 0
        num_shared = math.ceil(load.shared) if index >= self.sampled else 0
        expert_idx = np.repeat(np.array([0, self.first_copy], np.int32), [num_routed, num_shared])
        return received(num_routed + num_shared, self.model.hidden_size, expert_idx)

    async def give(self, lane: int, die: Die, index: int, expert_out: Array, event: int) -> None:
        """Answer the tokens of a lane; return when the exchange has ended."""
        meeting = self.meeting_e2a(lane, event)
        await meeting.meet(index, len(expert_out))
        self.draw("E2A'", SEND, lane, die, index, event, die.trace.depart)

    def draw(
        self,
        op: str,
        on: str,
        lane: int,
        die: Die,
        index: int,
        event: int,
        end: Callable[[Hashable, str, int, str, int], None],
    ) -> None:
        """Draw the trampoline's end of a trace arrow for each attention die that it serves."""
        sides = self.sides[lane % self.num_domains]
        if die.trace.is_on:
            for attention in sides.served(index):
                key = op, sides.attention[attention], lane, event
                end(key, op, die.index, on, die.clock.now - 1)

    # ---- meetings -----------------------------------------------------------------------------------

    def meeting_a2e(self, lane: int, event: int) -> Meeting[ExchangeLoad]:
        """Return the A2E meeting of an event.

        Its members are attention dies (0 and up), which post, then expert dies, which wait.
        """
        if (lane, event) not in self._a2e:
            settle = partial(self._settle_a2e, lane)
            self._a2e[lane, event] = Meeting(self.clock, "A2E", event, self._all, self.timeout_ns, settle)
        return self._a2e[lane, event]

    def meeting_e2a(self, lane: int, event: int) -> Meeting[None]:
        """Return the E2A meeting of an event.

        Its members are expert dies. Attention dies wait for it too, and then for the bulk transfer.
        """
        if (lane, event) not in self._e2a:
            settle = partial(self._settle_e2a, lane)
            self._e2a[lane, event] = Meeting(self.clock, "E2A", event, self._names, self.timeout_ns, settle)
        return self._e2a[lane, event]

    def _settle_a2e(self, lane: int, meeting: Meeting[ExchangeLoad]) -> tuple[float, ExchangeLoad]:
        del self._a2e[lane, meeting.event]
        top_k, routing = self.model.num_experts_per_tok, self.routings[lane % self.num_domains]
        total = sum(meeting.came.values()) * self.num_routed / self.sampled
        self.batch[lane] = max(meeting.came.values())
        drawn = meeting.event, 1 + lane, round(total * top_k)
        routed = routing.counts(*drawn)
        routing.collect(*drawn)
        shared = total / self.num_shared if self.num_shared else 0.0
        load = ExchangeLoad(routed, total * top_k / self.num_routed, shared)
        return self.dispatch_ns(lane, meeting.event, load), load

    def _settle_e2a(self, lane: int, meeting: Meeting[None]) -> tuple[float, None]:
        # Attention dies have all been here when they post the next event, so the one before is history.
        self._e2a.pop((lane, meeting.event - 2), None)
        return self.combine_ns(lane, meeting.event), None

    def dispatch_ns(self, lane: int, event: int, load: ExchangeLoad) -> float:
        """Return the time from the last arrival at A2E until expert dies have their rows, in ns."""
        return self._among_ns("dispatch", lane)

    def combine_ns(self, lane: int, event: int) -> float:
        """Return the time from the last expert die's arrival at E2A until the sums can go back, in ns."""
        return self._among_ns("combine", lane)

    def _among_ns(self, op: Op, lane: int) -> float:
        sizes = self.num_experts, self.batch[lane], self.copies
        return self.cost.among_ns(op, *sizes, self.carrier, self.num_attention)


def way_back_ns(model: ModelConfig, rows: float, has_shared: bool) -> float:
    """Return the time in ns of E2A's second stage, from a trampoline to its attention die.

    `rows` is the number of a microbatch's rows.
    """
    cost = CommCost(hidden=model.hidden_size, int8_answers=model.int8_answers)
    return cost.return_ns(rows, model.num_experts_per_tok + has_shared)


def slower_way(model: ModelConfig, num_experts: int, rows: float, has_shared: bool) -> float:
    """Return the time of the slower way among expert dies over the mean of both ways."""
    cost = CommCost(hidden=model.hidden_size, int8_answers=model.int8_answers)
    top_k = model.num_experts_per_tok + has_shared
    times = [cost.among_ns(op, num_experts, rows, top_k) for op in get_args(Op)]
    return 2 * max(times) / sum(times)
