"""What transfers cost by formula: operator-level models beside the simulated protocols.

The protocols of this package take the time that their engine operations add up to. The formulas here give the
same in closed form for the exchanges of hundreds of ranks, of which each rank's hundred thousand accesses
need not be simulated one by one. Both levels read the same parameter table (`hw.spec`), and
the tests compare them where both can run. That includes the two numbers of an exchange that are fitted to CM
Table 6, its fixed part and the price of a copy: where the levels agree they add things up alike, which does
not make either number right. All times are ns, not rounded.
"""

from __future__ import annotations

import functools
import math

import msgspec

from xdeepserve.comm.means import Carrier
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Topology


class CommCost(msgspec.Struct, frozen=True):
    """Costs on pods of one kind."""

    spec: Spec = Spec()
    topology: Topology = Topology()

    def exchange_ns(self, num_ranks: int, batch: float, copies: int, stretch: float = 1.0) -> float:
        """A dispatch or a combine in which each rank has `batch` tokens for `copies` experts each.

        A fixed part, and a price for each copy that crosses the UB port of the busiest rank. Of a rank's
        copies those that stay in its package (its own die and the sister die) cost nothing; those that leave
        the server pay the inter-server loss; and random routing makes the busiest of many ranks receive more
        than the average, by as many standard deviations as the maximum of so many normal variables has.
        `stretch` is what serving adds to a micro-benchmark: uneven ranks, and waiting for them.
        """
        spec, topology = self.spec, self.topology
        rows = batch * copies
        if rows == 0:
            return 1e9 * spec.exchange_fixed.value
        leaving = 1 - min(1.0, topology.dies_per_chip / num_ranks)
        far = max(0.0, 1 - topology.dies_per_server / num_ranks)
        deviation = math.sqrt((1 - 1 / num_ranks) / rows)
        busiest = 1 + expected_maximum(num_ranks) * deviation
        load = rows * leaving * (1 + spec.inter_server_loss.value * far) * busiest
        return 1e9 * (spec.exchange_fixed.value + spec.exchange_copy.value * load * stretch)

    def bulk_ns(self, nbytes: float, carrier: Carrier = "mte") -> float:
        """The other stage of A2E or E2A: a die's tokens in one piece to or from its trampoline."""
        ns = 1e9 * self.spec.exchange_fixed.value + self.spec.link_ns(0, 0, nbytes)
        return ns + self.start_ns(carrier, 1, self.spec.attention_cores.value)

    def among_ns(self, num_experts: int, batch: float, copies: int, carrier: Carrier = "mte") -> float:
        """The stage of A2E or E2A among the expert dies, each of which pulls from all others."""
        exchange = self.exchange_ns(num_experts, batch, copies)
        return exchange + self.start_ns(carrier, num_experts, self.spec.num_cores("aiv"))

    def start_ns(self, carrier: Carrier, num_pieces: int, cores: float) -> float:
        """What it takes that a carrier is asked for so many pieces by so many AIV cores, and begins. The
        fixed part of an exchange, which is fitted to cores that carry themselves, has theirs."""
        if carrier == "mte":
            return 0.0
        return self.spec.startup_ns(carrier) + self.spec.pieces_ns(num_pieces, int(cores))

    def a2e_ns(self, num_experts: int, batch: int, copies: int, token_nbytes: int) -> float:
        """A2E or E2A through trampolines, one for each attention die (XDS 3.3).

        One stage is an exchange among the expert dies; the other moves each token once between an attention
        die and its trampoline, in bulk, at the speed of the UB port.
        """
        return self.bulk_ns(batch * token_nbytes) + self.among_ns(num_experts, batch, copies)


@functools.cache
def expected_maximum(n: int) -> float:
    """Mean of the largest of n standard normal variables: the integral of x d(Phi(x)^n), by trapezoids."""
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
