"""Many TEs at the grain of a step, and who of them gets which request (DeepServe 5.1, XDS 5.1)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.balance.prompt_tree import PromptTree
from xdeepserve.engine.balance.te_policies import Floats, Known, Policy, RoutedRequest, best, scores
from xdeepserve.errors import InputError
from xdeepserve.platform.service_report import Outcome
from xdeepserve.platform.step_price import StepPrice
from xdeepserve.platform.step_te import StepLimits, StepTE, TETask
from xdeepserve.platform.traces import TracedRequest

Predict = Callable[[TracedRequest], float]
EVERY = 500  # requests between two words about progress


class FleetTE(NamedTuple):
    """One of the TEs that requests go to: with prefill and decode on the same dies, or (`apart`) on two
    halves that are a pair."""

    name: str
    price: StepPrice
    limits: StepLimits
    apart: tuple[StepPrice, StepLimits] | None = None  # of its decode half
    transfer_ns: float = 0.0  # a position of KV, on its way to that


class ServedRequest(NamedTuple):
    """What became of a request, in ns of virtual time."""

    number: int
    te: int
    at_ns: int
    first_ns: float
    last_ns: float
    num_prompt: int
    num_output: int
    num_cached: int

    @property
    def ttft_ns(self) -> float:
        return self.first_ns - self.at_ns

    @property
    def tpot_ns(self) -> float | None:
        """None for one token."""
        return (self.last_ns - self.first_ns) / (self.num_output - 1) if self.num_output > 1 else None

    def outcome(self) -> Outcome:
        """What a report is made of."""
        return Outcome(
            self.te, self.at_ns, self.ttft_ns, self.tpot_ns, self.last_ns,
            self.num_prompt, self.num_output, self.num_cached,
        )  # fmt: skip


class Decision(NamedTuple):
    """A request, the TE that got it, and the scores of all."""

    number: int
    te: int
    keys: Floats
    num_predicted: float


class Fleet:
    """TEs and one job executor, whose hints of prefixes are `stale_ns` old.

    `predict` tells the length of an answer, `heat` which kind of TE is better; `explain` hears of decisions;
    `forced` are TEs of some requests, by number, whatever the policy says.
    """

    def __init__(
        self,
        tes: Sequence[FleetTE],
        policy: Policy = "load",
        heat: HeatMap | None = None,
        predict: Predict = lambda request: 0.0,
        stale_ns: int = 0,
        explain: Callable[[Decision], None] | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> None:
        self.tes, self.policy, self.heat, self.predict = tes, policy, heat, predict
        self._stale_ns, self._explain, self._forced = stale_ns, explain, forced or {}
        self.tree = PromptTree()  # the global one
        self._notices: deque[tuple[float, int, Sequence[int], bool]] = deque()
        self.now = 0.0
        self.steppers: list[StepTE] = []
        self._fronts: list[int] = []  # of each TE, the stepper that prefills
        self._owners: list[int] = []  # of each stepper, its TE
        for number, te in enumerate(tes):
            self._fronts.append(len(self.steppers))
            self._add(number, te.price, te.limits, True, te.apart is None)
            if te.apart is not None:
                self._add(number, *te.apart, False, True)
        is_apart = np.array([te.apart is not None for te in tes])
        self._known = Known.none(is_apart)
        self._events: list[tuple[float, int, int, TETask | None]] = []  # when, order, stepper, who comes
        self._order = 0
        self._valid = [-1] * len(self.steppers)  # the order of the event that ends what is under way
        self.served: list[ServedRequest] = []
        self._first: dict[int, tuple[float, int]] = {}  # by number: first token, cached

    def _add(self, te: int, price: StepPrice, limits: StepLimits, prefills: bool, decodes: bool) -> None:
        def tell(blocks: Sequence[int], has: bool) -> None:
            if blocks:
                self._notices.append((self.now, te, blocks, has))

        self.steppers.append(StepTE(price, limits, prefills, decodes, tell))
        self._owners.append(te)

    # ---- the hour -----------------------------------------------------------------------------------

    def run(
        self,
        requests: Sequence[TracedRequest],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[ServedRequest]:
        """Serve all that arrive, in the order of their ends. InputError for one that fits nowhere."""
        requests = [
            each._replace(input_length=max(1, each.input_length), output_length=max(1, each.output_length))
            for each in requests
        ]
        self._check(requests)
        arrived = 0
        while arrived < len(requests) or self._events:
            if arrived < len(requests) and (not self._events or requests[arrived].at_ns < self._events[0][0]):
                self.now = float(requests[arrived].at_ns)
                self._arrive(arrived, requests[arrived])
                arrived += 1
                if arrived % EVERY == 0:
                    progress(arrived, len(requests))
            else:
                self._next_event()
        return self.served

    def _check(self, requests: Sequence[TracedRequest]) -> None:
        steppers = self.steppers
        room = min(stepper.limits.num_positions for stepper in steppers)
        for number, each in enumerate(requests):
            if each.input_length + each.output_length > room:
                raise InputError(
                    f"request {number} of the trace has {each.input_length} + {each.output_length} tokens, "
                    f"and a DP group has KV for {room}"
                )

    def _arrive(self, number: int, request: TracedRequest) -> None:
        te = self._choose(number, request)
        self._come(self._fronts[te], TETask(number, request, number))

    def _come(self, index: int, task: TETask) -> None:
        stepper = self.steppers[index]
        if not stepper.is_idle:
            before = stepper.ends_at
            stepper.interrupt(self.now)
            if stepper.ends_at != before:
                self._schedule(index, stepper.ends_at)
        stepper.give(task)
        if stepper.is_idle:
            self._begin(index)
        self._note(index)

    def _begin(self, index: int) -> None:
        ends = self.steppers[index].begin(self.now)
        if ends is not None:
            self._schedule(index, ends)

    def _schedule(self, index: int, at: float, task: TETask | None = None) -> None:
        heapq.heappush(self._events, (at, self._order, index, task))
        if task is None:
            self._valid[index] = self._order
        self._order += 1

    def _next_event(self) -> None:
        at, order, index, coming = heapq.heappop(self._events)
        if coming is not None:
            self.now = at
            self._come(index, coming)
            return
        if order != self._valid[index]:
            return
        self.now = at
        stepper = self.steppers[index]
        first, done = stepper.end()
        for task in first:
            self._first[task.number] = self.now, task.cached
        for task in done:
            if stepper.decodes or task.request.output_length == 1:
                self._end(index, task)
            else:
                te = self.tes[self._owners[index]]
                later = self.now + te.transfer_ns * task.request.input_length
                self._schedule(index + 1, later, TETask(task.number, task.request, task.number))
        self._begin(index)
        self._note(index)

    def _end(self, index: int, task: TETask) -> None:
        first_ns, cached = self._first.pop(task.number)
        request = task.request
        self.served.append(
            ServedRequest(
                task.number, self._owners[index], request.at_ns, first_ns, self.now,
                request.input_length, request.output_length, cached,
            )
        )  # fmt: skip

    # ---- the choice ---------------------------------------------------------------------------------

    def _note(self, index: int) -> None:
        """What is known of a TE has changed."""
        te = self._owners[index]
        front = self._fronts[te]
        stepper, known = self.steppers[front], self._known
        halves = [stepper] if self.tes[te].apart is None else self.steppers[front : front + 2]
        known.queued[te] = stepper.queued / stepper.price.num_groups
        known.has_long[te], known.has_short[te] = stepper.num_long > 0, stepper.num_short > 0
        known.sequences[te] = sum(half.num_tasks for half in halves)
        known.kv_load[te] = max(half.kv_load for half in halves)
        known.positions[te] = sum(half.positions for half in halves)

    def _choose(self, number: int, request: TracedRequest) -> int:
        while self._notices and self._notices[0][0] + self._stale_ns <= self.now:
            _, te, blocks, has = self._notices.popleft()
            (self.tree.publish if has else self.tree.evict)(te, blocks)
        known = self._known
        known.cached[:] = 0
        for te, num_blocks in self.tree.match(request.blocks).items():
            tokens = num_blocks * self.tes[te].limits.block
            known.cached[te] = min(tokens, request.input_length - 1)
        predicted = self.predict(request)
        keys = scores(self.policy, RoutedRequest(number, request.input_length, predicted), known, self.heat)
        te = self._forced.get(number, best(keys))
        if self._explain is not None:
            self._explain(Decision(number, te, keys, predicted))
        return te

    def busy_ns(self) -> list[float]:
        """How long each TE has had a step under way, of two halves the busier."""
        busy = [0.0] * len(self.tes)
        for stepper, te in zip(self.steppers, self._owners, strict=True):
            busy[te] = max(busy[te], stepper.busy_ns)
        return busy

    def check_integrity(self) -> None:
        """Every TE's counts are those of what it has."""
        for stepper in self.steppers:
            stepper.check_integrity()
