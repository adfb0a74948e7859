"""Costs of transfers by formula: operator-level models beside the simulated protocols.

A simulated protocol takes the sum of its engine operations' times. The formulas here give the same times in
closed form, for exchanges of hundreds of ranks, whose hundred thousand accesses per rank would be slow to
simulate. Both levels read the same parameter table (`hw.spec`), and the tests compare them where both can
run. All times are ns, not rounded; rows are those of the INT8 recipe, activations in a die's memory float32.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, TypeAlias

import msgspec

from xdeepserve.comm.exchange_choices import Carrier, Exchange
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import SUB_PLANES, Topology

Op: TypeAlias = Literal["dispatch", "combine"]
OPS: tuple[Op, Op] = "dispatch", "combine"
ACTIVATION, ANSWER = 4, 2  # bytes of an element where it is computed, and on its way back
SCALE_SLOT = 512  # bytes of a pushed message beside its INT8 payload (CM 4.2.1)
HEADER = 32  # of a pulled row


class CommCost(msgspec.Struct, frozen=True):
    """Costs of exchanging tokens of `hidden` elements, by pull or push (`way`), on pods of a kind."""

    spec: Spec = Spec()
    topology: Topology = Topology()
    hidden: int = 7168
    way: Exchange = "pull"
    spread: bool = True  # a message's packets go by all sub-planes of UB; else by one, whichever

    def exchange_ns(
        self,
        op: Op,
        num_ranks: int,
        batch: float,
        copies: int,
        stretch: float = 1.0,
        senders: int | None = None,
    ) -> float:
        """Time (ns) of a dispatch or combine in which each rank, or each of `senders`, has `batch` tokens for
        `copies` experts each.

        It adds the rank's own steps and a price for each copy that crosses the UB port of the busiest rank.
        `stretch` is the factor of serving over a micro-benchmark: uneven ranks, and waiting for them.
        """
        rows = batch * copies
        share = min(1.0, (senders or num_ranks) / num_ranks)
        come = rows * share * self.busiest(num_ranks, rows * share)
        if self.way == "push":
            own = self.push_ns(op, num_ranks, come)
        else:
            own = self.pull_ns(op, num_ranks, batch, copies, come)
        return own + self.crossing_ns(num_ranks, max(rows, come)) * stretch

    def busiest(self, num_ranks: int, rows: float) -> float:
        """Ratio of the busiest rank's received rows to the average of `rows`. Random routing adds the
        expected maximum of `num_ranks` normal variables, in standard deviations."""
        if rows == 0:
            return 1.0
        return 1 + expected_maximum(num_ranks) * math.sqrt((1 - 1 / num_ranks) / rows)

    def crossing_ns(self, num_ranks: int, rows: float) -> float:
        """Time (ns) of the busiest rank's token copies at its UB port.

        Those that stay in its package (its own die and the sister die) cost nothing, and those that leave the
        server pay the inter-server loss.
        """
        spec, topology = self.spec, self.topology
        leaving = 1 - min(1.0, topology.dies_per_chip / num_ranks)
        far = max(0.0, 1 - topology.dies_per_server / num_ranks)
        load = rows * leaving * (1 + spec.inter_server_loss.value * far)
        if not self.spread and load:
            load *= self.busiest(SUB_PLANES, load / SUB_PLANES)
        return 1e9 * spec.exchange_copy.value * load

    def pull_ns(self, op: Op, num_ranks: int, batch: float, copies: int, come: float) -> float:
        """Time (ns) of a rank's own steps in a pull-based operator (XDS 3.2), with `come` rows for its
        experts.

        A launch; what it loads and stores of rows, which share HBM; fields for all, and a note of each that
        comes. The cores meet before they post fields, and in dispatch also when they know all counts.
        """
        spec = self.spec
        if op == "dispatch":
            load, quantise = ACTIVATION * batch * self.hidden, 4 * batch * self.hidden
            staged, meetings = batch * copies * (self.hidden + HEADER), 2
        else:
            load, quantise = ACTIVATION * come * self.hidden, 0.0
            staged, meetings = come * ANSWER * self.hidden, 1
        own = spec.kernel_ns(0, 0) + self._vector_ns(quantise) + spec.hbm_ns(load + staged)
        noted = spec.field_poll_ns() * num_ranks / spec.num_cores("aiv")
        return own + meetings * spec.meeting_ns() + self.told_ns(num_ranks) + noted

    def push_ns(self, op: Op, num_ranks: int, come: float) -> float:
        """Time (ns) of a rank's own steps in a fused operator beside its push (CM 4.2.1), with `come` rows.

        A launch; flags for all ranks, or on the way back one for each answer; a gather or a weighted sum of
        what has come. In dispatch the cores meet before the flags, and when they know all counts.
        """
        spec = self.spec
        if op == "dispatch":
            own = 2 * spec.meeting_ns() + self.told_ns(num_ranks)
            return spec.kernel_ns(0, 0) + own + spec.hbm_ns(2 * come * (self.hidden + SCALE_SLOT))
        summed = max(spec.hbm_ns(come * ANSWER * self.hidden), self._vector_ns(2 * come * self.hidden))
        return spec.kernel_ns(0, 0) + self.told_ns(come) + summed

    def told_ns(self, num_fields: float, cores: int | None = None) -> float:
        """Time (ns) to post fields one by one, with their flight to another server and a look at the last."""
        spec = self.spec
        posts = spec.pieces_ns(math.ceil(num_fields), cores or spec.num_cores("aiv"))
        return spec.startup_ns("mte") + posts + spec.far_latency_ns() + spec.poll_ns()

    def _vector_ns(self, operations: float, cores: int | None = None) -> float:
        return self.spec.kernel_ns(operations, 0, "aiv", cores, is_fused=True)

    # ---- A2E and E2A (XDS 3.3) --------------------------------------------------------------------------

    def post_ns(self, batch: float, carrier: Carrier = "mte") -> float:
        """Time (ns) of A2E's first stage: an attention die, on few cores, quantises its tokens and posts them
        in one piece, which its trampoline pulls."""
        spec, cores = self.spec, int(self.spec.attention_cores.value)
        local = spec.link_ns(ACTIVATION * batch * self.hidden, 0, 0, cores)
        local += spec.link_ns(batch * (self.hidden + HEADER), 0, 0, cores)
        own = spec.kernel_ns(0, 0) + local + self._vector_ns(4 * batch * self.hidden, cores)
        told = spec.meeting_ns() + self.told_ns(1, cores) + spec.field_poll_ns() / spec.num_cores("aiv")
        return own + told + spec.link_ns(0, 0, batch * (self.hidden + HEADER)) + self.start_ns(carrier, 1)

    def return_ns(self, batch: float, copies: int, carrier: Carrier = "mte") -> float:
        """Time (ns) of E2A's second stage: a trampoline adds up answers and posts the sums, which the
        attention die's few cores pull."""
        spec, cores = self.spec, int(self.spec.attention_cores.value)
        rows, sums = batch * copies * ANSWER * self.hidden, ACTIVATION * batch * self.hidden
        added = max(spec.hbm_ns(rows), self._vector_ns(2 * batch * copies * self.hidden))
        told = spec.meeting_ns() + self.told_ns(1) + spec.field_poll_ns() / cores
        pulled = spec.link_ns(0, 0, sums, cores if carrier == "mte" else None)
        return added + spec.hbm_ns(sums) + told + pulled + self.start_ns(carrier, 1, cores)

    def among_ns(
        self,
        op: Op,
        num_experts: int,
        batch: float,
        copies: int,
        carrier: Carrier = "mte",
        trampolines: int | None = None,
    ) -> float:
        """Time (ns) of the stage of A2E or E2A among the expert dies, which all exchange with each other.
        Only `trampolines` of them have tokens."""
        start = self.start_ns(carrier, num_experts) if self.way == "pull" else 0.0
        return start + self.exchange_ns(op, num_experts, batch, copies, senders=trampolines)

    def start_ns(self, carrier: Carrier, num_pieces: int, cores: int | None = None) -> float:
        """Time (ns) to ask a carrier for `num_pieces` pieces from `cores` AIV cores, and its startup; 0 for
        MTE, which the cores drive themselves."""
        if carrier == "mte":
            return 0.0
        posts = self.spec.pieces_ns(num_pieces, cores or self.spec.num_cores("aiv"))
        return self.spec.startup_ns(carrier) + posts

    def a2e_ns(self, num_attention: int, num_experts: int, batch: int, copies: int) -> float:
        """Time (ns) of A2E through trampolines, one for each attention die (XDS 3.3)."""
        among = self.among_ns("dispatch", num_experts, batch, copies, trampolines=num_attention)
        return self.post_ns(batch) + among

    def e2a_ns(self, num_attention: int, num_experts: int, batch: int, copies: int) -> float:
        """Time (ns) of E2A through trampolines, one for each attention die (XDS 3.3)."""
        among = self.among_ns("combine", num_experts, batch, copies, trampolines=num_attention)
        return among + self.return_ns(batch, copies)


@functools.cache
def expected_maximum(n: int) -> float:
    """Expected maximum of n standard normal variables: the integral of x d(Phi(x)^n), by trapezoids."""
    steps, low, high = 4000, -9.0, 9.0
    width = (high - low) / steps
    total = 0.0
    for i in range(steps + 1):
        x = low + i * width
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        cumulative = 0.5 * math.erfc(-x / math.sqrt(2))
        weight = 0.5 if i in (0, steps) else 1.0
        total += weight * x * n * density * cumulative ** (n - 1)
    return total * width
