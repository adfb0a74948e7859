"""A sequence is in one place of its DP group and moves by the table; what is not in it is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tools import make_sequence
from xdeepserve.engine.dp.places import ON_TICKET, PLACES, Places
from xdeepserve.engine.job.pd_transfer import TRANSFERS
from xdeepserve.engine.te.life import LIVES
from xdeepserve.errors import ProtocolError, XDeepServeError


def test_every_place_can_be_reached_and_left() -> None:
    reached, pending = {"elsewhere"}, ["elsewhere"]
    while pending:
        place = pending.pop()
        found = {target for (origin, _), target in PLACES.items() if origin == place}
        pending += found - reached
        reached |= found
    assert reached == {origin for origin, _ in PLACES} | set(PLACES.values())
    assert all(any(origin == place for origin, _ in PLACES) for place in reached)


def test_a_te_ends_from_every_state() -> None:
    ends = {"gone"}
    while more := {life for (life, _), target in LIVES.items() if target in ends} - ends:
        ends |= more
    assert ends == {life for life, _ in LIVES} | set(LIVES.values())


def test_a_transfer_ends_released_from_every_stage() -> None:
    ends = {"released"}
    while more := {stage for (stage, _), target in TRANSFERS.items() if target in ends} - ends:
        ends |= more
    assert ends == {stage for stage, _ in TRANSFERS} | set(TRANSFERS.values())


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(sorted({cause for _, cause in PLACES}))), max_size=80
    )
)
def test_moves_follow_the_table_and_the_lists_agree(moves: list[tuple[int, str]]) -> None:
    places, tickets = Places(), 0
    seqs = [make_sequence(seq_id, 4, 4)[0] for seq_id in range(4)]
    for index, cause in moves:
        seq, place, tickets = seqs[index], places.of(seqs[index]), tickets + 1
        target = PLACES.get((place, cause))
        if target is None:
            with pytest.raises(ProtocolError, match=f"sequence {index} cannot {cause}: it is {place}"):
                places.move(seq, cause, tickets)
            target = place
        else:
            places.move(seq, cause, tickets)
        assert places.of(seq) == target
        if target in ON_TICKET:
            assert places.tickets[places.ticket_of(seq.seq_id)] is seq
        places.check_integrity()
    assert places.waiting == sorted(places.waiting, key=lambda seq: seq.rank)


def test_a_sequence_moved_by_hand_is_noticed() -> None:
    places = Places()
    seq, _ = make_sequence(7, 4, 4)
    places.move(seq, "add")
    places.running.append(places.waiting.pop())
    with pytest.raises(XDeepServeError, match=r"places: sequences are in \{7: 'running'\}"):
        places.check_integrity()
    places.waiting.append(places.running[0])
    with pytest.raises(XDeepServeError, match="places"):
        places.check_integrity()
