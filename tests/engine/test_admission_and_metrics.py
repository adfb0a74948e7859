"""Who is let in and in which order, and what is recorded of it in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.stats import StepStats, summed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.serving.request import OutputDelta, Parse
from xdeepserve.errors import DeploymentError, InputError, OverloadedError, RequestError, XDeepServeError
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

LONG = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def small(tiny: TinyCheckpoint) -> AsyncIterator[Engine]:
    """Two sequences at a time, and three that wait."""
    overrides = ["scheduler.max_num_seqs=2", "scheduler.max_waiting=3"]
    made = build_engine(tiny, "monolithic", "int8", overrides=overrides)
    await made.start()
    yield made
    await made.stop()
    made.check_integrity()
    assert made.stats().kv_cache_usage == 0.0


async def test_the_queue_is_bounded_and_opens_again(small: Engine) -> None:
    two = SamplingParams(max_tokens=1000, ignore_eos=True, n=2)
    requests = [small.submit([i], LONG, f"r{i}") for i in range(3)]
    requests.append(small.submit([3], two, "r3"))
    for params in (LONG, two):
        with pytest.raises(OverloadedError, match="5 sequences, 5 at most"):
            small.submit([9], params, "late")
    requests[0].abort()
    requests.append(small.submit([4], LONG, "late"))
    with pytest.raises(OverloadedError):
        small.submit([9], SHORT, "later")
    for request in requests:
        request.abort()
    assert [d async for d in small.submit([9], SHORT, "later")][-1].finish_reason == "length"


async def test_a_refused_request_changes_nothing(small: Engine) -> None:
    """Not even the random numbers of the unseeded requests after it."""
    unseeded = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    seeded = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
    fillers = [small.submit([i], seeded, f"r{i}") for i in range(5)]
    with pytest.raises(OverloadedError):
        small.submit([9], unseeded, "late")
    for request in fillers:
        request.abort()
    tokens = [t async for delta in small.submit([9], unseeded, "a") for t in delta.token_ids]
    with LLM("tiny-random") as llm:
        assert llm.generate([[9]], unseeded)[0].outputs[0].token_ids == tokens


async def test_who_finds_an_empty_engine_arrives_when_the_pod_rests(tiny: TinyCheckpoint) -> None:
    """After a request that was given up in the middle of a step, the rest of the step runs first."""
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2"])
    await engine.start()
    clock = engine.plan.pod.clock
    arrivals = set()
    for turns in range(12):
        left = engine.submit([1, 2, 3], LONG, f"left {turns}")
        begin = clock.now
        while left.outputs[0].finish_reason is None and clock.now == begin:
            await asyncio.sleep(0)
        left.abort()
        assert not clock.rests
        for _ in range(turns):
            await asyncio.sleep(0)
        both = [engine.submit([i], SHORT, f"{turns}-{i}") for i in range(2)]
        assert engine.stats().num_waiting == 2
        both[0].abort()  # perhaps before it has arrived
        assert [d.finish_reason async for d in both[0]] == ["abort"]
        deltas = [d async for d in both[1]]
        assert deltas[-1].finish_reason == "length"
        await engine.settle()
        arrivals.add((both[1].sequences[0].arrival_ns - begin, clock.now - begin))
    assert len(arrivals) == 1
    assert clock.rests
    await engine.stop()
    engine.check_integrity()


async def test_a_request_that_nobody_works_on_ends_with_an_error(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever: the pod rests, so that nothing can happen to it any more."""
    assert [d.finish_reason async for d in small.submit([1], SHORT, "first")][-1] == "length"
    monkeypatch.setattr(small.je, "submit", lambda sequences: None)
    forgotten = small.submit([1], SHORT, "forgotten")
    with pytest.raises(XDeepServeError, match=r"forgotten has not ended \(no task executor has it\)"):
        async for _ in forgotten:
            pass
    assert not small.is_healthy()


async def test_more_choices_than_the_engine_ever_holds_is_no_overload(small: Engine) -> None:
    with pytest.raises(RequestError, match="holds at most 5") as caught:
        small.submit([1], SamplingParams(n=6), "wide")
    assert not isinstance(caught.value, OverloadedError)
    assert caught.value.param == "n"


def test_an_overload_is_the_callers_fault_and_a_negative_bound_is_refused(tiny: TinyCheckpoint) -> None:
    assert issubclass(OverloadedError, InputError)
    with pytest.raises(DeploymentError, match="max_waiting must be 0 or more"):
        build_engine(tiny, "monolithic", "int8", overrides=["scheduler.max_waiting=-1"])


def test_a_batch_of_the_facade_may_be_of_any_length(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, overrides=["scheduler.max_num_seqs=2", "scheduler.max_waiting=0"]) as llm:
        assert len(llm.generate([[i] for i in range(9)], SHORT)) == 9


async def test_lower_priority_values_go_first(small: Engine) -> None:
    order: list[str] = []

    async def read(request_id: str, priority: int) -> None:
        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, priority=priority)
        async for delta in small.submit([1], params, request_id):
            if delta.finish_reason is not None:
                order.append(request_id)

    ranks = {"a": 0, "b": 0, "late": 5, "soon": -5, "middle": 0}
    await asyncio.gather(*(read(name, priority) for name, priority in ranks.items()))
    assert order == ["soon", "a", "b", "middle", "late"]


async def test_records_in_virtual_time(small: Engine) -> None:
    clock, begun = small.plan.pod.clock, list[tuple[str, int, int]]()

    async def read(name: str, n: int) -> list[OutputDelta]:
        params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, n=n)
        request = small.submit(
            [1, 2], params, name, on_scheduled=lambda choice: begun.append((name, choice, clock.now))
        )
        return [delta async for delta in request]

    before = clock.now
    first, second, third = await asyncio.gather(read("x", 1), read("y", 2), read("z", 1))
    assert [b[:2] for b in begun] == [("x", 0), ("y", 0), ("y", 1), ("z", 0)]
    for name, deltas in (("x", first), ("y", second), ("z", third)):
        for choice in {delta.index for delta in deltas}:
            own = [delta for delta in deltas if delta.index == choice]
            assert [delta.metrics for delta in own[:-1]] == [None] * (len(own) - 1)
            record = own[-1].metrics
            assert record is not None
            times = [delta.at_ns for delta in own]
            assert times == sorted(set(times))
            assert record.arrival_ns == before
            assert record.scheduled_ns == next(b[2] for b in begun if b[:2] == (name, choice))
            assert (record.first_token_ns, record.last_token_ns) == (times[0], times[-1])
            assert (record.num_tokens, record.num_steps, record.tokens_per_step) == (6, 6, 1.0)
            assert record.tpot_ns == (times[-1] - times[0]) / 5
    assert first[-1].metrics is not None
    assert first[-1].metrics.queue_ns == 0
    assert third[-1].metrics is not None
    assert third[-1].metrics.queue_ns is not None
    assert third[-1].metrics.queue_ns > 0


async def test_an_aborted_request_has_a_record_too(small: Engine) -> None:
    running = small.submit([1], LONG, "running")
    deltas = aiter(running)
    await anext(deltas)
    waiting = [small.submit([1], LONG, f"w{i}") for i in range(2)]
    for request in (running, *waiting):
        request.abort()
    [*_, last] = [delta async for delta in deltas]
    assert last.metrics is not None
    assert last.metrics.num_tokens >= 1
    [only] = [delta async for delta in waiting[1]]
    assert only.metrics == RequestMetrics(arrival_ns=only.at_ns)
    assert (
        only.metrics.queue_ns is only.metrics.ttft_ns is only.metrics.tpot_ns is only.metrics.e2e_ns is None
    )
    assert only.metrics.tokens_per_step is None


def test_the_facade_returns_records_that_repeat(tiny: TinyCheckpoint) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, n=2)
    runs = []
    for _ in range(2):
        with LLM(tiny) as llm:
            outputs = llm.generate([list(range(40)), list(range(40))], params)
            outputs += llm.generate([list(range(40))], params)
            runs.append([output.metrics for output in outputs])
    assert runs[0] == runs[1]
    *_, again = runs[0]
    assert again is not None
    assert again.num_tokens == 8
    assert again.num_cached_tokens == 32  # of the prompt, which both choices share
    assert again.ttft_ns is not None
    assert again.e2e_ns is not None
    assert 0 < again.ttft_ns < again.e2e_ns


def test_mtp_is_counted_by_position(tiny: TinyCheckpoint) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(tiny, overrides=["mtp=1"]) as llm:
        outputs = llm.generate([[5, 6, 7], list(range(40))], params)
        stats = llm.engine.stats()
    records = [output.metrics for output in outputs if output.metrics is not None]
    assert stats.num_drafted == (sum(record.num_drafts for record in records),)
    assert stats.num_accepted == (sum(record.num_accepted for record in records),)
    assert stats.num_drafted[0] > stats.num_accepted[0]
    for record in records:
        # The last step may have accepted a draft beyond the length limit.
        assert record.num_tokens <= record.num_steps + record.num_accepted <= record.num_tokens + 1


def test_steps_are_counted_by_their_rows(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, overrides=["scheduler.max_num_batched_tokens=16"]) as llm:
        llm.generate([list(range(40))], SamplingParams(max_tokens=3, ignore_eos=True))
        assert llm.engine.stats().rows_per_step == {16: 2, 8: 1, 1: 2}
        assert llm.engine.stats().virtual_ns == llm.virtual_ns > 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=20))
def test_step_stats(drafts: list[tuple[int, int]]) -> None:
    stats, drafts = StepStats(), [(k, min(k, accepted)) for k, accepted in drafts]
    for k, accepted in drafts:
        stats.count_drafts(k, accepted)
    deepest = max((k for k, _ in drafts), default=0)
    assert stats.num_drafted == [sum(k > i for k, _ in drafts) for i in range(deepest)]
    assert stats.num_accepted == [sum(a > i for _, a in drafts) for i in range(deepest)]
    assert summed([stats.num_drafted, [1]]) == tuple(
        n + (i == 0) for i, n in enumerate(stats.num_drafted or [0])
    )


async def test_the_engine_parses_when_asked(tiny: TinyCheckpoint) -> None:
    """The same tokens with and without: <think> is token 261 of tiny, and the prompt opens it here."""
    engine = build_engine(tiny, "monolithic", "int8")
    await engine.start()
    assert engine.formats.reasoning
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    plain = [delta async for delta in engine.submit([9, 261], params, "plain")]
    parsed = [delta async for delta in engine.submit([9, 261], params, "parsed", parse=Parse(reasoning=True))]
    await engine.stop()
    assert "".join(d.text for d in plain) == "".join(d.reasoning for d in parsed) != ""
    assert [d.token_ids for d in plain] == [d.token_ids for d in parsed]
    assert "".join(d.text for d in parsed) == "".join(d.reasoning for d in plain) == ""


def test_tokens_per_step_leave_out_the_step_without_drafts() -> None:
    assert RequestMetrics(arrival_ns=0, num_tokens=5, num_steps=3).tokens_per_step == 2.0
    assert RequestMetrics(arrival_ns=0, num_tokens=1, num_steps=1).tokens_per_step is None
