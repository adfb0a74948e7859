"""Search over layouts on a number of dies, and for the best plan under a latency bound.

With dies of one kind, the best plan has the most tokens per second on all dies. With several kinds it has the
most for its price (MS 4.2), and then fewer attention dies than available may be better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from xdeepserve.engine.deploy.deployment import Device
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.accelerators import ACCELERATORS
from xdeepserve.planner.layouts import (
    LayoutPlan,
    PodLayout,
    even,
    least_known,
    max_requests,
    predict,
    sized,
)
from xdeepserve.planner.performance import LatencyBound
from xdeepserve.prices.profile import HERE, PodProfile, usable_nbytes

MICROBATCHES = (1, 2, 3, 4)
DOMAINS = range(1, 9)
ROUTED_PER_SHARED = (16, 12, 8, 6, 4, 3, 2)  # 8 in xDeepServe 7.1: 256 and 32
PRICED_SIZES = 3  # of expert dies that are tried where a die's price counts: each kind is timed for each
CLIMBS = 6  # plans of which attention and shared dies are moved one by one while that is better
SHARES = (1, 2, 4)  # of the dies that are left, attention has one in so many, where a die's price counts
KINDS = ("colocated", "pd", "moe-attention", "transformerless")


class PodSpace(NamedTuple):
    """Search space of plans for a pod.

    Contents: dies, the bound of an iteration, whether unmeasured times are allowed, the usable share of
    memory, kinds of layouts (none: all), devices by name, whether TPOT was bounded.
    """

    num_dies: int
    slo_ns: float
    extrapolates: bool = False
    memory: float = 1.0
    kinds: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ("cm384",)
    of_tpot: bool = False

    @property
    def bound(self) -> LatencyBound:
        """Bound of an iteration, for messages."""
        return LatencyBound(self.slo_ns, self.of_tpot)

    def wants(self, *kinds: str) -> bool:
        """Whether any of the kinds may be planned; a TE of one die counts as colocated."""
        asked = {*self.kinds} | ({"monolithic"} if "colocated" in self.kinds else set())
        return not self.kinds or bool(asked & {*kinds})

    @property
    def pairs(self) -> list[tuple[Device, Device]]:
        """Pairs of devices: attention's and experts'."""
        return [(attention, experts) for attention in self.devices for experts in self.devices]

    @property
    def counts_price(self) -> bool:
        return self.devices != ("cm384",)


def least_dies(profile: PodProfile, memory: float = 1.0) -> int:
    """Return the fewest dies on which the model's weights, colocated, fit with the KV of a request."""
    experts = profile.config.n_routed_experts
    for dies in even(experts, experts):
        if max_requests(profile, PodLayout(kind="colocated", dies=dies), memory) >= 1:
            return dies
    needed = profile.weight_nbytes("all", experts) + profile.kv_nbytes()
    room = usable_nbytes(memory * ACCELERATORS["cm384"].hbm_nbytes)
    raise DeploymentError(
        f"model {profile.name} does not fit: with one expert of each layer, and KV of one request "
        f"of {profile.demand.mean_len} tokens, a die needs {needed / 2**30:.1f} GiB, of "
        f"{room / 2**30:.1f} GiB that are for both; a shorter --prompt takes less"
    )


def together(profile: PodProfile, asked: PodSpace) -> Iterator[PodLayout]:
    """Yield colocated layouts: TEs of every size that fits, as many as there are dies for."""
    if "cm384" not in asked.devices or not asked.wants("colocated", "monolithic", "pd"):
        return
    least, experts = least_dies(profile, asked.memory), profile.config.n_routed_experts
    for dies in [n for n in even(experts, asked.num_dies) if n >= least]:
        kind = "colocated" if dies > 1 else "monolithic"
        yield PodLayout(kind=kind, dies=dies, count=asked.num_dies // dies)


def apart(profile: PodProfile, asked: PodSpace) -> Iterator[PodLayout]:
    """Yield layouts with expert dies of each size. Attention dies get the rest, or a part of it, in equal
    domains."""
    if not asked.wants("moe-attention", "transformerless"):
        return
    sizes = even(profile.config.n_routed_experts, asked.num_dies - 1)
    shares = SHARES[: None if asked.counts_price else 1]
    for routed in sizes[-PRICED_SIZES:] if asked.counts_price else sizes:
        some = {max(1, routed // ratio) for ratio in ROUTED_PER_SHARED} if profile.has_shared else {0}
        numbers = itertools.product(asked.pairs, sorted(some), DOMAINS, MICROBATCHES)
        for devices, shared, domains, m in numbers:
            if domains > 1 and devices != HERE:  # MS has none: all attention nodes send at once
                continue
            left = max(0, (asked.num_dies - routed - shared) // domains)
            for dies in {left // share for share in shares}:
                if dies:
                    yield PodLayout(
                        kind="moe-attention",
                        dies=dies,
                        domains=domains,
                        microbatches=m,
                        routed=routed,
                        shared=shared,
                        devices=devices,
                    )


def with_prefill(profile: PodProfile, plan: LayoutPlan, num_dies: int) -> Iterator[PodLayout]:
    """Yield layouts with prefill dies beside those that decode, so that both finish equally many requests per
    second. Some colocated TEs become prefill TEs; with experts apart, attention dies give way."""
    layout, demand = plan.layout, profile.demand
    if not layout.routed:
        dies, tes = layout.dies, num_dies // layout.dies
        prompts = profile.prefill_rate(dies) / demand.prompt
        answers = plan.throughput / layout.count / demand.output
        if tes > 1:
            best = max(range(1, tes), key=lambda p: min(p * prompts, (tes - p) * answers))
            yield PodLayout(kind="pd", dies=dies, count=tes - best, prefill=(best, dies))
        return
    dies = least_dies(profile)
    prompts = profile.prefill_rate(dies) / demand.prompt
    answers = plan.throughput / demand.output / layout.groups  # of an attention die
    given = num_dies - layout.routed - layout.shared
    wanted = answers * given / (prompts + answers * dies)
    for count in {math.floor(wanted), math.ceil(wanted)} - {0}:
        left = (given - count * dies) // layout.domains
        if left > 0:
            yield msgspec.structs.replace(layout, kind="transformerless", dies=left, prefill=(count, dies))


def plans(profile: PodProfile, asked: PodSpace) -> list[LayoutPlan]:
    """Find all plans within the SLO, the best first. Raises DeploymentError, with what would work, if there
    is none."""
    dies = "1 die" if asked.num_dies == 1 else f"{asked.num_dies} dies"
    if asked.devices == ("cm384",):
        least = least_dies(profile, asked.memory)
        if asked.num_dies < least:
            raise DeploymentError(f"model {profile.name} does not fit on {dies}: the least is {least}")
    every = [*together(profile, asked), *apart(profile, asked)]
    fitting = [layout for layout in every if max_requests(profile, layout, asked.memory) >= 1]
    if not fitting:
        raise DeploymentError(_nothing_fits(profile, asked, dies, any(every)))
    limits = asked.slo_ns, asked.extrapolates, asked.memory
    found = [plan for layout in fitting if (plan := sized(profile, layout, *limits)) is not None]
    found += _climbed(profile, asked, found)
    if asked.extrapolates and HERE in asked.pairs:
        found += _beside_prefill(profile, asked, found)
    wanted = [plan for plan in found if asked.wants(plan.layout.kind)]
    if found and not wanted:
        kinds = ", ".join(dict.fromkeys(plan.layout.kind for plan in ranked(found, False)))
        raise DeploymentError(
            f"no {', '.join(asked.kinds)} has {dies}, some for prompts: more dies would do, or {kinds}"
        )
    if not wanted:
        least_ns = min(predict(profile, each, least_known(profile, each)) for each in fitting)
        raise DeploymentError(
            f"no plan keeps {asked.bound}: the shortest iteration on {dies} takes "
            f"{least_ns / 1e6:.2f} ms; {asked.bound.enough_for(least_ns)}"
        )
    return ranked(wanted, asked.counts_price)


def ranked(found: Sequence[LayoutPlan], counts_price: bool) -> list[LayoutPlan]:
    """Sort plans by tokens per second, or by tokens per second for a price of 1; then by dies."""
    return sorted(found, key=lambda plan: (-worth(plan, counts_price), plan.layout.total))


def worth(plan: LayoutPlan, counts_price: bool) -> float:
    """Return a plan's tokens per second, or that for a price of 1."""
    return plan.throughput / (plan.layout.price if counts_price else 1.0)


def _climbed(profile: PodProfile, asked: PodSpace, found: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Improve the best plan of each split step by step, to find plans which ROUTED_PER_SHARED and SHARES
    leave out."""
    starts: dict[tuple[object, ...], LayoutPlan] = {}
    for plan in ranked([plan for plan in found if plan.layout.routed], asked.counts_price):
        layout = plan.layout
        starts.setdefault((layout.devices, layout.routed, layout.domains, layout.microbatches), plan)
    limits, better = (asked.slo_ns, asked.extrapolates, asked.memory), []
    for plan in list(starts.values())[:CLIMBS]:
        while True:
            near = [sized(profile, layout, *limits) for layout in _neighbours(profile, asked, plan.layout)]
            top = ranked([plan, *(each for each in near if each is not None)], asked.counts_price)[0]
            if worth(top, asked.counts_price) <= worth(plan, asked.counts_price):
                break
            plan = top
            better.append(plan)
    return better


def _neighbours(profile: PodProfile, asked: PodSpace, layout: PodLayout) -> Iterator[PodLayout]:
    """Yield layouts with a die more or less in each domain, or for the shared expert, or both in exchange."""
    least, most = (1, layout.routed) if profile.has_shared else (0, 0)
    for step in (-1, 1):
        for dies, shared in ((step, 0), (0, step), (step, -step * layout.domains)):
            other = msgspec.structs.replace(layout, dies=layout.dies + dies, shared=layout.shared + shared)
            if other.dies and least <= other.shared <= most and other.total <= asked.num_dies:
                yield other


def exhaustive(profile: PodProfile, asked: PodSpace) -> list[LayoutPlan]:
    """List all plans of CloudMatrix384 dies without prefill, the best first; feasible only for small pods."""
    limits = asked.slo_ns, asked.extrapolates, asked.memory
    fitting = [each for each in _every(profile, asked.num_dies) if max_requests(profile, each) >= 1]
    found = [sized(profile, layout, *limits) for layout in fitting]
    return ranked([plan for plan in found if plan is not None], False)


def _every(profile: PodProfile, num_dies: int) -> Iterator[PodLayout]:
    """Yield all sizes of TEs, and all ways to divide dies into attention, routed and shared dies."""
    for dies in even(profile.config.n_routed_experts, num_dies):
        kind = "colocated" if dies > 1 else "monolithic"
        for count in range(1, num_dies // dies + 1):
            yield PodLayout(kind=kind, dies=dies, count=count)
        for shared in range(1, dies + 1) if profile.has_shared else (0,):
            for domains, m in itertools.product(DOMAINS, MICROBATCHES):
                for part in range(1, (num_dies - dies - shared) // domains + 1):
                    yield PodLayout(
                        kind="moe-attention",
                        dies=part,
                        domains=domains,
                        microbatches=m,
                        routed=dies,
                        shared=shared,
                    )


def _beside_prefill(profile: PodProfile, asked: PodSpace, found: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Find the best plan of each kind with prefill beside it."""
    best: dict[tuple[str, int], LayoutPlan] = {}
    for plan in ranked([plan for plan in found if plan.layout.devices == HERE], False):
        key = plan.layout.kind, 0 if plan.layout.routed else plan.layout.dies
        best.setdefault(key, plan)
    layouts = [
        layout
        for plan in best.values()
        if asked.wants("transformerless" if plan.layout.routed else "pd") and plan.layout.kind != "monolithic"
        for layout in with_prefill(profile, plan, asked.num_dies)
    ]
    limits = asked.slo_ns, True, asked.memory
    sizes = (sized(profile, layout, *limits) for layout in layouts)
    return [plan for plan in sizes if plan is not None]


def _nothing_fits(profile: PodProfile, asked: PodSpace, dies: str, has_some: bool) -> str:
    """Explain why there is no layout at all, and what would help."""
    name, kinds, devices = profile.name, ", ".join(asked.kinds), ", ".join(asked.devices)
    if not has_some:
        kinds = kinds or "layout"
        return f"no {kinds} has {dies} of {devices}: experts apart take 3 dies or more; add cm384 or --dies"
    roomy = max(ACCELERATORS.values(), key=lambda each: each.hbm_nbytes).name
    other = "" if roomy in asked.devices else f", or {roomy}, which has the most memory"
    return (
        f"model {name} does not fit on {dies} of {devices}{f' as {kinds}' * bool(kinds)}: more dies would "
        f"do{other}"
    )
