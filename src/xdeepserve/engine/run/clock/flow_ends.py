"""Both ends of a way without barriers in a timing-only run: the sending end and the serving end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.services.server import AT_ONCE, Batching
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.clock.exchange_hub import received
from xdeepserve.engine.run.clock.flow_costs import Errand
from xdeepserve.engine.run.clock.flow_hub import Counts, FlowHub
from xdeepserve.engine.run.clock.routing import PlacedRouting
from xdeepserve.engine.run.clock.timeline import Timeline
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.die import Die
from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import shape_only


class FlowClient:
    """An attention die's end for a microbatch, with the operations of `comm.trampoline.a2e.AttentionSide`.

    `shared_on` is the expert die with the copy of the shared expert that its tokens take, if there is one.
    """

    def __init__(
        self,
        timeline: Timeline,
        hub: FlowHub,
        rank: DieRank,
        microbatch: int,
        routing: PlacedRouting,
        top_k: int,
        hidden: int,
        shared_on: int | None,
        timeout_ns: int,
    ) -> None:
        self.timeline, self.hub, self.lane = timeline, hub, hub.lane_of(rank, microbatch)
        self.routing, self.top_k, self.hidden = routing, top_k, hidden
        self.shared_on, self.timeout_ns = shared_on, timeout_ns
        self._sent = Errand(0, 0, 0)

    def reset(self, epoch: int) -> None:
        """Forget the sending under way, after a rollback."""
        self.hub.forget(self.lane)

    async def a2e(self, x: Array, topk_idx: Array, topk_weights: Array, event_id: int) -> None:
        """Send tokens [T, H]; return when they have left."""
        count = len(x)
        drawn = event_id, 1 + self.lane, count * self.top_k
        rows = np.zeros((2, self.hub.num_experts), np.int64)
        routed = self.routing.counts(*drawn)
        self.routing.collect(*drawn)
        rows[0, : len(routed)] = routed
        if self.shared_on is not None:
            rows[1, self.shared_on] = count
        self._sent = sent = Errand(count, int(rows.sum()), int(rows.any(0).sum()))
        self.timeline.add("XCCL", "A2E", self.hub.cost.post_ns(sent))
        await self.timeline.catch_up()
        self.hub.send(self.lane, event_id, sent, rows)

    async def e2a(self, event_id: int) -> Array:
        """Wait for the answers; return their shape [T, H]."""
        start = await self.timeline.catch_up()
        await self.hub.back(self.lane, self.timeout_ns)
        self.timeline.waited("XCCL", "E2A", start)
        self.timeline.add("XCCL", "E2A", self.hub.cost.read_ns(self._sent))
        return shape_only(np.float32, self._sent.num_tokens, self.hidden)


class FlowBatch(NamedTuple):
    """Batch for an expert die: the rows of several sendings for the same layer."""

    layer: int
    received: Received
    lanes: Counts
    clients: Sequence[int]
    slots: Sequence[int]


class FlowServer:
    """An expert die's end, with the operations of `comm.services.server.ServiceServer`."""

    def __init__(
        self,
        die: Die,
        index: int,
        hub: FlowHub,
        num_layers: int,
        first_copy: int,
        hidden: int,
        batching: Batching = AT_ONCE,
    ) -> None:
        self.die, self.index, self.hub, self.num_layers = die, index, hub, num_layers
        self.hidden, self.batching = hidden, batching
        self._kinds = np.array([0, first_copy], np.int32)
        self._present = np.ones(hub.num_attention, bool)  # attention dies that it waits for

    def register(self) -> None:
        """Forget unanswered arrivals, after a rollback; attention dies send them again."""
        self.hub.here[self.index], self.hub.heard[self.index] = False, False

    async def next_batch(self, room: int) -> list[FlowBatch]:
        """Wait, without a deadline, for tokens; take all of them for the layer of the oldest."""
        hub, here = self.hub, self.hub.here[self.index]
        while not here.any():
            await hub.news(self.index, None)
        deadline_ns = hub.clock.now + self.batching.timeout_ns
        while not self._has_enough:
            try:
                await hub.news(self.index, deadline_ns)
            except DeadlineError:
                self._present = self._heard
        lanes = np.flatnonzero(here)
        layers = (hub.events[lanes] - 1) % self.num_layers
        layer = int(layers[hub.came_ns[lanes].argmin()])
        lanes = lanes[layers == layer]
        here[lanes], hub.heard[self.index] = False, False
        counts = hub.rows[:, self.index, lanes].sum(1)
        rows = received(int(counts.sum()), self.hidden, np.repeat(self._kinds, counts))
        clients, slots = np.unique(lanes // hub.num_microbatches), np.unique(lanes % hub.num_microbatches)
        return [FlowBatch(layer, rows, lanes, clients.tolist(), slots.tolist())]

    @property
    def _heard(self) -> npt.NDArray[np.bool_]:
        lanes = self.hub.heard[self.index] | self.hub.here[self.index]
        return lanes.reshape(self.hub.num_attention, -1).any(1)

    @property
    def _has_enough(self) -> bool:
        if self.batching.clients <= 1:
            return True
        heard = self._heard
        return int(heard.sum()) >= min(self.batching.clients, int((self._present | heard).sum()))

    async def answer(self, batch: Sequence[FlowBatch], expert_out: Array) -> None:
        """Answer a batch; return when the die can go on."""
        (one,), hub = batch, self.hub
        num_back = float(hub.rows[:, self.index, one.lanes].sum(0) @ hub.back_share[one.lanes])
        await hub.clock.sleep(round(hub.cost.answer_ns(len(one.received), len(one.lanes), num_back)))
        self.hub.answered(self.index, one.lanes)
