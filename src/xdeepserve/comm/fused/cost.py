"""Costs of FusedDispatch and FusedCombine by formula (CM 4.2.1).

A launch; flags for all ranks, or on the way back one for each answer; a gather or a weighted sum of what has
come; and the push, which ends when the busiest port is through.
"""

from __future__ import annotations

from xdeepserve.comm.port_cost import PortCost, PortLoad

SCALE_SLOT = 512  # bytes of a message beside its INT8 payload


def dispatch_ns(cost: PortCost, load: PortLoad) -> float:
    """Time (ns) of a FusedDispatch: the cores meet before the flags, and when they know all counts."""
    spec = cost.spec
    own = 2 * spec.meeting_ns() + cost.told_ns(load.num_ranks)
    gathered = spec.hbm_ns(2 * load.come * (cost.hidden + SCALE_SLOT))
    return spec.kernel_ns(0, 0) + own + gathered + cost.stretched_ns(load)


def combine_ns(cost: PortCost, load: PortLoad) -> float:
    """Time (ns) of a FusedCombine, whose answers are summed where they arrive."""
    spec, elements = cost.spec, load.come * cost.hidden
    summed = max(spec.hbm_ns(load.come * cost.answer_nbytes), cost.vector_ns(2 * elements))
    own = spec.kernel_ns(0, 0) + cost.quantised_ns(load.come) + cost.told_ns(load.come) + summed
    return own + cost.stretched_ns(load)
