"""Dispatch and combine of a timing-only run: real barriers of the ranks, with the cost of `comm/cost.py`.

No row moves. A late rank still makes the others wait, and every rank learns how many rows it would have
received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.clock.meeting import Meeting
from xdeepserve.engine.run.clock.routing import PlacedRouting, Routing, TimingConfig
from xdeepserve.engine.run.clock.timeline import Timeline
from xdeepserve.hw.clock import Clock
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import shape_only

KEPT = 1 << 14  # events whose spread is remembered


class ExchangeLoad(NamedTuple):
    """Rows of an exchange: routed rows by slot, their mean, and the rows of each shared expert die."""

    routed: npt.NDArray[np.int64]
    mean: float
    shared: float


class ExchangeHub:
    """Dispatch and combine between all ranks of a colocated group.

    The last `num_shared` ranks hold copies of the shared expert, to which each token sends a copy too. With
    `num_shared` 0, the ranks in excess of the routed experts hold such copies, and redundant slots spread the
    routed copies over all dies (XDS 7.1). `config.of_dies` bills as if the ranks were a sample of so many
    dies. Without it `held` says how many experts each rank has. Microbatches have hubs of their own, each
    with a `stream` of random numbers. `placed` knows the places of experts and replicas, if these are given.
    Then, with `num_shared` 0, each die has the shared expert for itself, and `num_primary` dies have experts
    of their own.
    """

    def __init__(
        self,
        clock: Clock,
        cost: CommCost,
        model: ModelConfig,
        dies: Sequence[int],
        config: TimingConfig,
        timeout_ns: int,
        stream: int = 0,
        held: Sequence[int] = (),
        placed: PlacedRouting | None = None,
        num_primary: int = 0,
        num_shared: int = 0,
    ) -> None:
        self.clock, self.cost, self.model, self.dies, self.stream = clock, cost, model, dies, stream
        self.num_ranks, self.timeout_ns = len(dies), timeout_ns
        self.num_dies = config.of_dies or self.num_ranks
        # Routed experts by rank, as far as these ranks are all that there are.
        self.held = held if config.of_dies is None and any(held) else ()
        self.num_routed = min(self.num_dies, config.routed_dies or self.num_dies - num_shared)
        num_others = self.num_dies - (config.routed_dies or model.n_routed_experts)
        self.num_shared = num_shared or (max(0, num_others) if model.n_shared_experts else 0)
        self.has_copies = num_shared > 0  # dies whose programs know of a copy, and not of one expert more
        self._num_sharing = self.num_routed  # dies that a token's copies are spread over on average
        self.routing: Routing | PlacedRouting = Routing(self.num_routed, config.skew, config.seed)
        if placed is not None:
            self.num_routed, self.num_shared = self.num_ranks, num_shared
            self.routing, self._num_sharing = placed, num_primary
        self.copies = model.num_experts_per_tok + (self.num_shared > 0)
        # Of the latest events: last arrival at the dispatch - first arrival.
        self.spreads_ns: dict[int, int] = {}
        self.priced_ns: dict[Op, float] = {"dispatch": 0.0, "combine": 0.0}  # all so far, without waiting
        self._meetings: dict[tuple[str, int], Meeting[ExchangeLoad]] = {}

    async def meet(self, op: str, rank: DieRank, event: int, num_tokens: int) -> Meeting[ExchangeLoad]:
        """Join the dispatch or combine of an event with a rank's tokens; return the meeting after its end."""
        key = (op, event)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = Meeting(self.clock, op, event, range(self.num_ranks), self.timeout_ns, self._settle)
            self._meetings[key] = meeting
        meeting.come(rank, num_tokens)
        await meeting.wait(rank)
        return meeting

    def _settle(self, meeting: Meeting[ExchangeLoad]) -> tuple[float, ExchangeLoad]:
        del self._meetings[meeting.op, meeting.event]
        top_k, tokens = self.model.num_experts_per_tok, sum(meeting.came.values())
        total = tokens * self.num_dies / self.num_ranks
        drawn = meeting.event, self.stream, round(total * top_k)
        routed = self.routing.counts(*drawn)
        load = ExchangeLoad(
            routed, total * top_k / self._num_sharing, total / self.num_shared if self.num_shared else 0.0
        )
        # A port is as busy as the rank that sends most; or that receives most, beyond ordinary imbalance.
        stretch = self.cost.spec.barrier_stretch.value
        batch = max(max(meeting.came.values()), float(routed.max()) / (top_k * stretch))
        if meeting.op == "dispatch":
            self.routing.collect(*drawn)
            self.spreads_ns[meeting.event] = meeting.last_ns - meeting.first_ns
            self.spreads_ns.pop(meeting.event - KEPT, None)
        op: Op = "dispatch" if meeting.op == "dispatch" else "combine"
        price_ns = self.cost.exchange_ns(op, self.num_dies, batch, self.copies, stretch)
        self.priced_ns[op] += price_ns
        return price_ns, load


class ClockExchange:
    """A rank's end of dispatch and combine, without bytes.

    `lane` is its lane in traces; with `is_fused` the operations have the fused names there.
    """

    def __init__(
        self, timeline: Timeline, rank: DieRank, hub: ExchangeHub, lane: str = "XCCL", is_fused: bool = False
    ) -> None:
        self.timeline, self.rank, self.hub, self.lane = timeline, rank, hub, lane
        self.is_fused = is_fused
        self.load: ExchangeLoad | None = None  # of the latest dispatch
        self._num_tokens = 0

    async def dispatch(self, x: Array, topk_idx: Array, event_id: int) -> Received:
        """Take part in a dispatch of x [T, H]; return shapes of the rows for this rank's experts."""
        self._num_tokens = len(x)
        self.load = await self._meet("dispatch", event_id)
        routed, shared = self._rows(self.load)
        return received(routed + math.ceil(shared), x.shape[1])

    async def combine(self, expert_out: Array, topk_weights: Array, event_id: int) -> Array:
        """Take part in a combine; return the shape [T, K, H], or [T, H] if fused."""
        await self._meet("combine", event_id)
        copies = () if self.is_fused else (self.hub.model.num_experts_per_tok,)
        return shape_only(np.float32, self._num_tokens, *copies, expert_out.shape[1])

    def reset(self, epoch: int) -> None:
        """Do nothing: exchanges after a rollback have new event IDs, so they are new meetings."""

    def bill(self, received: int) -> tuple[float, float, float]:
        """Return the work to bill after the latest dispatch.

        Token copies for routed experts, stretched; the number of experts with rows; rows for a copy of the
        shared expert. Where no die is said to have such copies, they are billed as rows of a routed expert.
        Where a die may have both, the hotter one is billed.
        """
        hub, load = self.hub, self.load
        assert load is not None
        routed, shared = self._rows(load)
        if self.rank >= hub.num_routed:
            return (0, 0, shared) if hub.has_copies else (shared, 1, 0)
        held = hub.held[self.rank] if hub.held else max(1.0, hub.model.n_routed_experts / hub.num_dies)
        copies = hub.cost.spec.billed_copies(float(routed), load.mean)
        if not hub.has_copies and self.rank >= hub.num_dies - hub.num_shared:
            copies = max(copies, load.shared)
        return copies, min(routed, held), shared

    def _rows(self, load: ExchangeLoad) -> tuple[int, float]:
        """Return the rows for routed experts on this die, and for a copy of the shared expert."""
        hub = self.hub
        routed = int(load.routed[self.rank]) if self.rank < hub.num_routed else 0
        first = hub.num_dies - hub.num_shared if hub.has_copies else hub.num_routed
        return routed, load.shared if self.rank >= first else 0.0

    async def _meet(self, op: str, event_id: int) -> ExchangeLoad:
        start = await self.timeline.catch_up()
        meeting = await self.hub.meet(op, self.rank, event_id, self._num_tokens)
        self.timeline.waited(self.lane, op, start, f"fused {op}" if self.is_fused else None)
        meeting.draw(self.hub.dies, self.rank, self.timeline.die, self.lane)
        return meeting.value


def received(num_rows: int, hidden: int, expert_idx: npt.NDArray[np.int32] | None = None) -> Received:
    """Return received rows as shapes; `expert_idx` where it matters which experts they are for."""
    index = shape_only(np.int32, num_rows)
    return Received(
        payload=shape_only(np.int8, num_rows, hidden),
        scale=shape_only(np.float32, num_rows),
        expert_idx=index if expert_idx is None else expert_idx,
        token_idx=index,
        slot=index,
        num_tokens_per_rank=shape_only(np.int64, 0),
    )
