"""All rows of the matrix, in sizes that suit the model where such sizes exist."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.resolve import PRESETS, SELF_SIZING
from xdeepserve.engine.deploy.roles import has_expert_dies, has_services
from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import LATE, NUM_COMPANIONS, Case, few_blocks, prefill_and_decode
from xdeepserve.verify.exchanges import exchanges
from xdeepserve.verify.features import GATHER
from xdeepserve.verify.forms import forms
from xdeepserve.verify.kv import transfers
from xdeepserve.verify.lives import lives
from xdeepserve.verify.loads import hosts, loads, one_call
from xdeepserve.verify.parallel import (
    microbatches,
    out_projections,
    papers,
    pipelines,
    pods_of_papers,
    replicas,
    tensor_parallel,
)
from xdeepserve.verify.pools import pools
from xdeepserve.verify.services import services

DATAFLOW_ON_MANY = (
    *("dataflow=true", "attention.domains=3", "attention.dies=10"),
    *("experts.routed_dies=16", "experts.shared_dies=2"),
)


DATAFLOW_ON_ALL = (
    *("dataflow=true", "attention.domains=3", "attention.dies=160"),
    *("experts.routed_dies=256", "experts.shared_dies=32"),
    *("scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=8"),
)
BY_COST = ("prefill.count=2", "scheduler.route=cost", "scheduler.job_executors=3")


def all_cases(config: ModelConfig) -> list[Case]:
    """List every row, ordered by deployment, whether or not the model allows it."""
    num_experts = num_routed_experts(config, 1)
    dies, tight = min(8, num_experts or 8), few_blocks(config)
    names = [name for name in SELF_SIZING if num_experts or not has_expert_dies(name)]
    rows = loads("monolithic", (), tight) + one_call(tight, config)
    rows += loads("colocated", (f"dies={dies}",), tight) + _colocated(dies, tight) + _pd(dies, tight)
    if num_experts:
        rows += _expert_dies(min(2, num_experts)) + pipelines(config, dies) + exchanges(config, dies)
        if num_experts >= 16:
            rows.append(Case("moe-attention", "dataflow, 30 + 18 dies", DATAFLOW_ON_MANY, crowded=True))
        if num_experts >= 256:
            rows.append(Case("moe-attention", "dataflow, 480 + 288 dies", DATAFLOW_ON_ALL))
        if num_experts > 1:
            rows += replicas(config, dies) + papers(config) + pods_of_papers(config)
        rows += microbatches(config)
        rows += [case for name in names if has_services(name) for case in services(name, config)]
    rows += tensor_parallel(config, dies) + out_projections(config, dies) + transfers(config, dies)
    if config.num_nextn_predict_layers:
        rows += _drafts(names, dies, config)
    rows += hosts(names, tight, config) + lives(names, dies, config) + forms(names, dies, config)
    rows += pools(names, dies, tight, config)
    return sorted(rows, key=lambda case: PRESETS.index(case.deployment))


def _colocated(dies: int, tight: tuple[str, ...]) -> list[Case]:
    """List the `colocated` rows with other numbers of dies, with other orders in which dies wake, and in
    lockstep."""
    numbers = [n for n in sorted({1, 2, 3, min(5, dies)}) if n < dies]
    together = (f"dies={dies}", "lockstep=true")
    rows = [
        *(Case("colocated", f"{n} {'die' if n == 1 else 'dies'}", (f"dies={n}",)) for n in numbers),
        *(
            Case("colocated", f"dies wake in order {seed}", (f"dies={dies}",), clock_seed=seed)
            for seed in (1, 2)
        ),
        Case("colocated", "statuses by all-gather", (f"dies={dies}", GATHER), crowded=True),
        Case("colocated", "in lockstep", together),
        Case("colocated", "in lockstep, among others", (*together, "threads=2"), crowded=True),
        Case("colocated", "in lockstep, preempted", (*together, *tight), crowded=True),
        Case("colocated", "in lockstep, 1 die", ("dies=1", "lockstep=true")),
    ]
    if dies > 3:
        rows.append(Case("colocated", "in lockstep, 3 dies", ("dies=3", "lockstep=true")))
    return rows


def _pd(dies: int, tight: tuple[str, ...]) -> list[Case]:
    """List the `pd` rows: how many prefill and decode TEs, and how full they are."""
    pair = prefill_and_decode(dies)
    return [
        Case("pd", "1 prefill and 1 decode TE"),
        Case("pd", "prefill TP1, each die a DP group", ("prefill.tp=1",)),
        Case("pd", "prefill TP1, statuses by all-gather", ("prefill.tp=1", GATHER), crowded=True),
        Case("pd", "2 prefill and 2 decode TEs", ("prefill.count=2", "decode.count=2", *pair)),
        Case("pd", "2 prefill TEs, chosen by cost, 3 job executors", BY_COST, repeated=True),
        Case("pd", f"among {NUM_COMPANIONS} others", pair, crowded=True),
        Case("pd", "few KV blocks on both sides", (*pair, *tight), crowded=True),
        Case("pd", "prefixes cached in HBM", pair, repeated=True),
    ]


def _expert_dies(few: int) -> list[Case]:
    """List the rows with attention and experts on separate dies; one shape has `few` routed expert dies."""
    shapes = {
        "fewer attention than expert dies": ("attention.domains=1", "attention.dies=1"),
        "3 domains, more attention dies": (
            "attention.domains=3",
            "attention.dies=4",
            f"experts.routed_dies={few}",
        ),
    }
    together = ("lockstep=true", "threads=2")
    return [
        *(Case("moe-attention", variant, overrides) for variant, overrides in shapes.items()),
        Case("moe-attention", "each prompt alone", alone=True),
        Case("moe-attention", f"among {NUM_COMPANIONS} others", crowded=True),
        Case("moe-attention", "dies wake in order 1", clock_seed=1),
        Case("transformerless", f"among {NUM_COMPANIONS} others", crowded=True),
        Case("transformerless", "prefill TP1, each die a DP group", ("prefill.tp=1",), crowded=True),
        Case("moe-attention", "dataflow", ("dataflow=true",)),
        Case("moe-attention", "dataflow, planned ahead", ("dataflow=true", "execution.overlap=true")),
        Case("moe-attention", "dataflow, dies wake in order 1", ("dataflow=true",), clock_seed=1),
        Case("transformerless", "dataflow, stragglers", ("dataflow=true", LATE), crowded=True),
        Case("moe-attention", "in lockstep", ("lockstep=true",)),
        Case("pd", "decode in lockstep", ("lockstep=true",)),
        Case("transformerless", "in lockstep, among others", together, crowded=True),
        *(
            Case("moe-attention", f"in lockstep, {variant}", ("lockstep=true", *overrides))
            for variant, overrides in shapes.items()
        ),
    ]


def _drafts(names: Sequence[Kind], dies: int, config: ModelConfig) -> list[Case]:
    """List the rows with 1 and 2 drafts from the MTP layers, also in lockstep and in dataflow."""
    rows = [Case(name, "MTP, 1 draft", ("mtp=1",)) for name in names if not has_expert_dies(name)]
    rows += [Case(name, "MTP, 2 drafts", ("mtp=2",)) for name in names]
    together = (f"dies={dies}", "lockstep=true", "mtp=2")
    rows.append(Case("colocated", "in lockstep, MTP, 2 drafts", together))
    if num_routed_experts(config, 1):
        rows += [
            Case("transformerless", "in lockstep, MTP, 1 draft", ("mtp=1", "lockstep=true")),
            Case("moe-attention", "in lockstep, MTP, 2 drafts", ("mtp=2", "lockstep=true")),
            Case("moe-attention", "dataflow, MTP, 2 drafts", ("mtp=2", "dataflow=true")),
        ]
    if config.num_nextn_predict_layers > 1:
        again = ("mtp=2", "mtp_reuse=true")
        rows += [Case(name, "MTP, 2 drafts from 1 layer", again) for name in names]
    return rows
