"""Faults of dies while they serve: others go on with the same bits, or a named error ends the requests."""

import json
import random
from pathlib import Path

import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main
from xdeepserve.errors import InputError, RequestError, XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest

PROMPTS = [[i + 1, 5, 9, 11] * (3 + i) for i in range(8)]
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, ignore_eos=True, seed=3)
TWO_BY_TWO = ["prefill.count=2", "decode.count=2", "prefill.dies=2", "decode.dies=2"]
ENDS_US = 40_000  # about when the prompts are done


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return [digest([output]) for output in one_die(PROMPTS, PARAMS)]


def served(deployment: str, settings: list[str], faults: list[Fault]) -> Told:
    return serve(History(deployment, settings, PROMPTS, PARAMS, faults=faults))


def digests(told: Told) -> list[str]:
    """Digest of each request."""
    return [digest([output]) for output in told.outputs]


def test_a_stall_costs_time_and_nothing_else(expected: list[str]) -> None:
    quiet, stalled = (
        served("colocated", ["dies=4"], faults) for faults in ([], [Fault(1500, 2, "stalled", 700)])
    )
    assert digests(quiet) == digests(stalled) == expected
    assert quiet.lost == stalled.lost == {}
    assert 500_000 < stalled.end_ns - quiet.end_ns < 900_000


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "more",
    [[], ["transfer=layer"], ["transfer_over=send-receive"], ["lockstep=true", "decode.tp=2"]],
    ids=str,
)
@pytest.mark.parametrize(("die", "at_us", "te"), [(1, 300, "prefill 0"), (7, 9000, "decode 1")])
def test_others_go_on_with_what_a_lost_die_had(
    expected: list[str], die: int, at_us: float, te: str, more: list[str]
) -> None:
    once, again = (served("pd", [*TWO_BY_TWO, *more], [Fault(at_us, die, "lost")]) for _ in range(2))
    assert digests(once) == expected
    assert list(once.lost) == [te]
    assert (again.digest, again.end_ns) == (once.digest, once.end_ns)
    assert str(again.lost) == str(once.lost)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("colocated", ["dies=4"]),
        ("colocated", ["dies=4", "lockstep=true"]),
        ("colocated", ["dies=4", "exchange=push"]),
        ("moe-attention", []),
        ("moe-attention", ["dataflow=true"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("die", [0, 3])
def test_where_nobody_else_can_serve_requests_end_with_an_error(
    deployment: str, settings: list[str], die: int
) -> None:
    with LLM("tiny-random", deployment, overrides=settings, faults=[Fault(2000, die, "lost")]) as llm:
        with pytest.raises(XDeepServeError, match=r"waits for peer|is lost"):
            llm.generate(PROMPTS, PARAMS)
        with pytest.raises(XDeepServeError):
            llm.generate([1, 2, 3], PARAMS)


def test_dies_that_nothing_depends_on_may_be_lost(expected: list[str]) -> None:
    """After the last request, or a prefill TE when all prompts are done."""
    told = served("pd", TWO_BY_TWO, [Fault(30_000, 0, "lost")])
    assert (digests(told), told.lost) == (expected, {})


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_lost_whenever(expected: list[str], seed: int) -> None:
    """Random plans: all bits if a TE of each role is left, else perhaps an error that names who waited."""
    rng = random.Random(seed)
    dies = rng.sample(range(8), rng.choice((1, 1, 2, 3)))
    faults = [Fault(rng.uniform(0, ENDS_US) ** rng.choice((0.6, 1)), die, "lost") for die in dies]
    stalls = [die for die in range(8) if die not in dies and rng.random() < 0.3]
    faults += [Fault(rng.uniform(0, ENDS_US), die, "stalled", rng.uniform(1, 3000)) for die in stalls]
    more = rng.choice(
        ([], ["transfer=layer"], ["transfer_over=send-receive"], ["max_model_len=64", "cache.num_blocks=6"])
    )
    tes = {die // 2 for die in dies}
    can_serve = not ({0, 1} <= tes or {2, 3} <= tes)
    try:
        told = served("pd", [*TWO_BY_TWO, *more], faults)
    except XDeepServeError as error:
        reason = str(error)
        assert not can_serve
        assert any(words in reason for words in ("waits for peer", "is lost")), reason
    else:
        assert digests(told) == expected
        assert len(told.lost) <= len(tes)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[[fault]]\nat_us = 300\ndie = 1\nkind = 'lost'\n")
    args = ["generate", "--model", "tiny-random", "--prompt-ids", "1,2,3", "--json", "--deployment", "pd"]
    args += [text for setting in TWO_BY_TWO for text in ("--set", setting)]
    assert main(args) == 0
    quiet = json.loads(capsys.readouterr().out)
    assert main([*args, "--faults", str(plan)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["digest"] == quiet["digest"]
    assert "TE prefill 0 was lost, others went on: all-reduce: deadline passed" in said.err
    assert main([*args, "--faults", str(plan), "--set", "recovery.failover=true"]) == 0
    assert "TE prefill 0 was lost, another TE came in its place: " in capsys.readouterr().err
    plan.write_text("[[fault]]\nat_us = 300\ndie = 99\nkind = 'lost'\n")
    assert main([*args, "--faults", str(plan)]) == 2
    assert "the deployment has no die 99; it has 8: 0, 1, 2, 3 ..." in capsys.readouterr().err


def test_a_guest_brings_no_faults() -> None:
    with LLM("tiny-random", "colocated", overrides=["dies=2"]) as llm:
        with pytest.raises(RequestError, match="give them with its first model"):
            LLM("tiny-random", beside=llm, faults=[Fault(1e9, 0, "lost")])
        with pytest.raises(InputError):
            LLM("tiny-random", faults=[Fault(1e9, 1, "lost")])
