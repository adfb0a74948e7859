"""Costs of transfers by formula: operator-level models beside the simulated protocols.

A simulated protocol takes the sum of its engine operations' times. The formulas here give the same times in
closed form, for exchanges of hundreds of ranks, whose hundred thousand accesses per rank would be slow to
simulate. Both levels read the same parameter table (`hw.spec`), and the tests compare them where both can
run. All times are ns, not rounded; rows are those of the INT8 recipe, activations in a die's memory float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

from xdeepserve.comm.exchange import cost as pull
from xdeepserve.comm.exchange_choices import Carrier, Exchange
from xdeepserve.comm.fused import cost as push
from xdeepserve.comm.port_cost import ACTIVATION, PortCost, PortLoad

Op: TypeAlias = Literal["dispatch", "combine"]
OPS: tuple[Op, Op] = "dispatch", "combine"
FORMULAS: Final[Mapping[Exchange, Mapping[Op, Callable[[PortCost, PortLoad], float]]]] = {
    "pull": {"dispatch": pull.dispatch_ns, "combine": pull.combine_ns},
    "push": {"dispatch": push.dispatch_ns, "combine": push.combine_ns},
}


class CommCost(PortCost, frozen=True):
    """Costs of exchanging tokens of `hidden` elements, by the formulas of an exchange (`way`)."""

    way: Exchange = "pull"

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

        It adds the rank's own steps and a price for each copy that crosses the UB port of the busiest rank,
        times `stretch` (see `PortLoad`).
        """
        rows = batch * copies
        share = min(1.0, (senders or num_ranks) / num_ranks)
        come = rows * share * self.busiest(num_ranks, rows * share)
        return FORMULAS[self.way][op](self, PortLoad(num_ranks, batch, copies, come, stretch))

    # ---- A2E and E2A (XDS 3.3) --------------------------------------------------------------------------

    def post_ns(self, batch: float, carrier: Carrier = "mte") -> float:
        """Time (ns) of A2E's first stage: an attention die, on few cores, quantises its tokens and posts them
        in one piece, which its trampoline pulls."""
        spec, cores = self.spec, int(self.spec.attention_cores.value)
        local = spec.link_ns(ACTIVATION * batch * self.hidden, 0, 0, cores)
        local += spec.link_ns(batch * (self.hidden + pull.HEADER), 0, 0, cores)
        own = spec.kernel_ns(0, 0) + local + self.vector_ns(4 * batch * self.hidden, cores)
        told = spec.meeting_ns() + self.told_ns(1, cores) + spec.field_poll_ns() / spec.num_cores("aiv")
        return (
            own + told + spec.link_ns(0, 0, batch * (self.hidden + pull.HEADER)) + self.start_ns(carrier, 1)
        )

    def return_ns(self, batch: float, copies: int, carrier: Carrier = "mte") -> float:
        """Time (ns) of E2A's second stage: a trampoline adds up answers and posts the sums, which the
        attention die's few cores pull."""
        spec, cores = self.spec, int(self.spec.attention_cores.value)
        rows, sums = batch * copies * self.answer_nbytes, ACTIVATION * batch * self.hidden
        added = max(spec.hbm_ns(rows), self.vector_ns(2 * batch * copies * self.hidden))
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
