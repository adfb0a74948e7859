"""Dispatch and combine as barriers of the ranks in virtual time, each of which ends for all at once.

A late rank makes the others wait. In a timing-only run no row moves: loads are drawn, and every rank learns
how many rows it would have received. In lockstep the last rank to come moves the rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.exchange_choices import EXCHANGES, ExchangeTraits
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


class RankLoad(NamedTuple):
    """Load of a rank's die after a dispatch: rows received, and the work to bill for them (`walk.ends`)."""

    received: int
    bill: tuple[float, float, float]


Settle: TypeAlias = Callable[[Op, int, Mapping[int, float]], tuple[float, Sequence[RankLoad]]]
"""Maps an operation, its event and each rank's tokens to the time in ns and, after a dispatch, all loads."""


@dataclass
class _RankPlace:
    """Rank's timeline, the load of its latest dispatch, and the tokens that it brought."""

    timeline: Timeline
    load: RankLoad | None = None
    num_tokens: int = 0


class AmongClock:
    """Dispatch and combine between all ranks of a colocated group, in one of their microbatches.

    The last rank to come calls `settle`. `top_k` is the number of a token's answers, which some exchanges
    sum. `lane` is the lane of the exchanges in traces.
    """

    def __init__(
        self,
        clock: Clock,
        dies: Sequence[int],
        timeout_ns: int,
        settle: Settle,
        top_k: int,
        lane: str = "XCCL",
        exchange: ExchangeTraits = EXCHANGES["pull"],
    ) -> None:
        self.clock, self.dies, self.timeout_ns, self.settle = clock, dies, timeout_ns, settle
        self._lane, self._prefix = lane, exchange.prefix
        self._answers = () if exchange.sums else (top_k,)  # for each token
        self._places: dict[DieRank, _RankPlace] = {}
        # Of the latest events: last arrival at the dispatch - first arrival.
        self.spreads_ns: dict[int, int] = {}
        self.priced_ns: dict[Op, float] = {"dispatch": 0.0, "combine": 0.0}  # all so far, without waiting
        self._meetings: dict[tuple[Op, int], Meeting[Sequence[RankLoad]]] = {}

    def end(self, rank: DieRank, timeline: Timeline) -> Exchange:
        """Make a rank's end of the exchange."""
        self._places[rank] = _RankPlace(timeline)
        return Exchange(
            partial(self.dispatch, rank),
            partial(self.combine, rank),
            partial(self.bill, rank),
            lambda epoch: self._meetings.clear(),  # all unfinished exchanges, after a rollback
        )

    async def dispatch(self, rank: DieRank, x: Array, topk_idx: Array, event_id: int) -> Received:
        """Take a rank's part in a dispatch of x [T, H]; return shapes of the rows for its experts."""
        place = self._places[rank]
        place.num_tokens = len(x)
        place.load = (await self._meet("dispatch", rank, event_id))[rank]
        return received(place.load.received, x.shape[1])

    async def combine(self, rank: DieRank, expert_out: Array, topk_weights: Array, event_id: int) -> Array:
        """Take a rank's part in a combine; return the shape [T, K, H], or [T, H] if summed."""
        await self._meet("combine", rank, event_id)
        return shape_only(np.float32, self._places[rank].num_tokens, *self._answers, expert_out.shape[1])

    def bill(self, rank: DieRank, received: int) -> tuple[float, float, float]:
        """Return a rank's work to bill after the latest dispatch.

        Token copies for routed experts, stretched; the number of experts with rows; rows for a copy of the
        shared expert.
        """
        load = self._places[rank].load
        assert load is not None
        return load.bill

    async def _meet(self, op: Op, rank: DieRank, event: int) -> Sequence[RankLoad]:
        """Join the dispatch or combine of an event with a rank's tokens, and wait for its end."""
        place, key = self._places[rank], (op, event)
        start = await place.timeline.catch_up()
        meeting = self._meetings.get(key)
        if meeting is None:
            members, settle = range(len(self.dies)), partial(self._settle, op)
            meeting = Meeting(self.clock, f"{self._prefix}{op}", event, members, self.timeout_ns, settle)
            self._meetings[key] = meeting
        await meeting.meet(rank, place.num_tokens)
        place.timeline.waited(self._lane, op, start, meeting.op)
        meeting.draw(self.dies, rank, place.timeline.die, self._lane)
        return meeting.value

    def _settle(self, op: Op, meeting: Meeting[Sequence[RankLoad]]) -> tuple[float, Sequence[RankLoad]]:
        del self._meetings[op, meeting.event]
        duration_ns, loads = self.settle(op, meeting.event, meeting.came)
        if op == "dispatch":
            self.spreads_ns[meeting.event] = meeting.last_ns - meeting.first_ns
            self.spreads_ns.pop(meeting.event - KEPT, None)
        self.priced_ns[op] += duration_ns
        return duration_ns, loads


class DrawnLoads:
    """Draws the loads of exchanges between `num_ranks` ranks for a timing-only run, in one microbatch.

    The last `num_shared` ranks hold copies of the shared expert, to which each token sends a copy too. With
    `num_shared` 0, the ranks in excess of the routed experts hold such copies, and redundant slots spread the
    routed copies over all dies (XDS 7.1). `config.of_dies` bills as if the ranks were a sample of so many
    dies. Without it `held` says how many experts each rank has. Microbatches each have a `stream` of random
    numbers. `placed` knows the places of experts and replicas, if these are given. Then, with `num_shared` 0,
    each die has the shared expert for itself, and `num_primary` dies have experts of their own.
    """

    def __init__(
        self,
        cost: CommCost,
        model: ModelConfig,
        num_ranks: int,
        config: TimingConfig,
        stream: int = 0,
        held: Sequence[int] = (),
        placed: PlacedRouting | None = None,
        num_primary: int = 0,
        num_shared: int = 0,
    ) -> None:
        self.cost, self.model, self.num_ranks, self.stream = cost, model, num_ranks, stream
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

    def settle(self, op: Op, event: int, came: Mapping[int, float]) -> tuple[float, Sequence[RankLoad]]:
        """Draw where the tokens that `came` from each rank go; return the time in ns, and ranks' loads."""
        top_k, total = self.model.num_experts_per_tok, sum(came.values()) * self.num_dies / self.num_ranks
        drawn = event, self.stream, round(total * top_k)
        routed = self.routing.counts(*drawn)
        # A port is as busy as the rank that sends most; or that receives most, beyond ordinary imbalance.
        stretch = self.cost.spec.barrier_stretch.value
        batch = max(max(came.values()), float(routed.max()) / (top_k * stretch))
        price_ns = self.cost.exchange_ns(op, self.num_dies, batch, self.copies, stretch)
        if op == "combine":
            return price_ns, ()
        self.routing.collect(*drawn)
        shared = total / self.num_shared if self.num_shared else 0.0
        load = ExchangeLoad(routed, total * top_k / self._num_sharing, shared)
        return price_ns, [self._of(rank, load) for rank in range(self.num_ranks)]

    def _of(self, rank: int, load: ExchangeLoad) -> RankLoad:
        """Compute the load of a rank from that of all ranks.

        Where no die is said to have copies of the shared expert, they are billed as rows of a routed expert.
        """
        routed = int(load.routed[rank]) if rank < self.num_routed else 0
        shared = load.shared if rank >= self.num_dies - self.num_shared else 0.0
        num_rows = routed + math.ceil(shared)
        if rank >= self.num_routed:
            return RankLoad(num_rows, (0, 0, shared) if self.has_copies else (shared, 1, 0))
        held = self.held[rank] if self.held else max(1.0, self.model.n_routed_experts / self.num_dies)
        # Of a sample each die stands for the busiest of all, which has no fewer than the mean.
        received = max(routed, load.mean) if self.num_dies > self.num_ranks else float(routed)
        copies = self.cost.spec.billed_copies(received, load.mean)
        touched = min(routed, held)
        if self.has_copies:
            return RankLoad(num_rows, (copies, touched, shared))
        return RankLoad(num_rows, (copies + shared, touched + (shared > 0), 0))


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
