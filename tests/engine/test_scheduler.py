"""The scheduler alone, with a die that is played by the test: nothing lost, duplicated, starved or leaked."""

from hypothesis import given, settings
from hypothesis import strategies as st

from xdeepserve.engine.deployment import Sizes
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.scheduler import Scheduled, Scheduler, SeqResult, make_plan
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.serving.request import SamplingParams


def make_scheduler(max_tokens: int, max_seqs: int, num_blocks: int, mtp: int = 0) -> Scheduler:
    sizes = Sizes(
        num_dies=1,
        experts_of=(range(0),),
        max_model_len=num_blocks * 16,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_logit_rows=max_tokens,
        block_size=16,
        num_blocks=num_blocks,
        mtp=mtp,
    )
    return Scheduler(sizes, RTC(num_blocks, 16))


def token(seq: Sequence, position: int) -> int:
    """What the model says at a position: a function of the sequence and nothing else."""
    return seq.seq_id * 1000 + position


def play_die(step: list[Scheduled], has_drafts: bool) -> list[SeqResult]:
    """What a die would write; every third draft is right."""
    results = []
    for share in step:
        seq, result = share.seq, SeqResult()
        if share.reaches_end:
            end = len(seq.token_ids)
            result.rows.append(SampledToken(token(seq, end), False, None))
            if share.num_drafts and seq.draft == token(seq, end):
                result.num_accepted = 1
                result.rows.append(SampledToken(token(seq, end + 1), False, None))
            following = end + 1 + result.num_accepted
            if has_drafts:
                result.draft = token(seq, following) if following % 3 == 0 else 0
        results.append(result)
    return results


def make_sequence(seq_id: int, num_prompt: int, max_tokens: int) -> tuple[Sequence, list[int]]:
    received: list[int] = []

    def on_tokens(seq: Sequence, rows: list[SampledToken]) -> bool:
        received.extend(row.token_id for row in rows)
        return len(received) >= max_tokens

    seq = Sequence(
        seq_id=seq_id,
        choice=0,
        token_ids=list(range(num_prompt)),
        num_prompt=num_prompt,
        max_tokens=max_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        on_tokens=on_tokens,
    )
    return seq, received


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=12),
    st.integers(8, 40),
    st.integers(1, 4),
    st.integers(7, 12),
    st.booleans(),
    st.dictionaries(st.integers(0, 11), st.integers(0, 60), max_size=4),
)
def test_every_sequence_gets_exactly_its_tokens(
    jobs: list[tuple[int, int, int]],
    max_tokens: int,
    max_seqs: int,
    num_blocks: int,
    has_drafts: bool,
    cancel_at: dict[int, int],
) -> None:
    scheduler = make_scheduler(max_tokens, max_seqs, num_blocks, mtp=int(has_drafts))
    made = []
    for seq_id, (num_prompt, new, arrival) in enumerate(jobs):
        new = min(new, num_blocks * 16 - num_prompt)
        made.append((arrival, *make_sequence(seq_id, num_prompt, new), new))
    for step_idx in range(5000):
        for arrival, seq, _, _ in made:
            if arrival == step_idx:
                scheduler.add(seq)
        if step_idx > 30 and not scheduler.has_work:
            break
        step = scheduler.schedule()
        assert step or not scheduler.has_work, "work is waiting but nothing was scheduled"
        rows = sum(share.num_tokens + share.num_drafts for share in step)
        assert rows <= max_tokens
        assert len(step) <= max_seqs
        plan = make_plan(step_idx, step, 16)
        assert plan.num_tokens == rows
        assert len(set(plan.slots)) == rows, "two rows write the same KV slot"
        scheduler.check_integrity()
        for _, seq, _, _ in made:
            if cancel_at.get(seq.seq_id) == step_idx and seq in scheduler.sequences():
                scheduler.remove(seq)  # while the step runs
                scheduler.check_integrity()
        scheduler.finish_step(step, play_die(step, has_drafts))
        scheduler.check_integrity()
    else:
        raise AssertionError("the scheduler did not finish")
    assert scheduler.rtc.num_free == num_blocks
    for _, seq, received, new in made:
        assert seq.is_finished
        assert received == [token(seq, seq.num_prompt + i) for i in range(len(received))]
        if seq.seq_id not in cancel_at:
            # An accepted draft may bring one token past the end; the output handler drops it.
            assert new <= len(received) <= new + int(has_drafts)


def test_a_long_prompt_goes_in_chunks_and_samples_once() -> None:
    scheduler = make_scheduler(max_tokens=16, max_seqs=2, num_blocks=8)
    seq, received = make_sequence(0, 40, 1)
    scheduler.add(seq)
    shares = []
    while scheduler.has_work:
        step = scheduler.schedule()
        shares.append((step[0].num_tokens, len(step[0].logit_rows)))
        scheduler.finish_step(step, play_die(step, False))
    assert shares == [(16, 0), (16, 0), (8, 1)]
    assert len(received) == 1


def test_the_last_admitted_gives_up_its_blocks() -> None:
    scheduler = make_scheduler(max_tokens=64, max_seqs=4, num_blocks=4)
    old, _ = make_sequence(0, 30, 30)
    young, received = make_sequence(1, 30, 20)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.finish_step(step, play_die(step, False))
        scheduler.check_integrity()
    assert old.num_preemptions == 0
    assert young.num_preemptions == 1
    assert received == [token(young, 30 + i) for i in range(20)]
