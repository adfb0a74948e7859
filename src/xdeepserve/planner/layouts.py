"""What to run on N dies: this project's own deployments, sized under a latency bound.

    colocated      attention and experts on all dies; several such TEs if there are more dies than experts
    pd             the same for decode, and prefill TEs beside it, in the ratio that the demand asks for
    moe-attention  attention dies in DP domains, expert dies of their own: the decode half of a SuperPod

A decode iteration is predicted from the profile of its stages; only `pd` has dies for prompts, so the others
are what decodes beside prefill elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.spec import Spec
from xdeepserve.model.config import ModelConfig
from xdeepserve.planner.fit import ROWS, Demand, PodProfile, decode_settings, usable_nbytes
from xdeepserve.planner.performance import Times
from xdeepserve.planner.search import Bound

MICROBATCHES = (1, 2, 3, 4)
DOMAINS = range(1, 9)
COPIES_KNOWN = 2
SIZES = 4  # of TEs or of expert dies that are tried, the largest: smaller ones read more weights for a token
ROUTED_PER_SHARED = (8, 4)  # the first as in xDeepServe 7.1: 256 and 32


class PodLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Dies and their roles, without batch sizes. `routed` is 0 where experts live with attention."""

    kind: str
    dies: int  # of DP groups: of each TE, or of each domain
    count: int = 1  # TEs that decode
    prefill: tuple[int, int] = (0, 0)  # TEs, dies of each
    domains: int = 1
    microbatches: int = 1
    routed: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """All dies."""
        apart = self.domains * self.dies + self.routed + self.shared
        return apart if self.routed else self.count * self.dies + self.prefill[0] * self.prefill[1]

    @property
    def groups(self) -> int:
        """Dies that decode, each a DP group."""
        return self.count * self.domains * self.dies

    def title(self) -> str:
        if self.routed:
            parts = f"{self.domains} x {self.dies} + {self.routed} + {self.shared}"
            return f"moe-attention {parts}, m = {self.microbatches}"
        if self.prefill[0]:
            return f"pd {self.prefill[0]} x {self.prefill[1]} : {self.count} x {self.dies}"
        return f"{self.kind} {self.dies}" + (f", {self.count} TEs" if self.count > 1 else "")

    def sections(self) -> dict[str, Any]:
        """Its settings in a deployment."""
        if self.routed:
            return {
                "attention": {
                    "domains": self.domains,
                    "dies": self.dies,
                    "microbatches": self.microbatches,
                },
                "experts": {"routed_dies": self.routed, "shared_dies": self.shared},
            }
        if self.prefill[0]:
            return {
                "prefill": {"count": self.prefill[0], "dies": self.prefill[1]},
                "decode": {"count": self.count, "dies": self.dies},
            }
        if self.count > 1:
            return {"te": [{"role": "both", "count": self.count, "dies": self.dies}]}
        return {} if self.kind == "monolithic" else {"dies": self.dies}

    def settings(self, demand: Demand, requests: int) -> dict[str, Any]:
        """A deployment with so many requests in a microbatch of a DP group, as a file has it."""
        sections = self.sections()
        kind = "mixed" if "te" in sections else self.kind
        return decode_settings(kind, demand, requests, self.microbatches, **sections)

    def deployment(self, demand: Demand, requests: int) -> Deployment:
        """The deployment of `settings`."""
        return msgspec.convert({"name": "plan"} | self.settings(demand, requests), Deployment)


def layout_of(deployment: Deployment, config: ModelConfig) -> tuple[PodLayout, int]:
    """The layout of a deployment, and requests of a microbatch. DeploymentError for what is not predicted."""
    tes = fit(deployment, config, is_timing_only=True)
    decoding = [sizes for sizes in tes if sizes.role != "prefill"]
    prefilling = [sizes for sizes in tes if sizes.role == "prefill"]
    first = decoding[0]
    is_alike = all((te.num_dies, te.turns) == (first.num_dies, first.turns) for te in decoding)
    if not is_alike or first.tp > 1 or first.mtp or first.turns not in ("serial", "away-and-back"):
        raise DeploymentError(
            f"deployment {deployment.name}: what is predicted are equal TEs whose DP groups are single dies, "
            "without MTP, without microbatches that overlap on a die, and without dataflow"
        )
    is_apart = first.experts == "away"
    routed = [held for held in first.experts_of if held]
    if is_apart and len(set(map(len, routed))) > 1:
        raise DeploymentError(
            f"deployment {deployment.name}: {len(routed)} dies cannot hold equally many of "
            f"{config.n_routed_experts} experts, and what is predicted are equal ones; try "
            f"experts.routed_dies={even(config.n_routed_experts, len(routed))[-1]}"
        )
    layout = PodLayout(
        kind=deployment.kind,
        dies=first.num_dies // first.num_domains,
        count=len(decoding),
        prefill=(len(prefilling), prefilling[0].num_dies) if prefilling else (0, 0),
        domains=first.num_domains,
        microbatches=first.num_microbatches,
        routed=len(routed) if is_apart else 0,
        shared=first.num_shared_dies if is_apart else 0,
    )
    return layout, max(1, first.max_seqs // layout.microbatches)


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with its batch: `requests` in each microbatch of a DP group."""

    layout: PodLayout
    requests: int
    iteration_ns: float
    bound: Bound
    times: Times | None  # of a microbatch, where experts have dies of their own
    notes: tuple[str, ...] = ()  # what about it was not calibrated

    @property
    def tpot_ns(self) -> float:
        """From one token of a request to its next: an iteration and the scheduler's gap, as in `sweep`."""
        return self.iteration_ns + 1e9 * Spec().scheduler_gap.value

    @property
    def throughput(self) -> float:
        """Generated tokens per second, of all dies, at that TPOT."""
        batch = self.requests * self.layout.microbatches * self.layout.groups
        return batch / self.tpot_ns * 1e9


def times_apart(profile: PodProfile, layout: PodLayout, rows: float) -> Times:
    """T_a, T_e, T_c of a microbatch of `rows` on each attention die; experts serve the domains in turn, and
    an exchange keeps them as busy as computing does."""
    routed, shared = layout.routed, layout.shared
    post, exchange = profile.away(routed, shared)
    own = profile.attention(routed, rows) + profile.other(routed, "Gate", rows) + post(rows)
    experts = profile.experts(routed, shared, rows * layout.dies)
    way = exchange(rows)
    busy = layout.domains * max(experts, way)
    return Times(own, experts, way + profile.back(rows, shared) / 2, busy)


def predict(profile: PodProfile, layout: PodLayout, rows: int) -> float:
    """A decode iteration with `rows` requests in each microbatch, in ns."""
    if layout.routed:
        ends = profile.ends(layout.routed, rows, layout.microbatches)
        times = times_apart(profile, layout, rows)
        # All domains come to the experts at once, and the last one's turn is when the others have had theirs.
        waits = times.busy * (layout.domains - 1) / layout.domains
        return ends + waits + times.total(layout.microbatches, profile.num_moe)
    n = layout.dies
    names = ("Gate", "dispatch", "Experts", "combine", "SharedExpert")
    layer = profile.attention(n, rows) + sum(profile.other(n, name, rows) for name in names)
    return profile.ends(n, rows) + profile.num_moe * layer


def is_known(layout: PodLayout, rows: int) -> bool:
    """Whether all that `predict` looks up was measured."""
    if rows > ROWS[-1]:
        return False
    if not layout.routed:
        return True
    arriving = rows * layout.dies
    return max(arriving / layout.routed, arriving / max(1, layout.shared)) <= ROWS[-1]


def least_known(profile: PodProfile, layout: PodLayout) -> int:
    """The fewest requests of a microbatch by which each expert gets COPIES_KNOWN token copies on average.

    With fewer, how many experts of a die are touched, whose weights are read, is chance: predictions were
    found to be off by up to a factor of two there.
    """
    if not layout.routed:
        return 1
    c = profile.config
    return math.ceil(COPIES_KNOWN * c.n_routed_experts / (c.num_experts_per_tok * layout.dies))


def max_requests(profile: PodProfile, layout: PodLayout, hbm_bytes: float) -> int:
    """Requests of a microbatch, by the memory of a die; below 0 if a die's weights do not fit."""
    room = usable_nbytes(hbm_bytes)
    if layout.routed:
        routed = profile.weight_nbytes("routed", layout.routed)
        if max(routed, profile.weight_nbytes("shared", 1)) > room:
            return -1
        room -= profile.weight_nbytes("attention", 1)
    else:
        for dies in (layout.prefill[1], layout.dies):
            if dies and profile.weight_nbytes("all", dies) > room:
                return -1
        room -= profile.weight_nbytes("all", layout.dies)
    return math.floor(room / (profile.kv_nbytes() * layout.microbatches))


def largest(obstacle: Callable[[int], Bound | None], limit: int) -> tuple[int, Bound]:
    """The largest number up to `limit` without an obstacle, by bisection, and the obstacle of the next."""
    low, high, bound = 0, limit + 1, obstacle(limit + 1) or "range"
    while high - low > 1:
        middle = (low + high) // 2
        found = obstacle(middle)
        if found is None:
            low = middle
        else:
            high, bound = middle, found
    return low, bound


def sized(
    profile: PodProfile, layout: PodLayout, slo_ns: float, extrapolates: bool, hbm_bytes: float
) -> LayoutPlan | None:
    """The layout with the largest batch that keeps the SLO, memory and what was measured."""
    room = max_requests(profile, layout, hbm_bytes)

    def obstacle(rows: int) -> Bound | None:
        if rows > room:
            return "memory"
        if not (extrapolates or is_known(layout, rows)):
            return "range"
        return "SLO" if predict(profile, layout, rows) > slo_ns else None

    rows, bound = largest(obstacle, (2 if extrapolates else 1) * ROWS[-1])
    if rows < (1 if extrapolates else least_known(profile, layout)):
        return None
    notes = []
    if not is_known(layout, rows):
        notes.append(f"batch beyond the {ROWS[-1]} rows that were measured")
    if rows < least_known(profile, layout):
        notes.append("experts with too few tokens for what was measured")
    if layout.prefill[0]:
        notes.append("prefill times are not calibrated")
    times = times_apart(profile, layout, rows) if layout.routed else None
    return LayoutPlan(
        layout=layout,
        requests=rows,
        iteration_ns=predict(profile, layout, rows),
        bound=bound,
        times=times,
        notes=tuple(notes),
    )


def even(num_experts: int, high: int) -> list[int]:
    """Numbers of dies up to `high` that hold equally many experts each."""
    return [n for n in range(1, min(num_experts, high) + 1) if num_experts % n == 0]


def least_dies(profile: PodProfile, hbm_bytes: float) -> int:
    """Dies by which the model's weights fit, colocated, with KV of a request."""
    experts = profile.config.n_routed_experts
    for dies in even(experts, experts):
        if max_requests(profile, PodLayout(kind="colocated", dies=dies), hbm_bytes) >= 1:
            return dies
    needed = profile.weight_nbytes("all", experts) + profile.kv_nbytes()
    raise DeploymentError(
        f"model {profile.checkpoint.name} does not fit: with one expert of each layer, and KV of one request "
        f"of {profile.demand.max_len} tokens, a die needs {needed / 2**30:.1f} GiB, of "
        f"{usable_nbytes(hbm_bytes) / 2**30:.1f} GiB that are for both; a shorter --prompt takes less"
    )


def together(profile: PodProfile, num_dies: int, hbm_bytes: float) -> Iterator[PodLayout]:
    """Colocated TEs, as many as there are dies for: the largest sizes that fit."""
    least, experts = least_dies(profile, hbm_bytes), profile.config.n_routed_experts
    for dies in [n for n in even(experts, num_dies) if n >= least][-SIZES:]:
        kind = "colocated" if dies > 1 else "monolithic"
        yield PodLayout(kind=kind, dies=dies, count=num_dies // dies)


def apart(profile: PodProfile, num_dies: int) -> Iterator[PodLayout]:
    """Expert dies of a few sizes; attention dies get what is left, in equal domains."""
    for routed in even(profile.config.n_routed_experts, num_dies // 2)[-SIZES:]:
        some = {max(1, routed // ratio) for ratio in ROUTED_PER_SHARED} if profile.has_shared else {0}
        for shared, domains, m in itertools.product(sorted(some), DOMAINS, MICROBATCHES):
            dies = (num_dies - routed - shared) // domains
            if dies >= 1:
                yield PodLayout(
                    kind="moe-attention",
                    dies=dies,
                    domains=domains,
                    microbatches=m,
                    routed=routed,
                    shared=shared,
                )


def with_prefill(profile: PodProfile, plan: LayoutPlan, num_dies: int) -> PodLayout | None:
    """Prefill and decode TEs of one colocated size on all dies, so that neither waits for the other:
    prompts and answers per second are the same."""
    dies, demand = plan.layout.dies, profile.demand
    tes = num_dies // dies
    if tes < 2:
        return None
    prompts = profile.prefill_rate(dies) / demand.prompt
    answers = plan.throughput / plan.layout.count / demand.output
    best = max(range(1, tes), key=lambda p: min(p * prompts, (tes - p) * answers))
    return PodLayout(kind="pd", dies=dies, count=tes - best, prefill=(best, dies))


def plans(
    profile: PodProfile,
    num_dies: int,
    slo_ns: float,
    extrapolates: bool = False,
    hbm_bytes: float = Spec().hbm_bytes.value,
) -> list[LayoutPlan]:
    """All that keep the SLO, by throughput."""
    least = least_dies(profile, hbm_bytes)
    dies = "1 die" if num_dies == 1 else f"{num_dies} dies"
    if num_dies < least:
        raise DeploymentError(f"model {profile.checkpoint.name} does not fit on {dies}: the least is {least}")
    found: list[LayoutPlan] = []

    def add(layout: PodLayout) -> None:
        plan = sized(profile, layout, slo_ns, extrapolates, hbm_bytes)
        if plan is not None:
            found.append(plan)

    for layout in (*together(profile, num_dies, hbm_bytes), *apart(profile, num_dies)):
        add(layout)
    if extrapolates:
        colocated = [plan for plan in found if plan.layout.kind == "colocated"]
        for ratio in [with_prefill(profile, plan, num_dies) for plan in colocated]:
            if ratio is not None:
                add(ratio)
    if not found:
        every = (*together(profile, num_dies, hbm_bytes), *apart(profile, num_dies))
        least_ns = min(
            predict(profile, layout, least_known(profile, layout))
            for layout in every
            if max_requests(profile, layout, hbm_bytes) > 0
        )
        raise DeploymentError(
            f"no plan keeps {slo_ns / 1e6:g} ms: the shortest iteration on {dies} takes "
            f"{least_ns / 1e6:.2f} ms; --slo-ms {math.ceil(least_ns / 1e5) / 10:g} would do"
        )
    return sorted(found, key=lambda plan: (-plan.throughput, plan.layout.total))
