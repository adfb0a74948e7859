"""Algorithm 1 of MegaScale-Infer, with a climb from its balanced n_a, and exhaustive search beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from xdeepserve.planner.performance import Times, transfer_ns
from xdeepserve.prices.curve import Curve

Bound = Literal["SLO", "memory", "range"]


class NodeKind(msgspec.Struct, frozen=True, kw_only=True):
    """Attention or expert nodes of one size.

    tp             devices of a node
    time           T_a over b_a, or T_e over b_e
    message        ns over bytes that one device sends or receives
    price          of a node
    fits           whether its parameters fit
    max_positions  for attention: positions of KV for which a node has room (equation 8)
    """

    tp: int
    time: Curve
    message: Curve
    price: float
    fits: bool = True
    max_positions: float = math.inf


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Search space for a kind of attention nodes and a kind of expert nodes.

    token_nbytes  of a hidden state
    extrapolates  whether times beyond the last measured point may be used
    """

    attention: tuple[NodeKind, ...]
    experts: tuple[NodeKind, ...]
    num_experts: int
    top_k: int
    layers: int
    context: float
    token_nbytes: float
    slo_ns: float
    microbatches: tuple[int, ...] = (3, 4)
    max_nodes: int = 64
    max_batch: int = 1024
    extrapolates: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a space. `b_a` requests are in a microbatch of an attention node, `batch` in all."""

    attention: NodeKind
    experts: NodeKind
    n_a: int
    m: int
    b_a: int
    b_e: float
    times: Times
    total_ns: float
    batch: int
    price: float
    bound: Bound = "range"

    @property
    def throughput(self) -> float:
        """Generated tokens per second of all nodes."""
        return self.batch / self.total_ns * 1e9

    @property
    def tpuc(self) -> float:
        """Throughput per unit cost (TPUC)."""
        return self.throughput / self.price


def evaluate(space: Space, attention: NodeKind, experts: NodeKind, n_a: int, m: int, b_a: int) -> Plan:
    """Evaluate equations 4 to 6 at a point of the space."""
    b_e = b_a * n_a * space.top_k / space.num_experts
    times = Times(
        attention.time(b_a),
        experts.time(b_e),
        transfer_ns(
            attention.message,
            experts.message,
            b_a * space.top_k * space.token_nbytes / attention.tp,
            b_e * space.token_nbytes / experts.tp,
        ),
    )
    return Plan(
        attention=attention,
        experts=experts,
        n_a=n_a,
        m=m,
        b_a=b_a,
        b_e=b_e,
        times=times,
        total_ns=times.total(m, space.layers),
        batch=b_a * n_a * m,
        price=n_a * attention.price + space.num_experts * experts.price,
    )


def obstacle(space: Space, plan: Plan) -> Bound | None:
    """Return the bound broken by a plan: SLO by equation 7, memory by equation 8, or range of measurements;
    None if it keeps all."""
    if plan.m * plan.b_a * space.context > plan.attention.max_positions:
        return "memory"
    if plan.total_ns > space.slo_ns:
        return "SLO"
    is_known = plan.attention.time.covers(plan.b_a) and plan.experts.time.covers(plan.b_e)
    if plan.b_a > space.max_batch or not (is_known or space.extrapolates):
        return "range"
    return None


def simulate(space: Space, attention: NodeKind, experts: NodeKind, n_a: int, m: int) -> Plan | None:
    """SIMULATE of the paper: find the largest batch within all bounds, by binary search, and the next
    bound."""
    low, high, bound = 0, 1, obstacle(space, evaluate(space, attention, experts, n_a, m, 1))
    while bound is None:
        low, high = high, 2 * high
        bound = obstacle(space, evaluate(space, attention, experts, n_a, m, high))
    while high - low > 1:
        middle = (low + high) // 2
        found = obstacle(space, evaluate(space, attention, experts, n_a, m, middle))
        if found is None:
            low = middle
        else:
            high, bound = middle, found
    if not low:
        return None
    return msgspec.structs.replace(evaluate(space, attention, experts, n_a, m, low), bound=bound)


def balance(space: Space, attention: NodeKind, experts: NodeKind) -> int:
    """BALANCE of the paper: the number of attention nodes for which T_a and T_e grow alike, n_a = k1 E / (k3
    K)."""
    return max(1, min(space.max_nodes, round(balanced(space, attention, experts))))


def balanced(space: Space, attention: NodeKind, experts: NodeKind) -> float:
    """Compute k1 E / (k3 K), not rounded."""
    (k1, _), (k3, _) = attention.time.line(), experts.time.line()
    return k1 * space.num_experts / max(k3 * space.top_k, 1e-12)


def choices(space: Space) -> Iterator[tuple[NodeKind, NodeKind, int]]:
    """Yield node sizes with enough memory for parameters, with numbers of microbatches."""
    for experts in space.experts:
        for attention in space.attention:
            if attention.fits and experts.fits:
                for m in space.microbatches:
                    yield attention, experts, m


def algorithm_1(space: Space) -> list[Plan]:
    """Run the paper's Algorithm 1: the best plan of each choice, the best first."""
    found = [simulate(space, a, e, balance(space, a, e), m) for a, e, m in choices(space)]
    return ranked(found)


def search(space: Space) -> list[Plan]:
    """Run Algorithm 1, then move n_a away from its balanced value while plans get better, because k2, k4, the
    SLO and memory count, too."""
    return ranked([_climb(space, a, e, m) for a, e, m in choices(space)])


def _climb(space: Space, a: NodeKind, e: NodeKind, m: int) -> Plan | None:
    """Climb from the balanced n_a. The climb continues a few steps beyond a worse plan, because rounding to
    whole numbers makes small dents."""
    patience, start = 3, balance(space, a, e)
    best = simulate(space, a, e, start, m)
    for direction in (-1, 1):
        n, worse = start + direction, 0
        while 1 <= n <= space.max_nodes and worse < patience:
            plan = simulate(space, a, e, n, m)
            if plan is not None and (best is None or plan.tpuc > best.tpuc):
                best, worse = plan, 0
            elif best is not None or direction > 0:
                worse += 1
            n += direction
    return best


def exhaustive(space: Space) -> Plan | None:
    """Find the best of all points, one by one; feasible only for small spaces."""
    best = None
    for a, e, m in choices(space):
        for n_a in range(1, space.max_nodes + 1):
            for b_a in range(1, space.max_batch + 1):
                plan = evaluate(space, a, e, n_a, m, b_a)
                if obstacle(space, plan) is None and (best is None or plan.tpuc > best.tpuc):
                    best = plan
    return best


def ranked(plans: list[Plan | None]) -> list[Plan]:
    """Sort existing plans by throughput per cost, then by price and microbatches."""
    found = [plan for plan in plans if plan is not None]
    return sorted(found, key=lambda p: (-p.tpuc, p.price, p.m))
