"""Random schedules from a seed: a pod with some of its possible settings, a load, and one to four faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from xdeepserve.chaos.fault_schedule import FaultSchedule, PoolState
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.sizes import Sizes, TEPlace
from xdeepserve.errors import DeploymentError
from xdeepserve.history import TEChange
from xdeepserve.hw.fault_kinds import GLITCHES, RULES, Kind, OnPlane, Place
from xdeepserve.hw.faults import Fault
from xdeepserve.model.config import ModelConfig

SMALL = ("max_model_len=64", "scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=24")
APART = ("attention.domains=2", "attention.dies=1", "experts.routed_dies=2", "experts.shared_dies=1")
SERVED = ("attention.dies=2", "experts.routed_dies=3", "experts.shared_dies=2")
IMPATIENT = ("services.heartbeat_ms=0.1", "services.answer_timeout_ms=0.3", "services.batch_clients=2")
VACANCY = "experts.vacancies=1"
TES = ("prefill.dies=2", "prefill.tp=2", "decode.dies=2")
PODS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "monolithic": [()],
    "colocated": [("dies=2",), ("dies=4",), ("dies=2", "lockstep=true"), ("dies=4", "lockstep=true")],
    "pd": [
        (*TES, "prefill.count=2", "decode.count=2"),
        (*TES, "prefill.count=2"),
        (*TES, "decode.count=2"),
        TES,
    ],
    "moe-attention": [APART, (*APART, "lockstep=true"), (*APART, "dataflow=true")],
    "transformerless": [
        (*APART, "prefill.dies=2", "prefill.tp=1"),
        (*APART, "prefill.dies=2", "prefill.tp=1", "prefill.count=2"),
    ],
    "eaas": [SERVED, (*SERVED, "experts.copies=1"), (*SERVED, "experts.copies=1", *IMPATIENT)],
}
POOL = ("ems.servers=2", "ems.block_size=16", "ems.dram_mb=1", "ems.volume_mb=1")
POOL_KNOBS: Sequence[tuple[str, ...]] = (("ems.decode_blocks=true",), ("ems.fabric=vpc",))
POOL_PARTS: Sequence[tuple[Place, int]] = (
    ("volume", 0),
    ("volume", 1),
    ("mp_server", 0),
    ("mp_server", 1),
    ("mp_controller", 0),
)
NUM_PAGES = 40  # that the memory of any die has: metadata, weights
WITH_KV = ("weights/norm", "weights/layers.0.wo", "sampled/0", "num_accepted/0", "hidden", "block_tables")
FAILOVER = ("recovery.failover=true", "recovery.max_restarts=9")
ELASTIC = (
    *("scale.most=3", "scale.warm=3", "scale.every_s=0.002", "scale.up_s=0.001"),
    *("scale.calm_s=0.005", "scale.down_s=0.004"),
)
PEERS = ("cache.peers=true", "cache.load=always", "scheduler.hint_age_ms=0.001")
KNOBS: Sequence[tuple[str, ...]] = (
    ("mtp=1",),
    ("mtp=2",),
    ("exchange=push",),
    ("transfer=layer",),
    ("transfer_over=send-receive",),
    ("execution.overlap=true",),
    ("execution.decode.overlap=true",),
    ("cache.num_blocks=6",),
    ("cache.num_blocks=8", "cache.num_host_blocks=8", "cache.preemption=swap"),
    ("experts.redundant_slots=1", "experts.balance_interval=0.0003", "experts.balance_slices=1"),
    ("attention.microbatches=1",),
    ("scheduler.dispatch=two-level",),
    ("scheduler.admission=decode",),
    ("scheduler.route=cost",),
    ("scheduler.statuses=all-gather",),
    ("fabric=roce",),
)


def draw(seed: int, deployments: Sequence[str], config: ModelConfig) -> FaultSchedule:
    """Draw the schedule of a seed, for one of some deployments."""
    rng = random.Random(f"chaos {seed}")
    deployment = rng.choice(list(deployments))
    small = (*SMALL, "checksums=true")
    settings = (*small, *rng.choice(_pods(deployment, small, config)))
    if deployment == "eaas" and random.Random(f"chaos clients {seed}").random() < 0.3:
        settings = (*settings, "attention.count=2")
    for knob in KNOBS:
        if rng.random() < 0.2 and _num_dies(deployment, (*settings, *knob), config):
            settings = (*settings, *knob)
    num_dies = _num_dies(deployment, settings, config)
    num_requests, clock_seed = rng.randint(1, 6), rng.choice((None, None, seed))
    faults = list(_faults(rng, num_dies))
    faults += _way_faults(random.Random(f"chaos ways {seed}"), num_dies, {fault.die for fault in faults})
    pool: PoolState = "none"
    rng = random.Random(f"chaos pool {seed}")
    if rng.random() < 0.3:
        pool, settings = rng.choice(("empty", "filled", "crowded")), (*settings, *POOL)
        settings += tuple(setting for knob in POOL_KNOBS if rng.random() < 0.3 for setting in knob)
        num_requests += rng.randint(0, 4)
        # Half of them are of the pool alone: all requests must be answered then.
        faults = [*rng.choice(((), faults)), *_pool_faults(rng)]
    rng = random.Random(f"chaos failover {seed}")
    if rng.random() < 0.3:
        settings += (*FAILOVER, f"recovery.spare_dies={rng.choice((0, 0, 1, 3))}")
    rng = random.Random(f"chaos scale {seed}")
    if rng.random() < 0.3 and deployment in ("monolithic", "colocated", "moe-attention", "pd"):
        settings += ("scale.least=0", *ELASTIC)
    rng = random.Random(f"chaos peers {seed}")
    if rng.random() < 0.4 and pool == "none":
        settings += (*PEERS, f"scheduler.route={rng.choice(('round-robin', 'sequences'))}")
        num_requests += rng.randint(0, 4)
    for (_, kind), rule in RULES.items():
        rng = random.Random(f"chaos {rule.chaos} {seed}")
        if rule.chaos and rng.random() < 0.3:
            tes = [te.place for te in fit(resolve(deployment, settings), config)]
            faults += _more_faults(rng, kind, tes, config, faults)
    faults.sort(key=lambda fault: (fault.at_us or 0, fault.target))
    drawn = FaultSchedule(deployment, settings, seed, num_requests, clock_seed, tuple(faults), pool)
    return _with_servers(random.Random(f"chaos servers {seed}"), drawn, config)


def _pods(deployment: str, small: Sequence[str], config: ModelConfig) -> list[tuple[str, ...]]:
    """Return the pods that a model can have; those without TP where its dies share no heads."""
    pods = [each for each in PODS[deployment] if _num_dies(deployment, (*small, *each), config)]
    return pods or [tuple(s for s in each if ".tp=" not in s) for each in PODS[deployment]]


def _with_servers(rng: random.Random, drawn: FaultSchedule, config: ModelConfig) -> FaultSchedule:
    """Add changes of expert servers to a schedule of services; some go to a seat that was vacant."""
    place = _with_services(drawn.deployment, drawn.settings, config)
    if place is None or rng.random() < 0.3:
        return drawn
    settings = (*drawn.settings, VACANCY)
    is_alone = len(_fitted(drawn.deployment, settings, config)) == 1  # else dies of the next TE are others
    if rng.random() < 0.5 and is_alone and (wider := _with_services(drawn.deployment, settings, config)):
        vacant = {wider.expert_dies[number] for number in wider.vacant}
        if all(fault.die not in vacant and not vacant & {*(fault.link or ())} for fault in drawn.faults):
            drawn, place = msgspec.structs.replace(drawn, settings=settings), wider
    whats: tuple[Literal["add server", "remove server"], ...] = ("add server", "add server", "remove server")
    changes = [
        TEChange(
            round(10 ** rng.uniform(1, 4.7), 3),
            rng.choice(whats),
            server=rng.randrange(place.num_expert_dies),
        )
        for _ in range(rng.randint(1, 5))
    ]
    return msgspec.structs.replace(drawn, servers=tuple(sorted(changes, key=lambda each: each.at_us)))


def _num_dies(deployment: str, settings: Sequence[str], config: ModelConfig) -> int:
    """Return the number of dies of a pod; 0 if there is no such pod."""
    tes = _fitted(deployment, settings, config)
    return len({die for te in tes for die in te.place.every_die})


def _with_services(deployment: str, settings: Sequence[str], config: ModelConfig) -> TEPlace | None:
    """Return the dies of the TE with expert servers; None if the pod has no such TE, or there is no such
    pod."""
    tes = _fitted(deployment, settings, config)
    return next((te.place for te in tes if te.walk.services), None)


def _fitted(deployment: str, settings: Sequence[str], config: ModelConfig) -> tuple[Sizes, ...]:
    """Return the sizes of a pod's TEs; none if there is no such pod."""
    try:
        return fit(resolve(deployment, settings), config)
    except DeploymentError:
        return ()


def _faults(rng: random.Random, num_dies: int) -> tuple[Fault, ...]:
    """Draw faults of dies, at most one for each die, more often early than late."""
    faults = []
    for die in rng.sample(range(num_dies), min(rng.choice((1, 1, 2, 3, 4)), num_dies)):
        at_us = round(10 ** rng.uniform(0, 4.7), 3)
        kind: Kind = rng.choice(("lost", "stalled", "glitch"))
        for_us = round(10 ** rng.uniform(0, 3), 3) if kind == "stalled" else None
        code = rng.choice(GLITCHES) if kind == "glitch" else None
        faults.append(Fault(at_us, die, kind, for_us, code=code))
    return tuple(faults)


def _way_faults(rng: random.Random, num_dies: int, others: Collection[int | None]) -> list[Fault]:
    """Draw, sometimes, a fault of a link between two dies, or of a slow or late die without another fault."""
    at_us, for_us = round(10 ** rng.uniform(0, 4.7), 3), round(10 ** rng.uniform(0, 3), 3)
    factor, by_us = round(10 ** rng.uniform(0.1, 1), 1), round(10 ** rng.uniform(-1, 2), 3)
    kind = rng.choice(("none", "none", "none", "slow die", "late", "down", "blocked", "slow link", "flipped"))
    die = rng.randrange(num_dies)
    if kind in ("slow die", "late") and die not in others:
        if kind == "late":
            return [Fault(at_us, die, "late", for_us, by_us=by_us)]
        return [Fault(at_us, die, "slow", for_us, factor=factor)]
    if kind in ("down", "blocked", "slow link", "flipped") and num_dies > 1:
        link = (die, (die + rng.randrange(1, num_dies)) % num_dies)
        plane: OnPlane = rng.choice(("ub", "ub", "roce"))
        if kind == "down":
            return [Fault(at_us, link=link, plane=plane, kind="down", for_us=rng.choice((None, for_us)))]
        if kind == "flipped":
            return [Fault(at_us, link=link, plane=plane, kind="flipped")]
        if kind == "blocked":
            return [Fault(at_us, link=link, plane=plane, kind="blocked", for_us=for_us)]
        return [Fault(at_us, link=link, plane=plane, kind="slow", for_us=for_us, factor=factor)]
    return []


DRAWN: Mapping[str, Callable[[random.Random], Any]] = {  # what a fault of a die says, but for its page
    "for_us": lambda rng: round(10 ** rng.uniform(0, 3), 3),
    "factor": lambda rng: round(10 ** rng.uniform(0.1, 1), 1),
    "by_us": lambda rng: round(10 ** rng.uniform(-1, 2), 3),
    "code": lambda rng: rng.choice(GLITCHES),
}


def _more_faults(
    rng: random.Random, kind: Kind, tes: Sequence[TEPlace], config: ModelConfig, others: Sequence[Fault]
) -> list[Fault]:
    """Draw faults of one kind on dies without another fault; those of pages mostly where there is KV."""
    taken = {fault.die for fault in others}
    dies = [die for die in dict.fromkeys(die for te in tes for die in te.every_die) if die not in taken]
    with_kv = {die for te in tes for die in te.dies}
    faults = []
    for die in rng.sample(dies, min(rng.choice((1, 1, 2)), len(dies))):
        needs = RULES["die", kind].needs
        page: int | str | None = rng.randrange(NUM_PAGES) if "page" in needs else None
        if page is not None and die in with_kv and rng.random() < 0.8:
            layer = rng.randrange(config.num_hidden_layers)
            page = rng.choice((f"kv/{layer}/latent", f"kv/{layer}/k_pe", *WITH_KV))
        says = {field: DRAWN[field](rng) for field in needs if field in DRAWN}
        faults.append(Fault(round(10 ** rng.uniform(0, 4.7), 3), die, kind, page=page, **says))
    return faults


def _pool_faults(rng: random.Random) -> list[Fault]:
    """Draw faults of the memory pool, at most one for each part; faults that can end do so half of the
    time."""
    faults = []
    for place, number in rng.sample(POOL_PARTS, rng.randint(1, 3)):
        kind: Kind = rng.choice([kind for where, kind in RULES if where == place])
        at_us = round(10 ** rng.uniform(0, 4), 3)
        is_over = "for_us" in RULES[place, kind].may and rng.random() < 0.5
        for_us = round(10 ** rng.uniform(0, 4), 3) if is_over else None
        fault = {"at_us": at_us, "kind": kind, "for_us": for_us, place: number}
        faults.append(msgspec.convert(fault, Fault))
    return faults
