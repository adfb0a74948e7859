"""Links between TEs, and dies that are slow or late: KV goes another way, bits are as they should be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import TransferError, XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [5] * 90]
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
PD = ["prefill.dies=1", "decode.dies=1", "max_model_len=128"]  # dies 0 and 1; with two decode TEs 2, too
TWO = [*PD, "decode.count=2"]
WAYS = [[], ["transfer=layer"], ["fabric=roce"], ["transfer_over=send-receive"]]


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


def served(tiny: TinyCheckpoint, settings: Sequence[str], *faults: Fault) -> tuple[str, int]:
    """The digest, and virtual time at the end."""
    with LLM(tiny, "pd", overrides=settings, faults=faults) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        llm.engine.check_integrity()
        return digest(outputs), llm.engine.stats().virtual_ns


def plane_of(settings: Sequence[str]) -> dict[str, str]:
    return {"plane": "roce" if "fabric=roce" in settings else "ub"}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["down", "blocked", "slow"])
def test_transfers_get_there(tiny: TinyCheckpoint, expected: str, way: list[str], kind: str) -> None:
    how = {"down": {}, "blocked": {"for_us": 300.0}, "slow": {"for_us": 3000.0, "factor": 9.0}}[kind]
    fault = Fault(2.0, link=(0, 1), kind=kind, **plane_of(way), **how)  # type: ignore[arg-type]
    assert served(tiny, [*TWO, *way], fault)[0] == expected


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_flipped_bits_are_found_and_sent_again(tiny: TinyCheckpoint, expected: str, way: list[str]) -> None:
    fault = Fault(2.0, link=(0, 1), kind="flipped", **plane_of(way))  # type: ignore[arg-type]
    assert served(tiny, [*TWO, *way, "checksums=true"], fault)[0] == expected
    assert served(tiny, [*TWO, *way], fault)[0] != expected  # computed with: hence checksums


@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("colocated", ["dies=2"]),
        ("colocated", ["dies=2", "exchange=push"]),
        ("colocated", ["dies=2", "pipeline.microbatches=2", "pipeline.overlap=engines"]),
        ("colocated", ["dies=2", "tp=2"]),
        ("moe-attention", ["attention.domains=1", "attention.dies=1", "experts.routed_dies=1"]),
        (
            "moe-attention",
            ["attention.domains=1", "attention.dies=1", "experts.routed_dies=1", "dataflow=true"],
        ),
        ("eaas", ["attention.dies=1", "experts.routed_dies=1"]),
    ],
    ids=str,
)
def test_flipped_bits_of_tokens_are_found_and_the_step_is_run_again(
    tiny: TinyCheckpoint, expected: str, deployment: str, settings: Sequence[str]
) -> None:
    fault = Fault(2.0, link=(0, 1), kind="flipped", plane="ub")

    def run(*more: str) -> tuple[str, int]:
        settings_of_run = ["max_model_len=128", *settings, *more]
        with LLM(tiny, deployment, overrides=settings_of_run, faults=(fault,)) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
            llm.engine.check_integrity()
            return digest(outputs), llm.engine.je.tes[0].recovery.count

    assert run("checksums=true") == (expected, 1)
    if settings == ["dies=2"]:  # elsewhere it may hit what nobody reads, or what a protocol checks
        computed_with, rollbacks = run()
        assert rollbacks == 0
        assert computed_with != expected


def test_the_only_way_is_down(tiny: TinyCheckpoint) -> None:
    with pytest.raises(TransferError, match=r"no decode TE can be reached .*link on the UB plane is down"):
        served(tiny, PD, Fault(2.0, link=(0, 1), kind="down", plane="ub"))


def test_checksums_take_time_and_change_no_bit(tiny: TinyCheckpoint, expected: str) -> None:
    without, quick = served(tiny, PD)
    checked, slow = served(tiny, [*PD, "checksums=true"])
    assert without == checked == expected
    assert quick < slow < 1.01 * quick


@pytest.mark.parametrize("lockstep", ["false", "true"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(5.0, 0, "slow", 2000.0, factor=4.0),
        Fault(5.0, 0, "stalled", 2000.0),
        Fault(5.0, 1, "late", 2000.0, by_us=5.0),
        Fault(5.0, link=(0, 1), kind="blocked", plane="ub", for_us=3000.0),
    ],
    ids=str,
)
def test_who_is_slow_or_late_holds_others_up(
    tiny: TinyCheckpoint, expected: str, fault: Fault, lockstep: str
) -> None:
    def ends(*faults: Fault) -> int:
        settings = ["dies=2", f"lockstep={lockstep}", "max_model_len=128"]
        with LLM(tiny, "colocated", overrides=settings, faults=faults) as llm:
            assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected
            return llm.engine.stats().virtual_ns

    assert ends(fault) > ends()


def test_a_stalled_die_holds_up_a_run_that_only_takes_time() -> None:
    def end_ns(*faults: Fault) -> int:
        settings = ["dies=2", "max_model_len=128"]
        timing = TimingConfig()
        with LLM("tiny", "colocated", overrides=settings, faults=faults, timing_only=timing) as llm:
            llm.generate(PROMPTS, PARAMS)
            return llm.engine.stats().virtual_ns

    assert end_ns(Fault(5.0, 0, "stalled", 2000.0)) > end_ns() + 1_500_000


@pytest.mark.parametrize("lockstep", ["false", "true"])
def test_a_link_between_dies_that_need_each_other_is_down(tiny: TinyCheckpoint, lockstep: str) -> None:
    settings = ["dies=2", f"lockstep={lockstep}", "max_model_len=128"]
    fault = Fault(300.0, link=(1, 0), kind="down", plane="ub")
    with (
        LLM(tiny, "colocated", overrides=settings, faults=[fault]) as llm,
        pytest.raises(XDeepServeError, match=r"cannot reach node .: their link on the UB plane is down"),
    ):
        llm.generate(PROMPTS, PARAMS)
