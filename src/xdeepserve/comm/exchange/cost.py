"""Costs of dispatch and combine by formula (XDS 3.2).

A launch; what a rank loads and stores of rows, which share HBM; fields for all, and a note of each that
comes. The cores meet before they post fields, and in dispatch also when they know all counts.
"""

from __future__ import annotations

from xdeepserve.comm.port_cost import ACTIVATION, PortCost, PortLoad

HEADER = 32  # bytes of a row beside its payload


def dispatch_ns(cost: PortCost, load: PortLoad) -> float:
    """Time (ns) of a dispatch: a rank quantises its tokens and stages a row for each copy."""
    loaded = ACTIVATION * load.batch * cost.hidden
    staged = load.batch * load.copies * (cost.hidden + HEADER)
    return _own_ns(cost, load, 4 * load.batch * cost.hidden, loaded + staged, 2) + cost.stretched_ns(load)


def combine_ns(cost: PortCost, load: PortLoad) -> float:
    """Time (ns) of a combine: a rank stages an answer for each row that has come."""
    moved = ACTIVATION * load.come * cost.hidden + load.come * cost.answer_nbytes
    return _own_ns(cost, load, 0.0, moved, 1) + cost.quantised_ns(load.come) + cost.stretched_ns(load)


def _own_ns(cost: PortCost, load: PortLoad, operations: float, nbytes: float, meetings: int) -> float:
    spec = cost.spec
    own = spec.kernel_ns(0, 0) + cost.vector_ns(operations) + spec.hbm_ns(nbytes)
    noted = spec.field_poll_ns() * load.num_ranks / spec.num_cores("aiv")
    return own + meetings * spec.meeting_ns() + cost.told_ns(load.num_ranks) + noted
