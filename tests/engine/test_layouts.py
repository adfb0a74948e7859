"""Experts on dies as the papers lay them out: so many on each die, and settings of each role."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import OF_PAPERS, resolve
from xdeepserve.engine.deploy.scale_down import largest
from xdeepserve.engine.description import describe
from xdeepserve.engine.die.replicas import first_map
from xdeepserve.engine.loading import Loading
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeploymentError
from xdeepserve.llm import digest
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import TinyCheckpoint, resolve_model

OFTEN = ("experts.balance_interval=0.001", "experts.balance_slices=1")

ONE_EACH = ["experts.shared_dies=2", "experts.experts_per_die=1", *OFTEN]  # on dies of their own, all kinds


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("colocated", ["dies=20", *ONE_EACH]),
        ("colocated", ["dies=20", *ONE_EACH, "lockstep=true"]),
        ("colocated", ["dies=20", *ONE_EACH, "exchange=push", "pipeline.microbatches=2", "mtp=1"]),
        ("moe-attention", ["experts.routed_dies=18", *ONE_EACH]),
        ("colocated", ["dies=4", "experts.experts_per_die=6", *OFTEN]),
    ],
)
def test_dies_that_have_one_expert_each_do_not_change_a_bit(
    name: str, overrides: list[str], tiny: TinyCheckpoint
) -> None:
    """As in CloudMatrix 4.1; replicas are there from the start, and EPLB moves them."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[3, 4, 5 + i] for i in range(12)]
    with LLM(tiny, name, overrides=[*overrides, "max_model_len=128"]) as llm:
        (te,) = llm.engine.je.tes
        changes = te.reconfiguration
        assert changes is not None
        assert sum(len(held) for held in changes.holdings[0]) == sum(te.sizes.experts.redundant_of)
        assert digest(llm.generate(prompts, params, keep_logits=True)) == digest(one_die(prompts, params))
        llm.engine.check_integrity()
        assert changes.num_done


def test_each_die_of_ep320_has_exactly_one_expert() -> None:
    """CloudMatrix 4.1 and 5.1; and the dies of xDeepServe 7.1."""
    config = resolve_model("deepseek-r1").config
    ep320 = ["dies=320", "experts.shared_dies=32", "experts.experts_per_die=1"]
    (sizes,) = fit(resolve("colocated", ep320), config)
    placed = sizes.experts
    assert [*map(len, placed.slots_of)] == [1] * 288 + [0] * 32
    assert placed.redundant_of == (0,) * 256 + (1,) * 32 + (0,) * 32
    assert len({expert for held in placed.first_of for expert in held}) == 32
    assert (placed.num_slots, len(placed.expert_rank), placed.num_primary_dies) == (288, 320, 288)
    dp288 = ["dies=288", "experts.shared_dies=32", "experts.experts_per_die=2"]
    (sizes,) = fit(resolve("colocated", dp288), config)
    placed = sizes.experts
    assert [*map(len, placed.slots_of)] == [2] * 256 + [1] * 32
    phy2log = first_map(placed)[0]
    for slots in placed.slots_of:
        assert len({phy2log[slot] for slot in slots}) == len(slots)
    counts = Counter(phy2log)
    assert set(counts) == set(range(256))
    assert set(counts.values()) == {2, 3}


def test_each_role_has_settings_of_its_own(tiny_config: ModelConfig) -> None:
    """They prevail over those of all experts."""
    both = ["decode.dies=6", "experts.redundant_slots=2", "experts.shared_dies=1"]
    own = ["prefill.redundant_slots=0", "prefill.shared_dies=0", "decode.experts_per_die=5"]
    common, ours = (fit(resolve("pd", each), tiny_config) for each in (both, both + own))
    assert [(te.experts.redundant_of, te.experts.num_shared_dies) for te in common] == [
        ((2,) * 4, 1),
        ((2,) * 6, 1),
    ]
    assert [(te.experts.redundant_of, te.experts.num_shared_dies) for te in ours] == [
        ((0,) * 4, 0),
        ((2, 2, 2, 2, 1, 4), 1),
    ]
    prefill, decode = fit(resolve("transformerless", ["prefill.shared_dies=1"]), tiny_config)
    assert (prefill.experts.where, prefill.experts.num_shared_dies) == ("among", 1)
    assert decode.experts.where == "away"


def test_a_smaller_te_has_as_much_room_as_it_can_use(tiny_config: ModelConfig) -> None:
    d = resolve("colocated", ["dies=20", *ONE_EACH])
    smaller = largest(d, tiny_config, "both", 10)
    assert smaller is not None
    assert smaller.experts.redundant_of == (0,) * 10
    assert smaller.place.num_dies == 10


def test_a_te_whose_slots_are_loaded_is_no_source_for_another(tiny: TinyCheckpoint) -> None:
    """EPLB may have put other experts there."""
    plan = PodPlan(tiny, resolve("colocated", ["dies=4", "experts.experts_per_die=6"]))
    with pytest.raises(DeploymentError, match="no TE like it is ready"):
        Loading(plan.tes[0], "peer", lambda: plan.tes, set())


# ---- the papers' pods -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "deployments.md"


def in_small(name: str) -> list[str]:
    """The settings that the page of deployments gives for a pod in small."""
    (command,) = re.findall(rf"--model tiny-random .*--deployment {name}(.*)", PAGE.read_text())
    return [word for word in shlex.split(command) if word != "--set"]


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("dp288", ["256 dies with 1 routed + 1 redundant; 32 dies with 1 redundant + 1 shared"]),
        (
            "production",
            [
                "32 dies with 8 routed + 1 redundant + 1 shared (prefill)",
                "128 dies with 2 routed + 1 redundant + 1 shared (decode)",
            ],
        ),
        (
            "cloudmatrix384",
            [
                "32 dies with 8 routed + 1 redundant + 1 shared (prefill)",
                "256 dies with 1 routed; 32 dies with 1 redundant; 32 dies with 1 shared (decode)",
            ],
        ),
    ],
)
def test_pods_have_the_experts_that_the_papers_print(name: str, held: list[str]) -> None:
    r1 = resolve_model("deepseek-r1")
    plan = PodPlan(r1, resolve(name), timing=TimingConfig())
    text = describe(plan)
    assert all(f"{'':12}{each}\n" in text for each in held)
    assert "does not fit" not in text
    assert len(plan.tes) == {"dp288": 1, "production": 5, "cloudmatrix384": 7}[name]


@pytest.mark.parametrize("name", [name for name in OF_PAPERS if name != "superpod"])
def test_pods_in_small_have_the_bits_of_one_die(name: str, tiny: TinyCheckpoint) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[3, 4, 5 + i] for i in range(12)]
    with LLM(tiny, name, overrides=in_small(name)) as llm:
        assert digest(llm.generate(prompts, params, keep_logits=True)) == digest(one_die(prompts, params))


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp288", "production", "cloudmatrix384"])
def test_pods_take_time(name: str) -> None:
    """All dies; a decode step with one request takes about as long as weights take to be read."""
    with LLM("deepseek-r1", name, timing_only=TimingConfig()) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert 0.05 < llm.virtual_ns / 1e9 < 0.5
