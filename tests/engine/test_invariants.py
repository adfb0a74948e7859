"""Invariants after every turn: each row finds what breaks it, and checking changes neither bits nor times."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests import breaches
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.events import GroupId, Observed, StepEnded
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.te import invariants
from xdeepserve.engine.te.invariants import INVARIANTS, Invariant, Turn
from xdeepserve.errors import XDeepServeError
from xdeepserve.model.presets import TinyCheckpoint

MADE_ON_IMPORT = resolve("monolithic", [])
PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
PROMPT = list(range(5, 25))


def running(turn: Turn) -> Sequence:
    return turn.group.places.running[0]


def twice_in_a_list(turn: Turn) -> None:
    turn.group.places.running.append(running(turn))


def kept_for_nobody(turn: Turn) -> None:
    turn.group.handover.sending[99] = Holding()


def a_block_leaks(turn: Turn) -> None:
    assert turn.group.rtc.alloc_blocks(Holding(), 16)


def more_computed_than_there_is(turn: Turn) -> None:
    running(turn).num_computed = len(running(turn).token_ids) + 1


def computed_without_a_block(turn: Turn) -> None:
    running(turn).token_ids += [7] * 40
    running(turn).num_computed += 40


def more_running_than_may(turn: Turn) -> None:
    turn.group.steps = msgspec.structs.replace(turn.group.steps, max_seqs=0)


def a_step_without_a_plan(turn: Turn) -> None:
    turn.steps.again.append(StepNo(turn.steps.next + 1))


def given_up_with_work(turn: Turn) -> None:
    turn.health.is_given_up = lambda group: True


def unknown_to_the_shell(turn: Turn) -> None:
    turn.shell.forget(running(turn))


BREACHES: tuple[Callable[[Turn], None], ...] = (
    twice_in_a_list,
    kept_for_nobody,
    a_block_leaks,
    more_computed_than_there_is,
    computed_without_a_block,
    more_running_than_may,
    a_step_without_a_plan,
    given_up_with_work,
    unknown_to_the_shell,
)


@pytest.mark.invariants("broken")
@pytest.mark.parametrize(
    "deployment", ["monolithic", "transformerless"]
)  # one loop, and one for each DP group
@pytest.mark.parametrize(
    ("breach", "invariant"),
    list(zip(BREACHES, INVARIANTS, strict=True)),
    ids=[each.__name__ for each in BREACHES],
)
def test_a_breach_ends_the_te_by_its_sentence(
    breach: Callable[[Turn], None],
    invariant: Invariant,
    deployment: str,
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken: list[Turn] = []

    def break_once(turn: Turn) -> None:
        if not broken and turn.group.places.running and running(turn).num_generated == 2:
            broken.append(turn)
            breach(turn)

    with LLM(tiny, deployment, invariants=True) as llm:
        monkeypatch.setattr(invariants, "INVARIANTS", (Invariant("", break_once), *INVARIANTS))
        with pytest.raises(XDeepServeError) as caught:
            llm.generate([PROMPT], SamplingParams(max_tokens=6))
    assert broken
    assert invariant.says in str(caught.value)
    assert broken[0].group.id.te in str(caught.value)
    assert invariants.is_breach(caught.value)


@pytest.mark.invariants("broken")
@pytest.mark.parametrize(
    "overrides",
    [
        ("recovery.failover=true", "recovery.spare_dies=2"),
        ("prefill.count=2", "decode.count=2"),
    ],
)
def test_no_other_te_hides_a_breach(
    overrides: tuple[str, ...], tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of this program ends every request, also where a lost TE would be replaced or missed."""

    def breaks(turn: Turn) -> str | None:
        has_two = turn.group.places.running and running(turn).num_generated == 2
        return "it is broken on purpose" if has_two else None

    monkeypatch.setattr(invariants, "INVARIANTS", (Invariant("Nothing is broken.", breaks),))
    sizes = ("prefill.dies=1", "decode.dies=1")
    with (
        LLM(tiny, "pd", invariants=True, overrides=(*sizes, *overrides)) as llm,
        pytest.raises(XDeepServeError, match=r"Nothing is broken\. But it is broken on purpose"),
    ):
        llm.generate([PROMPT], SamplingParams(max_tokens=6))


@pytest.mark.invariants("off")
@pytest.mark.parametrize("deployment", ["monolithic", "transformerless", "pd"])
def test_checking_changes_neither_bits_nor_times(deployment: str, tiny: TinyCheckpoint) -> None:
    seen = []
    for is_on in (False, True):
        with LLM(tiny, deployment, invariants=is_on) as llm:
            outputs = llm.generate([PROMPT, PROMPT[:7]], SamplingParams(max_tokens=6))
            seen.append(([each.outputs[0].token_ids for each in outputs], llm.virtual_ns))
    assert seen[0] == seen[1]


APART = ("attention.domains=2", "attention.dies=2", "experts.routed_dies=2", "experts.shared_dies=1")
KINDS: list[tuple[str, tuple[str, ...], bool]] = [  # and whether DP groups have loops of their own
    ("monolithic", (), False),
    ("monolithic", ("execution.overlap=true",), False),
    ("colocated", ("dies=2",), False),
    ("colocated", ("dies=2", "lockstep=true"), False),
    ("pd", ("prefill.dies=1", "decode.dies=2"), False),
    ("moe-attention", APART, False),
    ("moe-attention", (*APART, "lockstep=true"), False),
    ("moe-attention", (*APART, "dataflow=true"), True),
    ("eaas", (), True),
    ("transformerless", (*APART, "prefill.dies=1", "prefill.tp=1"), False),
    ("transformerless", (*APART, "prefill.dies=1", "prefill.tp=1", "dataflow=true"), True),
]


@pytest.mark.parametrize(
    ("deployment", "overrides", "is_apart", "is_timing_only"),
    [
        *((*kind, False) for kind in KINDS),
        *((*kind, True) for kind in KINDS if "lockstep=true" not in kind[1]),  # computes what others do
    ],
)
def test_every_turn_of_every_te_is_checked(
    deployment: str,
    overrides: tuple[str, ...],
    is_apart: bool,
    is_timing_only: bool,
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As tests have it, without a word: at least a check after each step, the last one included."""
    checks, steps, since = Counter[GroupId](), Counter[GroupId](), Counter[GroupId]()

    def count(turn: Turn) -> None:
        checks[turn.group.id] += 1
        since.pop(turn.group.id, None)

    def see(event: Observed) -> None:
        if isinstance(event, StepEnded):
            steps[event.group] += 1
            since[event.group] += 1

    monkeypatch.setattr(invariants, "INVARIANTS", (*INVARIANTS, Invariant("", count)))
    overrides = ("max_model_len=64", *overrides)
    with LLM(tiny, deployment, overrides=overrides, timing_only=is_timing_only) as llm:
        llm.engine.observe(see)
        llm.generate([PROMPT, PROMPT[:7], PROMPT[3:]], SamplingParams(max_tokens=6, ignore_eos=True))
        tes = llm.engine.je.tes
        apart = {te.sizes.walk.flows for te in tes if te.sizes.place.role != "prefill"}
        assert apart == {is_apart}
        assert {group.id.te for group in llm.engine.groups} == {group.te for group in checks}
        assert steps
        assert all(checks[group] >= count > 0 for group, count in steps.items())
        assert not since


@pytest.mark.invariants("broken")
def test_no_test_can_swallow_a_breach(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "INVARIANTS", (Invariant("Nothing is broken.", lambda _: "it is"),))
    with LLM(tiny, "monolithic") as llm, contextlib.suppress(XDeepServeError):
        llm.generate([PROMPT], SamplingParams(max_tokens=6))
    (said,) = set(breaches.take(frozenset()))
    assert "Nothing is broken. But it is" in said
    assert breaches.take(frozenset()) == []


@pytest.mark.invariants("off")
def test_no_test_runs_a_te_unchecked(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "monolithic", invariants=False) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2))
    assert breaches.take(frozenset()) == ["TE te runs, and its invariants are not checked"]


def test_deployments_that_were_made_before_any_test_are_checked() -> None:
    assert MADE_ON_IMPORT.invariants


def test_the_page_lists_them() -> None:
    section = PAGE.read_text().partition("## What holds after every turn")[2].partition("\n## ")[0]
    assert [line[2:] for line in section.splitlines() if line[:2] == "- "] == [
        each.says for each in INVARIANTS
    ]
