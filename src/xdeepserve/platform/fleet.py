"""Many TEs at the grain of a step, and the choice of a TE for each request (DeepServe 5.1, XDS 5.1).

TEs may join, drain and leave, or be lost while requests run. A request without a TE waits for one. Requests
of a lost TE begin again elsewhere (DeepServe 7: redirected), and keep the time of their first token if they
had one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.balance.prompt_tree import PromptTree
from xdeepserve.engine.balance.te_ledger import TELedger
from xdeepserve.engine.balance.te_policies import Known, RoutedRequest, best, scores
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.engine.dp.sequence import Sequence as Seq
from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.platform.fleet_words import Decision, FleetTE, ServedRequest
from xdeepserve.platform.step_group import StepGroup, TracedSequence
from xdeepserve.platform.step_pool import TEPool
from xdeepserve.platform.step_te import StepLimits, StepTE
from xdeepserve.platform.traced_tokens import Name, opening_name
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import StepPrice
from xdeepserve.prices.step_run import uncollected

Predict = Callable[[TracedRequest], float]
EVERY = 500  # requests between two words about progress


class Pool(Protocol):
    """Interface of a memory pool that all TEs share (platform/fleet_pool.py)."""

    block_ns: float  # what a block takes on its way to a TE

    def match(self, blocks: tuple[int, ...]) -> int: ...

    def use(self, blocks: tuple[int, ...], known: int) -> None: ...


class SentRequest(NamedTuple):
    """A request on its way, by its number; or what is left of one that has moved."""

    number: int
    request: TracedRequest


class FirstToken(NamedTuple):
    """First token of a request: its time, cached tokens of its prompt, the TE, and the time of its begin."""

    at_ns: float
    num_cached: int
    te: int
    begun_ns: float


class Fleet:
    """Fleet of TEs with a job executor, whose hints of prefixes are `stale_ns` old.

    `predict` tells the length of an answer, `heat` which kind of TE is better. `explain` is called with each
    decision. `forced` maps requests, by number, to TEs that take them whatever the policy says, unless the TE
    takes none.
    """

    def __init__(
        self,
        tes: Sequence[FleetTE],
        policy: str = "load",
        heat: HeatMap | None = None,
        predict: Predict = lambda request: 0.0,
        stale_ns: int = 0,
        explain: Callable[[Decision], None] | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> None:
        self.policy, self.heat, self.predict = policy, heat, predict
        self._explain, self._forced = explain, forced or {}
        # Within a run of steps TEs tell of blocks only where hints are not late: to ask them costs time.
        self._is_told_at_once = not stale_ns and not ROUTE.has(policy, "asks no TE")
        self._asks_for_kv_load = ROUTE.has(policy, "asks for KV load")
        self._asks_for_positions = ROUTE.has(policy, "asks for KV positions")
        self.tree = PromptTree(stale_ns)  # the global one
        self.ledger = TELedger()  # prompts that are not computed yet, by the number of their TE
        self.now = 0.0
        self.tes: list[FleetTE] = []
        self.steppers: list[StepTE] = []
        self._fronts: list[int] = []  # of each TE, the stepper that takes requests
        self._owners: list[int] = []  # of each stepper, its TE
        self.known = Known.none(np.zeros(0, bool))
        self._takes = np.zeros(0, bool)  # requests, of each TE
        self.serving: dict[int, None] = {}  # TEs that take requests, or KV to decode
        self._lost: set[int] = set()
        self.moving: set[int] = set()  # that others go on for
        self._whole: dict[int, TracedRequest] = {}  # by number, of those that have moved
        self._events: list[tuple[float, int, int, Callable[[], None] | None]] = []
        self._num_looks = 0  # of these events, those that bring nothing by themselves
        self._order = 0
        self._valid: list[int] = []  # the order of the event that ends what is under way, of each stepper
        self.served: list[ServedRequest] = []
        self._first: dict[int, FirstToken] = {}  # by number of the request
        self._sources: dict[int, int] = {}  # by number of the request: the stepper that keeps its prompt's KV
        self._homeless: list[SentRequest] = []  # for whom there is no TE
        self._undecoded: list[SentRequest] = []  # whose KV has nowhere to go
        self._num_left = 0  # requests that have not ended
        self.num_arrived = 0
        self._is_stopped = False
        self._idle: dict[int, None] = {}  # steppers that have got something, and are to begin
        self.on_end: Callable[[ServedRequest], None] = lambda each: None
        self.on_arrive: Callable[[TracedRequest], None] = lambda each: None
        self.pool: Pool | None = None
        self._changed: dict[int, None] = {}  # steppers that the job executor has to look at
        for te in tes:
            self.join(te)

    def _add(self, te: int, price: StepPrice, limits: StepLimits, prefills: bool, decodes: bool) -> None:
        def tell(blocks: Sequence[int], has: bool) -> None:
            if blocks:
                self.tree.tell(self.now, te, blocks, has)

        index = len(self.steppers)
        self.steppers.append(StepTE(price, limits, prefills, decodes, tell))
        self.steppers[index].on_receive(partial(self._receive, index))
        self._owners.append(te)
        self._valid.append(-1)
        if self.pool is not None:
            self._share(index, self.pool)

    def share(self, pool: Pool) -> None:
        """Share a memory pool among all TEs, and those that join later."""
        self.pool = pool
        for index in range(len(self.steppers)):
            self._share(index, pool)

    def _share(self, index: int, pool: Pool) -> None:
        block = self.steppers[index].limits.block

        def bring(num_tokens: int, came: Callable[[], None]) -> None:
            self.at(self.now + pool.block_ns * num_tokens / block, lambda: self._fetched(index, came))

        match = pool.match
        self.steppers[index].use_pool(TEPool(lambda asked: match(asked.blocks) * block, bring))

    # ---- TEs that come and go -----------------------------------------------------------------------

    def join(self, te: FleetTE) -> int:
        """Add a TE to the fleet, where it takes requests from now on; return its number."""
        number = len(self.tes)
        self.tes.append(te)
        self._fronts.append(len(self.steppers))
        self._add(number, te.price, te.limits, te.role != "decode", te.apart is None and te.role != "prefill")
        if te.apart is not None:
            self._add(number, *te.apart, False, True)
        fresh = Known.none(np.array([te.is_apart]))
        self.known = Known(*(np.append(old, new) for old, new in zip(self.known, fresh, strict=True)))
        self._takes = np.append(self._takes, te.role != "decode")
        self.serving[number] = None
        self._end_waits(number)
        return number

    def _end_waits(self, te: int) -> None:
        """Give requests without a TE, and KV without a decode TE, to a TE that has just come."""
        homeless, self._homeless = self._homeless, []
        for task in homeless:
            self._arrive(task.number, task.request)
        undecoded, self._undecoded = self._undecoded, []
        for task in undecoded:
            self._send(*task, te)

    def drain(self, te: int) -> None:
        """Let a TE take nothing more and finish the requests that it has."""
        self.serving.pop(te, None)
        self._takes[te] = False

    def resume(self, te: int) -> None:
        """Let a draining TE take requests again."""
        self.serving[te] = None
        self._takes[te] = self.tes[te].role != "decode"
        self._end_waits(te)

    def lose(self, te: int) -> None:
        """Lose a TE with all its requests; they begin again elsewhere."""
        self.drain(te)
        self._lost.add(te)
        for index in self._halves(te):
            self._valid[index] = -1
            for task in self.steppers[index].tasks():
                self.ledger.forget(task.seq_id)
                self._release(task.seq_id)
                self._arrive(task.seq_id, self._whole.pop(task.seq_id, task.request))

    def move_out(self, te: int) -> None:
        """Move a decode TE's requests to other TEs at the end of its step. KV on its way to the TE goes on to
        others, too."""
        self.drain(te)
        self.moving.add(te)
        index = self._fronts[te]
        if self.steppers[index].is_idle:
            self._move(index)
        else:
            self.steppers[index].interrupt(self.now)
            self._schedule(index, self.steppers[index].ends_at)

    def _move(self, index: int) -> None:
        for seq, left in self.steppers[index].move_out():
            self._whole.setdefault(seq.seq_id, seq.request)
            self._send(seq.seq_id, left, self._owners[index])

    def is_empty(self, te: int) -> bool:
        """Whether a TE has no requests."""
        return self.is_lost(te) or not any(stepper.num_tasks for stepper in self.steppers_of(te))

    def is_lost(self, te: int) -> bool:
        """Whether a TE is lost."""
        return te in self._lost

    def steppers_of(self, te: int) -> list[StepTE]:
        """Return the steppers of a TE: one, or two for a TE that is apart."""
        return [self.steppers[index] for index in self._halves(te)]

    def _halves(self, te: int) -> range:
        front = self._fronts[te]
        return range(front, front + 1 + (self.tes[te].apart is not None))

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call a function at a time, between steps."""
        heapq.heappush(self._events, (when, self._order, -1, call))
        self._order += 1

    def look_at(self, when: float, look: Callable[[], None]) -> None:
        """Call a function at a time, unless no other event that could end a request is left."""

        def call() -> None:
            self._num_looks -= 1
            look()

        self._num_looks += 1
        self.at(when, call)

    @property
    def num_homeless(self) -> int:
        """Number of requests for which no TE is there."""
        return len(self._homeless)

    @property
    def is_open(self) -> bool:
        """Whether requests have not ended, or not arrived."""
        return self._num_left > 0

    @property
    def decoding(self) -> Mapping[int, FirstToken]:
        """Requests that have a first token and have not ended, by their number in the trace."""
        return self._first

    def stop(self) -> None:
        """End the run now, whatever has not ended: its result is known without the rest."""
        self._is_stopped = True

    # ---- the hour -----------------------------------------------------------------------------------

    def run(
        self,
        requests: Sequence[TracedRequest],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[ServedRequest]:
        """Serve all requests, or as many as end before `stop`; return results in the order of their ends.
        Raises InputError for a request that fits on no TE."""
        requests = [
            each._replace(input_length=max(1, each.input_length), output_length=max(1, each.output_length))
            for each in requests
        ]
        self._check(requests)
        with uncollected():
            self._serve(requests, progress)
        if self.is_open and not self._is_stopped:
            waiting = len(self._homeless) + len(self._undecoded)
            raise XDeepServeError(f"{waiting} requests of the trace wait for a TE, and none comes")
        return self.served

    def _serve(self, requests: Sequence[TracedRequest], progress: Callable[[int, int], None]) -> None:
        arrived, total = 0, len(requests)
        self._num_left = total
        while not self._is_stopped and (arrived < total or self._idle or self._has_events):
            event_ns = self._events[0][0] if self._events else math.inf
            arrival_ns = requests[arrived].at_ns if arrived < total else math.inf
            if self._idle and min(event_ns, arrival_ns) > self.now:
                self._begin_idle()
            elif arrival_ns < event_ns:
                self.now = float(requests[arrived].at_ns)
                self.on_arrive(requests[arrived])
                self._arrive(arrived, requests[arrived])
                self.num_arrived = arrived = arrived + 1
                if arrived % EVERY == 0:
                    progress(arrived, total)
            else:
                self._next_event()

    @property
    def _has_events(self) -> bool:
        """Whether an event is left that can change something."""
        return len(self._events) > (self._num_looks if self.is_open else 0)

    def _check(self, requests: Sequence[TracedRequest]) -> None:
        room = min(each.limits.num_blocks * each.limits.block_size for each in self.steppers)
        for number, each in enumerate(requests):
            if each.input_length + each.output_length > room:
                raise InputError(
                    f"{each.said(number)} has {each.input_length} + {each.output_length} tokens, and "
                    f"a DP group has KV for {room}"
                )

    def _arrive(self, number: int, request: TracedRequest) -> None:
        if not self._takes.any():
            self._homeless.append(SentRequest(number, request))
            return
        pooled = 0 if self.pool is None else self.pool.match(request.blocks)
        self._give(self._fronts[self._choose(number, request, pooled)], number, request)

    def _receive(self, index: int, group: StepGroup, seqs: list[Seq]) -> None:
        """Have the KV of sequences come to a DP group, which has room for it as of its turn.

        Those from one DP group come one after the other, since their messages are heard together.
        """
        moves_at = group.begins + self.tes[self._owners[index]].transfer.ask_ns
        by_sender: dict[StepGroup | None, list[Seq]] = {}
        for seq in seqs:
            source = self._sources.get(seq.seq_id)
            sender = None if source is None else self.steppers[source].sender_of(seq.seq_id)
            by_sender.setdefault(sender, []).append(seq)
        for sender, those in by_sender.items():
            for seq in those:
                self.at(moves_at, partial(self._move_kv, index, group, seq, sender))

    def _move_kv(self, index: int, group: StepGroup, seq: Seq, sender: StepGroup | None) -> None:
        """Move the KV of a sequence, behind what moves to the same DP group, and at the port of the die that
        it comes from behind what has been booked there."""
        kv, num_blocks = self.tes[self._owners[index]].transfer, len(seq.holding.slots)
        ends = max(self.now, group.moves_until) + kv.start_ns + num_blocks * kv.block_ns
        if sender is not None:
            ends = max(ends, sender.sends_until)
            sender.sends_until = ends + num_blocks * kv.port_ns
        group.moves_until = ends + num_blocks * kv.port_ns
        self.at(group.moves_until, partial(self._received, index, group, seq))

    def _received(self, index: int, group: StepGroup, seq: Seq) -> None:
        """Let a sequence decode whose KV has come, and free the blocks that it came from a message later."""
        if self._owners[index] in self._lost or group.places.of(seq) != "receiving":
            return  # it has gone on elsewhere
        self._between(index, lambda: self.steppers[index].take_received(group, seq))
        told_ns = self.now + self.tes[self._owners[index]].transfer.tell_ns
        self.at(told_ns, lambda: self._release(seq.seq_id))

    def _release(self, number: int) -> None:
        index = self._sources.pop(number, None)
        if index is not None and self._owners[index] not in self._lost:
            self._between(index, lambda: self.steppers[index].release(number))

    def _fetched(self, index: int, came: Callable[[], None]) -> None:
        if self._owners[index] not in self._lost:  # else it has begun again elsewhere
            self._between(index, came)

    def _give(self, index: int, number: int, request: TracedRequest) -> None:
        self._between(index, lambda: self.steppers[index].give(number, request))

    def _between(self, index: int, act: Callable[[], None]) -> None:
        """Give a stepper something to do between steps: interrupt its run at the end of a step, then act."""
        stepper = self.steppers[index]
        if not stepper.is_idle:
            before = stepper.ends_at
            stepper.interrupt(self.now)
            if stepper.ends_at != before:
                self._schedule(index, stepper.ends_at)
        act()
        stepper.wake()
        if stepper.is_idle:
            self._idle[index] = None
        self._changed[index] = None

    def _begin_idle(self) -> None:
        """Begin steps of idle TEs that have got something, after all that comes at the same time."""
        idle, self._idle = self._idle, {}
        for index in idle:
            if self._owners[index] not in self._lost and self.steppers[index].is_idle:
                self._begin(index)

    def _begin(self, index: int) -> None:
        self._changed[index] = None
        ends = self.steppers[index].turn(self.now)
        if ends is not None:
            self._schedule(index, ends)

    def _schedule(self, index: int, at: float) -> None:
        heapq.heappush(self._events, (at, self._order, index, None))
        self._valid[index] = self._order
        self._order += 1

    def _next_event(self) -> None:
        at, order, index, what = heapq.heappop(self._events)
        if what is not None:
            self.now = at
            what()
            return
        if order != self._valid[index]:
            return
        self.now = at
        if self._owners[index] in self.moving:
            self.steppers[index].stop(self.now)
            self._collect(index, math.inf)
            self._move(index)
            self._changed[index] = None
        else:
            self._begin(index)
            self._collect(index, self.now)

    def _collect(self, index: int, now: float) -> None:
        """Take the requests with a first or a last token of a stepper, and look again at the next ones."""
        stepper = self.steppers[index]
        if self._owners[index] in self._lost or stepper.told_at == math.inf:
            return
        first, done = stepper.take(now)
        if first or done:
            self._changed[index] = None
        if stepper.told_at < math.inf:
            self.at(stepper.told_at, lambda: self._collect(index, self.now))
        for seq in first:
            begun_ns = seq.told_ns if seq.scheduled_ns is None else seq.scheduled_ns
            first_token = FirstToken(seq.told_ns, seq.num_cached, self._owners[index], begun_ns)
            self._first.setdefault(seq.seq_id, first_token)
            self.ledger.forget(seq.seq_id)
            if self.pool is not None:
                block, own = stepper.limits.block, seq.num_cached if seq.num_own is None else seq.num_own
                self.pool.use(seq.request.blocks[: seq.num_prompt // block], own // block)
        for seq in done:
            if stepper.decodes or seq.max_tokens == 1:
                self._end(index, seq)
            else:
                self._sources[seq.seq_id] = index
                self._send(seq.seq_id, seq.request, self._owners[index])

    def _send(self, number: int, request: TracedRequest, te: int) -> None:
        """Send a prefilled request to its decoder: the TE's other half, or the least loaded decode TE."""
        index = self._fronts[te] + 1
        if self.tes[te].apart is None:
            decoders = [each for each in self.serving if self.tes[each].role == "decode"]
            if not decoders:
                self._undecoded.append(SentRequest(number, request))
                return
            steppers = self.steppers
            index = min(
                map(self._fronts.__getitem__, decoders),
                key=lambda at: (steppers[at].kv_load, steppers[at].num_tasks, at),
            )
        self._give(index, number, request)

    def _end(self, index: int, seq: TracedSequence) -> None:
        number = seq.seq_id
        first_ns, cached, first_te, begun_ns = self._first.pop(number)
        request = self._whole.pop(number, seq.request)
        served = ServedRequest(
            number, self._owners[index], request.at_ns, first_ns, seq.told_ns,
            request.input_length, request.output_length, cached, first_te, begun_ns,
        )  # fmt: skip
        self.served.append(served)
        self._num_left -= 1
        self.on_end(served)

    # ---- the choice ---------------------------------------------------------------------------------

    def _note(self, index: int) -> None:
        """Update the job executor's knowledge of a TE after a change."""
        te, known = self._owners[index], self.known
        known.queued[te] = self.ledger.cost(te) / self.steppers[self._fronts[te]].price.num_groups
        known.has_long[te], known.has_short[te] = self.ledger.has(te, True), self.ledger.has(te, False)
        known.sequences[te] = sum(half.num_tasks for half in self.steppers_of(te))

    def _note_kv(self) -> None:
        """Ask TEs how much of their KV is in use, as far as the policy wants to know."""
        for te in self.serving if self._asks_for_kv_load else ():
            self.known.kv_load[te] = max(half.kv_load for half in self.steppers_of(te))
        for te in self.serving if self._asks_for_positions else ():
            used = sum(half.used_positions(self.now) for half in self.steppers_of(te))
            self.known.positions[te] = used

    def _match(self, request: TracedRequest) -> dict[int, int]:
        """Return how many of a prompt's blocks each TE has, without TEs that have none."""
        if self._is_told_at_once and self._show(request):
            self.tree.catch_up(self.now)
        return self.tree.match(request.blocks)

    def _show(self, request: TracedRequest) -> bool:
        """Have TEs tell of blocks with a prompt's beginning that have come or gone in runs of steps; return
        whether there are any."""
        names: dict[int, Name | None] = {}  # of the prompt's first KV block, by its size
        shown = False
        for te in self.serving:
            stepper = self.steppers[self._fronts[te]]
            if stepper.shows:
                size = stepper.limits.block_size
                if size not in names:
                    names[size] = opening_name(request.blocks, stepper.limits.block, size)
                name = names[size]
                shown |= name is not None and stepper.show(self.now, name)
        return shown

    def _choose(self, number: int, request: TracedRequest, pooled: int = 0) -> int:
        self.tree.catch_up(self.now)
        known, changed, self._changed = self.known, self._changed, {}
        for index in changed:
            self._note(index)
        self._note_kv()
        found = dict.fromkeys(self.serving, pooled) if pooled else {}
        for te, num_blocks in self._match(request).items():
            found[te] = max(pooled, num_blocks)
        known.cached[:] = 0
        for te, num_blocks in found.items():
            limits = self.tes[te].limits
            reusable = (request.input_length - 1) // limits.block_size * limits.block_size
            known.cached[te] = min(num_blocks * limits.block, reusable)
        predicted = self.predict(request)
        asked = RoutedRequest(number, request.input_length, predicted)
        if self._takes.all():
            keys = scores(self.policy, asked, known, self.heat)
        else:
            some = scores(self.policy, asked, known.among(self._takes), self.heat)
            keys = np.full((len(self.tes), some.shape[1]), np.inf)
            keys[self._takes] = some
        te = self._forced.get(number, -1)
        if te not in self.serving or not self._takes[te]:
            te = best(keys, known.sequences)
        if self._explain is not None:
            self._explain(Decision(number, te, keys, predicted))
        self.ledger.give(number, te, request.input_length, int(known.cached[te]))
        return te

    def busy_ns(self) -> list[float]:
        """Return how long each TE was busy with steps [ns]; for a TE of two halves, the busier half."""
        busy = [0.0] * len(self.tes)
        for stepper, te in zip(self.steppers, self._owners, strict=True):
            busy[te] = max(busy[te], stepper.busy_ns)
        return busy

    def check_integrity(self) -> None:
        """Check every TE's counts against its requests."""
        for stepper in self.steppers:
            stepper.check_integrity()
