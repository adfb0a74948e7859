"""DP groups of several dies: the bits of one die, whatever the size, the mode and what happens meanwhile."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.hf_fixtures import Fixture, fixtures
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.distflow import Endpoint
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.job.pd_transfer import prefill_rank
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import Address
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.config import TP_SIZES, ModelConfig, TPMode
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.model.weights import RECIPES, Recipe

MODES: tuple[TPMode, ...] = ("tp", "sp-tp-sp")
PROMPTS = [[5], list(range(40)), list(range(3, 180)), [7, 8, 9]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)


def settings(tp: int, mode: TPMode, dies: int | None = None) -> list[str]:
    return [f"dies={dies or tp}", f"tp={tp}", f"tp_mode={mode}"]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """Digest of one die, by precision."""
    return {recipe: digest(one_die(PROMPTS, PARAMS, recipe)) for recipe in RECIPES}


def served(llm: LLM, times: int = 1) -> str:
    """Digest of the last of `times` runs."""
    for _ in range(times):
        value = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
    llm.engine.check_integrity()
    assert llm.engine.stats().kv_cache_usage == 0.0
    return value


@pytest.mark.thin(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_the_bits_of_one_die(
    tp: int, mode: TPMode, recipe: Recipe, tiny: TinyCheckpoint, expected: dict[str, str]
) -> None:
    with LLM(tiny, "colocated", recipe, overrides=settings(tp, mode, max(tp, 4))) as llm:
        assert served(llm) == expected[recipe]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("tp", "mode", "runner"),
    [
        (1, "tp", "lockstep=false"),
        (1, "tp", "lockstep=true"),
        (2, "tp", "lockstep=false"),
        (8, "tp", "lockstep=false"),
        (4, "sp-tp-sp", "lockstep=false"),
    ],
)
def test_layers_that_int8_keeps_in_float(tp: int, mode: TPMode, runner: str, tiny: TinyCheckpoint) -> None:
    """Exact products in blocks of K, which dies share; as the reference has them."""
    ends = ("self_attn.o_proj", "self_attn.q_b_proj", "mlp.down_proj", "mlp.shared_experts.down_proj")
    kept = frozenset(f"model.layers.{layer}.{end}" for layer in range(4) for end in ends)
    config = msgspec.structs.replace(tiny.config, kept_float=kept)
    model = SeededCheckpoint("kept", tiny.directory, config, seed=7)
    ids = list(range(3, 60))
    with LLM(model, "colocated", "int8", overrides=[*settings(tp, mode), runner]) as llm:
        assert np.array_equal(llm.logits(ids), Reference(model, "int8").logits(ids))


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_hold_the_same_latents_and_only_their_heads(mode: TPMode, tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "colocated", "int8", overrides=settings(4, mode, 8)) as llm:
        llm.generate(PROMPTS, PARAMS)
        names = [f"kv/{layer}/{part}" for layer in range(4) for part in ("latent", "scale", "k_pe")]
        for group in llm.engine.groups:
            caches = [
                [mem.workspace.take(name, mem.workspace.size(name)) for name in names] for mem in group.mems
            ]
            assert any(array.any() for array in caches[0]), "no request came here"
            for cache in caches[1:]:
                assert all(np.array_equal(a, b) for a, b in zip(caches[0], cache, strict=True))
        mems = llm.engine.groups[1].mems
        assert [list(mem.heads) for mem in mems] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert all(mem.specs["layers.0.w_uk"].shape[0] == 2 for mem in mems)


@pytest.mark.thin(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "more",
    [
        ["mtp=1"],
        ["scheduler.max_num_batched_tokens=19"],  # slices of 5, 5, 5, 4; of 3, 3, 3, 0 for what remains
        ["threads=2"],
    ],
    ids=str,
)
def test_whatever_happens_meanwhile(
    mode: TPMode,
    more: list[str],
    tiny: TinyCheckpoint,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xdeepserve.step.linear.PARALLEL_OPS", 1000)
    with LLM(tiny, "colocated", "int8", overrides=[*settings(4, mode), *more], clock_seed=1) as llm:
        assert served(llm) == expected["int8"]


@pytest.mark.parametrize("mode", MODES)
def test_swapped_and_cached_blocks_move_on_every_rank(mode: TPMode, tiny: TinyCheckpoint) -> None:
    prompts = [list(range(i, i + 60)) for i in range(5)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    wanted = digest(one_die(prompts, params))
    tight = ["max_model_len=128", "cache.num_blocks=16", "cache.num_host_blocks=64", "cache.preemption=swap"]
    with LLM(tiny, "colocated", overrides=[*settings(2, mode), *tight, "cache.load=always"]) as llm:
        for _ in range(2):
            assert digest(llm.generate(prompts, params, keep_logits=True)) == wanted
            llm.engine.check_integrity()
        assert llm.engine.stats().num_preemptions > 0
        assert llm.engine.stats().prefix_cache_hits > 0


@pytest.mark.thin(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("deployment", "decode"), [("pd", ["decode.dies=2"]), ("transformerless", [])])
def test_prefill_by_four_dies_and_decode_by_single_ones(
    mode: TPMode, deployment: str, decode: list[str], tiny: TinyCheckpoint, expected: dict[str, str]
) -> None:
    prefill = ["prefill.dies=4", "prefill.tp=4", f"prefill.tp_mode={mode}"]
    with LLM(tiny, deployment, "int8", overrides=[*prefill, *decode], trace=True) as llm:
        assert served(llm) == expected["int8"]
        received = [span for span in llm.engine.plan.pod.trace.spans if span.name.startswith("DistFlow")]
        assert len(received) == len(PROMPTS)


def test_decode_dies_pull_from_the_ranks_they_are_connected_with(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: dict[str, set[int]] = {}
    send = Endpoint.send

    def remember(endpoint: Endpoint, tag: int, peer: str, spans: list[tuple[Address, int]]) -> None:
        pulled.setdefault(peer, set()).update(address.node for address, _ in spans)
        send(endpoint, tag, peer, spans)

    monkeypatch.setattr(Endpoint, "send", remember)
    overrides = ["prefill.dies=4", "prefill.tp=4", "decode.dies=4"]
    with LLM(tiny, "pd", "int8", overrides=overrides) as llm:
        llm.generate([[i, i + 1] for i in range(12)], PARAMS)
    assert pulled == {f"decode 0/dp{rank}": {rank} for rank in range(4)}


def test_decode_groups_of_two_dies_receive_on_both(tiny: TinyCheckpoint, expected: dict[str, str]) -> None:
    overrides = ["prefill.dies=4", "prefill.tp=4", "decode.dies=4", "decode.tp=2"]
    with LLM(tiny, "pd", "int8", overrides=overrides, trace=True) as llm:
        assert served(llm) == expected["int8"]
        received = [span for span in llm.engine.plan.pod.trace.spans if span.name.startswith("DistFlow")]
        assert len(received) == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    "name", ["groups-yarn-mtp", "no-shared-yarn-defaults"]
)  # with and without q_lora_rank
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_logits_of_transformers(name: str, mode: TPMode, tmp_path) -> None:
    fixture: Fixture = next(f for f in fixtures() if f.name == name)
    with LLM(
        open_checkpoint(fixture.checkpoint_dir(tmp_path)), "colocated", "fp32", overrides=settings(2, mode)
    ) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(fixture.prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == fixture.tokens
        for prompt, logits in zip(fixture.prompts, fixture.logits, strict=True):
            assert np.abs(llm.logits(prompt)[-1] - logits).max() < 2e-3


# ---- connection mapping


@given(st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES), st.integers(1, 12))
def test_the_mapping_is_the_papers(decode_tp: int, more: int, groups: int) -> None:
    """Where the paper's formula is defined, and each prefill rank serves group_size decode ranks."""
    prefill_tp, decode_dp = decode_tp * more, groups * more
    group_size = Fraction(decode_dp) / Fraction(prefill_tp, decode_tp)
    served: dict[int, int] = {}
    for dp_rank in range(decode_dp):
        for tp_rank in range(decode_tp):
            rank = prefill_rank(dp_rank, tp_rank, decode_dp, decode_tp, prefill_tp)
            assert rank == dp_rank // group_size * decode_tp + tp_rank
            served[rank] = served.get(rank, 0) + 1
    assert served == dict.fromkeys(range(prefill_tp), group_size)


@given(st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES), st.integers(1, 40))
def test_any_shape_is_mapped_evenly(decode_tp: int, prefill_tp: int, decode_dp: int) -> None:
    ranks = [
        prefill_rank(dp_rank, tp_rank, decode_dp, decode_tp, prefill_tp)
        for dp_rank in range(decode_dp)
        for tp_rank in range(decode_tp)
    ]
    loads = [ranks.count(rank) for rank in range(prefill_tp)]
    assert sum(loads) == len(ranks)
    assert max(loads) - min(loads) <= max(decode_tp // prefill_tp, 1) * decode_tp


# ---- sizes


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("colocated", ["tp=3"], "tp must be one of 1, 2, 4, 8, found 3"),
        ("colocated", ["tp=4", "dies=6"], "dies=6 cannot be groups of tp=4"),
        ("monolithic", ["tp=2"], "tp is no setting of monolithic"),
        ("moe-attention", ["tp=2"], "tp is no setting of moe-attention"),
        ("pd", ["prefill.tp=16"], r"prefill\.tp must be one of"),
        ("colocated", ["tp_mode=pp"], "tp_mode=pp"),
    ],
)
def test_refusals(name: str, overrides: list[str], reason: str, tiny_config: ModelConfig) -> None:
    with pytest.raises(DeploymentError, match=reason):
        fit(resolve(name, overrides), tiny_config)


def test_a_model_whose_sizes_do_not_divide_is_refused(tmp_path) -> None:
    by_name = {f.name: f for f in fixtures()}
    kimi = open_checkpoint(by_name["kimi-one-group"].checkpoint_dir(tmp_path)).config
    with pytest.raises(DeploymentError, match="tp=2 does not divide the model's 5 heads"):
        fit(resolve("colocated", ["tp=2", "dies=2"]), kimi)


def test_dense_layers_whose_features_do_not_divide_are_refused_or_cut_by_tokens(
    tiny_config: ModelConfig,
) -> None:
    config = msgspec.structs.replace(tiny_config, intermediate_size=100)
    with pytest.raises(DeploymentError, match="tp=8 does not divide the intermediate size 100"):
        fit(resolve("colocated", ["tp=8"]), config)
    assert fit(resolve("colocated", ["tp=8", "tp_mode=sp-tp-sp"]), config)[0].groups.tp == 8
    no_dense = msgspec.structs.replace(config, first_k_dense_replace=0)
    assert fit(resolve("colocated", ["tp=8"]), no_dense)[0].groups.tp == 8


def test_dies_default_to_whole_groups(tiny_config: ModelConfig) -> None:
    sizes = fit(resolve("pd", ["prefill.tp=8"]), tiny_config)
    assert [(te.place.num_dies, te.groups.num_groups, te.groups.tp) for te in sizes] == [(8, 1, 8), (4, 4, 1)]
    assert fit(resolve("colocated", ["tp=2"]), tiny_config)[0].groups.num_groups == 4


@pytest.mark.parametrize(
    ("overrides", "changes", "expected"),
    [
        ([], {}, (4, 4)),
        (["prefill.dies=8"], {}, (8, 4)),
        (["prefill.dies=6"], {}, (6, 2)),
        (["prefill.dies=3"], {}, (3, 1)),
        ([], {"n_routed_experts": 3, "n_group": 1, "topk_group": 1}, (3, 1)),
        ([], {"num_attention_heads": 6}, (4, 2)),
        ([], {"intermediate_size": 98}, (4, 2)),
        (["prefill.tp_mode=sp-tp-sp"], {"intermediate_size": 98}, (4, 4)),
        (["prefill.tp=1"], {}, (4, 1)),
    ],
)
def test_prefill_groups_are_as_large_as_dies_and_model_allow(
    tiny_config: ModelConfig, overrides: list[str], changes: dict[str, int], expected: tuple[int, int]
) -> None:
    """XDS 5.1: TP = 4 in prefill. Decode dies are DP groups of their own."""
    config = msgspec.structs.replace(tiny_config, **changes)
    for deployment in ("pd", "transformerless"):
        prefill, decode = fit(resolve(deployment, overrides), config)
        assert (prefill.place.num_dies, prefill.groups.tp) == expected
        assert decode.groups.tp == 1
