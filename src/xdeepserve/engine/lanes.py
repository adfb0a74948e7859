"""Names and order of dies in a trace, by role as in the papers' figures, and the lanes of each die.

The job executor and the TE-shells come first (engine/job/journey.py), then decode, then prefill, then hosts.
Within decode, attention dies come domain by domain, then dies of routed experts, then copies of the shared
expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xdeepserve.engine.deploy.sizes import TEPlace
from xdeepserve.hw.pod import Pod

FIRST_DIE = 1000  # in the order of a trace's processes; smaller numbers are for the host's software
DEFAULT_SHOWN_DIES = 16  # of a role that a trace shows

RECEIVE, COMPUTE, SEND = "A2E receive", "MoE", "E2A send"  # the persistent kernels of an expert die
TRAMPOLINE = "trampoline"  # one more, where tokens flow
STREAMS = ("stream 0: attention", "stream 1: experts")  # of microbatches that share a die by cores
LANES = (
    "requests",
    "DP group",
    "steps",
    "EPLB",
    *STREAMS,
    "microbatch 0",
    "microbatch 1",
    TRAMPOLINE,
    RECEIVE,
    f"{RECEIVE}: steps",
    COMPUTE,
    SEND,
    f"{SEND}: steps",
    "AIC",
    "AIV",
    "XCCL",
    "XCCL microbatch 0",
    "XCCL microbatch 1",
    "MTE2",
    "MTE3",
    "SDMA",
    "DMA",
    "URMA",
    "DistFlow",
    "KV transfer",
)

LABELS = {"DMA": "SDMA", "URMA": "SDMA (URMA)"}  # what viewers see, where the engine is called otherwise


def stream_item(microbatch: int, domain: int) -> str:
    """Name an item of an expert die's streams; a viewer gives each name a colour."""
    return f"domain {domain} microbatch {microbatch}"


def name_lanes(pod: Pod, tes: Sequence[TEPlace], most: int) -> None:
    """Name all dies of a pod in its trace, and show `most` of each role (0: all)."""
    trace = pod.trace
    if not trace.is_on:
        return
    trace.lane_order = LANES
    order = FIRST_DIE
    trace.lane_labels = LABELS
    named: set[int] = set()  # TEs may share expert servers
    for te in sorted(tes, key=lambda te: te.role == "prefill"):
        for role in _roles(te, f"{te.name} " if len(tes) > 1 else ""):
            for number, (die, name) in enumerate(role):
                if die in named:
                    continue
                named.add(die)
                trace.name_node(die, name, order, pod.topology.name(die))
                order += 1
                if most and number >= most:
                    trace.hide(die)
    for node in trace.node_names:
        trace.node_orders.setdefault(node, order + node)


def _roles(place: TEPlace, te: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the dies of each role with their names, which begin with `te`."""
    dies = place.dies
    if not place.num_expert_dies:
        yield [(die, f"{te}die {i}") for i, die in enumerate(dies)]
        return
    te = te and f"{te}/ "
    size = place.dies_per_domain
    for d in range(place.num_domains):
        domain = dies[d * size : (d + 1) * size]
        yield [(die, f"{te}domain {d} / attention die {i}") for i, die in enumerate(domain)]
    routed = place.routed_dies
    yield [(die, f"{te}experts {i} (routed)") for i, die in enumerate(routed)]
    shared = place.expert_dies[len(routed) :]
    yield [(die, f"{te}shared expert die {i}") for i, die in enumerate(shared)]
