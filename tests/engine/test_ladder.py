"""One ladder for all losses: the first rung that can mends each kind, and the rungs before say why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from tools import ladder as page
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.recovery.ladder import (
    LADDER,
    LOSSES,
    OF_A_TE,
    Loss,
    Remedies,
    Remedy,
    at_once,
    climb,
)
from xdeepserve.engine.serving import te_group
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te import te as te_module
from xdeepserve.errors import GlitchError, HardwareError, LostDieError, XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.loop import run

# ---- the table ------------------------------------------------------------------------------------------


def test_names_of_rungs_are_unique() -> None:
    assert len({rung.name for rung in LADDER}) == len(LADDER)


def test_the_last_rung_is_for_every_loss() -> None:
    """A loss of any kind comes to an end, and that is the end of the engine."""
    assert LADDER[-1].name == "end"
    assert set(LADDER[-1].kinds) == {*LOSSES}


def test_rungs_run_ever_further_out() -> None:
    """What the TE's loop can mend comes first, then what concerns one TE, then what concerns all."""
    places = [rung.runs for rung in LADDER]
    assert places == sorted(places, key=["loop", "TE", "group"].index)


def test_each_rung_has_its_remedy() -> None:
    with LLM("tiny-random", "pd", "int8", overrides=["recovery.failover=true"], timing_only=True) as llm:
        (te, *_) = llm.engine.je.tes
        assert [*te.remedies] == [rung.name for rung in LADDER if rung.runs != "group"]


def test_the_page_of_faults_says_what_the_ladder_says() -> None:
    text = page.PAGE.read_text()
    assert page.drawn(text) == text, "run python -m tools.ladder"


# ---- how a loss climbs ----------------------------------------------------------------------------------


class Climbed(NamedTuple):
    """A rung that was asked about a loss, and what it said or did."""

    kind: str
    rung: str
    said: str


MENDS = "mends"


def watched(remedies: Remedies, seen: list[Climbed]) -> Remedies:
    """Remedies that note what each rung says to a loss."""

    def noting(name: str, remedy: Remedy) -> Remedy:
        def why_not(loss: Loss) -> str | None:
            why = remedy.why_not(loss)
            seen.append(Climbed(loss.kind, name, why or MENDS))
            return why

        return Remedy(why_not, remedy.mend)

    return {name: noting(name, remedy) for name, remedy in remedies.items()}


def fails(_: Loss) -> None:
    raise ZeroDivisionError("tried on purpose")


def test_a_mend_that_fails_makes_the_loss_worse() -> None:
    """The next rung gets the error of the mend, as a loss that no finer rung is for."""
    seen, mended = list[Climbed](), list[Loss]()

    async def waits_and_fails(loss: Loss) -> None:
        await asyncio.sleep(0)
        fails(loss)

    remedies: Remedies = {
        "run again": Remedy(lambda _: None, waits_and_fails),
        "go on without": Remedy(lambda _: None, mended.append),
        "replace": Remedy(lambda _: None, fails),
        "give up": Remedy(lambda _: "the others are too few", mended.append),
        "end": Remedy(lambda _: None, mended.append),
    }
    glitch = Loss("glitch", "te", (3,), GlitchError(3, "mte-error", "a transfer has failed"))
    assert run(climb(glitch, watched(remedies, seen))) is None
    assert seen == [
        ("glitch", "run again", MENDS),
        ("error", "replace", MENDS),
        ("error", "give up", "the others are too few"),
        ("error", "end", MENDS),
    ]
    (last,) = mended
    assert last[:3] == ("error", "te", (3,))
    assert str(last.reason) == "te: ZeroDivisionError('tried on purpose')"


def test_what_is_left_goes_to_the_next_ladder() -> None:
    """A TE's remedies return the loss that they cannot mend, with the error of the last mend."""
    loss = Loss("die", "te", (0,), LostDieError("die 0 is lost"))
    assert at_once(climb(loss, {"go on without": Remedy(lambda _: "it is needed", fails)})) is loss
    left = at_once(climb(loss, {"go on without": Remedy(lambda _: None, fails)}))
    assert left is not None
    assert (left.kind, type(left.error)) == ("error", ZeroDivisionError)


def test_a_cancelled_mend_is_no_loss() -> None:
    """What ends a process goes on through the ladder, and no further rung is asked."""

    async def is_cancelled(_: Loss) -> None:
        raise asyncio.CancelledError

    remedies = {"run again": Remedy(lambda _: None, is_cancelled), "end": Remedy(lambda _: None, fails)}
    loss = Loss("report", "te", (0,), GlitchError(0, "hbm-page", "a page"))
    with pytest.raises(asyncio.CancelledError):
        at_once(climb(loss, remedies))


def test_outside_of_the_loop_no_rung_waits() -> None:
    async def waits(_: Loss) -> None:
        await asyncio.sleep(0)

    loss = Loss("error", None, (), XDeepServeError("anything"))
    with pytest.raises(AssertionError, match="waits"):
        at_once(climb(loss, {"end": Remedy(lambda _: None, waits)}))


# ---- each kind, in a pod --------------------------------------------------------------------------------

SOON = ("health.suspect_s=0.01", "health.lost_s=0.05")
TWO = ("prefill.dies=2", "decode.dies=2", "prefill.count=2")
TWO_DECODE = ("prefill.dies=2", "decode.dies=2", "decode.count=2")
BEATS = ("health.beat_s=0.001", "health.shell_lost_s=0.01")
NO_CLIENTS = "the dies of {} are no clients of expert servers, each on its own"
NO_OTHERS = "no other task executor could go on"
Meanwhile = Callable[[Engine], Coroutine[Any, Any, None]]


async def burns(engine: Engine) -> None:
    (te, *_) = engine.je.tes
    te.executors[0].reports.put(StepFailed(0, HardwareError("the die is on fire")))


async def finds_a_die_silent(engine: Engine) -> None:
    for tell in engine.plan.pod.memories.on_silence.values():
        tell(0)


class Case(NamedTuple):
    """A loss of a kind: the pod, what happens to it, and how the loss climbs; `error` is what users see."""

    kind: str
    deployment: str
    settings: tuple[str, ...]
    faults: tuple[Fault, ...]
    climbed: tuple[tuple[str, str], ...]
    error: str | None = None
    meanwhile: Meanwhile | None = None


GLITCH = (Fault(300.0, 0, "glitch", code="mte-error"),)
CASES = (
    Case("glitch", "monolithic", (), GLITCH, (("run again", MENDS),)),
    Case(
        *("glitch", "monolithic", (), (Fault(300.0, 0, "glitch", code="unspecified"),)),
        (
            ("run again", "unspecified does not say whether the die can go on"),
            ("give up", NO_OTHERS),
            ("end", MENDS),
        ),
        error="die 0 reports unspecified",
    ),
    Case(
        *(
            "glitch",
            "pd",
            (*TWO_DECODE, "recovery.stage=2"),
            (Fault(die=2, kind="glitch", code="mte-error", operation="dispatch", step=3),),
        ),
        (("run again", "recovery.stage=2 does without token recomputation"), ("give up", MENDS)),
    ),
    Case(
        *("glitch", "monolithic", ("recovery.max_rollbacks=0",), GLITCH),
        (
            ("run again", "steps have been run again 0 times, and none has ended since"),
            ("give up", NO_OTHERS),
            ("end", MENDS),
        ),
        error="mte-error",
    ),
    Case(
        "report",
        "monolithic",
        (),
        (Fault(300.0, 0, "bad-page", page="kv/0/latent"),),
        (("run again", MENDS),),
    ),
    Case("irreparable", "pd", TWO, (Fault(60.0, 0, "bad-page", page=0),), (("give up", MENDS),)),
    Case("server", "eaas", ("experts.copies=1",), (Fault(300.0, 5, "lost"),), (("mask", MENDS),)),
    Case("missed", "eaas", (), (Fault(300.0, 0, "lost"),), (("go on without", MENDS),)),
    Case("silence", "eaas", SOON, (Fault(300.0, 0, "stalled", for_us=1e7),), (("go on without", MENDS),)),
    Case(
        *("silence", "pd", (*TWO, *SOON), (Fault(60.0, 0, "lost"),)),
        (("go on without", NO_CLIENTS.format("prefill 0")), ("give up", MENDS)),
    ),
    Case(
        *("silence", "colocated", ("dies=4", "recovery.failover=true", *SOON), (Fault(300.0, 1, "lost"),)),
        (("go on without", NO_CLIENTS.format("te")), ("replace", MENDS)),
    ),
    Case(
        *("die", "pd", TWO, ()),
        (("go on without", NO_CLIENTS.format("prefill 0")), ("give up", MENDS)),
        meanwhile=finds_a_die_silent,
    ),
    Case("die", "eaas", (), (), (("go on without", MENDS),), meanwhile=finds_a_die_silent),
    Case(
        *(
            "shell",
            "pd",
            ("decode.dies=16", "decode.count=2", *BEATS),
            (Fault(300.0, host=1, kind="stalled", for_us=1e6),),
        ),
        (("give up", MENDS),),
    ),
    Case(
        *("error", "monolithic", (), ()),
        (("give up", NO_OTHERS), ("end", MENDS)),
        error="the die is on fire",
        meanwhile=burns,
    ),
    Case(
        *("replacement", "monolithic", ("recovery.failover=true", *SOON), (Fault(300.0, 0, "lost"),)),
        (("give up", NO_OTHERS), ("end", MENDS)),
        error="spare_dies=1 would do",
    ),
)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def climbs(monkeypatch: pytest.MonkeyPatch) -> list[Climbed]:
    """What every rung of a pod has said to losses, in order."""
    seen: list[Climbed] = []

    async def notes(loss: Loss, remedies: Remedies) -> Loss | None:
        return await climb(loss, watched(remedies, seen))

    monkeypatch.setattr(te_module, "climb", notes)
    monkeypatch.setattr(te_group, "climb", notes)
    return seen


@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind} {case.deployment}" for case in CASES])
def test_a_loss_is_mended_by_the_first_rung_that_can(case: Case, climbs: list[Climbed]) -> None:
    overrides = ["max_model_len=64", *case.settings]
    prompts = [[1, 2, 3]] * 4
    with LLM("tiny-random", case.deployment, "int8", overrides=overrides, faults=list(case.faults)) as llm:
        if case.error is None:
            llm.generate(prompts, PARAMS, meanwhile=case.meanwhile)
        else:
            with pytest.raises(XDeepServeError, match=case.error):
                llm.generate(prompts, PARAMS, meanwhile=case.meanwhile)
    assert [(rung, said) for kind, rung, said in climbs if kind == case.kind] == [*case.climbed]


def test_a_client_that_could_not_be_missed_is_waited_for(climbs: list[Climbed]) -> None:
    """The monitor only suspects: the deadline of heartbeats tells that the only client is lost."""
    overrides = ["max_model_len=64", "attention.dies=1", *SOON]
    faults = [Fault(300.0, 0, "lost")]
    with (
        LLM("tiny-random", "eaas", "int8", overrides=overrides, faults=faults) as llm,
        pytest.raises(XDeepServeError, match="die 0 of te lost"),
    ):
        llm.generate([[1, 2, 3]], PARAMS)
    *suspected, why, needed, end = climbs
    none_left = "te would have no client left"
    assert suspected
    assert {*suspected} == {("missed", "go on without", none_left), ("missed", "wait", MENDS)}
    assert why == ("silence", "go on without", none_left)
    assert (needed, end) == (("silence", "give up", NO_OTHERS), ("silence", "end", MENDS))


@pytest.mark.parametrize("settings", [TWO, (*TWO, "recovery.failover=true")])
def test_a_te_that_cannot_be_given_up_ends_the_engine(
    settings: tuple[str, ...], climbs: list[Climbed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books of requests are broken: no request waits for another TE, and each hears why."""
    monkeypatch.setattr(JobExecutor, "lose", lambda *_: 1 // 0)
    overrides = ["max_model_len=64", *settings]
    with (
        LLM("tiny-random", "pd", "int8", overrides=overrides) as llm,
        pytest.raises(XDeepServeError, match="ZeroDivisionError"),
    ):
        llm.generate([[1, 2, 3]] * 4, PARAMS, meanwhile=finds_a_die_silent)
    first = "replace" if "recovery.failover=true" in settings else "give up"
    assert [each[:2] for each in climbs if each.said == MENDS] == [("die", first), ("error", "end")]


def test_the_last_te_that_leaves_ends_the_engine(climbs: list[Climbed]) -> None:
    """A TE drains because another one could serve; when the drain has ended, that one is lost."""

    async def leaves(engine: Engine) -> None:
        clock, (first, second, _) = engine.plan.pod.clock, engine.je.tes
        leaving = clock.spawn(engine.drain(first.plan.name), name="drain")
        await clock.sleep(1)
        assert first.life == "draining"
        second.executors[0].reports.put(StepFailed(0, HardwareError("the die is on fire")))
        await clock.join(leaving)

    with (
        LLM("tiny-random", "pd", "int8", overrides=["max_model_len=64", *TWO]) as llm,
        pytest.raises(XDeepServeError, match="the die is on fire"),
    ):
        llm.generate([[1, 2, 3]] * 4, PARAMS, meanwhile=leaves)
    assert climbs == [("error", "give up", MENDS), ("departure", "end", MENDS)]


def test_an_error_of_no_te_ends_the_engine(climbs: list[Climbed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is the process that tells a TE of a die whose memory is silent."""
    monkeypatch.setattr(te_module.TE, "lose", lambda _, loss: fails(loss))
    overrides = ["max_model_len=64"]
    with (
        LLM("tiny-random", "monolithic", "int8", overrides=overrides, timing_only=True) as llm,
        pytest.raises(XDeepServeError, match="tried on purpose"),
    ):
        llm.generate([[1, 2, 3]], PARAMS, meanwhile=finds_a_die_silent)
    assert climbs == [("engine", "end", MENDS)]


def test_a_client_that_was_given_up_is_no_loss_again(climbs: list[Climbed]) -> None:
    """Its die is not needed any more: reads of it end nothing, and the page lets other dies break."""
    overrides = ["max_model_len=64", "experts.copies=1"]
    with LLM("tiny-random", "eaas", "int8", overrides=overrides, faults=[Fault(300.0, 0, "lost")]) as llm:
        llm.generate([[1, 2, 3]] * 4, PARAMS)
        assert llm.engine.cannot_lose(1) is None
        llm.generate([[1, 2, 3]] * 4, PARAMS, meanwhile=finds_a_die_silent)
        (te,) = llm.engine.je.tes
        assert te.life == "ready"
    assert climbs == [("missed", "go on without", MENDS)]


NEEDS = "te needs die {}, and no other task executor could go on: serve with --set "


@pytest.mark.parametrize(
    ("deployment", "settings", "why"),
    [
        ("pd", TWO, {0: None, 3: None, 4: "decode 0 needs die 4"}),
        ("eaas", (), {0: None, 5: NEEDS.format(5) + "experts.copies=1, or with recovery.failover=true"}),
        ("eaas", ("experts.copies=1",), {0: None, 5: None}),
        ("colocated", ("dies=4",), {1: NEEDS.format(1) + "recovery.failover=true"}),
        ("colocated", ("dies=4", "recovery.failover=true"), {1: None}),
        ("monolithic", ("recovery.failover=true",), {0: "the 0 dies that would be left are too few: 1 are"}),
    ],
)
def test_the_same_column_is_asked_beforehand(
    deployment: str, settings: tuple[str, ...], why: dict[int, str | None]
) -> None:
    """A die may be lost if some rung is certain to help; the refusal is why the last ones are not."""
    with LLM("tiny-random", deployment, "int8", overrides=["max_model_len=64", *settings]) as llm:
        llm.generate([[1, 2, 3]], PARAMS)
        for die, expected in why.items():
            said = llm.engine.cannot_lose(die)
            assert said == expected if expected is None else str(said).startswith(expected)


def test_a_loss_that_is_foreseen_has_no_error() -> None:
    """Nobody may mend it, and the end of the engine does not count as help."""
    loss = Loss("die", "te", (0,), None)
    with pytest.raises(AssertionError, match="foreseen"):
        _ = loss.reason
    assert {*LOSSES} > OF_A_TE
