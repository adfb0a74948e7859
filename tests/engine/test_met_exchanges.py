"""Lockstep of dies that meet inside of a layer, or have several microbatches: their exchanges alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.engine.lockstep import GREEDY, PRECISIONS, PROMPTS, SLOTS, TWO, check_colocated, skip
from xdeepserve import LLM
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.lockstep import colocated
from xdeepserve.engine.ways.among.clock import AmongClock
from xdeepserve.errors import XDeepServeError
from xdeepserve.history import History, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.model.canonical import Array

SETTINGS = [
    ("tp=2", "mtp=2"),
    ("tp=4",),
    ("tp=2", "tp_mode=sp-tp-sp", "mtp=1"),
    ("o_proj_tp=2", "experts.shared_dies=1", "mtp=1"),
    (TWO, "mtp=2", *SLOTS),
    (TWO, "pipeline.overlap=engines"),
    ("tp=2", TWO, "experts.shared_dies=1"),
    ("tp=2", "exchange=push", "mtp=1"),
    ("o_proj_tp=4", TWO, "exchange=push", *SLOTS),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_leaves_the_same_bytes_as_tasks(precision: str, settings: tuple[str, ...]) -> None:
    check_colocated(precision, "dies=4", *settings)


def test_int8_answers_leave_the_same_bytes() -> None:
    check_colocated("int8", "dies=4", "tp=2", "combine=int8", "threads=3")


@pytest.mark.parametrize("settings", [("tp=2",), (TWO,)])
def test_dies_without_rows_take_part(settings: tuple[str, ...]) -> None:
    check_colocated("int8", "dies=8", "mtp=1", *settings, prompts=PROMPTS[:1])


@pytest.mark.parametrize("changes", [("tp=2",), (TWO,)])
def test_trace_shows_dies_that_are_as_busy(changes: tuple[str, ...]) -> None:
    """Stages whose kernels ran with the exchange take their time in the same lanes as those of tasks."""
    lanes = []
    for mode in ("lockstep=true", "lockstep=false"):
        settings = ["max_model_len=64", "dies=4", mode, *changes]
        with LLM("tiny-random", "colocated", "int8", overrides=settings, trace=True) as llm:
            llm.generate(PROMPTS, GREEDY)
            spans = llm.engine.plan.pod.trace.spans
        lanes.append({(span.node, span.lane, span.name) for span in spans if "XCCL" not in span.lane})
        exchanged = {(span.lane.split()[0], span.name) for span in spans if span.end_ns > span.start_ns}
        assert ("AIC", "Experts") in exchanged
        if mode == "lockstep=true":
            assert {("XCCL", "dispatch"), ("XCCL", "combine")} <= exchanged
    assert {each for each in lanes[1] - lanes[0] if not each[2][:1].isdigit()} <= steps_of(lanes[1])


def steps_of(lanes: set[tuple[int, str, str]]) -> set[tuple[int, str, str]]:
    """Steps of a protocol, which lockstep has as one."""
    return {each for each in lanes if each[2].split()[0] in ("dispatch", "combine")}


def test_a_die_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = AmongClock.dispatch

    async def absent(self: AmongClock, rank: DieRank, x: Array, topk_idx: Array, event: int) -> Received:
        if rank == 2:
            await self.clock.sleep(10**12)
        return await dispatch(self, rank, x, topk_idx, event)

    monkeypatch.setattr(AmongClock, "dispatch", absent)
    message = "dispatch: deadline passed .* waits for peer .2., field event 1: expected 4, seen 3"
    with (
        LLM("tiny-random", "colocated", overrides=["dies=4", "tp=2", "lockstep=true"]) as llm,
        pytest.raises(XDeepServeError, match=message),
    ):
        llm.generate(PROMPTS, GREEDY)


def test_a_field_of_another_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And everybody is told, not only who came last."""
    monkeypatch.setattr(colocated.d, "dispatch_stage", skip)
    with LLM("tiny-random", "colocated", overrides=["dies=4", TWO, "lockstep=true"]) as llm:
        with pytest.raises(XDeepServeError, match="dispatch: rank 0 finds another event's field in event 1"):
            llm.generate(PROMPTS, GREEDY)
        assert llm.engine.plan.pod.clock.now < 10**9  # no deadline had to pass


def test_a_slow_die_sets_the_pace() -> None:
    history = History("colocated", ("max_model_len=64", "dies=4", "tp=2", "lockstep=true"), PROMPTS, GREEDY)
    slow = Fault(kind="slow", die=1, at_us=0.0, for_us=1e6, factor=3.0)
    quiet, held_up = serve(history), serve(replace(history, faults=(slow,)))
    assert quiet.digest == held_up.digest
    assert held_up.end_ns > 1.5 * quiet.end_ns
