"""The leader of the DP groups deals prefill out by statuses that their dies exchange (xDeepServe 4.3)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.engine.balance.dp import GroupStatus
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.rules import without_effect
from xdeepserve.engine.dp import events
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.status_gather import MAX_REQUESTS, Gathered, StatusGather, pack, row_nbytes, unpack
from xdeepserve.errors import XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.llm import digest

GATHER = "scheduler.statuses=all-gather"
PROMPTS = [[5 + i, *range(10, 10 + 9 * i)] for i in range(9)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
COUNTS = st.integers(0, 2**40)


@given(
    status=st.builds(
        GroupStatus,
        rank=st.integers(0, 767),
        num_free_places=st.integers(-5, 1000),
        num_sequences=COUNTS,
        num_blocks=COUNTS,
        num_used_blocks=COUNTS,
        num_reserved_blocks=COUNTS,
        num_promised_blocks=COUNTS,
        queued_cost=st.floats(0, 1e12),
        queued_tokens=COUNTS,
        has_long=st.booleans(),
    ),
    cached=st.lists(st.integers(0, 2**20), max_size=MAX_REQUESTS),
)
def test_a_row_says_all_that_a_group_does(status: GroupStatus, cached: list[int]) -> None:
    row = np.frombuffer(pack(Gathered(status, tuple(cached))), np.uint8)
    assert len(row) == row_nbytes(len(cached))
    assert unpack(row) == Gathered(status, tuple(cached))


def served(deployment: str, *settings: str, **more: Any) -> tuple[Told, dict[int, int]]:
    """Results of the requests, and the DP group of prefill that each was given to."""
    told = serve(
        History(deployment, ("max_model_len=128", *settings), PROMPTS, PARAMS, **more), hears=(events.Given,)
    )
    return told, {event.seq_id: event.group.rank for event in reversed(told.of(events.Given))}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("colocated", ["dies=4"]),
        ("colocated", ["dies=4", "tp=2", "execution.overlap=true"]),
        ("colocated", ["dies=4", "lockstep=true"]),
        ("pd", ["prefill.tp=1"]),
        ("moe-attention", ["dataflow=true"]),
    ],
    ids=str,
)
def test_placements_are_those_of_a_leader_that_knows(deployment: str, settings: list[str]) -> None:
    """The same statuses, some microseconds later; and the tokens of one die."""
    known, as_known = served(deployment, *settings)
    found, placed = served(deployment, *settings, GATHER)
    assert (found.digest, placed) == (known.digest, as_known)
    assert known.end_ns < found.end_ns < known.end_ns + 1_000_000
    again, as_before = served(deployment, *settings, GATHER)
    assert (again.digest, as_before, again.end_ns) == (found.digest, placed, found.end_ns)
    again, as_before = served(deployment, *settings, GATHER, clock_seed=1)
    assert (again.digest, as_before) == (found.digest, placed)


def test_it_takes_its_time_where_nothing_is_computed() -> None:
    ways = ((), (GATHER,))
    (at_once, placed), (later, as_before) = (
        served("colocated", "dies=4", *more, is_timing_only=True) for more in ways
    )
    assert placed == as_before
    assert at_once.end_ns < later.end_ns < at_once.end_ns + 1_000_000


def test_placements_follow_from_the_bytes_that_were_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose bytes say that it has no place gets nothing, whatever its state is."""
    all_gather = Collectives.all_gather

    async def spoilt(self: Collectives, x: Any, event_id: int) -> Any:
        rows = await all_gather(self, x, event_id)
        if self.layout.name == "dp.statuses":
            status = unpack(rows[2]).status
            assert status.rank == 2
            at = list(GroupStatus.__struct_fields__).index("num_free_places")
            rows[2][:80].view("<i8")[at] = 0
        return rows

    monkeypatch.setattr(Collectives, "all_gather", spoilt)
    _, placed = served("colocated", "dies=4", GATHER)
    assert set(placed.values()) == {0, 1, 3}


def test_groups_that_are_not_well_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather goes on among the others, and the leader is the first of these."""
    asked = iter([(0, 1, 2, 3), (1, 3), (1, 3), (0, 1, 2)])
    monkeypatch.setattr(Heartbeats, "open_ranks", property(lambda self: next(asked, (0, 1, 2, 3))))
    few = ("scheduler.max_num_batched_tokens=16", "scheduler.max_num_seqs=2")
    run = StatusGather.run
    took_part: list[tuple[int, ...]] = []

    async def watched(self: StatusGather, ranks: tuple[int, ...], prompts: Any) -> Any:
        found = await run(self, ranks, prompts)
        took_part.append(tuple(each.status.rank for each in found))
        assert took_part[-1] == ranks
        return found

    monkeypatch.setattr(StatusGather, "run", watched)
    told, placed = served("colocated", "dies=4", *few, GATHER)
    monkeypatch.undo()
    assert len(set(took_part)) > 1
    assert told.digest == digest(one_die(PROMPTS, PARAMS, max_model_len=128))
    assert len(placed) == len(PROMPTS)


def test_a_group_that_does_not_take_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = StatusGather.exchange

    async def absent(self: StatusGather, rank: int, *args: Any) -> None:
        if rank != 2:
            await exchange(self, rank, *args)

    monkeypatch.setattr(StatusGather, "exchange", absent)
    with pytest.raises(XDeepServeError, match=r"all-gather.*waits for peer \(2,\)"):
        served("colocated", "dies=4", GATHER)


def test_no_request_waits_no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked as often as there is something to deal out, and not in each of the steps."""
    calls = []
    all_gather = Collectives.all_gather

    async def counted(self: Collectives, x: Any, event_id: int) -> Any:
        calls.append(event_id)
        return await all_gather(self, x, event_id)

    monkeypatch.setattr(Collectives, "all_gather", counted)
    served("colocated", "dies=4", GATHER)
    assert calls == [1] * 4


def test_where_tokens_flow_a_place_that_becomes_free_is_dealt_out() -> None:
    """The end of any group's step is an occasion, though that group goes on and none of them rests."""
    two = ["attention.domains=1", "attention.dies=2", "dataflow=true", "scheduler.max_num_seqs=2"]
    params = [
        SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (40, 40, 2, 40, 3, 3, 3, 3)
    ]
    waited = []
    for more in ((), (GATHER,)):
        with LLM("tiny-random", "moe-attention", overrides=["max_model_len=64", *two, *more]) as llm:
            outputs = llm.generate([[5 + i, 7, 9] for i in range(8)], params)
            llm.engine.check_integrity()
            waited.append([output.metrics.ttft_ns for output in outputs])
    tpot_ns = outputs[0].metrics.tpot_ns
    for place, (at_once, later) in enumerate(zip(*waited, strict=True)):
        turn = max(0, place - 3)  # a step more for each that had the place before
        assert later < at_once + (turn + 1) * 1.5 * tpot_ns


def test_it_has_no_effect_where_nobody_leads() -> None:
    for deployment, settings in (
        ("monolithic", [GATHER]),
        ("colocated", [GATHER, "scheduler.dispatch=two-level"]),
    ):
        assert without_effect(resolve(deployment, settings), [GATHER])
    assert not without_effect(resolve("colocated", [GATHER]), [GATHER])
