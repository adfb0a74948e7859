"""`xdeepserve bench pdc`, the C: servers of the memory pool, as a workload changes (CloudMatrix 4.1).

DeepSeek-R1 runs on eight TEs of 32 dies which get requests in turn, so that a chat's TE has mostly not seen
it before. Phases are unrelated requests, chats, and unrelated requests again. Fixed numbers of servers are
compared with a number that starts at one and follows the saved time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.platform.cluster import Cluster, ClusterPool, ClusterTE, fleet_tes, pool_of, priced_kinds
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.traces import TracedRequest

CLUSTER = Cluster((ClusterTE(mtp=0, count=8),), policy="round-robin")
POOL = ClusterPool(worth=0.02, server_gib=64)
BLOCK = 512
SECONDS = 480.0  # of a phase
STRANGERS = MadeTraffic(requests=4000, turns=1, systems=0, prompt=3000, output=200)
CHATS = MadeTraffic(requests=12000, turns=8, systems=50, system=3000, prompt=9000, output=200, pause=45)
PHASES = (STRANGERS, CHATS, STRANGERS)
FIXED = (1, 4, 16)


def pool_rows() -> Iterator[Row]:
    """Yield the share of cached tokens, the waits of chats, and the average number of servers."""
    kinds, trace = priced_kinds(CLUSTER, block=BLOCK), phases()
    ways = {f"fixed {count}": (count, count) for count in FIXED} | {"adaptive": (1, POOL.most)}
    for way, (least, most) in ways.items():
        fleet = Fleet(fleet_tes(CLUSTER, kinds), CLUSTER.policy)
        pool = msgspec.structs.replace(POOL, servers=least, least=least, most=most)
        given = pool_of(msgspec.structs.replace(CLUSTER, pool=pool), fleet)
        served = [each for each in fleet.run(trace) if each.at_ns // (1e9 * SECONDS) == 1]
        assert given is not None
        cached = sum(each.num_cached for each in served) / sum(each.num_prompt for each in served)
        mean_s = float(np.mean([each.ttft_ns for each in served])) / 1e9
        name = f"pdc/pool/{way}"
        yield Row(f"{name}/cached", 100 * cached, "%", "predicted", "of chats' prompts, by TEs and pool")
        yield Row(f"{name}/ttft", mean_s, "s", "predicted", "mean, of chats")
        mean = given.server_s / (fleet.now / 1e9)
        yield Row(f"{name}/servers", mean, "", "predicted", "on average over all phases")


def phases() -> Sequence[TracedRequest]:
    """Make the workload: phases in sequence; chats are cut off at the end of their phase."""
    trace: list[TracedRequest] = []
    for number, traffic in enumerate(PHASES):
        some = made(msgspec.structs.replace(traffic, seconds=SECONDS, seed=number))
        later = round(1e9 * SECONDS * number)
        trace += [
            each._replace(at_ns=each.at_ns + later, blocks=tuple(b + (number << 40) for b in each.blocks))
            for each in some
            if each.at_ns < 1e9 * SECONDS
        ]
    return sorted(trace, key=lambda each: each.at_ns)
