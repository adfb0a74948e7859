"""Rows for the sharing and overlap of work on dies: tensor parallelism, microbatches, replicas of experts."""

from __future__ import annotations

from xdeepserve.engine.deploy.resolve import PRESETS, resolve
from xdeepserve.engine.deploy.roles import has_expert_dies
from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.model.config import TP_SIZES, ModelConfig, TPMode, tp_sizes
from xdeepserve.verify.case import LATE, Case

PAPERS_EXPERTS = 256  # of DeepSeek-V3
MANY = 64  # routed experts, beyond which a die for each is too slow as tasks
REPLICAS = ("experts.redundant_slots=1", "experts.balance_interval=0.001", "experts.balance_slices=1")
ONE_EACH = ("experts.redundant_slots=0", "experts.experts_per_die=1")  # of every kind, on dies of their own


def tensor_parallel(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with DP groups of several dies, as far as the model's sizes allow."""
    rows = []
    for mode in ("tp", "sp-tp-sp"):
        label = mode.upper()
        for tp in tensor_parallel_sizes(config, dies, mode):
            setting, num_dies = (f"tp={tp}", f"tp_mode={mode}"), dies - dies % tp
            rows.append(Case("colocated", f"{label} of {tp}", (f"dies={num_dies}", *setting)))
            if tp == 2:
                few = ("dies=2", *setting, "scheduler.max_num_batched_tokens=19")
                rows.append(Case("colocated", f"{label} of 2, chunks of 19", few, crowded=True))
                if config.num_nextn_predict_layers:
                    drafting = ("dies=2", *setting, "mtp=2")
                    rows.append(Case("colocated", f"{label} of 2, MTP, 2 drafts", drafting))
                if num_routed_experts(config, 1):
                    halves = (f"dies={num_dies}", *setting, "pipeline.microbatches=2")
                    rows.append(Case("colocated", f"{label} of 2, 2 microbatches", halves, crowded=True))
                    met = (*halves, "lockstep=true")
                    rows.append(Case("colocated", f"{label} of 2, 2 microbatches, in lockstep", met))
            if tp <= 4:
                prefill = (f"prefill.dies={tp}", f"prefill.tp={tp}", f"prefill.tp_mode={mode}")
                rows.append(Case("pd", f"prefill by {label} of {tp}", (*prefill, "decode.dies=2")))
    return rows


def tensor_parallel_sizes(config: ModelConfig, dies: int, mode: TPMode) -> list[int]:
    """List the sizes (at least 2) that a DP group of at most `dies` dies may have with this model."""
    return [tp for tp in tp_sizes(config, mode) if 1 < tp <= dies]


def out_projections(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with an output projection shared by DP groups of one die (xDeepServe Figure 10)."""
    drafts = "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    has_experts, rows = num_routed_experts(config, 1) > 1, []
    for size in TP_SIZES:
        if not 1 < size <= dies or config.num_attention_heads % size:
            continue
        name, base = f"output projection TP of {size}", (f"dies={dies - dies % size}", f"o_proj_tp={size}")
        rows.append(Case("colocated", name, base, crowded=True))
        if size <= 4:
            prefill, decode = (
                (f"{te}.dies={size}", f"{te}.o_proj_tp={size}") for te in ("prefill", "decode")
            )
            rows.append(Case("pd", f"{name}, on both sides, {drafts}", (*prefill, *decode, drafts)))
        if size == 2:
            halves = (*base, "pipeline.microbatches=2", drafts)
            ahead = (*base, "execution.overlap=true", LATE)
            rows.append(Case("colocated", f"{name}, 2 microbatches, {drafts}", halves, crowded=True))
            rows.append(Case("colocated", f"{name}, planned ahead", ahead))
            rows.append(Case("colocated", f"{name}, in lockstep", (*base, "lockstep=true"), crowded=True))
            if has_experts:
                moving = (*base, *REPLICAS, "exchange=push")
                rows += [
                    Case("colocated", f"{name}, by push, EPLB", moving, crowded=True, reconfigurations=1),
                    Case("transformerless", f"{name}, in prefill", prefill),
                ]
    return rows


def microbatches(config: ModelConfig) -> list[Case]:
    """List the rows of attention dies with steps whole and in 2 microbatches, with MTP and without."""
    rows = []
    for name in (name for name in PRESETS if has_expert_dies(resolve(name).kind)):
        for mtp in (0, 1) if config.num_nextn_predict_layers else (0,):
            for count in (1, 2):
                variant = f"{count} microbatch{'es' if count > 1 else ''}, MTP, {mtp} drafts"
                variant = variant.removesuffix(", MTP, 0 drafts").replace("1 drafts", "1 draft")
                if name == "superpod":
                    variant = f"480 + 288 dies, prefill on 8, {variant}"
                rows.append(Case(name, variant, (f"attention.microbatches={count}", f"mtp={mtp}")))
    return rows


def pipelines(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with microbatches that overlap on a die with attention and experts, and with ping-pong of
    3 and 4."""
    two = (f"dies={dies}", "pipeline.microbatches=2")
    engines = (*two, "pipeline.overlap=engines")
    pair = ("pipeline.microbatches=2", "prefill.dies=2", "prefill.tp=1", "decode.dies=2")
    rows = [
        Case("colocated", "2 microbatches by cores, 1 die", ("dies=1", "pipeline.microbatches=2")),
        Case("colocated", "2 microbatches by cores", two),
        Case("colocated", "2 microbatches by cores, among others", two, crowded=True),
        Case("colocated", "2 microbatches by engines", engines),
        Case("colocated", "2 microbatches by engines, in lockstep", (*engines, "lockstep=true")),
        Case("pd", "2 microbatches on both sides", pair[:1]),
        *([Case("pd", "2 microbatches on both sides, prefill TP1", pair)] if dies > 1 else []),
        Case(
            "pd",
            "2 microbatches on both sides, prefill by SP-TP-SP",
            ("pipeline.microbatches=2", "prefill.tp_mode=sp-tp-sp"),
            crowded=True,
        ),
        *[Case("moe-attention", f"{m} microbatches", (f"attention.microbatches={m}",)) for m in (3, 4)],
    ]
    if config.num_nextn_predict_layers:
        rows += [
            Case(
                "colocated",
                f"2 microbatches by cores, MTP, {n} draft{'s' if n > 1 else ''}",
                (*two, f"mtp={n}"),
            )
            for n in (1, 2)
        ]
        rows += [
            Case("colocated", "2 microbatches by engines, MTP, 2 drafts", (*engines, "mtp=2")),
            Case("pd", "2 microbatches on both sides, MTP, 1 draft", ("pipeline.microbatches=2", "mtp=1")),
        ]
    return rows


def replicas(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with replicas of experts, which EPLB changes every few steps if some experts are hotter
    than others."""
    ahead, drafts = "execution.overlap=true", "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    most = min(3, config.n_routed_experts - -(-config.n_routed_experts // dies))
    ways: list[tuple[str, str, tuple[str, ...]]] = [
        ("colocated", "EPLB every ms", (f"dies={dies}",)),
        (
            "colocated",
            f"EPLB every ms, {most} redundant slots, {drafts}",
            (f"experts.redundant_slots={most}", drafts),
        ),
        ("colocated", "EPLB every ms, planned ahead", (f"dies={dies}", ahead, LATE)),
        ("moe-attention", "EPLB every ms", ()),
        ("transformerless", f"EPLB every ms, {drafts}", (drafts, ahead)),
        ("colocated", "EPLB every ms, in lockstep", (f"dies={dies}", "lockstep=true")),
        ("moe-attention", f"EPLB every ms, in lockstep, {drafts}", ("lockstep=true", drafts)),
        ("transformerless", "EPLB every ms, in lockstep", ("lockstep=true", "threads=2")),
        ("moe-attention", f"EPLB every ms, dataflow, {drafts}", ("dataflow=true", drafts)),
        ("transformerless", "EPLB every ms, dataflow, stragglers", ("dataflow=true", LATE)),
        ("eaas", f"EPLB every ms, {drafts}", (drafts,)),
    ]
    if config.n_shared_experts:
        shared = ("experts.shared_dies=2", f"dies={dies + 2}")
        # So many that none of them is hotter than the die of the hottest routed expert.
        alone = ("experts.shared_dies=6", f"dies={config.n_routed_experts + 8}")
        ways += [
            ("colocated", "EPLB every ms, 2 dies of the shared expert", shared),
            (
                "colocated",
                f"EPLB every ms, 2 dies of the shared expert, in lockstep, {drafts}",
                (*shared, "lockstep=true", drafts),
            ),
        ]
        if config.n_routed_experts <= MANY:
            ways.append(("colocated", "EPLB every ms, more dies than routed experts", alone))
            ways.append(("colocated", "EPLB every ms, one expert on each die", (*alone, *ONE_EACH)))
    rows = [
        Case(name, variant, (*REPLICAS, *overrides), crowded=True, reconfigurations=1)
        for name, variant, overrides in ways
    ]
    if config.n_shared_experts:
        rows += [
            Case("colocated", f"2 dies of the shared expert{end}", (*shared, *more))
            for end, more in (("", ()), (", in lockstep", ("lockstep=true",)))
        ]
        own = ("experts.shared_dies=1", "prefill.tp=1", "prefill.dies=2", "decode.dies=2")
        rows.append(Case("pd", "a die of the shared expert in each TE", own, crowded=True))
    return rows


def pods_of_papers(config: ModelConfig) -> list[Case]:
    """List the rows of the papers' pods, with small batches and as many dies as the model has experts for.

    With 256 routed experts a decode TE has all of the paper's dies.
    """
    num, eighth = config.n_routed_experts, config.n_routed_experts // 8
    mixed = [Case("heterogeneous", "prefill on 910B and on CloudMatrix dies", (), crowded=True)]
    if num:
        mixed.append(Case("megascale", "attention on H20, experts on L40S", (), crowded=True))
    if num % 8 or not config.n_shared_experts:
        return mixed
    small = ("max_model_len=256", "cache.block_size=16", "cache.num_blocks=32")
    few = ("scheduler.max_num_seqs=8", "scheduler.max_num_batched_tokens=32")
    prefill = ("prefill.count=2", "prefill.dies=4", "prefill.tp=4", "prefill.max_num_batched_tokens=64")
    held = f"prefill.experts_per_die={num // 4 + 2}"
    decode = ("decode.max_num_seqs=2", "decode.max_num_batched_tokens=8")
    each = (f"decode.dies={num + 2 * eighth}", f"decode.shared_dies={eighth}")
    whole = ("pipeline.microbatches=1",) if num > MANY else ()  # halves of steps would be tasks
    pods: dict[str, tuple[str, ...]] = {
        "dp288": (f"dies={num + eighth}", f"experts.shared_dies={eighth}", *few),
        "production": (f"decode.dies={num // 2}", held, *prefill, *decode),
        "cloudmatrix384": (*each, held, *prefill, *decode, *whole),
    }
    return mixed + [
        Case(name, f"on {num} routed experts", (*overrides, *small), crowded=True)
        for name, overrides in pods.items()
    ]


def papers(config: ModelConfig) -> list[Case]:
    """List the rows of the papers' sizes, for a model with as many routed experts.

    These are EP288 (xDeepServe 7.1) and EP320 (CloudMatrix 4.2), in both of which 32 dies have the shared
    expert, and the superpod; all have redundant slots.
    """
    if config.n_routed_experts < PAPERS_EXPERTS or not config.n_shared_experts:
        return []
    often, oftener = (
        (REPLICAS[0], f"experts.balance_interval={seconds}", REPLICAS[2], "threads=2")
        for seconds in (0.09, 0.03)
    )
    small = ("max_model_len=256", "cache.num_blocks=16", "scheduler.max_num_seqs=2")
    few = (*small, "scheduler.max_num_batched_tokens=8")
    together = ("experts.shared_dies=32", "lockstep=true", *often, *few)
    return [
        *(
            Case(
                "colocated",
                f"EP{dies}, 32 dies of the shared expert, EPLB",
                (f"dies={dies}", *together),
                reconfigurations=2,
            )
            for dies in (288, 320)
        ),
        Case("superpod", "480 + 288 dies, prefill on 8, EPLB", oftener, reconfigurations=2),
    ]
