"""`xdeepserve bench pdc`: prefill TEs and decode TEs, as a workload changes (CloudMatrix 4.1).

DeepSeek-R1 runs on six TEs of 32 dies. The workload consists of unrelated requests: first long prompts with
short answers, then short prompts with long answers, then both. Each phase asks for a fraction of what its
best ratio can serve. Every fixed ratio serves the whole workload, and so does an adaptive ratio that starts
even. The adaptive one knows the lengths of answers that have ended, or (`knows`) of future ones, as only a
perfect predictor would. Rows give the share of requests within the bounds, of each phase and in all: the mean
of some workloads. The best fixed ratio is known only afterwards. That is 3:3, because six tenths of what five
TEs of a role can do are just what three can. At that load, chance decides how many requests wait too long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from xdeepserve.bench.papers.pool_servers import pool_rows
from xdeepserve.bench.report import Row
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.cluster import Cluster, ClusterTE, fleet_tes, priced_kinds, scale_up_of
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_roles import FleetRoles
from xdeepserve.platform.fleet_scaling import ScaleEvent
from xdeepserve.platform.fleet_words import FleetTE, ServedRequest, TERole
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.role_ratio import RoleBounds, RoleRates, Workload, role_rates
from xdeepserve.platform.scale_up import ScaleUp, ScaleWays
from xdeepserve.platform.service_report import Bounds, is_within
from xdeepserve.platform.traces import TracedRequest

CLUSTER = Cluster((ClusterTE(mtp=0, role="prefill"), ClusterTE(mtp=0, role="decode")))
TOTAL = 6  # TEs
SECONDS = 480.0  # of a phase
SPREAD = 0.5  # of lengths
SEEDS = 4  # workloads
ASKED = 0.6  # of what the best ratio for a phase can serve
SERVICE = Bounds(ttft_s=10, tpot_ms=80)
PHASES = {
    "prefill-heavy": MadeTraffic(prompt=6000, output=60),
    "decode-heavy": MadeTraffic(prompt=500, output=2000),
    "mixed": MadeTraffic(prompt=2500, output=350),
}


def all_rows() -> Iterator[Row]:
    """Yield rows of every ratio on the whole workload."""
    kinds = priced_kinds(CLUSTER, block=512)
    first, second = fleet_tes(CLUSTER, kinds)
    scale_up = scale_up_of(resolve_model(CLUSTER.model), CLUSTER.te[0], first.price, ScaleWays())
    tes: dict[TERole, FleetTE] = {"prefill": first, "decode": second}
    for name, each in PHASES.items():
        split = rates_of(each, tes).best_split(TOTAL)
        yield Row(f"pdc/{name}/best ratio", split, "prefill", "predicted", f"of {TOTAL} TEs, by rates alone")
    shares: dict[str, list[float]] = {}
    changes: dict[str, list[int]] = {}
    for seed in range(SEEDS):
        trace = phases(tes, seed)
        results = {f"fixed {count}:{TOTAL - count}": fixed(count, tes, trace) for count in range(1, TOTAL)}
        for way, knows in (("adaptive", False), ("adaptive/knows", True)):
            results[way], events = adaptive(tes, trace, scale_up, knows)
            changes.setdefault(way, []).append(sum(event.what == "joins" for event in events))
        for way, served in results.items():
            for name, share in shares_of(served).items():
                shares.setdefault(f"{way}/{name}" if name else way, []).append(share)
    for name, found in shares.items():
        note = f"within the bounds; {min(found):.0f} to {max(found):.0f} of {SEEDS} workloads"
        yield Row(f"pdc/{name}", float(np.mean(found)), "%", "predicted", note)
    for way, counts in changes.items():
        yield Row(f"pdc/{way}/changes", float(np.mean(counts)), "", "predicted", "of a TE's role")
    yield from pool_rows()


def rates_of(traffic: MadeTraffic, tes: dict[TERole, FleetTE]) -> RoleRates:
    """Compute the rates of a TE of each role for these requests."""
    long = traffic.prompt * float(np.exp(1.645 * SPREAD - SPREAD**2 / 2))
    work = Workload(1.0, traffic.prompt, long, traffic.prompt, traffic.output)
    limits = tes["prefill"].limits, tes["decode"].limits
    return role_rates(tes["decode"].price, limits, work, 1e6 * SERVICE.tpot_ms)


def shares_of(served: Sequence[ServedRequest]) -> dict[str, float]:
    """Compute the shares of requests within the bounds, of each phase and ("") of all."""
    found = {}
    for number, name in enumerate(PHASES):
        found[name] = within([each for each in served if each.at_ns // (1e9 * SECONDS) == number])
    return {**found, "": within(served)}


def phases(tes: dict[TERole, FleetTE], seed: int) -> list[TracedRequest]:
    """Make the workload: phases in sequence, each at its own rate."""
    trace: list[TracedRequest] = []
    for number, traffic in enumerate(PHASES.values()):
        rates = rates_of(traffic, tes)
        split = rates.best_split(TOTAL)
        count = int(ASKED * SECONDS * rates.capacity(split, TOTAL - split))
        some = msgspec.structs.replace(
            traffic, requests=count, seconds=SECONDS, spread=SPREAD, turns=1, systems=0,
            seed=len(PHASES) * seed + number,
        )  # fmt: skip
        later = round(1e9 * SECONDS * number)
        trace += [each._replace(at_ns=each.at_ns + later, blocks=()) for each in made(some)]
    return sorted(trace, key=lambda each: each.at_ns)


def fleet_of(num_prefill: int, tes: dict[TERole, FleetTE]) -> Fleet:
    """Make a fleet with TEs of both roles."""
    roles: list[TERole] = ["prefill" if number < num_prefill else "decode" for number in range(TOTAL)]
    return Fleet([tes[role]._replace(name=f"{role} {number}") for number, role in enumerate(roles)], "load")


def fixed(
    num_prefill: int, tes: dict[TERole, FleetTE], trace: Sequence[TracedRequest]
) -> list[ServedRequest]:
    """Serve the workload with a fixed ratio."""
    return fleet_of(num_prefill, tes).run(trace)


def adaptive(
    tes: dict[TERole, FleetTE], trace: Sequence[TracedRequest], scale_up: ScaleUp, knows: bool
) -> tuple[list[ServedRequest], list[ScaleEvent]]:
    """Serve the workload with an adaptive ratio; return the requests and the changes. With `knows` the fleet
    is told the length of each answer."""
    fleet = fleet_of(TOTAL // 2, tes)
    if knows:
        fleet.predict = lambda each: each.output_length
    roles = FleetRoles(fleet, tes, scale_up, RoleBounds(), SERVICE)
    return fleet.run(trace), roles.events


def within(served: Sequence[ServedRequest]) -> float:
    """Compute the share of requests within the bounds, in percent."""
    return 100 * sum(is_within(each.outcome(), SERVICE) for each in served) / len(served)
