"""Virtual times of stages in lockstep: a time for each die, moved on stage by stage.

Dies with attention run their stages one after another. A dispatch starts when the last die has come to it,
and a combine when the slowest expert has ended: both are barriers. Where experts have dies of their own, an
A2E needs two things. The last die of its domain must have posted, and the receiving stream of the expert dies
must be free. Experts run when the A2E has ended and their die is free. An E2A starts when the slowest expert
has ended. An exchange as a whole costs as much as by `comm.cost`, as in timing-only runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost, Op, Way
from xdeepserve.comm.means import Carrier
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND, stream_item
from xdeepserve.engine.run.lockstep.drawing import Drawing
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core

Ns = npt.NDArray[np.int64]


class Timed(NamedTuple):
    """Stage with a duration on each die, in ns [A]."""

    name: str
    core: Core
    ns: Ns


class TokenTimes(NamedTuple):
    """Times of a microbatch's tokens on their ways, in ns, equal in each layer of a run."""

    post_ns: Ns  # [A]: from each die to its trampoline
    return_ns: Ns  # [A]: and back
    dispatch_ns: list[int]  # by domain: among the expert dies
    combine_ns: list[int]


class Timetable:
    """Virtual times of a run of layers; `attention` has the time of each attention die so far, in ns [A].

    `drawing` draws them into the trace.
    """

    def __init__(self, dies: Sequence[Die], hidden: int, way: Way, num_domains: int = 0) -> None:
        self.dies, self.spec = dies, dies[0].spec
        self.cost = CommCost(self.spec, dies[0].fabric.topology, hidden, way)
        self.drawing = Drawing(dies, num_domains)
        self.attention: Ns = np.zeros(len(dies), np.int64)

    def begin(self, came: Ns) -> None:
        """Begin a run at the times in ns when the dies came [A]."""
        self.drawing.begin()
        self.attention = came.copy()

    def stages(self, timed: Sequence[Timed]) -> None:
        """Run stages on each die, one after another."""
        for name, core, ns in timed:
            start = self.attention
            self.attention = start + ns
            self.drawing.spans(core.upper(), name, start, self.attention)

    def meet(self, op: str, exchange_ns: int) -> None:
        """Make a dispatch or a combine of all dies."""
        start = self.attention
        end = int(start.max()) + exchange_ns
        self.attention = np.full_like(start, end)
        self.drawing.meeting(op, "XCCL", start, self.attention)


class DisaggregatedTimetable(Timetable):
    """Timetable with expert dies; `experts` has the time of each expert die so far, in ns.

    `carrier` carries pulled rows.
    """

    def __init__(
        self,
        dies: Sequence[Die],
        hidden: int,
        way: Way,
        expert_dies: Sequence[Die],
        num_domains: int,
        num_microbatches: int,
        carrier: Carrier,
    ) -> None:
        super().__init__(dies, hidden, way, num_domains)
        self.expert_dies, self._num_domains = expert_dies, num_domains
        self._num_places = num_domains * num_microbatches
        self._per_domain = len(dies) // num_domains
        self.expert_drawing = Drawing(expert_dies)
        self._carrier = carrier

    def begin_apart(self, attention: Ns, experts: Ns) -> None:
        """Begin a run at the times in ns when attention dies [A] and expert dies came."""
        self.begin(attention)
        self.expert_drawing.begin()
        self.experts = experts.copy()
        self._received = self._sent = int(experts.max(initial=0))
        self._sent_at = [0] * self._num_places  # when the buffers of a place were last free

    def token_times(self, rows: Ns, copies: int) -> TokenTimes:
        """Compute the times of a microbatch with `rows` [A] on each die, each row for `copies` experts."""
        cost, carrier, num_ranks = self.cost, self._carrier, len(self.expert_dies)
        most = [int(mine.max(initial=0)) for mine in rows.reshape(self._num_domains, -1)]
        ops: tuple[Op, Op] = "dispatch", "combine"
        among = [
            [round(cost.among_ns(op, num_ranks, n, copies, carrier, self._per_domain)) for n in most]
            for op in ops
        ]
        counts, of_die = np.unique(rows, return_inverse=True)
        post = [round(cost.post_ns(count, carrier)) for count in counts.tolist()]
        back = [round(cost.return_ns(count, copies, carrier)) for count in counts.tolist()]
        return TokenTimes(np.array(post)[of_die], np.array(back)[of_die], *among)

    # ---- attention dies -----------------------------------------------------------------------------

    def come_back(self, leaves_ns: Sequence[int], times: TokenTimes) -> None:
        """Wait for a microbatch's answers, which left the trampolines of each domain at `leaves_ns`.

        Nothing happens if the microbatch is not away.
        """
        if not leaves_ns:
            return
        before = self.attention
        ready = np.repeat(leaves_ns, self._per_domain) + times.return_ns
        self.attention = np.maximum(before, ready)
        if not self.drawing.is_on:
            return
        for domain in range(self._num_domains):
            self.drawing.spans("XCCL", "E2A'", before, self.attention, domain)
            for at, die, _ in self.drawing.of(domain):
                if self.attention[at] > before[at]:
                    key = "E2A'", die, self.drawing.place(domain)["microbatch"]
                    self.drawing.trace.arrive(key, "E2A'", die, "XCCL", int(self.attention[at]) - 1)

    def _draw_post(self, domain: int, before: Ns) -> None:
        """Draw A2E's bulk stage of a domain in the trace."""
        self.drawing.spans("XCCL", "A2E", before, self.attention, domain)
        for at, die, _ in self.drawing.of(domain):
            key = "A2E", die, self.drawing.place(domain)["microbatch"]
            self.drawing.trace.depart(key, "A2E", die, "XCCL", int(self.attention[at]) - 1)

    # ---- expert dies --------------------------------------------------------------------------------

    def serve(self, microbatch: int, times: TokenTimes, kernels_ns: Ns) -> list[int]:
        """Post a microbatch and serve it on the expert dies; return when each domain's answers leave, in ns.

        Expert dies serve a domain when its last attention die has posted. kernels_ns [domains, expert dies]
        is their time.
        """
        before = self.attention
        self.attention = before + times.post_ns
        posted, leaves = self.attention.reshape(self._num_domains, -1).max(axis=1).tolist(), []
        for domain, posted_ns in enumerate(posted):
            if self.drawing.is_on:
                self._draw_post(domain, before)
            leaves.append(self._serve_item(microbatch, domain, posted_ns, times, kernels_ns[domain]))
        return leaves

    def _serve_item(
        self, microbatch: int, domain: int, posted_ns: int, times: TokenTimes, kernels_ns: Ns
    ) -> int:
        """Serve an item by A2E, experts and E2A; return when its answers leave, in ns.

        It is pipelined with the items around it.
        """
        place = microbatch * self._num_domains + domain
        # The three streams of an expert die each take one item after another.
        start = max(posted_ns, self._received, self._sent_at[place])
        self._received = received = start + times.dispatch_ns[domain]
        begin = np.maximum(self.experts, received)
        self.experts = begin + kernels_ns
        computed = max(int(self.experts.max()), self._sent)
        self._sent = self._sent_at[place] = sent = computed + times.combine_ns[domain]
        if self.expert_drawing.is_on:
            self._draw_item(microbatch, domain, (start, received), begin, (computed, sent))
        return sent

    def _draw_item(
        self, microbatch: int, domain: int, receiving: tuple[int, int], begin: Ns, sending: tuple[int, int]
    ) -> None:
        """Draw an item in the three streams of the expert dies, with arrows from and to attention dies.

        Attention dies have trampolines as `comm.trampoline.layout` deals them out.
        """
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
    def experts_end_ns(self) -> int:
        """Virtual time in ns at which the last answers have left the expert dies."""
        return self._sent
