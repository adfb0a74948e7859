"""Layouts on a number of dies, of this project's own kinds, sized under a latency bound.

    colocated        attention and experts on all dies; several such TEs if there are more dies than experts
    pd               the same for decode, and prefill TEs beside it, in the ratio that the demand asks for
    moe-attention    attention dies in DP domains, expert dies of their own: the decode half of a SuperPod
    transformerless  the same, and prefill TEs beside it

A decode iteration is predicted from the profile of its stages. Only `pd` and `transformerless` have dies for
prompts; the other kinds decode, with prefill elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment, Device
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.accelerators import ACCELERATORS
from xdeepserve.model.config import ModelConfig
from xdeepserve.planner.performance import GAP_NS, Times
from xdeepserve.planner.search import Bound
from xdeepserve.prices.profile import HERE, ROWS, Demand, PodProfile, decode_settings, usable_nbytes

COPIES_KNOWN = 2


class PodLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Dies by role, without batch sizes. `routed` is 0 where experts live with attention."""

    kind: str
    dies: int  # of DP groups: of each TE, or of each domain
    count: int = 1  # TEs that decode
    prefill: tuple[int, int] = (0, 0)  # TEs, dies of each
    domains: int = 1
    microbatches: int = 1
    routed: int = 0
    shared: int = 0
    devices: tuple[Device, Device] = HERE  # of attention and of experts, where these are apart

    @property
    def price(self) -> float:
        """Price of all dies, with an L20 at 1 (MS Table 3)."""
        attention, experts = (ACCELERATORS[device].price.value for device in self.devices)
        return (self.total - self.routed - self.shared) * attention + (self.routed + self.shared) * experts

    @property
    def total(self) -> int:
        """Number of all dies, prefill included."""
        decoding = (
            self.domains * self.dies + self.routed + self.shared if self.routed else self.count * self.dies
        )
        return decoding + self.prefill[0] * self.prefill[1]

    @property
    def groups(self) -> int:
        """Number of decoding dies; each is a DP group."""
        return self.count * self.domains * self.dies

    def title(self) -> str:
        if self.routed:
            parts = f"{self.domains} x {self.dies} + {self.routed} + {self.shared}"
            beside = f"{self.prefill[0]} x {self.prefill[1]} : " if self.prefill[0] else ""
            where = "" if self.devices == HERE else f" on {self.devices[0]} + {self.devices[1]}"
            return f"{self.kind} {beside}{parts}, m = {self.microbatches}{where}"
        if self.prefill[0]:
            return f"pd {self.prefill[0]} x {self.prefill[1]} : {self.count} x {self.dies}"
        return f"{self.kind} {self.dies}" + (f", {self.count} TEs" if self.count > 1 else "")

    def sections(self) -> dict[str, Any]:
        """Return the layout's settings in a deployment."""
        if self.routed:
            on: list[dict[str, Any]] = [{} if self.devices == HERE else {"hardware": d} for d in self.devices]
            sizes = {"domains": self.domains, "dies": self.dies, "microbatches": self.microbatches}
            prefill = {"count": self.prefill[0], "dies": self.prefill[1]}
            return {
                **({"prefill": prefill} if self.prefill[0] else {}),
                "attention": sizes | on[0],
                "experts": {"routed_dies": self.routed, "shared_dies": self.shared} | on[1],
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
        """Return a deployment's settings, as in a file, with `requests` in each microbatch of a DP group."""
        sections = self.sections()
        kind = "mixed" if "te" in sections else self.kind
        return decode_settings(kind, demand, requests, self.microbatches, **sections)

    def deployment(self, demand: Demand, requests: int) -> Deployment:
        """Return the deployment of `settings`."""
        return msgspec.convert({"name": "plan"} | self.settings(demand, requests), Deployment)


def layout_of(deployment: Deployment, config: ModelConfig) -> tuple[PodLayout, int]:
    """Return a deployment's layout, and its requests per microbatch. Raises DeploymentError if the deployment
    cannot be predicted."""
    tes = fit(deployment, config, is_timing_only=True)
    decoding = [sizes for sizes in tes if sizes.place.role != "prefill"]
    prefilling = [sizes for sizes in tes if sizes.place.role == "prefill"]
    first = decoding[0]
    is_alike = all(
        (te.place.num_dies, te.walk.turns) == (first.place.num_dies, first.walk.turns) for te in decoding
    )
    if (
        not is_alike
        or first.groups.tp > 1
        or first.steps.mtp
        or first.walk.turns not in ("serial", "away-and-back")
    ):
        raise DeploymentError(
            f"deployment {deployment.name}: what is predicted are equal TEs whose DP groups are single dies, "
            "without MTP, without microbatches that overlap on a die, and without dataflow"
        )
    is_apart = first.experts.where == "away"
    routed = [held for held in first.experts.experts_of if held]
    if is_apart and len(set(map(len, routed))) > 1:
        raise DeploymentError(
            f"deployment {deployment.name}: {len(routed)} dies cannot hold equally many of "
            f"{config.n_routed_experts} experts, and what is predicted are equal ones; try "
            f"experts.routed_dies={even(config.n_routed_experts, len(routed))[-1]}"
        )
    layout = PodLayout(
        kind=deployment.kind,
        dies=first.place.dies_per_domain,
        count=len(decoding),
        prefill=(len(prefilling), prefilling[0].place.num_dies) if prefilling else (0, 0),
        domains=first.place.num_domains,
        microbatches=first.walk.num_microbatches,
        routed=len(routed) if is_apart else 0,
        shared=first.experts.num_shared_dies if is_apart else 0,
        devices=first.place.devices,
    )
    return layout, max(1, first.steps.max_seqs // layout.microbatches)


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout together with a batch: `requests` in each microbatch of a DP group."""

    layout: PodLayout
    requests: int
    iteration_ns: float
    bound: Bound
    times: Times | None  # of a microbatch, where experts have dies of their own
    notes: tuple[str, ...] = ()  # what about it was not calibrated

    @property
    def tpot_ns(self) -> float:
        """Time between two tokens of a request [ns]: an iteration and the scheduler's gap, as in `sweep`."""
        return self.iteration_ns + GAP_NS

    @property
    def throughput(self) -> float:
        """Generated tokens per second of all dies, at the TPOT above."""
        batch = self.requests * self.layout.microbatches * self.layout.groups
        return batch / self.tpot_ns * 1e9


def times_apart(profile: PodProfile, layout: PodLayout, rows: float) -> Times:
    """Compute T_a, T_e and T_c of a microbatch of `rows` on each attention die. Experts serve the domains in
    turn, and an exchange keeps them as busy as computing does."""
    routed, shared, (near, far) = layout.routed, layout.shared, layout.devices
    ways = profile.away(routed, shared, layout.devices)
    own = profile.attention(routed, rows, near) + profile.other(routed, "Gate", rows, near) + ways.post(rows)
    arriving = rows * layout.dies
    experts = profile.experts(routed, shared, arriving, far)
    copies = profile.copies(routed, shared, arriving)
    busy = layout.domains * max(experts, ways.over.busy(rows, copies))
    return Times(own, experts, ways.over(rows, copies) / 2, busy)


def predict(profile: PodProfile, layout: PodLayout, rows: int) -> float:
    """Predict a decode iteration with `rows` requests in each microbatch, in ns."""
    if layout.routed:
        ends = profile.ends(layout.routed, rows, layout.microbatches, layout.devices[0])
        times = times_apart(profile, layout, rows)
        # All domains come to the experts at once, and the last one's turn is when the others have had theirs.
        waits = times.busy * (layout.domains - 1) / layout.domains
        return ends + waits + times.total(layout.microbatches, profile.num_moe)
    n = layout.dies
    names = ("Gate", "dispatch", "Experts", "combine", "SharedExpert")
    layer = profile.attention(n, rows) + sum(profile.other(n, name, rows) for name in names)
    return profile.ends(n, rows) + profile.num_moe * layer


def is_known(layout: PodLayout, rows: int) -> bool:
    """Whether `predict` uses only measured points."""
    if rows > ROWS[-1]:
        return False
    if not layout.routed:
        return True
    arriving = rows * layout.dies
    return max(arriving / layout.routed, arriving / max(1, layout.shared)) <= ROWS[-1]


def least_known(profile: PodProfile, layout: PodLayout) -> int:
    """Return the fewest requests of a microbatch that give each expert COPIES_KNOWN token copies on average.

    With fewer, chance decides how many experts of a die are used, whose weights are read. Predictions were
    off by up to a factor of two there.
    """
    if not layout.routed:
        return 1
    c = profile.config
    return math.ceil(COPIES_KNOWN * c.n_routed_experts / (c.num_experts_per_tok * layout.dies))


class RoleDies(NamedTuple):
    """Dies of a role in a layout: number, kind, and bytes of weights on each."""

    role: str
    dies: int
    device: Device
    weights: int


def roles_of(profile: PodProfile, layout: PodLayout) -> list[RoleDies]:
    """List the dies of a layout by role; the first role's memory holds the KV of requests that decode."""
    near, far = layout.devices
    if layout.routed:
        weights = profile.weight_nbytes("attention", 1)
        roles = [
            RoleDies("attention", layout.groups, near, weights),
            RoleDies("routed experts", layout.routed, far, profile.weight_nbytes("routed", layout.routed)),
        ]
        if layout.shared:
            weights = profile.weight_nbytes("shared", 1)
            roles.append(RoleDies("the shared expert", layout.shared, far, weights))
    else:
        weights = profile.weight_nbytes("all", layout.dies)
        roles = [RoleDies("attention and experts", layout.groups, near, weights)]
    if layout.prefill[0]:
        tes, dies = layout.prefill
        roles.append(RoleDies("prefill", tes * dies, near, profile.weight_nbytes("all", dies)))
    return roles


def max_requests(profile: PodProfile, layout: PodLayout, memory: float = 1.0) -> int:
    """Return the requests of a microbatch that fit in the share `memory` of a die's memory; below 0 if
    weights do not fit."""
    rooms = [
        usable_nbytes(memory * ACCELERATORS[each.device].hbm_nbytes) - each.weights
        for each in roles_of(profile, layout)
    ]
    if min(rooms) < 0:
        return -1
    return math.floor(rooms[0] / (profile.kv_nbytes() * layout.microbatches))


def largest(obstacle: Callable[[int], Bound | None], limit: int) -> tuple[int, Bound]:
    """Find the largest number up to `limit` without an obstacle, by bisection, and the obstacle of the next
    number."""
    low, high, bound = 0, limit + 1, obstacle(limit + 1) or "range"
    while high - low > 1:
        middle = (low + high) // 2
        found = obstacle(middle)
        if found is None:
            low = middle
        else:
            high, bound = middle, found
    return low, bound


class LargestBatch(NamedTuple):
    """The largest batch of a layout.

    `requests` of a microbatch fit, `bound` stops more, `least` are the fewest that can be predicted.
    """

    requests: int
    bound: Bound
    least: int

    def refusal(self, first_ns: float) -> str:
        """Explain why there is no plan with so few requests; a single request takes `first_ns`."""
        if not self.requests:
            slow = f"one request takes {first_ns / 1e6:.2f} ms"
            return "not one request fits" if self.bound == "memory" else slow
        return (
            f"{self.bound} leaves {self.requests} requests in a microbatch, and with fewer than {self.least} "
            f"(each expert needs {COPIES_KNOWN} tokens on average) no iteration is predicted"
        )


def batch_of(
    profile: PodProfile, layout: PodLayout, slo_ns: float, extrapolates: bool, memory: float = 1.0
) -> LargestBatch:
    """Find the largest batch within the SLO, memory and measured points. Fewer requests than its `least` are
    no plan."""
    room, goes_beyond = max_requests(profile, layout, memory), extrapolates and layout.devices == HERE

    def obstacle(rows: int) -> Bound | None:
        if rows > room:
            return "memory"
        if not (goes_beyond or is_known(layout, rows)):
            return "range"
        return "SLO" if predict(profile, layout, rows) > slo_ns else None

    rows, bound = largest(obstacle, (2 if goes_beyond else 1) * ROWS[-1])
    return LargestBatch(rows, bound, 1 if goes_beyond else least_known(profile, layout))


def sized(
    profile: PodProfile, layout: PodLayout, slo_ns: float, extrapolates: bool, memory: float = 1.0
) -> LayoutPlan | None:
    """Find a layout's largest batch; None if the batch is too small to be predicted."""
    rows, bound, least = batch_of(profile, layout, slo_ns, extrapolates, memory)
    if rows < least:
        return None
    notes = []
    if not is_known(layout, rows):
        whose = "batch" if rows > ROWS[-1] else "rows of an expert die"
        notes.append(f"{whose} beyond the {ROWS[-1]} that were measured")
    if rows < least_known(profile, layout):
        notes.append("experts with too few tokens for what was measured")
    if layout.prefill[0]:
        notes.append("prefill times are not calibrated")
    if layout.devices != HERE:
        notes.append("devices that nobody has timed")
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
    """List the numbers of dies up to `high` that hold equally many experts each."""
    return [n for n in range(1, min(num_experts, high) + 1) if num_experts % n == 0]
