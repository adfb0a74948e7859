"""Walkthrough 19: the platform: many task executors, and who of them gets a request.

Traffic of chats comes to four TEs at the grain of a step: what a step costs is read off timing-only runs of
the engine, for its counts, and the step itself is not run. Each decision is printed with its reason
(DeepServe 5), then what policies come to on a busy hour. Then TEs come and go: a burst brings more by
NPU-fork (DeepServe 6), one is lost, some change their role as long prompts give way to long answers, and
servers of a memory pool come and go with chats (CloudMatrix 4.1); a line for each decision. At last traffic
of the same kind is served with tokens by a small pod, whose bits are those of one die.

    python examples/19_platform.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

from xdeepserve import LLM
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.hw.spec import Spec
from xdeepserve.llm import digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.cluster import (
    Cluster,
    ClusterTE,
    fleet_tes,
    position_nbytes,
    priced_kinds,
    scale_up_of,
)
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_pool import FleetPool
from xdeepserve.platform.fleet_roles import FleetRoles
from xdeepserve.platform.fleet_scaling import FleetScaler, ScaleEvent
from xdeepserve.platform.fleet_words import Decision, FleetTE, TERole
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.pool_size import PoolBounds
from xdeepserve.platform.role_ratio import RoleBounds
from xdeepserve.platform.scale_up import ScaleUp, ScaleWays
from xdeepserve.platform.service_report import Bounds, report
from xdeepserve.platform.token_replay import replayed
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.progress import working

CLUSTER = Cluster((ClusterTE(count=4, dies=4, mtp=0),), model="tiny")
HOUR = MadeTraffic(
    requests=4000, seconds=3600, swing=0.8, prompt=600, output=80, system=200, block=16, turns=4, seed=1
)
BUSY = 1200  # times as fast as an hour: a small model is quick
SMALL = MadeTraffic(requests=12, seconds=0.05, prompt=80, output=6, system=32, block=16, pause=0.02)
BURST = MadeTraffic(
    requests=4000, seconds=12, swing=1.0, prompt=600, output=80, spread=0.5, turns=1, systems=0, block=16
)
CHATS = MadeTraffic(requests=1500, seconds=3, prompt=300, output=10, systems=0, block=16, pause=0.2)
PROMPTS = MadeTraffic(requests=6000, seconds=4, spread=0.3, turns=1, systems=0, block=16)
SHOWN, WIDTH = 6, 100  # decisions, and columns of a line
BOUNDS = Bounds(ttft_s=0.008, tpot_ms=5)


def prices(tes: Sequence[FleetTE]) -> None:
    price, limits = tes[0].price, tes[0].limits
    print(f"{len(tes)} TEs of 4 dies; a DP group has room for {limits.num_positions:,} positions of KV")
    print("what a step costs, in us, by rows of the fullest DP group (interpolated between such points):")
    for rows in (1, 16, 256, 1024):
        own, feed = price.own(rows), price.feed(rows * price.num_groups)
        what = "row: " if rows == 1 else "rows:"
        print(f"  {rows:5} {what} {own / 1e3:8.1f} of each group, {feed / 1e3:7.1f} for experts", end="")
        print(f", {price.attention(rows, rows * 600, 600) / 1e3:8.1f} to attend to 600 positions each")


def decisions(tes: Sequence[FleetTE], trace: Sequence[TracedRequest]) -> None:
    print("\nwho gets the first requests, by Algorithm 1:")

    def show(each: Decision) -> None:
        if each.number < SHOWN:
            first = [float(keys[1]) for keys in each.keys]
            is_balanced = max(first) <= 0 and (
                min(first) < 0 or max(float(keys[2]) for keys in each.keys) == 0
            )
            reason = "load is balanced: cached tokens" if is_balanced else "load is not: queued cost"
            scores = ", ".join(f"{abs(key):.0f}" for key in first)
            print(f"  request {each.number} -> TE {each.te}; {reason} {scores}")

    Fleet(tes, "deepserve", explain=show).run(trace)


def policies(tes: Sequence[FleetTE], trace: Sequence[TracedRequest]) -> None:
    print(f"\n{len(trace):,} requests, the hour {BUSY} times as fast:")
    print(f"  {'policy':<13}{'TTFT ms':>9}{'p99':>9}{'TPOT ms':>9}{'hits':>7}{'in bounds':>11}")
    names: tuple[str, ...] = ("round-robin", "load", "prefix", "cost", "deepserve", "dynamo", "llm-d")
    for policy in names:
        with working(f"Replaying by {policy}"):
            served = Fleet(tes, policy).run(trace)
        found = report([each.outcome() for each in served], [te.name for te in tes], BOUNDS)
        print(
            f"  {policy:<13}{found.ttft_ms['mean']:>9.2f}{found.ttft_ms['p99']:>9.2f}"
            f"{found.tpot_ms['mean']:>9.3f}{100 * found.hit_rate:>5.0f} %{100 * found.within:>9.1f} %"
        )


def told(events: Sequence[ScaleEvent]) -> None:
    for event in events:
        te = f" {event.te}" if event.te else ""
        line = f"  {event.at_ns / 1e9:6.2f} s {event.what}{te}: {event.reason}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 11))


def scaling(kind: FleetTE, scale_up: ScaleUp) -> None:
    print("\na burst comes to one TE; at 9 s one that has come is lost:")
    fleet = Fleet([kind], "load")
    bounds = ScaleBounds(most=4, every_s=0.05, up_s=0.2, calm_s=0.6, down_s=1.5)
    scaler = FleetScaler(fleet, kind, scale_up, bounds, BOUNDS)
    fleet.at(9e9, lambda: scaler.lose(1) if 1 in fleet.serving else None)
    with working("Replaying a burst"):
        served = fleet.run(made(BURST))
    told(scaler.events)
    print(f"  {len(served):,} of {BURST.requests:,} requests served, {len(fleet.tes)} TEs in all")


def roles(kind: FleetTE, scale_up: ScaleUp) -> None:
    print("\nlong prompts with short answers, then short prompts with long answers:")
    kinds: dict[TERole, FleetTE] = {
        "prefill": kind._replace(role="prefill"),
        "decode": kind._replace(role="decode"),
    }
    start: list[TERole] = ["prefill", "prefill", "prefill", "decode", "decode", "decode"]
    fleet = Fleet([kinds[role]._replace(name=f"{role} {n}") for n, role in enumerate(start)], "load")
    bounds = RoleBounds(every_s=0.1, patience_s=0.5, calm_s=1, while_s=1)
    changing = FleetRoles(fleet, kinds, scale_up, bounds, BOUNDS)
    first = msgspec.structs.replace(PROMPTS, prompt=900, output=2, seconds=3)
    second = msgspec.structs.replace(PROMPTS, prompt=20, output=150, seed=1)
    later = round(1e9 * first.seconds)
    answers = [each._replace(at_ns=each.at_ns + later, blocks=()) for each in made(second)]
    prompts = [each._replace(blocks=()) for each in made(first)]
    with working("Replaying TEs that change their role"):
        served = fleet.run(sorted([*prompts, *answers], key=lambda each: each.at_ns))
    told(changing.events)
    print(f"  {len(served):,} of {2 * PROMPTS.requests:,} requests served")


def pool(tes: Sequence[FleetTE]) -> None:
    print("\nchats between strangers, on TEs that share a memory pool of 1 MiB a server:")
    fleet = Fleet(tes, "round-robin")
    bounds = PoolBounds(most=8, worth=1e-4, every_s=0.05, patience_s=0.2, calm_s=0.3, while_s=0.5)
    block_nbytes = CHATS.block * position_nbytes(resolve_model(CLUSTER.model))
    shared = FleetPool(fleet, 1, 2**20 // block_nbytes, block_nbytes, bounds, Spec())
    trace = []
    for number, turns in enumerate((1, 8, 1)):  # 1: nobody comes twice
        phase = made(msgspec.structs.replace(CHATS, turns=turns, seed=number))
        later, other = round(1e9 * CHATS.seconds * number), number << 32
        for each in [each for each in phase if each.at_ns < 1e9 * CHATS.seconds]:
            blocks = tuple(block + other for block in each.blocks)
            trace.append(each._replace(at_ns=each.at_ns + later, blocks=blocks))
    with working("Replaying chats"):
        served = fleet.run(sorted(trace, key=lambda each: each.at_ns))
    told(shared.events)
    for number in range(3):
        mine = [each for each in served if each.at_ns // (1e9 * CHATS.seconds) == number]
        cached = sum(each.num_cached for each in mine) / sum(each.num_prompt for each in mine)
        print(f"  phase {number}: {len(mine):,} requests, {100 * cached:.0f} % of their prompts were there")


def with_tokens() -> None:
    print("\nthe same kind of traffic, with tokens:")
    digests = {}
    for deployment, settings in (
        ("monolithic", []),
        ("pd", ["prefill.count=2", "scheduler.route=deepserve"]),
    ):
        with LLM("tiny", deployment, overrides=["max_model_len=512", *settings]) as llm:
            outputs, outcomes, names, _ = replayed(llm, made(SMALL), SMALL.block)
        digests[deployment] = digest(outputs)
        cached = sum(each.num_cached for each in outcomes)
        print(
            f"  {deployment:<11} {len(outputs)} requests to {', '.join(names)}; {cached} tokens from caches"
        )
        print(f"  {'':<11} {digests[deployment]}")
    print("  the same bits" if len({*digests.values()}) == 1 else "  the bits differ")


def main() -> None:
    with working("Pricing steps") as status:
        kinds = priced_kinds(CLUSTER, HOUR.block, status.progress)
    tes = fleet_tes(CLUSTER, kinds)
    prices(tes)
    trace = made(msgspec.structs.replace(HOUR, seconds=HOUR.seconds / BUSY, pause=HOUR.pause / BUSY))
    decisions(tes, trace)
    policies(tes, trace)
    scale_up = scale_up_of(resolve_model(CLUSTER.model), CLUSTER.te[0], kinds[0].price, ScaleWays())
    scaling(tes[0], scale_up)
    roles(tes[0], scale_up)
    pool(tes)
    with_tokens()


if __name__ == "__main__":
    main()
