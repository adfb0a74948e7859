"""Links between TEs, and dies that are slow or late: KV goes another way, bits are as they should be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.tools import one_die
from xdeepserve import SamplingParams
from xdeepserve.errors import TransferError, XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [5] * 90]
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
PD = ["prefill.dies=1", "decode.dies=1", "max_model_len=128"]  # dies 0 and 1; with two decode TEs 2, too
TWO = [*PD, "decode.count=2"]
WAYS = [[], ["transfer=layer"], ["fabric=roce"], ["transfer_over=send-receive"]]


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


def served(settings: Sequence[str], *faults: Fault, deployment: str = "pd") -> Told:
    return serve(History(deployment, settings, PROMPTS, PARAMS, faults=faults))


def plane_of(settings: Sequence[str]) -> dict[str, str]:
    return {"plane": "roce" if "fabric=roce" in settings else "ub"}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["down", "blocked", "slow"])
def test_transfers_get_there(expected: str, way: list[str], kind: str) -> None:
    how = {"down": {}, "blocked": {"for_us": 300.0}, "slow": {"for_us": 3000.0, "factor": 9.0}}[kind]
    fault = Fault(2.0, link=(0, 1), kind=kind, **plane_of(way), **how)  # type: ignore[arg-type]
    assert served([*TWO, *way], fault).digest == expected


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_flipped_bits_are_found_and_sent_again(expected: str, way: list[str]) -> None:
    fault = Fault(2.0, link=(0, 1), kind="flipped", **plane_of(way))  # type: ignore[arg-type]
    assert served([*TWO, *way, "checksums=true"], fault).digest == expected
    assert served([*TWO, *way], fault).digest != expected  # computed with: hence checksums


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
    expected: str, deployment: str, settings: Sequence[str]
) -> None:
    fault = Fault(2.0, link=(0, 1), kind="flipped", plane="ub")

    settings = ["max_model_len=128", *settings]
    found = served([*settings, "checksums=true"], fault, deployment=deployment)
    assert (found.digest, found.stats.num_recoveries["3"]) == (expected, 1)
    if settings[1:] == ["dies=2"]:  # elsewhere it may hit what nobody reads, or what a protocol checks
        computed_with = served(settings, fault, deployment=deployment)
        assert computed_with.stats.num_recoveries["3"] == 0
        assert computed_with.digest != expected


def test_the_only_way_is_down() -> None:
    with pytest.raises(TransferError, match=r"no decode TE can be reached .*link on the UB plane is down"):
        served(PD, Fault(2.0, link=(0, 1), kind="down", plane="ub"))


def test_checksums_take_time_and_change_no_bit(expected: str) -> None:
    without, checked = served(PD), served([*PD, "checksums=true"])
    assert without.digest == checked.digest == expected
    assert without.end_ns < checked.end_ns < 1.01 * without.end_ns


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
def test_who_is_slow_or_late_holds_others_up(expected: str, fault: Fault, lockstep: str) -> None:
    settings = ["dies=2", f"lockstep={lockstep}", "max_model_len=128"]
    held, quiet = (served(settings, *faults, deployment="colocated") for faults in ((fault,), ()))
    assert held.digest == quiet.digest == expected
    assert held.end_ns > quiet.end_ns


def test_a_stalled_die_holds_up_a_run_that_only_takes_time() -> None:
    history = History("colocated", ["dies=2", "max_model_len=128"], PROMPTS, PARAMS, is_timing_only=True)
    stalled = msgspec.structs.replace(history, faults=[Fault(5.0, 0, "stalled", 2000.0)])
    assert serve(stalled).end_ns > serve(history).end_ns + 1_500_000


@pytest.mark.parametrize("lockstep", ["false", "true"])
def test_a_link_between_dies_that_need_each_other_is_down(lockstep: str) -> None:
    settings = ["dies=2", f"lockstep={lockstep}", "max_model_len=128"]
    fault = Fault(300.0, link=(1, 0), kind="down", plane="ub")
    with pytest.raises(XDeepServeError, match=r"cannot reach node .: their link on the UB plane is down"):
        served(settings, fault, deployment="colocated")
