"""Dispatch and combine of a timing-only run: real barriers of the ranks, with the cost of `comm/cost.py`.

No row moves. A late rank still makes the others wait, and every rank learns how many rows it would have
received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import Exchange
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.meeting import Meeting
from xdeepserve.engine.ways.routing import PlacedRouting, Routing, TimingConfig
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


@dataclass
class _RankPlace:
    """Rank's timeline, the load of its latest dispatch, and the tokens that it brought."""

    timeline: Timeline
    load: ExchangeLoad | None = None
    num_tokens: int = 0


class AmongClock:
    """Dispatch and combine between all ranks of a colocated group, in one of their microbatches.

    The last `num_shared` ranks hold copies of the shared expert, to which each token sends a copy too. With
    `num_shared` 0, the ranks in excess of the routed experts hold such copies, and redundant slots spread the
    routed copies over all dies (XDS 7.1). `config.of_dies` bills as if the ranks were a sample of so many
    dies. Without it `held` says how many experts each rank has. Microbatches have hubs of their own, each
    with a `stream` of random numbers. `placed` knows the places of experts and replicas, if these are given.
    Then, with `num_shared` 0, each die has the shared expert for itself, and `num_primary` dies have experts
    of their own. `lane` is the lane of the exchanges in traces; if the ranks push rows, the operations have
    the fused names there.
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
        lane: str = "XCCL",
    ) -> None:
        self._lane, self._is_fused = lane, cost.way == "push"
        self._places: dict[DieRank, _RankPlace] = {}
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

    def end(self, rank: DieRank, timeline: Timeline) -> Exchange:
        """Make a rank's end of the exchange."""
        self._places[rank] = _RankPlace(timeline)
        return Exchange(
            partial(self.dispatch, rank),
            partial(self.combine, rank),
            partial(self.bill, rank),
            lambda epoch: None,  # exchanges after a rollback have new event IDs, so they are new meetings
        )

    async def dispatch(self, rank: DieRank, x: Array, topk_idx: Array, event_id: int) -> Received:
        """Take a rank's part in a dispatch of x [T, H]; return shapes of the rows for its experts."""
        place = self._places[rank]
        place.num_tokens = len(x)
        place.load = await self._meet("dispatch", rank, event_id)
        routed, shared = self._rows(rank, place.load)
        return received(routed + math.ceil(shared), x.shape[1])

    async def combine(self, rank: DieRank, expert_out: Array, topk_weights: Array, event_id: int) -> Array:
        """Take a rank's part in a combine; return the shape [T, K, H], or [T, H] if fused."""
        await self._meet("combine", rank, event_id)
        copies = () if self._is_fused else (self.model.num_experts_per_tok,)
        return shape_only(np.float32, self._places[rank].num_tokens, *copies, expert_out.shape[1])

    def bill(self, rank: DieRank, received: int) -> tuple[float, float, float]:
        """Return a rank's work to bill after the latest dispatch.

        Token copies for routed experts, stretched; the number of experts with rows; rows for a copy of the
        shared expert. Where no die is said to have such copies, they are billed as rows of a routed expert.
        Where a die may have both, the hotter one is billed.
        """
        load = self._places[rank].load
        assert load is not None
        routed, shared = self._rows(rank, load)
        if rank >= self.num_routed:
            return (0, 0, shared) if self.has_copies else (shared, 1, 0)
        held = self.held[rank] if self.held else max(1.0, self.model.n_routed_experts / self.num_dies)
        copies = self.cost.spec.billed_copies(float(routed), load.mean)
        if not self.has_copies and rank >= self.num_dies - self.num_shared:
            copies = max(copies, load.shared)
        return copies, min(routed, held), shared

    def _rows(self, rank: DieRank, load: ExchangeLoad) -> tuple[int, float]:
        """Return the rows for routed experts on a rank's die, and for a copy of the shared expert."""
        routed = int(load.routed[rank]) if rank < self.num_routed else 0
        first = self.num_dies - self.num_shared if self.has_copies else self.num_routed
        return routed, load.shared if rank >= first else 0.0

    async def _meet(self, op: str, rank: DieRank, event: int) -> ExchangeLoad:
        """Join the dispatch or combine of an event with a rank's tokens, and wait for its end."""
        place = self._places[rank]
        start = await place.timeline.catch_up()
        key = (op, event)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = Meeting(self.clock, op, event, range(self.num_ranks), self.timeout_ns, self._settle)
            self._meetings[key] = meeting
        meeting.come(rank, place.num_tokens)
        await meeting.wait(rank)
        place.timeline.waited(self._lane, op, start, f"fused {op}" if self._is_fused else None)
        meeting.draw(self.dies, rank, place.timeline.die, self._lane)
        return meeting.value

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
