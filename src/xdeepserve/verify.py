"""The bit-exactness matrix: one digest per precision, whatever the pod looks like and however it is loaded.

Each row serves the same prompts in another way and digests every token id and every bit of the logits that
chose it. The first row is the NumPy reference, which knows no batch, cache, page, die or thread: it is
teacher-forced with the tokens of the first deployment and samples from its own logits, so a wrong token
anywhere gives it another digest.

Every deployment is there with 0 and 1 MTP drafts, and with steps whole and in 2 microbatches. `monolithic`
has no microbatches: one die that cuts its steps is `colocated` with one die, which has rows of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from xdeepserve.engine.deploy.resolve import PRESETS, SELF_SIZING, resolve
from xdeepserve.engine.deploy.sizes import fit
from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.errors import DeploymentError
from xdeepserve.llm import LLM, CompletionOutput, RequestOutput, digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference
from xdeepserve.model.sampling import philox4x32, sample
from xdeepserve.model.tp import TPMode, tp_sizes
from xdeepserve.model.weights import RECIPES, Recipe

PROMPT_LENGTHS = (1, 17, 130)
NEW_TOKENS = 12
TEMPERATURES = (0.0, 0.8)
NUM_COMPANIONS = 20
ARRIVAL_SPAN_NS = 20_000_000  # about as long as the prompts take
SWAP = "cache.preemption=swap"
LATE = "execution.pin_cores=false"  # launches are late at random
REPLICAS = ("experts.redundant_slots=1", "experts.balance_interval=0.001", "experts.balance_slices=1")
SIMPLE = ("monolithic", "colocated", "pd")  # run models without routed experts too


class Case(msgspec.Struct, frozen=True):
    """One way to serve the prompts."""

    deployment: str
    variant: str
    overrides: tuple[str, ...] = ()
    alone: bool = False  # one prompt after the other
    crowded: bool = False  # among NUM_COMPANIONS others
    repeated: bool = False  # a second time, when the first has filled the prefix cache
    arrivals: int | None = None  # seed of random arrival times, else all come at once
    clock_seed: int | None = None


class Row(msgspec.Struct, frozen=True):
    """A line of the matrix."""

    precision: str
    deployment: str
    variant: str
    digest: str
    is_equal: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "deployment": self.deployment,
            "variant": self.variant,
            "digest": self.digest,
            "equal": self.is_equal,
        }


class LeftOut(msgspec.Struct, frozen=True):
    """Rows of a deployment that a model does not allow; without `variants`, it allows none."""

    deployment: str
    reason: str
    variants: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        more = {"variants": list(self.variants)} if self.variants else {}
        return {"deployment": self.deployment, "reason": self.reason, **more}

    def __str__(self) -> str:
        rows = f" without {'; '.join(self.variants)}" if self.variants else ""
        return f"{self.deployment}{rows}: {self.reason}"


def cases(config: ModelConfig) -> list[Case]:
    """Every row that this model allows."""
    return [case for case in _all_cases(config) if _reason_against(case, config) is None]


def left_out(config: ModelConfig) -> list[LeftOut]:
    """Deployments and single rows that there would be, but for this model, and why not."""
    present = {case.deployment for case in cases(config)}
    found = [
        LeftOut(name, _reason_against(Case(name, ""), config) or "not for this model: no row fits it")
        for name in PRESETS
        if name not in present
    ]
    variants: dict[tuple[str, str], list[str]] = {}
    for case in _all_cases(config):
        reason = _reason_against(case, config)
        if reason is not None and case.deployment in present:
            variants.setdefault((case.deployment, reason), []).append(case.variant)
    return found + [LeftOut(name, reason, tuple(rows)) for (name, reason), rows in variants.items()]


def _reason_against(case: Case, config: ModelConfig) -> str | None:
    """Why a case cannot be built. Cases are fixed, so it is a reason of the model."""
    try:
        fit(resolve(case.deployment, case.overrides), config)
    except DeploymentError as error:
        return "not for this model: " + str(error).removeprefix(f"deployment {case.deployment}: ")
    return None


def _all_cases(config: ModelConfig) -> list[Case]:
    """Every row, in sizes that suit the model as far as there are such."""
    num_experts = num_routed_experts(config, 1)
    dies = min(8, num_experts or 8)
    tight = _tight(config)
    rows = (
        _loads("monolithic", (), tight)
        + _one_call(tight, config)
        + _loads("colocated", (f"dies={dies}",), tight)
    )
    rows += [
        Case("colocated", f"{n} {'die' if n == 1 else 'dies'}", (f"dies={n}",))
        for n in sorted({1, 2, 3, min(5, dies)})
        if n < dies
    ]
    rows += [
        Case("colocated", f"dies wake in order {seed}", (f"dies={dies}",), clock_seed=seed) for seed in (1, 2)
    ]
    together = (f"dies={dies}", "lockstep=true")
    rows += [
        Case("colocated", "in lockstep", together),
        Case("colocated", "in lockstep, among others", (*together, "threads=2"), crowded=True),
        Case("colocated", "in lockstep, preempted", (*together, *tight), crowded=True),
        Case("colocated", "in lockstep, 1 die", ("dies=1", "lockstep=true")),
    ]
    if dies > 3:
        rows.append(Case("colocated", "in lockstep, 3 dies", ("dies=3", "lockstep=true")))
    pair = _pair(dies)
    rows += [
        Case("pd", "1 prefill and 1 decode TE"),
        Case("pd", "prefill TP1, each die a DP group", ("prefill.tp=1",)),
        Case("pd", "2 prefill and 2 decode TEs", ("prefill.count=2", "decode.count=2", *pair)),
        Case("pd", f"among {NUM_COMPANIONS} others", pair, crowded=True),
        Case("pd", "few KV blocks on both sides", (*pair, *tight), crowded=True),
        Case("pd", "prefixes cached in HBM", pair, repeated=True),
    ]
    if num_experts:
        few = min(2, num_experts)
        shapes = {
            "fewer attention than expert dies": ("attention.domains=1", "attention.dies=1"),
            "3 domains, more attention dies": (
                "attention.domains=3",
                "attention.dies=4",
                f"experts.routed_dies={few}",
            ),
        }
        rows += [Case("moe-attention", variant, overrides) for variant, overrides in shapes.items()]
        rows += [
            Case("moe-attention", "each prompt alone", alone=True),
            Case("moe-attention", f"among {NUM_COMPANIONS} others", crowded=True),
            Case("moe-attention", "dies wake in order 1", clock_seed=1),
            Case("transformerless", f"among {NUM_COMPANIONS} others", crowded=True),
            Case("transformerless", "prefill TP1, each die a DP group", ("prefill.tp=1",), crowded=True),
            Case("moe-attention", "dataflow", ("dataflow=true",)),
            Case("moe-attention", "dataflow, dies wake in order 1", ("dataflow=true",), clock_seed=1),
            Case("transformerless", "dataflow, stragglers", ("dataflow=true", LATE), crowded=True),
            Case("moe-attention", "in lockstep", ("lockstep=true",)),
            Case(
                "transformerless", "in lockstep, among others", ("lockstep=true", "threads=2"), crowded=True
            ),
        ]
        rows += [
            Case("moe-attention", f"in lockstep, {variant}", ("lockstep=true", *overrides))
            for variant, overrides in shapes.items()
        ]
        rows += _pipelines(config, dies)
        if num_experts > 1:
            rows += _replicas(config, dies)
        rows += _microbatches(config)
    rows += _tensor_parallel(config, dies) + _transfers(config, dies)
    if config.num_nextn_predict_layers:
        names = [name for name in SELF_SIZING if num_experts or name in SIMPLE]
        rows += [Case(name, "MTP, 1 draft", ("mtp=1",)) for name in names if name in SIMPLE]
        rows += [Case(name, "MTP, 2 drafts", ("mtp=2",)) for name in names]
        rows.append(Case("colocated", "in lockstep, MTP, 2 drafts", (*together, "mtp=2")))
        if num_experts:
            rows += [
                Case("transformerless", "in lockstep, MTP, 1 draft", ("mtp=1", "lockstep=true")),
                Case("moe-attention", "in lockstep, MTP, 2 drafts", ("mtp=2", "lockstep=true")),
                Case("moe-attention", "dataflow, MTP, 2 drafts", ("mtp=2", "dataflow=true")),
            ]
        if config.num_nextn_predict_layers > 1:
            again = ("mtp=2", "mtp_reuse=true")
            rows += [Case(name, "MTP, 2 drafts from 1 layer", again) for name in names]
    rows += _hosts([name for name in SELF_SIZING if num_experts or name in SIMPLE], tight, config)
    return sorted(rows, key=lambda case: PRESETS.index(case.deployment))


def _pair(dies: int) -> tuple[str, str]:
    """Prefill on one die, decode on two if the model's experts can be on so many."""
    return "prefill.dies=1", f"decode.dies={min(2, dies)}"


def _hosts(names: Sequence[str], tight: tuple[str, ...], config: ModelConfig) -> list[Case]:
    """How the host launches steps and when it plans them, and when requests come."""
    ahead = "execution.overlap=true"
    drafts = "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    jitter = ("execution.pin_cores=false", "execution.cache_graphs=false", "execution.control_gc=false")
    rows = []
    for number, name in enumerate(names):
        rows += [
            Case(name, "steps as graphs", ("execution.mode=graph",)),
            Case(name, "operator by operator", ("execution.mode=op",)),
            Case(name, "planned ahead", (ahead,)),
            Case(name, f"planned ahead, {drafts}", (ahead, drafts)),
            Case(name, "random arrivals", crowded=True, arrivals=number),
            Case(name, "random arrivals, planned ahead", (ahead,), crowded=True, arrivals=number + 10),
        ]
    rows += [
        Case("monolithic", "planned ahead, preempted", (ahead, drafts, *tight), crowded=True),
        Case("colocated", "planned ahead, host with jitter", (ahead, *jitter)),
        Case("pd", "planned ahead, few KV blocks", (ahead, drafts, *tight), crowded=True),
    ]
    return rows


def _transfers(config: ModelConfig, dies: int) -> list[Case]:
    """KV from prefill to decode by request and by layer, over every fabric, with groups of several dies."""
    pair, layer = _pair(dies), "transfer=layer"
    rows = []
    for tp in (1, *_tensor_parallel_sizes(config, min(4, dies), "tp")):
        prefill = (f"prefill.dies={tp}", f"prefill.tp={tp}", pair[1])
        for mtp in range(3 if config.num_nextn_predict_layers else 1):
            variant = f"prefill TP{tp}, {mtp} drafts"
            if tp > 1 and mtp:  # the others have rows already
                rows.append(Case("pd", f"KV by request, {variant}", (*prefill, f"mtp={mtp}")))
            rows.append(Case("pd", f"KV by layer, {variant}", (*prefill, f"mtp={mtp}", layer)))
    for fabric in ("roce", "vpc"):
        over = (*pair, f"fabric={fabric}")
        rows += [
            Case("pd", f"KV by request over {fabric}", over),
            Case("pd", f"KV by layer over {fabric}", (*over, layer)),
        ]
    other = (f"prefill.dies={min(4, dies)}", pair[1], "prefill.hardware=910b")
    rows += [
        Case("pd", "prefill on 910B", other),
        Case("pd", "prefill on 910B, KV by layer over vpc", (*other, layer, "fabric=vpc")),
        Case("pd", "KV by layer, few KV blocks", (*pair, layer, *_tight(config)), crowded=True),
        Case("pd", "KV by layer, prefixes cached", (*pair, layer), repeated=True),
        Case("pd", "KV by layer, planned ahead", (*pair, layer, "execution.overlap=true"), crowded=True),
    ]
    if num_routed_experts(config, 1):
        rows += [
            Case("transformerless", "KV by layer", (layer,)),
            Case("transformerless", "KV by layer, dataflow", (layer, "dataflow=true"), crowded=True),
        ]
    return rows


def _microbatches(config: ModelConfig) -> list[Case]:
    """Attention dies with steps whole and in microbatches, with MTP and without."""
    rows = []
    for name in ("moe-attention", "transformerless", "superpod"):
        for mtp in (0, 1) if config.num_nextn_predict_layers else (0,):
            for count in (1, 2):
                variant = f"{count} microbatch{'es' if count > 1 else ''}, MTP, {mtp} drafts"
                variant = variant.removesuffix(", MTP, 0 drafts").replace("1 drafts", "1 draft")
                if name == "superpod":
                    variant = f"480 + 288 dies, prefill on 8, {variant}"
                rows.append(Case(name, variant, (f"attention.microbatches={count}", f"mtp={mtp}")))
    return rows


def _pipelines(config: ModelConfig, dies: int) -> list[Case]:
    """Microbatches that overlap on dies with attention and experts; ping-pong of 3 and 4."""
    two = (f"dies={dies}", "pipeline.microbatches=2")
    engines = (*two, "pipeline.overlap=engines")
    pair = ("pipeline.microbatches=2", "prefill.dies=2", "prefill.tp=1", "decode.dies=2")
    rows = [
        Case("colocated", "2 microbatches by cores, 1 die", ("dies=1", "pipeline.microbatches=2")),
        Case("colocated", "2 microbatches by cores", two),
        Case("colocated", "2 microbatches by cores, among others", two, crowded=True),
        Case("colocated", "2 microbatches by engines", engines),
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


def _replicas(config: ModelConfig, dies: int) -> list[Case]:
    """Replicas of experts, which change every few steps if some experts are hotter than others."""
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
    ]
    return [Case(name, variant, (*REPLICAS, *overrides), crowded=True) for name, variant, overrides in ways]


def _tight(config: ModelConfig) -> tuple[str, ...]:
    """So few KV blocks that sequences are preempted."""
    length = min(config.max_position_embeddings, 256)
    return f"max_model_len={length}", f"cache.num_blocks={-(-length // 16)}"


def _tensor_parallel(config: ModelConfig, dies: int) -> list[Case]:
    """DP groups of several dies, as far as the model's sizes allow."""
    rows = []
    for mode in ("tp", "sp-tp-sp"):
        label = mode.upper()
        for tp in _tensor_parallel_sizes(config, dies, mode):
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
            if tp <= 4:
                prefill = (f"prefill.dies={tp}", f"prefill.tp={tp}", f"prefill.tp_mode={mode}")
                rows.append(Case("pd", f"prefill by {label} of {tp}", (*prefill, "decode.dies=2")))
    return rows


def _tensor_parallel_sizes(config: ModelConfig, dies: int, mode: TPMode) -> list[int]:
    """Of DP groups of several dies, as far as the model's sizes allow."""
    return [tp for tp in tp_sizes(config, mode) if 1 < tp <= dies]


def _one_call(tight: tuple[str, ...], config: ModelConfig) -> list[Case]:
    """One die that runs all layers in one call, as it does by itself with a large model."""
    together, drafts = "lockstep=true", "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    return [
        Case("monolithic", "layers in one call", (together,)),
        Case("monolithic", "layers in one call, each prompt alone, 2 threads", (together, "threads=2"), True),
        Case("monolithic", "layers in one call, 2 threads", (together, "threads=2", drafts), crowded=True),
        Case("monolithic", "layers in one call, preempted", (together, drafts, *tight), crowded=True),
    ]


def _loads(name: str, base: tuple[str, ...], tight: tuple[str, ...]) -> list[Case]:
    """Ways to load a deployment of one TE."""

    def case(variant: str, *overrides: str, **more: bool) -> Case:
        return Case(name, variant, (*base, *overrides), **more)

    host = ("cache.num_host_blocks=64", "cache.load=always")
    return [
        case("1 die" if not base else f"{base[0].removeprefix('dies=')} dies"),
        case("each prompt alone", alone=True),
        case(f"among {NUM_COMPANIONS} others", crowded=True),
        case("2 threads", "threads=2"),
        case("prefill in chunks of 16", "scheduler.max_num_batched_tokens=16"),
        case("KV blocks of 64", "cache.block_size=64"),
        case("preempted, recomputed", *tight, crowded=True),
        case("preempted, swapped", *tight, *host, SWAP, crowded=True),
        case("prefix cache off", "cache.prefix=false"),
        case("prefixes cached in HBM", repeated=True),
        case("prefixes loaded from the host", *tight, *host, repeated=True),
    ]


def verify(
    model: str | Checkpoint,
    deployments: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Run the matrix for `deployments` (default all) in both precisions. InputError for unknown names."""
    checkpoint = model if isinstance(model, Checkpoint) else resolve_model(model)
    for name in deployments or ():
        if name not in PRESETS:
            raise DeploymentError(f"unknown deployment '{name}': known are {', '.join(PRESETS)}")
    chosen = [
        case for case in cases(checkpoint.config) if deployments is None or case.deployment in deployments
    ]
    for without in left_out(checkpoint.config):
        if without.deployment in (deployments or ()) and not without.variants:
            raise DeploymentError(f"deployment {without}")
    rows: list[Row] = []
    total = len(RECIPES) * (len(chosen) + 1)
    for recipe in RECIPES:
        expected = ""
        for case in chosen:
            outputs = run_case(checkpoint, recipe, case)
            if not expected:
                expected = digest(reference_outputs(checkpoint, recipe, outputs))
                rows.append(Row(recipe, "reference", "NumPy, no batch, no cache", expected, True))
            value = digest(outputs)
            rows.append(Row(recipe, case.deployment, case.variant, value, value == expected))
            progress(len(rows), total)
    return rows


def prompts(config: ModelConfig) -> list[list[int]]:
    """Seeded prompts of several lengths, each once per temperature."""
    room = min(config.max_position_embeddings, 256) - NEW_TOKENS
    lengths = [max(1, min(length, room)) for length in PROMPT_LENGTHS]
    return [_seeded_ids(config, i, length) for i, length in enumerate(lengths) for _ in TEMPERATURES]


def _seeded_ids(config: ModelConfig, stream: int, length: int) -> list[int]:
    return [_random(0, 2, i, stream) % config.vocab_size for i in range(length)]


def _random(seed: int, purpose: int, index: int, stream: int = 0) -> int:
    return philox4x32((index, stream, 0, purpose), (seed, 0))[0]


def _params(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=TEMPERATURES[index % len(TEMPERATURES)],
        seed=index,
        ignore_eos=True,
    )


def run_case(checkpoint: Checkpoint, recipe: Recipe, case: Case) -> list[RequestOutput]:
    """Serve the prompts the way `case` says; companions' outputs are dropped."""
    wanted = prompts(checkpoint.config)
    params = [_params(i) for i in range(len(wanted))]
    with LLM(
        checkpoint, case.deployment, recipe, overrides=case.overrides, clock_seed=case.clock_seed
    ) as llm:
        if case.repeated:
            llm.generate(wanted, params)
            llm.generate([_seeded_ids(checkpoint.config, 50 + i, 90) for i in range(4)], _params(0))
        if case.alone:
            outputs = [
                llm.generate([ids], [one], keep_logits=True)[0]
                for ids, one in zip(wanted, params, strict=True)
            ]
        else:
            others: list[list[int]] = []
            if case.crowded:
                others = [_seeded_ids(checkpoint.config, 100 + i, 5 + 3 * i) for i in range(NUM_COMPANIONS)]
            half = len(others) // 2
            batch = [*others[:half], *wanted, *others[half:]]
            companions = [_params(0)] * half
            every = [*companions, *params, *companions][: len(batch)]
            arrivals = None
            if case.arrivals is not None:
                arrivals = [_random(case.arrivals, 3, i) % ARRIVAL_SPAN_NS for i in range(len(batch))]
            made = llm.generate(batch, every, keep_logits=True, arrivals_ns=arrivals)
            outputs = made[half : half + len(wanted)]
        llm.engine.check_integrity()
    return outputs


def reference_outputs(
    checkpoint: Checkpoint, recipe: Recipe, outputs: Sequence[RequestOutput]
) -> list[RequestOutput]:
    """What the NumPy reference makes of the same prompts."""
    reference = Reference(checkpoint, recipe)
    results = []
    for index, output in enumerate(outputs):
        params, forced = _params(index), output.outputs[0].token_ids
        prompt = output.prompt_token_ids
        logits = reference.logits([*prompt, *forced[:-1]])[len(prompt) - 1 :]
        tokens = [
            sample(row, params.temperature, params.top_k, params.top_p, index, 0, len(prompt) + i)
            for i, row in enumerate(logits)
        ]
        choice = CompletionOutput(
            index=0, text="", token_ids=tokens, finish_reason="length", logits=np.ascontiguousarray(logits)
        )
        results.append(
            RequestOutput(request_id="reference", prompt=None, prompt_token_ids=prompt, outputs=[choice])
        )
    return results


def print_matrix(model: str, rows: Sequence[Row], without: Sequence[LeftOut]) -> None:
    """The matrix for people, and what it has no rows for."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bit-exactness of {model}", title_justify="left")
    for column in ("precision", "deployment", "variant", "digest", "equal"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(
            row.precision, row.deployment, row.variant, row.digest[7:23], "yes" if row.is_equal else "NO"
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for each in without:
        print(each)
    different = sum(not row.is_equal for row in rows)
    print(f"bit-exact: {'yes' if not different else f'no, {different} of {len(rows)} rows differ'}")
