"""Rows for the ways tokens get to experts and answers come back: each exchange, URMA, M2N, INT8."""

from __future__ import annotations

from typing import get_args

from xdeepserve.engine.deploy.deployment import Exchange
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.rules import EXCLUDED, LOCKSTEP, refused
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import LATE, Case
from xdeepserve.verify.parallel import REPLICAS, tensor_parallel_sizes

PUSH = "exchange=push"


def exchanges(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows of all these ways."""
    others = [row for each in get_args(Exchange)[1:] for row in in_place_of_pull(each, config, dies)]
    return others + carriers() + mixed_hardware() + int8_answers(config, dies)


def in_place_of_pull(way: str, config: ModelConfig, dies: int) -> list[Case]:
    """List rows by another exchange for every deployment that takes it: as tasks and in lockstep, with TP,
    EPLB and drafts."""
    chosen = f"exchange={way}"
    drafts = "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    few = min(3, dies)
    base, together = (chosen, f"dies={dies}"), (chosen, "lockstep=true")
    ways: list[tuple[str, str, tuple[str, ...]]] = [
        ("colocated", drafts, (*base, drafts)),
        ("colocated", "in lockstep", (*base, "lockstep=true")),
        (
            "colocated",
            f"in lockstep, {few} dies, 2 threads, {drafts}",
            (*together, f"dies={few}", "threads=2", drafts),
        ),
        ("colocated", "2 microbatches by cores", (*base, "pipeline.microbatches=2")),
        (
            "colocated",
            "2 microbatches by engines",
            (*base, "pipeline.microbatches=2", "pipeline.overlap=engines", drafts),
        ),
        ("pd", drafts, (chosen, drafts)),
        ("moe-attention", drafts, (chosen, drafts)),
        ("moe-attention", f"in lockstep, {drafts}", (*together, drafts)),
        ("transformerless", drafts, (chosen, drafts)),
        ("transformerless", "in lockstep", together),
        ("superpod", "480 + 288 dies, prefill on 8", (chosen,)),
    ]
    for mode in ("tp", "sp-tp-sp"):
        for tp in tensor_parallel_sizes(config, min(2, dies), mode):
            split = (chosen, f"dies={dies - dies % tp}", f"tp={tp}", f"tp_mode={mode}")
            ways.append(("colocated", f"{mode.upper()} of {tp}", split))
            ways.append(("colocated", f"{mode.upper()} of {tp}, in lockstep", (*split, "lockstep=true")))
    rows = [Case(name, f"by {way}, {variant}", overrides, crowded=True) for name, variant, overrides in ways]
    if config.n_routed_experts > 1:
        rows += [
            Case(
                name,
                f"by {way}, EPLB every ms{end}",
                (*REPLICAS, *more),
                crowded=True,
                reconfigurations=1,
            )
            for name, end, more in (
                ("colocated", "", base),
                ("colocated", ", in lockstep", (*base, "lockstep=true")),
                ("moe-attention", "", (chosen,)),
                ("moe-attention", ", in lockstep", together),
            )
        ]
        if config.n_shared_experts:
            shared = (chosen, f"dies={dies + 2}", "experts.shared_dies=2", "experts.redundant_slots=1")
            rows += [
                Case("colocated", f"by {way}, 2 dies of the shared expert{end}", (*shared, *more))
                for end, more in (("", ()), (", in lockstep", ("lockstep=true",)))
            ]
    return [row for row in rows if not _is_refused(row)]


def _is_refused(row: Case) -> bool:
    """Whether settings of the row exclude each other."""
    d = resolve(row.deployment, row.overrides)
    return bool(refused(d, (*EXCLUDED, *LOCKSTEP) if d.lockstep else EXCLUDED))


def carriers() -> list[Case]:
    """List the rows with A2E and E2A by URMA (xDeepServe 3.3)."""
    urma = "attention.carrier=urma"
    return [
        Case("moe-attention", "A2E by URMA", (urma,), crowded=True),
        Case("moe-attention", "A2E by URMA, expert dies push", (urma, PUSH)),
        Case("moe-attention", "A2E by URMA, dataflow", (urma, "dataflow=true")),
        Case("moe-attention", "A2E by URMA, in lockstep", (urma, "lockstep=true")),
        Case("transformerless", "A2E by URMA", (urma,), crowded=True),
    ]


def mixed_hardware() -> list[Case]:
    """List the rows with attention and experts on different hardware, by M2N (MegaScale-Infer 4.3, 5)."""
    h20, l40s = "attention.hardware=h20", "experts.hardware=l40s"
    return [
        Case("moe-attention", "M2N among CloudMatrix dies", ("attention.carrier=rdma",), crowded=True),
        Case(
            "moe-attention",
            "attention on H20, experts on L40S, 3 microbatches",
            (h20, l40s, "attention.microbatches=3"),
            crowded=True,
        ),
        Case("moe-attention", "experts on 910B, stragglers", ("experts.hardware=910b", LATE), clock_seed=1),
        Case("transformerless", "attention on H20, experts on L40S", (h20, l40s), crowded=True),
    ]


def int8_answers(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with expert outputs that come back in INT8 (xDeepServe 4.7).

    Some run on one die, where no output travels.
    """
    drafts = "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    both = f"dies={dies}", "combine=int8"
    ways: list[tuple[str, str, tuple[str, ...]]] = [
        ("monolithic", "", ("combine=int8",)),
        ("monolithic", f", {drafts}", ("combine=int8", drafts)),
        ("colocated", "", both),
        ("colocated", f", by push, {drafts}", (*both, PUSH, drafts)),
        ("colocated", ", 2 microbatches", (*both, "pipeline.microbatches=2")),
        ("pd", "", ("combine=int8",)),
        ("monolithic", ", in one call", ("combine=int8", "lockstep=true", "threads=2")),
        ("colocated", f", in lockstep, {drafts}", (*both, "lockstep=true", drafts)),
        ("colocated", ", by push, in lockstep", (*both, PUSH, "lockstep=true")),
        ("moe-attention", "", ("combine=int8",)),
        ("moe-attention", f", in lockstep, {drafts}", ("combine=int8", "lockstep=true", drafts)),
        ("transformerless", ", by push, in lockstep", ("combine=int8", PUSH, "lockstep=true")),
        ("moe-attention", ", by push", ("combine=int8", PUSH)),
        ("moe-attention", ", dataflow", ("combine=int8", "dataflow=true")),
        ("transformerless", f", {drafts}", ("combine=int8", drafts)),
    ]
    rows = [Case(name, f"INT8 combine{end}", overrides, crowded=True) for name, end, overrides in ways]
    if config.n_shared_experts and config.n_routed_experts > 1:
        shared = ("combine=int8", f"dies={dies + 2}", "experts.shared_dies=2")
        rows.append(
            Case(
                "colocated",
                "INT8 combine, 2 dies of the shared expert, EPLB",
                (*REPLICAS, *shared),
                reconfigurations=1,
            )
        )
    if tensor_parallel_sizes(config, min(2, dies), "tp"):
        rows.append(Case("colocated", "INT8 combine, TP of 2", ("dies=2", "tp=2", "combine=int8")))
    return rows
