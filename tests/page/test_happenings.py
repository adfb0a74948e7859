"""What the page shows of losses, links and replicas: what the engine has found, when it finds it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import DiesLost, DiesTested, LinkChanged, Observed, ReplicasChanged
from xdeepserve.hw.faults import Fault
from xdeepserve.page.happenings import Happenings
from xdeepserve.page.pod_look import now_part

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
SOON = ("health.suspect_s=0.01", "health.lost_s=0.05")


def test_a_loss_is_shown_when_the_engine_has_found_it() -> None:
    told: list[tuple[int, Observed]] = []
    overrides = ("max_model_len=64", "dies=3", *SOON, "recovery.failover=true")
    lost = [Fault(900.0, 1, "lost")]
    with LLM("tiny-random", "colocated", overrides=overrides, faults=lost, timing_only=True) as llm:
        engine = llm.engine
        clock, happened = engine.plan.pod.clock, Happenings(lambda: engine.plan.pod.clock.now)
        engine.observe(happened.see)

        def note(event: Observed) -> None:
            if isinstance(event, DiesLost | DiesTested):
                told.append((clock.now, event))
                shown = now_part(engine, 0).lost
                assert shown == ([0, 1, 2] if isinstance(event, DiesLost) else [1])

        engine.observe(note)
        assert now_part(engine, 0).lost == []
        llm.generate([[5, 6, 7]] * 4, PARAMS)
        assert [event for _, event in told] == [DiesLost("te", (1,), (0, 2)), DiesTested("te", (0, 2), (1,))]
        assert all(at_ns > 900_000 for at_ns, _ in told)
        rows = [row for row in happened.events_part().rows if row.kind == "fault"]
        assert [(row.ns, row.text, row.die) for row in rows] == [
            (told[0][0], "die 1 of te is lost; dies 0, 2 are given up with the TE", 1),
            (
                told[1][0],
                "a test of what te had: dies 0, 2 are well, and free again; die 1 is not well, and lost",
                1,
            ),
        ]
        assert engine.lost_dies == {1}
        assert now_part(engine, 0).lost == [1]


@pytest.mark.parametrize(
    ("event", "kind", "said", "is_loss"),
    [
        (DiesLost("te", (), (4, 5)), "fault", "dies 4 to 5 are given up with te", True),
        (DiesLost("te", (4,), ()), "fault", "die 4 of te is lost", True),
        (
            DiesTested("te", (0, 2), (1,)),
            "fault",
            "a test of what te had: dies 0, 2 are well, and free again; die 1 is not well, and lost",
            False,
        ),
        (
            LinkChanged("prefill 0", "decode 1", False, "no carrier"),
            *("link", "the link from prefill 0 to decode 1 has failed: no carrier", True),
        ),
        (
            LinkChanged("prefill 0", "decode 1", True),
            *("link", "the link from prefill 0 to decode 1 works again", False),
        ),
        (
            ReplicasChanged("te", 1),
            "replicas",
            "te uses other replicas of experts: one slot has changed",
            False,
        ),
    ],
)
def test_each_has_a_line(event: Observed, kind: str, said: str, is_loss: bool) -> None:
    happened = Happenings(lambda: 7)
    happened.see(event)
    rows: Sequence[object] = happened.events_part().rows
    assert [(row.number, row.ns, row.kind, row.text) for row in rows] == [(1, 7, kind, said)]  # type: ignore[attr-defined]
    assert event.is_loss is is_loss
