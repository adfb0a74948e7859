"""Attention and experts on different hardware: the bits of one die, times of either device, refusals."""

from pathlib import Path

import pytest

from tests.tools import one_die
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeploymentError
from xdeepserve.history import History, serve
from xdeepserve.hw.accelerators import ACCELERATORS
from xdeepserve.llm import LLM, digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.step_run import decode_iteration

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPTS = [[7], list(range(3, 40)), [5, 6, 7] * 9]
H20 = ["attention.hardware=h20", "experts.hardware=l40s"]
SLOTS = ["experts.redundant_slots=1", "experts.balance_interval=0.001", "experts.cold_tokens=4"]


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("moe-attention", ["attention.carrier=rdma"]),
        ("moe-attention", [*H20, "attention.microbatches=3", "mtp=1"]),
        ("moe-attention", ["experts.hardware=910b", *SLOTS]),
        ("transformerless", H20),
    ],
    ids=str,
)
def test_the_bits_are_those_of_one_die(expected: str, name: str, overrides: list[str]) -> None:
    assert serve(History(name, overrides, PROMPTS, PARAMS)).digest == expected


@pytest.mark.parametrize(
    ("name", "overrides"), [("pd", ["prefill.hardware=910b"]), ("moe-attention", H20)], ids=str
)
def test_cards_lead_to_the_memory_pool_where_no_ub_does(
    expected: str, tmp_path: Path, name: str, overrides: list[str]
) -> None:
    pool = [f"ems.path={tmp_path}", "ems.fabric=vpc", "ems.block_size=16"]
    for num_cached in (0, 32):
        with LLM("tiny-random", name, overrides=[*overrides, *pool]) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        assert digest(outputs) == expected
        assert outputs[1].metrics is not None
        assert outputs[1].metrics.num_cached_tokens == num_cached


def test_each_die_has_the_hardware_that_is_said() -> None:
    with LLM("tiny-random", "moe-attention", overrides=H20, timing_only=True) as llm:
        plan = llm.engine.plan
        (te,) = plan.tes
        for device, dies in (("h20", te.sizes.place.dies), ("l40s", te.sizes.place.expert_dies)):
            assert {plan.pod.spec_of(die).hbm_bytes.value for die in dies} == {
                ACCELERATORS[device].spec.hbm_bytes.value
            }
            assert min(dies) >= 768  # no UB leads there


def test_a_faster_device_takes_less_of_its_own_half_alone() -> None:
    model = resolve_model("deepseek-r1")

    def spent(*overrides: str) -> dict[str, float]:
        sizes = ["attention.domains=1", "attention.dies=4", "experts.routed_dies=32", "experts.shared_dies=2"]
        more = ["max_model_len=730", "scheduler.max_num_seqs=32", "cache.num_blocks=1500"]
        deployment = resolve("moe-attention", [*sizes, *more, "attention.microbatches=1", *overrides])
        return decode_iteration(model, deployment, 600, 32, TimingConfig()).spent_ns

    slow, fast = (spent(f"attention.hardware={name}", "experts.hardware=h20") for name in ("l40s", "h20"))
    assert fast["OProj"] < slow["OProj"]
    assert fast["A2E"] < slow["A2E"]  # its card is twice as fast


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        (
            "moe-attention",
            [*H20, "attention.carrier=mte"],
            "attention.carrier=mte needs it",
        ),
        ("moe-attention", [*H20, "dataflow=true"], "dataflow for nobody: choose one"),
        ("moe-attention", [*H20, "exchange=push"], "has no trampolines"),
        ("transformerless", [*H20, "fabric=ub"], "transformerless: fabric=ub does not lead to attention."),
        (
            "transformerless",
            [*H20, "transfer_over=send-receive"],
            "over ub, which does not lead to attention",
        ),
        ("moe-attention", [*H20, "ems.path=pool"], "ems.fabric=ub does not lead to attention"),
        (
            "pd",
            ["prefill.hardware=910b", "ems.path=pool"],
            "does not lead to 910b prefill: set ems.fabric=vpc",
        ),
        ("moe-attention", ["attention.carrier=rdma", "lockstep=true"], "lockstep takes a group as one"),
        (
            "eaas",
            ["experts.hardware=h20"],
            "clients of expert services write and read themselves",
        ),
        ("moe-attention", ["experts.hardware=h21"], "experts.hardware must be one of"),
        ("moe-attention", ["experts.cold_tokens=-1"], "must be 0 or more"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    name: str, overrides: list[str], reason: str
) -> None:
    with pytest.raises(DeploymentError) as refused:
        fit(resolve(name, overrides), resolve_model("tiny-random").config)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
