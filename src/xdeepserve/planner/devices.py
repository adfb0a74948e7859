"""Algorithm 1 over lists of devices: the kind for attention and the kind for experts (MegaScale-Infer
4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from xdeepserve.errors import InputError
from xdeepserve.hw.accelerators import Accelerator
from xdeepserve.planner.fit import attention_sides, expert_sides
from xdeepserve.planner.moe_shape import BF16, MoEShape
from xdeepserve.planner.performance import LatencyBound
from xdeepserve.planner.search import Plan, Space, choices, evaluate, search


class Pairing(NamedTuple):
    """The best plan for a kind of attention nodes and a kind of expert nodes."""

    attention: Accelerator
    experts: Accelerator
    plan: Plan


def space_of(
    shape: MoEShape,
    attention: Accelerator,
    experts: Accelerator,
    context: float,
    slo_ns: float,
    extrapolates: bool = False,
) -> Space:
    """Make the search space of Algorithm 1 for a pair of devices."""
    return Space(
        attention=attention_sides(shape, attention, context),
        experts=expert_sides(shape, experts),
        num_experts=shape.experts,
        top_k=shape.top_k,
        layers=shape.layers,
        context=context,
        token_nbytes=BF16 * shape.hidden,
        slo_ns=slo_ns,
        extrapolates=extrapolates,
    )


def paired(
    shape: MoEShape, attention: Accelerator, experts: Accelerator, context: float, slo_ns: float
) -> tuple[Plan | None, float]:
    """Find the best plan of a pair of devices (None if none keeps the bound), and its shortest iteration [ns]
    (infinite if the model does not fit)."""
    space = space_of(shape, attention, experts, context, slo_ns)
    best = search(space)
    times = (evaluate(space, a, e, 1, m, 1).total_ns for a, e, m in choices(space))
    return best[0] if best else None, min(times, default=math.inf)


def pairings(
    shape: MoEShape, devices: Sequence[Accelerator], context: float, bound: LatencyBound
) -> list[Pairing]:
    """Find the best plan of each pair, the best first. Raises InputError, with what would work, if there is
    none."""
    found, least = [], math.inf
    for attention in devices:
        for experts in devices:
            best, shortest = paired(shape, attention, experts, context, bound.slo_ns)
            least = min(least, shortest)
            if best is not None:
                found.append(Pairing(attention, experts, best))
    if least == math.inf:
        names = ", ".join(device.name for device in devices)
        raise InputError(
            f"model {shape.name} does not fit on nodes of up to 8 {names}: try others beside them"
        )
    if not found:
        raise InputError(
            f"no plan keeps {bound}: an iteration of one request for each attention node takes "
            f"{least / 1e6:.2f} ms; {bound.enough_for(least)}"
        )
    return sorted(found, key=lambda pair: -pair.plan.tpuc)


def cheaper(device: Accelerator, factor: float) -> Accelerator:
    """Return a device at another price, for sensitivity."""
    price = msgspec.structs.replace(device.price, value=device.price.value * factor)
    return msgspec.structs.replace(device, price=price)


def slower(device: Accelerator, factor: float) -> Accelerator:
    """Return a device with another share of its server's cards, for sensitivity."""
    network = msgspec.structs.replace(device.network, value=device.network.value * factor)
    spec = msgspec.structs.replace(device.spec, roce_bandwidth=network)
    return msgspec.structs.replace(device, spec=spec)
