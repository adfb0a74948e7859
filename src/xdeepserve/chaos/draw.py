"""Schedules from a seed: a pod with some of the settings that it may have, a load, and one to four faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from xdeepserve.chaos.fault_schedule import FaultSchedule
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.sizes import fit
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.error_codes import ERROR_CODES
from xdeepserve.hw.faults import KINDS, Fault
from xdeepserve.model.config import ModelConfig

SMALL = ("max_model_len=64", "scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=24")
APART = ("attention.domains=2", "attention.dies=1", "experts.routed_dies=2", "experts.shared_dies=1")
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
}
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
    """The schedule of a seed, of one of these deployments."""
    rng = random.Random(f"chaos {seed}")
    deployment = rng.choice(list(deployments))
    settings = (*SMALL, *rng.choice(PODS[deployment]))
    for knob in KNOBS:
        if rng.random() < 0.2 and _num_dies(deployment, (*settings, *knob), config):
            settings = (*settings, *knob)
    num_dies = _num_dies(deployment, settings, config)
    return FaultSchedule(
        deployment,
        settings,
        seed,
        num_requests=rng.randint(1, 6),
        clock_seed=rng.choice((None, None, seed)),
        faults=_faults(rng, num_dies),
    )


def _num_dies(deployment: str, settings: Sequence[str], config: ModelConfig) -> int:
    """How many dies a pod has; 0 if there is no such pod."""
    try:
        tes = fit(resolve(deployment, settings), config)
    except DeploymentError:
        return 0
    return sum(te.num_dies + te.num_expert_dies for te in tes)


def _faults(rng: random.Random, num_dies: int) -> tuple[Fault, ...]:
    """On dies of their own, soon more often than late."""
    faults = []
    for die in rng.sample(range(num_dies), min(rng.choice((1, 1, 2, 3, 4)), num_dies)):
        at_us = round(10 ** rng.uniform(0, 4.7), 3)
        kind = rng.choice(KINDS)
        for_us = round(10 ** rng.uniform(0, 3), 3) if kind == "stalled" else None
        code = rng.choice(list(ERROR_CODES)) if kind == "glitch" else None
        faults.append(Fault(at_us, die, kind, for_us, code))
    return tuple(sorted(faults, key=lambda fault: (fault.at_us, fault.die)))
