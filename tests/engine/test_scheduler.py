"""The scheduler alone, with a die that is played by the test: nothing lost, duplicated, starved or leaked."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tools import make_scheduler, make_sequence, play, play_die, short, token
from xdeepserve.engine.dp.preemption import VictimPolicy, last, least_computed
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.engine.dp.sequence import OrderPolicy, Sequence, by_arrival, shortest_first
from xdeepserve.engine.dp.step import PlannedStep, make_plan
from xdeepserve.engine.plans import BlockCopy


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(12, 40),
    st.integers(1, 4),
    st.integers(7, 12),
    st.integers(0, 2),
    st.dictionaries(st.integers(0, 11), st.integers(0, 60), max_size=4),
    st.sampled_from([(0, False), (9, False), (9, True), (40, True)]),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=12, max_size=12),
    st.sampled_from([last, least_computed]),
    st.sampled_from([by_arrival, shortest_first]),
)
def test_every_sequence_gets_exactly_its_tokens(
    jobs: list[tuple[int, int, int]],
    max_tokens: int,
    max_seqs: int,
    num_blocks: int,
    num_drafts: int,
    cancel_at: dict[int, int],
    host: tuple[int, bool],
    delay: int,
    has_forks: bool,
    cache_keys: list[str | None],
    victim: VictimPolicy,
    order: OrderPolicy,
) -> None:
    scheduler = make_scheduler(max_tokens, max_seqs, num_blocks, num_drafts, *host, victim)
    scheduler.rtc.index.max_ids = 2
    in_flight: dict[int, int] = {}  # ticket -> the step after which it ends
    made = []
    for seq_id, (num_prompt, new, arrival) in enumerate(jobs):
        if has_forks and seq_id % 2 == 1:
            num_prompt = jobs[seq_id - 1][0]
        new = min(new, num_blocks * 16 - num_prompt)
        made.append((arrival, *make_sequence(seq_id, num_prompt, new, cache_keys[seq_id], order), new))
    for step_idx in range(1500):
        for arrival, seq, _, _ in made:
            if arrival == step_idx:
                pairs_up = has_forks and seq.seq_id % 2 == 1
                leader = made[seq.seq_id - 1][1] if pairs_up else None
                is_equal = leader is not None and leader.token_ids[: leader.num_prompt] == seq.token_ids
                scheduler.add(seq, leader if is_equal else None)
        if step_idx > 30 and not scheduler.places.has_work:
            break
        planned = scheduler.schedule()
        step = planned.shares
        in_flight |= {ticket: step_idx + delay for ticket, _ in planned.transfers}
        assert step or in_flight or not scheduler.places.has_work, "work is waiting but nothing was scheduled"
        rows = sum(share.num_tokens + share.num_drafts for share in step)
        assert rows <= max_tokens
        assert len(step) <= max_seqs
        plan = make_plan(step_idx, step, 16)
        assert plan.num_tokens == rows
        assert len(set(plan.slots)) == rows, "two rows write the same KV slot"
        scheduler.check_integrity()
        for _, seq, _, _ in made:
            if cancel_at.get(seq.seq_id) == step_idx and seq in scheduler.places.sequences():
                scheduler.remove(seq)  # while the step runs
                scheduler.check_integrity()
        scheduler.finish_step(planned, play_die(planned, num_drafts))
        scheduler.check_integrity()
        for ticket in [ticket for ticket, end in in_flight.items() if end <= step_idx]:
            del in_flight[ticket]
            scheduler.finish_transfer(ticket)
            scheduler.check_integrity()
    else:
        raise AssertionError("the scheduler did not finish")
    for ticket in in_flight:
        scheduler.finish_transfer(ticket)
    assert scheduler.rtc.num_available == num_blocks
    assert scheduler.rtc.num_host_available == host[0]
    for _, seq, received, new in made:
        assert seq.is_finished
        assert received == [token(seq, seq.num_prompt + i) for i in range(len(received))]
        if seq.seq_id not in cancel_at:
            # An accepted draft may bring tokens past the end; the output handler drops it.
            assert new <= len(received) <= new + num_drafts


def test_a_long_prompt_goes_in_chunks_and_samples_once() -> None:
    scheduler = make_scheduler(max_tokens=16, max_seqs=2, num_blocks=8)
    seq, received = make_sequence(0, 40, 1)
    scheduler.add(seq)
    shares = []
    while scheduler.places.has_work:
        step = scheduler.schedule()
        shares.append((step.shares[0].num_tokens, len(step.shares[0].logit_rows)))
        scheduler.finish_step(step, play_die(step))
    assert shares == [(16, 0), (16, 0), (8, 1)]
    assert len(received) == 1


def test_the_last_admitted_gives_up_its_blocks() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=4, num_blocks=4)
    old, _ = make_sequence(0, 30, 30)
    young, received = make_sequence(1, 30, 20)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.places.has_work:
        step = scheduler.schedule()
        scheduler.finish_step(step, play_die(step))
        scheduler.check_integrity()
    assert old.num_preemptions == 0
    assert scheduler.preemption.count == 1
    assert young.num_preemptions == 1
    assert received == [token(young, 30 + i) for i in range(20)]


def run_alone(scheduler: Scheduler, seq: Sequence) -> list[int]:
    """Run one sequence to its end; the number of rows of each step."""
    scheduler.add(seq)
    rows = []
    while scheduler.places.has_work:
        step = scheduler.schedule()
        rows.append(sum(share.num_tokens for share in step.shares))
        scheduler.finish_step(step, play_die(step))
        for ticket, _ in step.transfers:
            scheduler.finish_transfer(ticket)
    return rows


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=2, num_blocks=8)
    assert run_alone(scheduler, make_sequence(0, 50, 2)[0]) == [50, 1]
    # 3 whole blocks of 16 are found; without them 50 rows would be computed
    again = make_sequence(1, 50, 2)[0]
    assert run_alone(scheduler, again) == [2, 1]
    assert again.num_cached == 48
    # a prompt that ends with a cached block still computes its last token
    assert run_alone(scheduler, make_sequence(2, 48, 1)[0]) == [16]
    assert scheduler.prefixes.num_hits == 48 + 32


def test_a_prefix_comes_back_from_the_host() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=2, num_blocks=8, host=8)
    run_alone(scheduler, make_sequence(0, 50, 1)[0])
    for ticket, _ in scheduler.prefixes.save(10):
        scheduler.finish_transfer(ticket)
    filler, _ = make_sequence(1, 120, 1)
    filler.token_ids = [999] * 120
    run_alone(scheduler, filler)  # pushes the prefix out of HBM
    assert not scheduler.rtc.match_by_prefix_token(range(48)).ready
    again = make_sequence(2, 50, 1)[0]
    assert run_alone(scheduler, again) == [0, 2]
    assert again.num_cached == 48


def loads(step: PlannedStep) -> list[tuple[int, list[BlockCopy]]]:
    """The transfers from host DRAM that begin beside a step, without those that save cached blocks there."""
    return [each for each in step.transfers if each[1][0].src_tier == "host"]


def test_a_named_prefix_is_fetched_while_its_request_waits() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=1, num_blocks=12, host=8)
    rtc, prefixes = scheduler.rtc, scheduler.prefixes
    first = make_sequence(0, 50, 1, "talk")[0]
    run_alone(scheduler, first)
    for ticket, _ in prefixes.save(10):
        scheduler.finish_transfer(ticket)
    filler = make_sequence(1, 186, 1)[0]
    filler.token_ids = [999] * 186
    run_alone(scheduler, filler)  # pushes the prefix out of HBM
    busy, _ = make_sequence(2, 20, 20)
    busy.token_ids = [555] * 20
    turn, received = make_sequence(3, 50, 2, "talk")
    scheduler.add(busy)
    scheduler.add(turn)
    step = scheduler.schedule()
    [(ticket, copies)] = loads(step)
    assert [share.seq for share in step.shares] == [busy], "the only place is taken"
    assert len(copies) == 3
    assert (scheduler.places.tickets, scheduler.places.of(turn), rtc.query_populate(ticket)) == (
        {ticket: turn},
        "loading",
        False,
    )
    assert (prefixes.num_id_queries, prefixes.num_id_hits, prefixes.num_prefetched) == (2, 1, 3)
    scheduler.check_integrity()
    scheduler.finish_step(step, play_die(step))
    scheduler.finish_transfer(ticket)
    assert rtc.query_populate(ticket)
    step = scheduler.schedule()
    assert scheduler.places.waiting == [turn]
    assert not loads(step), "once is enough"
    while scheduler.places.has_work:
        scheduler.finish_step(step, play_die(step))
        step = scheduler.schedule()
    assert turn.num_cached == 48
    assert received == [token(turn, 50), token(turn, 51)]
    scheduler.check_integrity()


def test_a_request_that_is_aborted_while_its_prefix_comes_leaves_nothing() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=1, num_blocks=8, host=8)
    run_alone(scheduler, make_sequence(0, 50, 1, "talk")[0])
    for ticket, _ in scheduler.prefixes.save(10):
        scheduler.finish_transfer(ticket)
    filler = make_sequence(1, 120, 1)[0]
    filler.token_ids = [999] * 120
    run_alone(scheduler, filler)
    turn = make_sequence(2, 50, 1, "talk")[0]
    scheduler.add(turn)
    step = scheduler.schedule()
    assert len(loads(step)) == 1
    scheduler.remove(turn)
    assert not scheduler.places.has_work
    scheduler.check_integrity()
    for ticket, _ in step.transfers:
        scheduler.finish_transfer(ticket)
    scheduler.check_integrity()
    assert scheduler.rtc.num_available == 8
    assert run_alone(scheduler, make_sequence(3, 50, 1, "talk")[0]) == [2], "others find it"


def test_further_choices_share_the_prompt_and_copy_on_write() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=4, num_blocks=12)
    leader, _ = make_sequence(0, 40, 3)
    other, received = make_sequence(1, 40, 3)
    scheduler.add(leader)
    scheduler.add(other, leader)
    first = scheduler.schedule()
    assert [share.seq for share in first.shares] == [leader]
    scheduler.finish_step(first, play_die(first))
    second = scheduler.schedule()
    assert [(share.seq, share.num_tokens) for share in second.shares] == [(leader, 1), (other, 1)]
    assert other.holding.slots[:2] == leader.holding.slots[:2]
    assert other.holding.slots[2] != leader.holding.slots[2]
    assert len(second.copies) >= 1
    scheduler.check_integrity()
    scheduler.finish_step(second, play_die(second))
    while scheduler.places.has_work:
        step = scheduler.schedule()
        scheduler.finish_step(step, play_die(step))
    assert received == [token(other, 40 + i) for i in range(3)]


def test_priority_goes_first() -> None:
    scheduler = make_scheduler(max_tokens=16, max_seqs=1, num_blocks=8)
    seqs = [make_sequence(i, 4, 1)[0] for i in range(3)]
    seqs[2].priority = -1
    for seq in seqs:
        scheduler.add(seq)
    order = []
    while scheduler.places.has_work:
        step = scheduler.schedule()
        order += [share.seq.seq_id for share in step.shares]
        scheduler.finish_step(step, play_die(step))
    assert order == [2, 0, 1]


@pytest.mark.parametrize("swap", [False, True])
def test_what_was_preempted_is_not_overtaken_for_ever(swap: bool) -> None:
    scheduler = make_scheduler(max_tokens=200, max_seqs=4, num_blocks=12, host=24, swap=swap)
    for number, num_new in enumerate((24, 16)):
        short(scheduler, number, 40, num_new)
    elder = short(scheduler, 2, 60, 60)
    under_way: list[int] = []
    for number in range(3, 300):
        if number > 4 and len(scheduler.places.waiting) < 2:
            short(scheduler, number, 40, 24)
        play(scheduler, under_way)
        if elder.is_finished:
            break
    assert elder.num_preemptions
    assert elder.is_finished


def test_arrivals_from_prefill_do_not_overtake_the_preempted_for_ever() -> None:
    steps = msgspec.structs.replace(make_scheduler(200, 4, 12).steps, role="decode")
    scheduler = Scheduler(steps, RTC(12, 16, 0), None)

    def arrive(number: int, num_prompt: int, num_new: int) -> Sequence:
        seq, _ = make_sequence(number, num_prompt, num_new)
        seq.token_ids = [number * 1000 + 7 * i for i in range(num_prompt)] + [number * 1000 + num_prompt]
        seq.num_computed = num_prompt
        scheduler.handover.arrive(seq)
        return seq

    arrive(0, 40, 24)
    arrive(1, 40, 16)
    elder = arrive(2, 60, 60)
    under_way: list[int] = []
    for number in range(3, 300):
        if number > 5 and len(scheduler.places.arriving) < 2:
            arrive(number, 40, 24)
        play(scheduler, under_way)
        if elder.is_finished:
            break
    assert elder.num_preemptions
    assert elder.is_finished
