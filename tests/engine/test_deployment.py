"""Deployments: presets, overrides, and every reason at once when one cannot be built."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig, Kind
from xdeepserve.engine.deploy.fitting import fit, with_servers_outside
from xdeepserve.engine.deploy.resolve import PRESETS, SELF_SIZING, resolve
from xdeepserve.engine.deploy.roles import (
    DEPLOYMENTS,
    PREFILL,
    WITH_SERVICES,
    decode_alone,
    has_expert_dies,
    is_listed,
)
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.engine.description import describe
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint


@pytest.mark.parametrize("name", SELF_SIZING)
def test_presets_fit_tiny(name: str, tiny_config: ModelConfig) -> None:
    sizes = fit(resolve(name), tiny_config)[0]
    experts = [e for held in sizes.experts.experts_of for e in held]
    assert experts == list(range(tiny_config.n_routed_experts))
    assert sizes.kv.num_blocks * sizes.kv.block_size >= sizes.steps.max_model_len


def test_every_kind_has_rows_and_a_preset_and_every_row_its_sections() -> None:
    assert tuple(DEPLOYMENTS) == get_args(Kind)
    assert {resolve(name).kind for name in PRESETS} == {*DEPLOYMENTS}
    for kind, rows in DEPLOYMENTS.items():
        assert is_listed(kind) == (kind == "mixed")
        roles = [row.role for row in rows]
        assert roles in (["both"], ["prefill", "decode"]) or kind == "mixed"
        assert {section for row in rows for section in row.sections} <= {*Deployment.__struct_fields__}


def test_a_kind_of_deployment_is_a_row(monkeypatch: pytest.MonkeyPatch, tiny: TinyCheckpoint) -> None:
    """Prefill beside expert servers, for which there is no name: the first TE has no servers."""
    kind: Any = "pd-services"
    monkeypatch.setitem(DEPLOYMENTS, kind, (PREFILL, WITH_SERVICES._replace(role="decode")))
    outside = Deployment(name="new", kind=kind, experts=ExpertConfig(transport="shm"))
    assert with_servers_outside(outside, tiny.config).place.role == "decode"
    with pytest.raises(DeploymentError, match="an expert server is a process"):
        with_servers_outside(Deployment(name="new", kind=kind), tiny.config)
    halves = {
        kind: "eaas",
        "pd": "colocated",
        "transformerless": "moe-attention",
        "eaas": None,
        "mixed": None,
    }
    assert {each: decode_alone(each) for each in halves} == halves
    copied = PodPlan(tiny, Deployment(name="new", kind=kind, experts=ExpertConfig(copies=1)), "int8")
    assert "\ncopies      each routed expert is on another server" in describe(copied)


TWO = "pipeline.microbatches=2"


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("monolithic", [], [("here", "serial", 1)]),
        ("colocated", ["dies=1"], [("here", "serial", 1)]),
        ("colocated", [], [("among", "serial", 1)]),
        ("colocated", [TWO], [("among", "overlap", 2)]),
        ("pd", [TWO, "prefill.dies=1"], [("here", "overlap", 2), ("among", "overlap", 2)]),
        ("moe-attention", [], [("away", "away-and-back", 1)]),
        ("transformerless", [TWO, "dataflow=true"], [("among", "overlap", 2), ("away", "dataflow", 1)]),
    ],
)
def test_where_experts_are_and_how_steps_take_turns(
    name: str, overrides: list[str], expected: list[tuple[str, str, int]], tiny_config: ModelConfig
) -> None:
    found = fit(resolve(name, overrides), tiny_config)
    assert [(sizes.experts.where, sizes.walk.turns, sizes.walk.num_parts) for sizes in found] == expected


def test_experts_spread_evenly_over_any_number_of_dies(tiny_config: ModelConfig) -> None:
    for dies in range(1, tiny_config.n_routed_experts + 1):
        held = [
            len(r) for r in fit(resolve("colocated", [f"dies={dies}"]), tiny_config)[0].experts.experts_of
        ]
        assert sum(held) == tiny_config.n_routed_experts
        assert max(held) - min(held) <= 1


def test_overrides_reach_nested_settings() -> None:
    deployment = resolve("colocated", ["scheduler.max_num_seqs=3", "cache.num_blocks=9", "dies=2"])
    assert (deployment.scheduler.max_num_seqs, deployment.cache.num_blocks, deployment.dies) == (3, 9, 2)
    assert deployment.scheduler.max_num_batched_tokens == 128


def test_a_toml_file_is_a_deployment(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('kind = "colocated"\ndies = 4\n[cache]\nblock_size = 32\n')
    deployment = resolve(str(path))
    assert (deployment.name, deployment.dies, deployment.cache.block_size) == ("small", 4, 32)


def test_every_wrong_override_is_named_in_one_error() -> None:
    with pytest.raises(DeploymentError) as caught:
        resolve("colocated", ["dies=many", "colour=3", "nonsense", "scheduler.speed=1"])
    message = str(caught.value)
    assert "\n" not in message
    for part in ("dies=many", "colour", "'nonsense' is not of the form key=value", "speed"):
        assert part in message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("block_size=32", "unknown setting block_size; the nearest are cache.block_size, "),
        ("cache.blocksize=32", "unknown setting cache.blocksize; the nearest are cache.block_size, "),
        ("prefil.dies=1", "unknown setting prefil.dies; the nearest are prefill.dies, "),
        ("execution.decode.overlp=true", "the nearest are execution.decode.overlap, "),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_ones(override: str, reason: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        resolve("pd", [override])
    assert reason in str(caught.value)


def test_a_file_with_an_unknown_setting_names_the_nearest_ones(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('kind = "colocated"\n[cache]\nblocksize = 32\n')
    with pytest.raises(
        DeploymentError, match=r"unknown setting cache.blocksize; the nearest are cache.block_"
    ):
        resolve(str(path))


def fields(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names of everything that TOML can say."""
    for field in msgspec.inspect.type_info(struct).fields:  # type: ignore[attr-defined]
        types = getattr(field.type, "types", (field.type,))
        inner = [each.cls for each in types if isinstance(each, msgspec.inspect.StructType)]
        if inner:
            yield from fields(inner[0], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_field_is_a_setting_with_a_meaning() -> None:
    found = {setting.key: setting for setting in settings()}
    assert ["name", *found] == [field for field in fields(Deployment) if field != "te"]
    assert all(setting.meaning and setting.meaning == setting.meaning.strip() for setting in settings())
    assert found["fabric"][:3] == ("fabric", "auto|ub|roce|vpc", "auto")
    assert found["prefill.dies"][:3] == ("prefill.dies", "int", None)
    calls = ["deepseek", "deepseek_v31", "deepseek_v32", "kimi", "hermes", "glm", "qwen3_coder", "minimax"]
    assert found["output.tools"].names == ["auto", "off", *calls]


def test_every_default_is_a_value_that_can_be_set() -> None:
    for setting in settings():
        if setting.default is not None:
            said = f"{setting.key}={str(setting.default).lower()}"
            assert resolve("transformerless", [said]).kind == "transformerless", said


@pytest.mark.parametrize(
    ("name", "override", "reason"),
    [
        ("pd", "fabric=foo", "fabric must be one of auto, roce, ub, vpc, found 'foo'"),
        ("pd", "fabric=3", "fabric must be one of auto, roce, ub, vpc, found 3"),
        ("pd", "transfer=x", "transfer must be one of layer, request, found 'x'"),
        ("pd", "prefill.hardware=a3", "prefill.hardware must be one of 910b, cm384, found 'a3'"),
        ("pd", "execution.prefill.mode=x", "execution.prefill.mode must be one of graph, op, found 'x'"),
        (
            "pd",
            "kind=x",
            f"kind must be one of {', '.join(sorted(DEPLOYMENTS))}, found 'x'",
        ),
        (
            "pd",
            "output.tools=x",
            "output.tools must be one of auto, deepseek, deepseek_v31, deepseek_v32, glm, hermes, kimi, "
            "minimax, off, qwen3_coder, found 'x'",
        ),
    ],
)
def test_a_wrong_name_is_refused_with_the_names_that_are_known(name: str, override: str, reason: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        resolve(name, [override])
    assert str(caught.value) == f"deployment {name}: {override}: {reason}"


def test_every_reason_against_a_model_is_in_one_error(tiny_config: ModelConfig) -> None:
    overrides = ["dies=17", "max_model_len=99999", "cache.block_size=20", "scheduler.max_num_seqs=0", "mtp=3"]
    with pytest.raises(DeploymentError) as caught:
        fit(resolve("colocated", overrides), tiny_config)
    message = str(caught.value)
    for part in ("16 routed experts", "max_model_len", "block_size", "max_num_seqs", "mtp must be 0, 1 or 2"):
        assert part in message


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("nowhere", [], "unknown deployment 'nowhere': known are monolithic, colocated, pd, moe-attention"),
        ("pd", ["dies=2"], "dies is no setting of pd, which has decode, experts, pipeline, prefill"),
        ("pd", ["decode.count=0"], "decode.count must be at least 1"),
        ("moe-attention", ["attention.domains=0"], "attention.domains must be at least 1"),
        ("moe-attention", ["experts.shared_dies=0"], "needs dies for its shared expert"),
        ("moe-attention", ["attention.dies=400"], "a SuperPod has 768 dies"),
        ("missing.toml", [], "deployment missing.toml: No such file"),
        ("monolithic", ["dies=2"], "monolithic is one die"),
        ("colocated", ["dies=0"], "at least 1"),
        ("colocated", ["dies=769"], "routed experts"),
        ("monolithic", ["cache.num_blocks=3"], "set at least 128, or max_model_len=48"),
        ("monolithic", ["scheduler.max_num_batched_tokens=8"], "cannot hold one step"),
        ("monolithic", ["threads=0"], "threads must be at least 1"),
        ("monolithic", ["hardware.hbm_mb=0"], "hbm_mb"),
        ("monolithic", ["max_model_len=1"], "max_model_len"),
    ],
)
def test_refusals(name: str, overrides: list[str], reason: str, tiny_config: ModelConfig) -> None:
    with pytest.raises(DeploymentError, match=reason):
        fit(resolve(name, overrides), tiny_config)


@pytest.mark.parametrize(
    ("name", "overrides", "whole"),
    [
        (
            "colocated",
            ["cache.block_size=0", "cache.num_blocks=5"],
            "cache.block_size must be a multiple of 16, found 0",
        ),
        (
            "pd",
            ["cache.block_size=-16", "cache.num_blocks=5"],
            "cache.block_size must be a multiple of 16, found -16",
        ),
        ("monolithic", ["health.lost_s=nan"], "health.lost_s must be more than 0 and finite, found nan"),
        (
            "monolithic",
            ["health.lost_s=1e300"],
            "health.lost_s must be more than 0 and at most 1e+09, found 1e+300",
        ),
        ("pd", ["experts.shared_dies=7"], "experts.shared_dies=7 leaves no die of 4 for routed experts"),
        ("monolithic", ["prefill.dies=0"], "prefill is no setting of monolithic, which is one die"),
        (
            "colocated",
            ["experts.routed_dies=-1"],
            "experts.routed_dies is for pods with dies for experts alone "
            f"({', '.join(filter(has_expert_dies, DEPLOYMENTS))})",
        ),
        (
            "colocated",
            ["mtp=7", "threads=0"],
            "threads must be at least 1, found 0; mtp must be 0, 1 or 2, found 7",
        ),
    ],
)
def test_a_mistake_has_one_reason(
    name: str, overrides: list[str], whole: str, tiny_config: ModelConfig
) -> None:
    with pytest.raises(DeploymentError) as caught:
        fit(resolve(name, overrides), tiny_config)
    assert str(caught.value) == f"deployment {name}: {whole}"


def test_slots_without_experts_are_refused_beside_other_mistakes(tiny_config: ModelConfig) -> None:
    dense = msgspec.structs.replace(tiny_config, first_k_dense_replace=99)
    with pytest.raises(DeploymentError, match="needs a model with routed experts") as caught:
        fit(resolve("colocated", ["experts.redundant_slots=1", "threads=0"]), dense)
    assert "threads must be at least 1" in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²"])
def test_threads_that_are_no_number_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XDEEPSERVE_THREADS", value)
    with pytest.raises(InputError, match=f"XDEEPSERVE_THREADS={value}: a whole number from 1 on"):
        resolve("monolithic", [])
    monkeypatch.setenv("XDEEPSERVE_THREADS", "3")
    assert resolve("monolithic", []).threads == 3


def test_mtp_needs_an_mtp_layer(tiny_config: ModelConfig) -> None:
    config = msgspec.structs.replace(tiny_config, num_nextn_predict_layers=0)
    with pytest.raises(DeploymentError, match="has none"):
        fit(resolve("monolithic", ["mtp=1"]), config)


def test_dies_that_cannot_hold_the_model_are_refused_before_memory_is_taken(tiny: TinyCheckpoint) -> None:
    with pytest.raises(DeploymentError, match=r"node 0 needs [\d,]+ bytes of memory but has 1,048,576"):
        PodPlan(tiny, resolve("colocated", ["hardware.hbm_mb=1", "dies=2"]), "int8")


def test_a_pod_that_this_computer_cannot_hold_is_refused_with_its_sum(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xdeepserve.engine.build.physical_memory", lambda: 10_000_000)
    with pytest.raises(DeploymentError, match="add up to"):
        PodPlan(tiny, resolve("colocated"), "int8")


@pytest.mark.parametrize(
    ("name", "override", "hint"),
    [
        ("moe-attention", TWO, "; for pipeline.microbatches it has attention.microbatches"),
        (
            "moe-attention",
            "pipeline.microbatches=1",
            "; for pipeline.microbatches it has attention.microbatches",
        ),
        (
            "colocated",
            "attention.microbatches=3",
            "; for attention.microbatches it has pipeline.microbatches",
        ),
        ("pd", "dies=2", "; for dies it has prefill.dies and decode.dies"),
        ("monolithic", "attention.dies=3", "which is one die"),
        ("eaas", "tp=2", "which has attention, experts, services"),
    ],
)
def test_a_setting_of_another_deployment_names_the_own_one(
    name: str, override: str, hint: str, tiny_config: ModelConfig
) -> None:
    with pytest.raises(DeploymentError) as refused:
        fit(resolve(name, [override]), tiny_config)
    assert str(refused.value).endswith(hint)
