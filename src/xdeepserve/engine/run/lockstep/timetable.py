"""Virtual times of stages in lockstep: a time for each die, moved on stage by stage.

A timetable is the runner of all dies: the schedules of `walk` lead it through Programs as they lead a single
die's runner. Dies with attention run their stages one after another. A dispatch starts when the last die has
come to it, and a combine when the slowest expert has ended: both are barriers. Where experts have dies of
their own, an A2E needs two things. The last die of its domain must have posted, and the receiving stream of
the expert dies must be free. Experts run when the A2E has ended and their die is free. An E2A starts when the
slowest expert has ended. An exchange as a whole costs as much as by `comm.cost`, as in timing-only runs.
A die whose host launches single operators waits for the launch of each stage and exchange, as `walk.launcher`
has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND, stream_item
from xdeepserve.engine.run.lockstep.drawing import Drawing
from xdeepserve.engine.run.lockstep.shares import RowCounts
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.engine.walk.schedule import Schedule, Visit
from xdeepserve.hw.die import Die
from xdeepserve.model.tensors import Layer
from xdeepserve.step.frame import KVCache
from xdeepserve.step.stage import Counts, Meet, Stage

Ns = npt.NDArray[np.int64]


class TokenTimes(NamedTuple):
    """Times of a microbatch's tokens on their ways, in ns, equal in each layer of a run."""

    post_ns: Ns  # [A]: from each die to its trampoline
    return_ns: Ns  # [A]: and back
    dispatch_ns: list[int]  # by domain: among the expert dies
    combine_ns: list[int]


class Timetable(Runner):
    """Runner of all dies in lockstep, whose bytes are made already: only virtual time passes.

    `attention` has the time of each attention die so far, in ns [A]. A row goes to `copies` dies. The same
    object runs each microbatch, and draws spans into the trace.
    """

    def __init__(self, executors: Sequence[Executor], copies: int, num_domains: int = 0) -> None:
        first = executors[0]
        super().__init__(first.die, first.runner.frame, first.runner.pace)
        self.executors, self.dies = executors, [executor.die for executor in executors]
        self.spec, self.copies = first.die.spec, copies
        topology, way = first.die.fabric.topology, first.mem.walk.exchange
        sizes = first.config.hidden_size, first.config.int8_answers
        self.cost = CommCost(self.spec, topology, *sizes, way=way)
        self.drawing = Drawing(self.dies, num_domains)
        self.attention: Ns = np.zeros(len(self.dies), np.int64)
        self._microbatch = 0

    def begin(self, came: Ns) -> None:
        """Begin a run at the times in ns when all members of the lockstep came."""
        self.drawing.begin()
        self.attention = came.copy()
        launchers = [executor.launcher for executor in self.executors]
        self._eager = {at: each for at, each in enumerate(launchers) if each is not None and each.is_eager}
        # By die: when its host has launched all operators so far, and what one more takes; 0 if it need not.
        self._launched_ns: Ns = np.zeros(len(launchers), np.int64)
        self._op_ns: Ns = np.zeros(len(launchers), np.int64)
        for at, launcher in self._eager.items():
            self._launched_ns[at], self._op_ns[at] = launcher.launched_ns, launcher.op_ns

    def pass_layers(
        self,
        schedule: Schedule,
        visits: Sequence[Visit],
        counts: Sequence[RowCounts],
        experts_ns: Sequence[Ns],
    ) -> None:
        """Take all dies through layers by a schedule of single dies, in which nothing waits here.

        By microbatch: `counts` of rows, and the time of the experts on each die in each layer with experts,
        [layers, domains, dies] in ns.
        """
        self._counts, self._experts = counts, [iter(of_layers) for of_layers in experts_ns]
        self._known: dict[tuple[int, int, int], Ns] = {}  # by stage, kind of layer and microbatch
        self._exchange_ns: dict[Op, int] = {}
        self.begin_layers()
        for waits in schedule([self] * len(counts), lambda: [*visits], _end_layer).__await__():
            raise AssertionError(f"{waits}: a schedule waits, but its time is not the clock's")
        for at, launcher in self._eager.items():
            launcher.launched_ns = int(self._launched_ns[at])

    def begin_layers(self) -> None:
        """Compute the times that are equal in all layers."""

    @property
    def ends_ns(self) -> Ns:
        """Virtual times in ns at which members of the lockstep are done."""
        return self.attention

    # ---- as a runner --------------------------------------------------------------------------------

    def at(self, **place: int) -> None:
        """Set the microbatch that is to run, and the place in the model for later trace spans."""
        self._microbatch = place.get("microbatch", 0)
        self.drawing.at(**place)

    def enter(self, layer: Layer, cache: KVCache, event: int) -> None:
        """Set the layer whose stages are priced; no frame has its rows."""
        self._layer = layer

    async def stage(self, stage: Stage) -> None:
        """Run a stage on each die."""
        key = id(stage), self._layer.kind, self._microbatch
        if stage.rows == "received":
            (ns,) = self._next_experts()
        elif key in self._known:
            ns = self._known[key]
        else:
            ns = self._known[key] = self._price_rows(stage)
        if self._eager:
            rows = ns if stage.rows == "received" else self._counts[self._microbatch].rows
            self._wait_for_launch(np.where(rows > 0, stage.operators, 0))
        start = self.attention
        self.attention = start + ns
        self.drawing.spans(stage.core.upper(), stage.name, start, self.attention)

    async def meet(self, meet: Meet) -> None:
        """Make a dispatch or a combine of all dies."""
        op: Op = "dispatch" if "dispatch" in meet.op else "combine"
        if op not in self._exchange_ns:
            self._exchange_ns[op] = self.exchange_ns(op, int(self._counts[self._microbatch].rows.max()))
        self._wait_for_launch(1)
        start = self.attention
        self.attention = np.full_like(start, int(start.max()) + self._exchange_ns[op])
        self.drawing.meeting(meet.op.replace("_", " "), "XCCL", start, self.attention)

    def _wait_for_launch(self, operators: int | Ns) -> None:
        """Let each die wait until its host has launched so many more operators, in single-op mode."""
        if self._eager:
            self._launched_ns = self._launched_ns + operators * self._op_ns
            self.attention = np.maximum(self.attention, self._launched_ns)

    def exchange_ns(self, op: Op, batch: int) -> int:
        """Return the time in ns of a dispatch or combine of all dies; the fullest die has `batch` rows."""
        stretch = self.spec.barrier_stretch.value
        return round(self.cost.exchange_ns(op, len(self.dies), batch, self.copies, stretch))

    def _next_experts(self) -> Ns:
        """Return the time of experts in the microbatch's next layer that has some [domains, dies]."""
        return next(self._experts[self._microbatch])

    def _price_rows(self, stage: Stage) -> Ns:
        """Price a stage on each die's own rows; experts, too, where a single die has all of them."""
        counts, prices = self._counts[self._microbatch], []
        copies_of = self.frame.config.num_experts_per_tok if stage.name == "Experts" else 0
        for num_rows, context, kv_tokens in counts.few:
            copies = num_rows * copies_of
            work = Counts(num_rows, context, kv_tokens, copies, min(copies, len(self.frame.slots)))
            prices.append(round(self.price_of(stage, self._layer, work)) if num_rows else 0)
        return np.array(prices, np.int64)[counts.of_die]


async def _end_layer(layer_idx: int) -> None:
    """Ignore the end of a layer, which only dies as tasks report."""


class DisaggregatedTimetable(Timetable):
    """Timetable with expert dies; `experts` has the time of each expert die so far, in ns."""

    def __init__(
        self,
        executors: Sequence[Executor],
        copies: int,
        expert_dies: Sequence[Die],
        num_domains: int,
    ) -> None:
        super().__init__(executors, copies, num_domains)
        self.expert_dies, self._num_domains = expert_dies, num_domains
        self._per_domain = len(self.dies) // num_domains
        self.expert_drawing = Drawing(expert_dies)
        carrier = executors[0].mem.walk.carrier
        assert carrier != "rdma"  # cards of several kinds of hardware have no twin
        self._carrier = carrier

    def begin(self, came: Ns) -> None:
        """Begin a run at the times in ns when attention dies and, after them, expert dies came."""
        attention, experts = np.split(came, [len(self.dies)])
        super().begin(attention)
        self.expert_drawing.begin()
        self.experts = experts.copy()
        self._received = self._sent = int(experts.max(initial=0))

    def begin_layers(self) -> None:
        """Compute the times of tokens on their ways."""
        self._times = [self._token_times(counts.rows) for counts in self._counts]
        self._leaves: list[list[int]] = [[] for _ in self._counts]  # of answers, by domain
        # When the buffers of a microbatch of a domain were last free.
        self._sent_at = [[0] * self._num_domains for _ in self._counts]

    def _token_times(self, rows: Ns) -> TokenTimes:
        """Compute the times of a microbatch with `rows` [A] on each die."""
        cost, carrier, copies, num_ranks = self.cost, self._carrier, self.copies, len(self.expert_dies)
        most = [int(mine.max(initial=0)) for mine in rows.reshape(self._num_domains, -1)]
        ops: tuple[Op, Op] = "dispatch", "combine"
        among = [
            [round(cost.among_ns(op, num_ranks, n, copies, carrier, self._per_domain)) for n in most]
            for op in ops
        ]
        few, of_die = np.unique(rows, return_inverse=True)
        post = [round(cost.post_ns(count, carrier)) for count in few.tolist()]
        back = [round(cost.return_ns(count, copies, carrier)) for count in few.tolist()]
        return TokenTimes(np.array(post)[of_die], np.array(back)[of_die], *among)

    async def meet(self, meet: Meet) -> None:
        """Send the microbatch to the experts, or wait for its answers."""
        self._wait_for_launch(1)
        if meet.op == "a2e":
            self._go_away_and_serve()
        else:
            self._come_back()

    # ---- attention dies -----------------------------------------------------------------------------

    def _come_back(self) -> None:
        """Wait for the microbatch's answers, which have left the trampolines of each domain."""
        before, m = self.attention, self._microbatch
        ready = np.repeat(self._leaves[m], self._per_domain) + self._times[m].return_ns
        self.attention = np.maximum(before, ready)
        if not self.drawing.is_on:
            return
        for domain in range(self._num_domains):
            self.drawing.spans("XCCL", "E2A'", before, self.attention, domain)
            for at, die, _ in self.drawing.of(domain):
                if self.attention[at] > before[at]:
                    self.drawing.trace.arrive(
                        ("E2A'", die, m), "E2A'", die, "XCCL", int(self.attention[at]) - 1
                    )

    def _draw_post(self, domain: int, before: Ns) -> None:
        """Draw A2E's bulk stage of a domain in the trace."""
        self.drawing.spans("XCCL", "A2E", before, self.attention, domain)
        for at, die, _ in self.drawing.of(domain):
            key = "A2E", die, self._microbatch
            self.drawing.trace.depart(key, "A2E", die, "XCCL", int(self.attention[at]) - 1)

    # ---- expert dies --------------------------------------------------------------------------------

    def _go_away_and_serve(self) -> None:
        """Post the microbatch, and serve it on the expert dies.

        Expert dies serve a domain when its last attention die has posted.
        """
        before, m, kernels_ns = self.attention, self._microbatch, self._next_experts()
        self.attention = before + self._times[m].post_ns
        posted = self.attention.reshape(self._num_domains, -1).max(axis=1).tolist()
        self._leaves[m] = []
        for domain, posted_ns in enumerate(posted):
            if self.drawing.is_on:
                self._draw_post(domain, before)
            self._leaves[m].append(self._serve(domain, posted_ns, kernels_ns[domain]))

    def _serve(self, domain: int, posted_ns: int, kernels_ns: Ns) -> int:
        """Serve an item by A2E, experts and E2A; return when its answers leave, in ns.

        An item is the microbatch of a domain. It is pipelined with the items around it.
        """
        m, times = self._microbatch, self._times[self._microbatch]
        # The three streams of an expert die each take one item after another.
        start = max(posted_ns, self._received, self._sent_at[m][domain])
        self._received = received = start + times.dispatch_ns[domain]
        begin = np.maximum(self.experts, received)
        self.experts = begin + kernels_ns
        computed = max(int(self.experts.max()), self._sent)
        self._sent = self._sent_at[m][domain] = sent = computed + times.combine_ns[domain]
        if self.expert_drawing.is_on:
            self._draw_item(domain, (start, received), begin, (computed, sent))
        return sent

    def _draw_item(
        self, domain: int, receiving: tuple[int, int], begin: Ns, sending: tuple[int, int]
    ) -> None:
        """Draw an item in the three streams of the expert dies, with arrows from and to attention dies.

        Attention dies have trampolines as `comm.trampoline.layout` deals them out.
        """
        microbatch = self._microbatch
        drawing, name = self.expert_drawing, stream_item(microbatch, domain)
        trace, place = drawing.trace, self.drawing.place(domain)
        for lane, called in ((COMPUTE, name), ("AIC", "Experts")):
            drawing.spans(lane, called, begin, self.experts, place=place)
        first = domain * self._per_domain
        for at, die, _ in drawing.shown:
            trace.span(die, RECEIVE, name, *receiving, place)
            trace.span(die, SEND, name, *sending, place)
            for rank in range(at, self._per_domain, len(self.expert_dies)):
                attention = self.dies[first + rank].index
                trace.arrive(("A2E", attention, microbatch), "A2E", die, RECEIVE, receiving[0])
                trace.depart(("E2A'", attention, microbatch), "E2A'", die, SEND, sending[1] - 1)

    @property
    def ends_ns(self) -> Ns:
        """Virtual times in ns at which members are done; expert dies, when the last answers have left."""
        return np.concatenate([self.attention, np.maximum(self.experts, self._sent)])
