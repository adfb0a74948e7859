"""The bit-exactness matrix: which rows there are for a model."""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from xdeepserve.ems.pool_use import PoolUse
from xdeepserve.engine.deploy import fitting
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import OF_PAPERS, PRESETS, SELF_SIZING, resolve
from xdeepserve.engine.deploy.roles import is_one_die
from xdeepserve.errors import DeploymentError
from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import PRESET_DIRECTORY, SeededCheckpoint, resolve_model
from xdeepserve.verify import matrix, outputs
from xdeepserve.verify.case import Case
from xdeepserve.verify.matrix import cases, left_out, verify
from xdeepserve.verify.outputs import run_case

COUNTED = functools.cache(num_parameters)


@pytest.fixture(autouse=True)
def _parameters_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with 256 experts a count takes 0.2 s, and each of 355 rows asks for it."""
    monkeypatch.setattr(fitting, "num_parameters", COUNTED)


def combination(case: Case, config: ModelConfig) -> tuple[str, int, int]:
    """What a case is once it is fitted: deployment, drafts, microbatches of the TE that decodes."""
    decode = fit(resolve(case.deployment, case.overrides), config)[-1]
    return case.deployment, decode.steps.mtp, decode.walk.num_microbatches


@pytest.mark.always
@pytest.mark.thin(3)
@pytest.mark.parametrize("model", ["tiny", "tiny-random", "tiny-r1"])
def test_every_deployment_with_and_without_mtp_in_one_and_two_microbatches(model: str) -> None:
    """For every deployment that the model allows; `monolithic` has no microbatches."""
    config = resolve_model(model).config
    names = (*SELF_SIZING, *(["superpod"] if config.n_routed_experts >= 256 else []))
    wanted = {
        (name, mtp, microbatches)
        for name in names
        for mtp in (0, 1)
        for microbatches in ((1,) if is_one_die(resolve(name).kind) else (1, 2))
    }
    assert not wanted - {combination(case, config) for case in cases(config)}


@pytest.mark.parametrize("model", ["tiny", "tiny-r1"])
def test_rows_are_told_apart_by_their_names(model: str) -> None:
    rows = cases(resolve_model(model).config)
    counts = Counter((case.deployment, case.variant) for case in rows)
    assert not [row for row, count in counts.items() if count > 1]
    ways = Counter(msgspec.structs.replace(case, variant="") for case in rows)
    assert not [way for way, count in ways.items() if count > 1]


ONE_EXPERT = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
ODD: dict[str, dict[str, Any]] = {
    "256 experts, none shared": {
        "n_routed_experts": 256,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
    },
    "one expert": ONE_EXPERT,
    "one expert, no MTP": ONE_EXPERT | {"num_nextn_predict_layers": 0},
    "experts in the MTP layer alone": {"first_k_dense_replace": 4},
    "dense": {"first_k_dense_replace": 99, "num_nextn_predict_layers": 0},
    "3 heads": {"num_attention_heads": 3},
    "1 head, odd dense layers": {"num_attention_heads": 1, "intermediate_size": 35},
    "short contexts": {"max_position_embeddings": 40},
}


def odd(name: str) -> ModelConfig:
    return msgspec.structs.replace(resolve_model("tiny").config, **ODD[name])


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ODD)
def test_odd_models_have_the_rows_that_fit_them(name: str) -> None:
    config = odd(name)
    rows = cases(config)
    for case in rows:
        fit(resolve(case.deployment, case.overrides), config)
    counts = Counter((case.deployment, case.variant) for case in rows)
    assert not [row for row, count in counts.items() if count > 1]
    without = left_out(config)
    named = {(each.deployment, variant) for each in without for variant in each.variants}
    assert not named & counts.keys()
    whole = {each.deployment for each in without if not each.variants}
    assert whole == set(PRESETS) - {case.deployment for case in rows}
    assert all(each.reason.startswith("not for this model: ") for each in without)
    assert {"monolithic", "colocated", "pd"}.isdisjoint(whole)
    if "experts" not in name:
        assert not named


def test_what_has_no_rows_says_why() -> None:
    def told(config: ModelConfig) -> dict[str, str]:
        return {each.deployment: each.reason for each in left_out(config) if not each.variants}

    experts = "experts.routed_dies=256 is more than the model's 32 routed experts"
    experts += "; set experts.routed_dies=32, or take a model with 256 or more"
    assert told(resolve_model("tiny").config) == {"superpod": f"not for this model: {experts}"}
    assert not left_out(resolve_model("tiny-r1").config)
    shared = "the model has no shared expert, found experts.shared_dies=32"
    without_shared = told(odd("256 experts, none shared"))
    assert without_shared["superpod"] == f"not for this model: {shared}"
    assert set(without_shared) == set(OF_PAPERS) - {"heterogeneous", "megascale"}
    needed = "not for this model: moe-attention needs a model with routed experts"
    assert told(odd("dense"))["moe-attention"] == needed
    (without,) = [
        each
        for each in left_out(odd("experts in the MTP layer alone"))
        if each.deployment == "moe-attention" and each.reason == needed
    ]
    assert "dataflow" in without.variants
    assert str(without).startswith("moe-attention without fewer attention than expert dies; 3 domains")
    assert str(without).endswith(f": {needed}")
    assert msgspec.to_builtins(without)["variants"] == without.variants


def test_experts_move_where_a_row_promises_it() -> None:
    """Each way to run with replicas; at the papers' sizes at least twice."""
    rows = cases(resolve_model("tiny-r1").config)
    moving = [case for case in rows if any(each.startswith("experts.balance") for each in case.overrides)]
    assert all(case.reconfigurations for case in moving)
    twice = {(case.deployment, case.overrides[0]) for case in moving if case.reconfigurations == 2}
    slots = "experts.redundant_slots=1"
    assert twice == {("colocated", "dies=288"), ("colocated", "dies=320"), ("superpod", slots)}
    assert all(slots in case.overrides for case in moving if case.reconfigurations == 2)


def test_a_row_that_has_not_shown_what_it_promises_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    still = Case("monolithic", "experts that stay", reconfigurations=1)
    monkeypatch.setattr("xdeepserve.verify.matrix.cases", lambda config, subject: [still])
    rows = [row for row in verify("tiny-random") if row.deployment == "monolithic"]
    assert [(row.is_equal, row.missing, row.holds) for row in rows] == [
        (True, "0 of 1 reconfigurations", False)
    ] * 2
    assert str(rows[0]) == "fp32 monolithic, experts that stay: equal, but 0 of 1 reconfigurations"


def test_rows_that_evict_do(monkeypatch: pytest.MonkeyPatch) -> None:
    evicting = [case for case in cases(resolve_model("tiny-random").config) if case.evicts]
    assert {case.deployment for case in evicting} == {*SELF_SIZING}
    (one,) = [case for case in evicting if case.deployment == "monolithic"]
    monkeypatch.setattr("xdeepserve.verify.matrix.RECIPES", ("int8",))
    monkeypatch.setattr("xdeepserve.verify.matrix.cases", lambda config, subject: [one])
    for missing in ("", "nothing was evicted from the memory pool"):
        (row,) = [row for row in verify("tiny-random") if row.deployment == "monolithic"]
        assert (row.is_equal, row.missing) == (True, missing)
        monkeypatch.setattr(PoolUse, "crowd", lambda self: None)  # there is room


@pytest.mark.parametrize("variant", ["all TEs start anew", "a client is lost"])
def test_who_is_lost_is_counted_among_tes_that_still_serve(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, *_ = [case for case in cases(resolve_model("tiny-random").config) if case.variant == variant]
    monkeypatch.setattr("xdeepserve.verify.matrix.RECIPES", ("int8",))
    monkeypatch.setattr("xdeepserve.verify.matrix.cases", lambda config, subject: [one])
    (row,) = [row for row in verify("tiny-random") if row.deployment == one.deployment]
    assert (row.is_equal, row.missing) == (True, "")


def test_a_deployment_without_rows_is_refused() -> None:
    config = msgspec.structs.replace(resolve_model("tiny-random").config, **ODD["dense"])
    dense = SeededCheckpoint("dense", PRESET_DIRECTORY / "tiny-random", config, seed=1)
    reason = "not for this model: moe-attention needs a model with routed experts"
    with pytest.raises(DeploymentError, match=f"^deployment moe-attention: {reason}$"):
        verify(dense, ["moe-attention"])


@pytest.fixture
def small_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A second model with 32 experts, in place of the one with 256."""
    monkeypatch.setattr(outputs, "SECOND_MODEL", "tiny")
    monkeypatch.setattr(matrix, "SECOND_MODEL", "tiny")
    outputs.second_alone.cache_clear()
    yield
    outputs.second_alone.cache_clear()


@pytest.mark.usefixtures("small_second")
def test_a_second_model_that_answers_otherwise_than_alone_is_no_equal_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = resolve_model("tiny-random")
    beside = Case("monolithic", "a second model beside it", beside="monolithic")
    monkeypatch.setattr("xdeepserve.verify.matrix.cases", lambda config, subject: [beside])
    monkeypatch.setattr("xdeepserve.verify.matrix.RECIPES", ("int8",))
    monkeypatch.setattr("xdeepserve.verify.matrix.run_case", functools.cache(run_case))
    (row,) = [row for row in verify(tiny) if row.deployment == "monolithic"]
    assert (row.is_equal, row.missing) == (True, "")
    monkeypatch.setattr("xdeepserve.verify.matrix.second_alone", lambda: "sha256:of other prompts")
    (row,) = [row for row in verify(tiny) if row.deployment == "monolithic"]
    assert (row.is_equal, row.holds) == (False, False)
    assert str(row).endswith("DIFFERENT: tiny beside it does not answer as it does alone")
