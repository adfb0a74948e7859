"""Balancing decisions: equal step times, places respected, long and short apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.engine.balance.dp import (
    LONG_PROMPT,
    Candidate,
    GroupStatus,
    assign_prefill,
    pick_decode,
    prefill_cost,
)


def status(rank: int, places: int = 8, used: int = 0, reserved: int = 0, **more: object) -> GroupStatus:
    return GroupStatus(
        rank=rank,
        num_free_places=places,
        num_sequences=8 - places,
        num_blocks=100,
        num_used_blocks=used,
        num_reserved_blocks=reserved,
        **more,  # type: ignore[arg-type]
    )


@given(
    st.lists(st.integers(1, 6000), max_size=20),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300)), min_size=1, max_size=6),
)
def test_places_are_respected_and_nobody_is_dealt_twice(
    lengths: list[int], groups: list[tuple[int, int]]
) -> None:
    candidates = [Candidate(n) for n in lengths]
    statuses = [status(r, places=p, queued_tokens=q) for r, (p, q) in enumerate(groups)]
    pairs = assign_prefill(candidates, statuses, max_tokens=512)
    assert len({index for index, _ in pairs}) == len(pairs)
    assert [index for index, _ in pairs] == list(range(len(pairs))), "requests are taken in order of arrival"
    for s in statuses:
        assert sum(rank == s.rank for _, rank in pairs) <= s.num_free_places
    if candidates and any(s.num_free_places > 0 and s.queued_tokens < 512 for s in statuses):
        assert pairs, "there was room, but nothing was dealt"


def test_the_dearest_is_placed_first_and_costs_come_out_even() -> None:
    lengths = [100, 100, 100, 100, 400]
    pairs = assign_prefill([Candidate(n) for n in lengths], [status(0), status(1)], 1000)
    loads = [sum(lengths[i] for i, rank in pairs if rank == r) for r in (0, 1)]
    assert sorted(loads) == [400, 400]


def test_what_does_not_fit_in_the_step_waits() -> None:
    pairs = assign_prefill([Candidate(300)] * 5, [status(0), status(1)], 300)
    assert len(pairs) == 2


def test_a_cached_prefix_attracts_its_request() -> None:
    request = Candidate(200, 0, (0, 192))
    assert assign_prefill([request], [status(0), status(1)], 512) == [(0, 1)]
    busy = status(1, queued_cost=1000.0)
    assert assign_prefill([request], [status(0), busy], 512) == [(0, 0)]


def test_long_and_short_prompts_are_kept_apart() -> None:
    long, short = Candidate(LONG_PROMPT), Candidate(10)
    pairs = dict(assign_prefill([long, short, short], [status(0), status(1)], 100_000))
    assert pairs[1] == pairs[2] != pairs[0]
    assert dict(assign_prefill([short], [status(0, has_long=True), status(1, queued_cost=1e9)], 512)) == {
        0: 1
    }
    assert dict(assign_prefill([short], [status(0, has_long=True)], 512)) == {0: 0}


def test_cost_grows_with_the_context() -> None:
    assert prefill_cost(100, 0) < prefill_cost(100, 5000)
    assert prefill_cost(200, 0) > 2 * prefill_cost(100, 0)
    in_chunks = prefill_cost(100, 100) + prefill_cost(100, 0)
    assert in_chunks == pytest.approx(prefill_cost(200, 0))


def test_decode_goes_to_the_lowest_kv_use_with_reservation() -> None:
    assert pick_decode([status(0, used=50), status(1, used=40)]) == 1
    assert pick_decode([status(0, used=50), status(1, used=40, reserved=20)]) == 0
    assert pick_decode([status(0, places=0), status(1, used=90)]) == 1
    assert pick_decode([status(0, places=0)]) is None
    assert pick_decode([status(0, used=80), status(1, used=70, reserved=25)], num_blocks=15) == 0


def test_decode_waits_for_any_group_while_all_are_full() -> None:
    """In the queue of one group it would miss the room that another one gets."""
    full, promised = status(0, used=95), status(1, used=70, num_promised_blocks=25)
    assert pick_decode([full, promised], num_blocks=20, num_now=10) is None
    assert pick_decode([full, status(1, used=70)], num_blocks=20, num_now=10) == 1
    # A reservation that fits nowhere keeps nobody out: most end before they have used theirs.
    assert pick_decode([full, status(1, used=70)], num_blocks=60, num_now=10) == 1
    # An empty group may be filled to the last block; beside others there must be one for growth.
    assert pick_decode([status(0, used=0)], num_blocks=100, num_now=100) == 0
    assert pick_decode([status(0, places=7, used=50)], num_blocks=50, num_now=50) is None
