"""Parts of the formulas of exchanges: the busiest rank, its UB port, fields, vector cores.

`comm.cost` has the table of formulas, and each exchange's own folder has its formulas, which add up these
parts. All times are ns, not rounded.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import msgspec

from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import SUB_PLANES, Topology

ACTIVATION = 4  # bytes of an element where it is computed


class PortLoad(NamedTuple):
    """Load of a dispatch or combine: each rank has `batch` tokens for `copies` experts each, and the busiest
    rank has `come` rows for its experts.

    `stretch` is the factor of serving over a micro-benchmark: uneven ranks, and waiting for them.
    """

    num_ranks: int
    batch: float
    copies: int
    come: float
    stretch: float = 1.0


class PortCost(msgspec.Struct, frozen=True):
    """Costs of a rank's steps with tokens of `hidden` elements, and of copies at its UB port.

    Experts' answers go back as BF16, or with `int8_answers` as INT8 (xDeepServe 4.7).
    """

    spec: Spec = Spec()
    topology: Topology = Topology()
    hidden: int = 7168
    int8_answers: bool = False
    spread: bool = True  # a message's packets go by all sub-planes of UB; else by one, whichever

    @property
    def answer_nbytes(self) -> int:
        """Size of an expert's answer to a token on its way back, in bytes."""
        return self.hidden + 4 if self.int8_answers else 2 * self.hidden  # a scale, as `exchange.answers` has

    def quantised_ns(self, num_answers: float) -> float:
        """Time (ns) to quantise answers on vector cores; 0 where they go as BF16."""
        operations = 4 * num_answers * self.hidden if self.int8_answers else 0.0
        return self.vector_ns(operations) if operations else 0.0

    def busiest(self, num_ranks: int, rows: float) -> float:
        """Ratio of the busiest rank's received rows to the average of `rows`. Random routing adds the
        expected maximum of `num_ranks` normal variables, in standard deviations."""
        if rows == 0:
            return 1.0
        return 1 + expected_maximum(num_ranks) * math.sqrt((1 - 1 / num_ranks) / rows)

    def stretched_ns(self, load: PortLoad) -> float:
        """Time (ns) of all token copies of a load at the busiest port, when serving."""
        return self.crossing_ns(load.num_ranks, max(load.batch * load.copies, load.come)) * load.stretch

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

    def told_ns(self, num_fields: float, cores: int | None = None) -> float:
        """Time (ns) to post fields one by one, with their flight to another server and a look at the last."""
        spec = self.spec
        posts = spec.pieces_ns(math.ceil(num_fields), cores or spec.num_cores("aiv"))
        return spec.startup_ns("mte") + posts + spec.far_latency_ns() + spec.poll_ns()

    def vector_ns(self, operations: float, cores: int | None = None) -> float:
        """Time (ns) of operations on vector cores, within a kernel that runs already."""
        return self.spec.kernel_ns(operations, 0, "aiv", cores, is_fused=True)


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
