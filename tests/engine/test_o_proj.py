"""DP groups of one die that share an output projection: the bits of one die, MLA whole, its weights cut."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.timing.closed_forms import ClosedForms
from tests.timing.tools import watch, watch_end, without_experts
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.ways.group.real import Groups
from xdeepserve.errors import DeploymentError
from xdeepserve.llm import digest
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint, resolve_model
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.model.weights import RECIPES, Recipe

PROMPTS = [[5], list(range(40)), list(range(3, 180)), [7, 8, 9]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """Digest of one die, by precision."""
    return {recipe: digest(one_die(PROMPTS, PARAMS, recipe)) for recipe in RECIPES}


def served(llm: LLM) -> str:
    value = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
    llm.engine.check_integrity()
    return value


@pytest.mark.thin(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_bits_of_one_die(
    size: int, recipe: Recipe, tiny: TinyCheckpoint, expected: dict[str, str]
) -> None:
    """With 4 requests on 8 dies some have no rows."""
    with LLM(tiny, "colocated", recipe, overrides=["dies=8", f"o_proj_tp={size}"]) as llm:
        assert served(llm) == expected[recipe]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("colocated", ["dies=4", "o_proj_tp=2", "mtp=2", "exchange=push"]),
        ("colocated", ["dies=4", "o_proj_tp=4", "pipeline.microbatches=2", "mtp=1"]),
        ("colocated", ["dies=4", "o_proj_tp=4", "pipeline.microbatches=2", "pipeline.overlap=engines"]),
        ("colocated", ["dies=4", "o_proj_tp=2", "execution.overlap=true", "execution.mode=graph"]),
        ("colocated", ["dies=4", "o_proj_tp=4", "scheduler.max_num_batched_tokens=19", "threads=2"]),
        ("pd", ["prefill.dies=2", "prefill.o_proj_tp=2", "decode.dies=4", "decode.o_proj_tp=4"]),
        ("transformerless", ["prefill.dies=2", "prefill.o_proj_tp=2", "transfer=layer"]),
    ],
    ids=str,
)
def test_whatever_else_there_is(
    deployment: str, overrides: list[str], tiny: TinyCheckpoint, expected: dict[str, str]
) -> None:
    with LLM(tiny, deployment, "int8", overrides=overrides, clock_seed=1) as llm:
        assert served(llm) == expected["int8"]


def test_projections_that_int8_keeps_in_float(tiny: TinyCheckpoint) -> None:
    """In some layers; exact products in blocks of K, which dies share, as the reference has them."""
    kept = frozenset(f"model.layers.{layer}.self_attn.o_proj" for layer in (1, 3))
    config = msgspec.structs.replace(tiny.config, kept_float=kept)
    model = SeededCheckpoint("kept", tiny.directory, config, seed=7)
    ids = list(range(3, 60))
    with LLM(model, "colocated", "int8", overrides=["dies=4", "o_proj_tp=4"]) as llm:
        assert np.array_equal(llm.logits(ids), Reference(model, "int8").logits(ids))


def test_only_the_output_projection_is_cut(tiny: TinyCheckpoint) -> None:
    """Each die has all heads, the latents of its own requests, and its inputs of the projection."""
    with LLM(tiny, "colocated", "int8", overrides=["dies=4", "o_proj_tp=2"]) as llm:
        with LLM(tiny, "colocated", "int8", overrides=["dies=4"]) as apart:
            whole = apart.engine.groups[0].mems[0].specs
        config = tiny.config
        for group in llm.engine.groups:
            (mem,) = group.mems
            assert list(mem.heads) == list(range(config.num_attention_heads))
            changed = {name for name, spec in mem.specs.items() if spec.shape != whole[name].shape}
            assert changed == {name for name in whole if name.endswith(".wo")}
            width = config.num_attention_heads * config.v_head_dim
            assert mem.specs["layers.0.wo"].shape == (config.hidden_size, width // 2)


def test_the_columns_that_come_are_what_is_multiplied(
    tiny: TinyCheckpoint, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that is changed where a peer's columns have landed changes the logits."""
    spread = Groups.spread

    async def spoilt(self: Groups, rank: DieRank, parts: Sequence[Array]) -> list[Array]:
        found = await spread(self, rank, parts)
        for part in found[1 - rank : 2 - rank]:
            part.reshape(-1)[:1] ^= 64
        return found

    monkeypatch.setattr(Groups, "spread", spoilt)
    with LLM(tiny, "colocated", "int8", overrides=["dies=2", "o_proj_tp=2"]) as llm:
        assert served(llm) != expected["int8"]


# ---- runs that only take time


def program_of(overrides: list[str], timing_only: bool) -> list[list[tuple[object, ...]]]:
    """What each die does: stages and exchanges, with shapes."""
    logs: list[list[tuple[object, ...]]] = []
    settings = ["dies=4", "cache.prefix=false", *overrides]
    with LLM("tiny-random", "colocated", "int8", overrides=settings, timing_only=timing_only) as llm:
        for executor in llm.engine.je.tes[0].executors:
            for runner in dict.fromkeys((executor.runner, *executor.traversal.runners)):
                log: list[tuple[object, ...]] = []
                logs.append(log)
                watch(runner, "launch", log, lambda args: (args[0],))
                if runner.group is not None:
                    watch_end(runner, "group", "spread", log, shapes)
                    watch_end(runner, "group", "reduce_scatter", log, lambda args: (args[0].shape, *args[1]))
        llm.generate([list(range(70)), [5] * 7, [9]], SamplingParams(max_tokens=3, ignore_eos=True))
    return logs


def shapes(args: tuple[Any, ...]) -> tuple[object, ...]:
    return tuple((x.shape, x.dtype) for x in args[0])


@pytest.mark.parametrize("overrides", [["o_proj_tp=2"], ["o_proj_tp=4", "pipeline.microbatches=2"]], ids=str)
def test_stages_and_collectives_are_those_of_a_run_that_computes(overrides: list[str]) -> None:
    real, timing = (program_of(overrides, timing_only) for timing_only in (False, True))
    assert {entry[0] for log in real for entry in log} == {"launch", "spread", "reduce_scatter"}
    assert [without_experts(log) for log in timing] == [without_experts(log) for log in real]


def test_a_decode_step_reads_less_of_the_projection() -> None:
    """Its weights are read once by four dies instead of by each: for few rows that is most of its time."""
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=6)
    cost, spent = ClosedForms(model.config), {}
    for size in (1, 4):
        overrides = ["dies=4", f"o_proj_tp={size}", "max_model_len=512"]
        with LLM(model, "colocated", overrides=overrides, timing_only=True) as llm:
            llm.generate([[3] * 8] * 8, SamplingParams(max_tokens=1, ignore_eos=True))
            wiring = llm.engine.plan.tes[0].wiring
            assert isinstance(wiring, ClockWiring)
            spent[size] = wiring.timelines[0][0].spent_ns
    rows = 16  # of two requests on each die
    whole = cost.linear_ns(rows, cost.output_projection, cost.absorbed(model.config.v_head_dim))
    whole += cost.out_vectors_ns(rows)
    assert spent[1]["OProj"] == pytest.approx(6 * (whole + cost.small_kernels_ns() / 2), rel=1e-3)
    cut = cost.linear_ns(4 * rows, cost.output_projection / 4) + cost.small_kernels_ns() / 2
    cut += cost.out_vectors_ns(4 * rows, 4)
    assert spent[4]["OProj"] == pytest.approx(6 * cut, rel=1e-3)
    assert spent[4]["OProj"] + spent[4]["HeadOutputs"] < spent[1]["OProj"]
    assert spent[4]["all-to-all"] > 0
    assert spent[4]["reduce-scatter"] > 0


# ---- sizes


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("colocated", ["o_proj_tp=3"], "o_proj_tp must be one of 1, 2, 4, 8, found 3"),
        ("colocated", ["o_proj_tp=4", "dies=6"], "dies=6 cannot be groups of o_proj_tp=4"),
        ("colocated", ["o_proj_tp=2", "tp=2"], "o_proj_tp=2 is for DP groups of one die, found tp=2"),
        ("pd", ["decode.o_proj_tp=16"], r"decode\.o_proj_tp must be one of"),
        ("monolithic", ["o_proj_tp=2"], "o_proj_tp is no setting of monolithic"),
        ("moe-attention", ["o_proj_tp=2"], "o_proj_tp is no setting of moe-attention"),
    ],
)
def test_refusals(name: str, overrides: list[str], reason: str, tiny_config: ModelConfig) -> None:
    with pytest.raises(DeploymentError, match=reason):
        fit(resolve(name, overrides), tiny_config)


def test_heads_that_do_not_divide_are_refused(tiny_config: ModelConfig) -> None:
    config = msgspec.structs.replace(tiny_config, num_attention_heads=6)
    with pytest.raises(DeploymentError, match="o_proj_tp=4 does not divide the model's 6 heads"):
        fit(resolve("colocated", ["o_proj_tp=4"]), config)


def test_dies_default_to_whole_groups(tiny_config: ModelConfig) -> None:
    prefill, decode = fit(resolve("pd", ["prefill.o_proj_tp=8", "decode.o_proj_tp=2"]), tiny_config)
    assert (prefill.place.num_dies, prefill.groups.tp, prefill.groups.num_groups) == (8, 1, 8)
    assert (decode.place.num_dies, decode.groups.tp, decode.groups.o_proj_tp) == (4, 1, 2)
