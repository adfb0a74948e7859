"""Seven properties of the protocols in `contract`: a test each, with a case for each row and way."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.contract import (
    PROPERTIES,
    PROTOCOLS,
    SEEDS,
    US,
    Ended,
    Protocol,
    Scene,
    Way,
    exchange,
    opened,
    others,
    run,
    same,
    table,
)
from xdeepserve.comm.exchange_choices import EXCHANGES
from xdeepserve.errors import DeadlineError, ProtocolError

pytestmark = pytest.mark.always
ROWS = pytest.mark.parametrize("protocol", PROTOCOLS, ids=[protocol.name for protocol in PROTOCOLS])
WAYS = pytest.mark.parametrize(
    ("protocol", "way"),
    [(protocol, way) for protocol in PROTOCOLS for way in protocol.ways],
    ids=[" ".join(map(str, (each.name, *way.values()))) for each in PROTOCOLS for way in each.ways],
)


def check_results(scene: Scene, ends: list[Ended]) -> None:
    for index, end in enumerate(ends):
        for turn, result in enumerate(end.results):
            assert same(result, scene.expected(turn, index)), (scene.ranks[index].name, turn)


def check_all(scene: Scene, ends: list[Ended], turns: int, last_event: int) -> None:
    """All have what the oracle says, and leave nothing behind."""
    for rank, end in zip(scene.ranks, ends, strict=True):
        if end.error is not None:
            raise end.error
        assert len(end.results) == (0 if rank.serves else turns)
        rank.die.memory.check_integrity()
        assert rank.serves or rank.die.memory.watches == []
    check_results(scene, ends)
    scene.look(last_event)


def small(protocol: Protocol, way: Way, **how: Any) -> Way:
    return {"seed": 5, "timeout_ns": protocol.timeout_ns, **protocol.small, **way, **how}


def deaths(protocol: Protocol, way: Way) -> list[tuple[int, list[tuple[str, int]]]]:
    """Ranks, and the steps at which each may die."""

    async def body(scene: Scene) -> list[tuple[int, list[tuple[str, int]]]]:
        every = [(index, list(protocol.steps(scene, way, index))) for index in range(len(scene.ranks))]
        return [(index, steps) for index, steps in every if steps]

    return opened(protocol.open, body, **small(protocol, way))


async def go_on(scene: Scene, first_event: int) -> None:
    """All are mended and reset, and do what they would have done undisturbed."""
    for rank in scene.ranks:
        rank.mend()
        rank.reset()
    check_all(scene, await run(scene, 2, first_event), 2, first_event + 1)


# ---- bits -------------------------------------------------------------------------------------------


def check_bits(protocol: Protocol, num_examples: int, big: Way) -> None:
    sizes = {"seed": SEEDS, "clock": st.none() | st.integers(0, 99), "turns": st.integers(1, 4)}
    # So that some ranks run ahead by up to several operations.
    waits = st.lists(st.integers(0, 200 * US), min_size=1, max_size=8)

    @settings(max_examples=num_examples, derandomize=True)
    @given(st.fixed_dictionaries(sizes | dict(protocol.random) | dict(big)), waits)
    def check(how: Way, waits: list[int]) -> None:
        async def body(scene: Scene) -> None:
            turns, count = how["turns"], len(scene.ranks)
            ends = await run(scene, turns, wait_ns=lambda i, turn: waits[(turn * count + i) % len(waits)])
            check_all(scene, ends, turns, turns)

        opened(protocol.open, body, waits, **how)

    check()


@ROWS
def test_every_bit_is_the_oracles(protocol: Protocol) -> None:
    """Whatever the sizes; several turns on the same buffers, none of which sees an older one's bytes."""
    check_bits(protocol, protocol.num_examples, {})


@pytest.mark.long
@ROWS
def test_every_bit_is_the_oracles_at_more_sizes(protocol: Protocol) -> None:
    check_bits(protocol, 3 * protocol.num_examples, {})


@pytest.mark.campaign
@ROWS
def test_every_bit_of_large_ones_is_the_oracles(protocol: Protocol) -> None:
    check_bits(protocol, 3 * protocol.num_examples, protocol.big)


@WAYS
def test_any_order_of_events_gives_the_same_bits(protocol: Protocol, way: Way) -> None:
    """Any seed of the clock, and any order in which ranks start; one seed has always the same events."""

    def history(clock: int | None, step: int = 1) -> tuple[Any, str, int]:
        async def body(scene: Scene) -> tuple[Any, str, int]:
            scene.pod.trace.is_on = True
            ends = await run(scene, 2, order=range(len(scene.ranks))[::step])
            check_all(scene, ends, 2, 2)
            return [end.results for end in ends], scene.pod.trace.digest(), scene.pod.clock.now

        return opened(protocol.open, body, step, **small(protocol, way, clock=clock))

    clocks = (None, 0, 1, 2)
    found = [history(clock) for clock in clocks]
    assert all(same(results, found[0][0]) for results, *_ in (*found, history(None, -1)))
    if "any order" not in protocol.notes:
        assert [history(clock)[1:] for clock in clocks] == [each[1:] for each in found]


# ---- ranks that are missing -------------------------------------------------------------------------


def check_waits(
    protocol: Protocol, way: Way, scene: Scene, ends: list[Ended], index: int, op: str, step: int
) -> None:
    """Who waits for a missing rank names it, and what was expected and seen; all others have what the oracle
    says, or wait for one who has given up."""
    wait, name = protocol.missing(scene, way, index, op, step), scene.ranks[index].name
    failed = {name} | {rank.name for rank, end in zip(scene.ranks, ends, strict=True) if end.error}
    naming = set()
    check_results(scene, ends)
    for each in others(scene, index):
        if (error := ends[each].error) is None:
            assert scene.ranks[each].serves or len(ends[each].results) == 2
            continue
        assert isinstance(error, DeadlineError), error
        peers = error.peer.split(", ") if isinstance(error.peer, str) else error.peer
        peers = set(peers) if isinstance(peers, list | tuple) else {peers}
        assert error.rank == scene.ranks[each].name
        assert peers
        assert peers <= failed
        assert error.expected != error.seen
        waits = f"rank {error.rank} waits for peer {error.peer}, field {error.field}"
        said = f"{error.op}: deadline passed at {error.at_ns} ns: {waits}: expected {error.expected}, "
        assert str(error).startswith(f"{said}seen {error.seen}")
        if wait is not None and each in wait.waiting and name in peers:
            naming.add(each)
            assert (error.op, error.field) == (wait.op, wait.field)
            assert wait.expected is None or error.expected == wait.expected
            if callable(wait.seen):
                assert wait.seen(scene.ranks[each], error), error
            else:
                assert wait.seen is None or error.seen == wait.seen
    assert naming == set(wait.waiting if wait is not None else ())
    assert wait is not None or failed == {name}


@WAYS
def test_a_rank_that_dies_at_any_step_is_named_and_all_go_on(protocol: Protocol, way: Way) -> None:
    async def body(index: int, op: str, step: int, scene: Scene) -> None:
        rank = scene.ranks[index]
        rank.break_at(op, step)
        ends = await run(scene, 2)
        assert str(ends[index].error) == "lost power"
        check_waits(protocol, way, scene, ends, index, op, step)
        await go_on(scene, 10)

    for index, steps in deaths(protocol, way):
        for op, step in steps:
            opened(protocol.open, partial(body, index, op, step), index, op, step, **small(protocol, way))


@WAYS
def test_a_rank_that_is_late_is_waited_for_until_the_deadline(protocol: Protocol, way: Way) -> None:
    """Whoever comes later is named as one is who never comes, and all can go on."""

    async def in_time(index: int, scene: Scene) -> None:
        check_all(scene, await run(scene, 2, wait_ns=lambda i, turn: (i == index) * protocol.late_ns), 2, 2)

    async def too_late(index: int, first: str, scene: Scene) -> None:
        ends = await run(scene, 2, wait_ns=lambda i, turn: (i == index) * 3 * protocol.timeout_ns)
        check_waits(protocol, way, scene, ends, index, first, 0)
        await go_on(scene, 10)

    for index, steps in deaths(protocol, way):
        opened(protocol.open, partial(in_time, index), index, **small(protocol, way))
        opened(
            protocol.open, partial(too_late, index, steps[0][0]), index, "too late", **small(protocol, way)
        )


# ---- callers that err -------------------------------------------------------------------------------


@WAYS
def test_a_rank_with_another_event_is_named_with_both(protocol: Protocol, way: Way) -> None:
    async def body(scene: Scene) -> None:
        events, said = protocol.disagree(scene)
        ends = await run(scene, 1, 4, events=events)
        for index, message in said.items():
            assert re.search(message, str(ends[index].error)), ends[index].error
        assert all(end.error is None or isinstance(end.error, ProtocolError) for end in ends), ends
        check_results(scene, ends)
        await go_on(scene, 10)

    opened(protocol.open, body, **small(protocol, way))


@WAYS
def test_arguments_are_refused_before_a_byte_moves(protocol: Protocol, way: Way) -> None:
    """And a call that is refused has not happened: neither its event nor the rank's turn is used up."""

    async def body(scene: Scene) -> None:
        def memories() -> list[bytes]:
            own = [scene.pod.memory(node) for node in scene.pod.memories.plans]
            return [bytes(memory.buffer) for memory in (*own, *(rank.die.memory for rank in scene.ranks))]

        before, die = memories(), scene.ranks[0].die
        for call, error, message in scene.refused():
            with pytest.raises(error, match=message):
                await die.spawn(call())
            assert memories() == before, message
        assert die.clock.now == 0
        check_all(scene, await run(scene, 2), 2, 2)

    opened(protocol.open, body, **small(protocol, way))


@WAYS
def test_those_who_have_failed_are_reset_and_go_on_without_a_lost_rank(protocol: Protocol, way: Way) -> None:
    async def body(index: int, scene: Scene) -> None:
        ends = await run(scene, 1, order=others(scene, index))
        for rank, end in zip(scene.ranks, ends, strict=True):
            if end.error is not None and protocol.failed is not None:
                with pytest.raises(ProtocolError, match=protocol.failed):
                    await rank.die.spawn(rank.call(0, 2))
        assert (scene.without is None) == ("reset" in protocol.notes)
        left = scene if scene.without is None else scene.without(index)
        await go_on(left, 2)
        await go_on(left, 20)

    for index, _ in deaths(protocol, way):
        opened(protocol.open, partial(body, index), index, **small(protocol, way))


# ---- the table --------------------------------------------------------------------------------------


def test_the_table_is_the_documents() -> None:
    """A row a protocol and a column a property; a cell with a note says what is promised instead."""
    assert {row.small.get("way", "pull") for row in PROTOCOLS if row.open is exchange} == {*EXCHANGES}
    assert {each for protocol in PROTOCOLS for each in protocol.notes} <= set(PROPERTIES)
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    assert "\n".join(table()) in page
