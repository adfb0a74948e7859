"""The engine's life: aborts free blocks at once, a lost die ends every request with the reason."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from xdeepserve.engine.die import sampler
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import DeadlineError, RequestError, XDeepServeError
from xdeepserve.hw.clock import Waiting
from xdeepserve.llm import LLM, build_engine
from xdeepserve.model.presets import TinyCheckpoint

LONG = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def engine(tiny: TinyCheckpoint) -> AsyncIterator[Engine]:
    made = build_engine(tiny, "colocated", "int8", overrides=["dies=2"])
    await made.start()
    yield made
    await made.stop()
    made.check_integrity()
    assert made.stats().kv_cache_usage == 0.0


async def test_blocks_that_are_only_being_saved_are_waited_for(tiny: TinyCheckpoint) -> None:
    """A prompt needs all of them, and nothing else is under way: that is no deadlock."""
    tight = ["dies=2", "max_model_len=96", "cache.num_blocks=6", "cache.num_host_blocks=24"]
    engine = build_engine(tiny, "colocated", "int8", overrides=tight)
    await engine.start()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[7] * 40, list(range(60)), *([90 + i % 2] * 80 for i in range(6))]
    requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(prompts)]
    for request in requests:
        assert sum([len(delta.token_ids) async for delta in request]) == 8
    await engine.stop()


async def test_abort_frees_blocks_at_once(engine: Engine) -> None:
    request = engine.submit([1, 2, 3], LONG, "a")
    deltas = aiter(request)
    for _ in range(3):
        await anext(deltas)
    assert engine.stats().kv_cache_usage > 0
    request.abort()
    assert engine.stats().kv_cache_usage == 0
    assert engine.stats().num_running == 0
    rest = [delta async for delta in deltas]
    assert rest[-1].finish_reason == "abort"
    request.abort()


@pytest.mark.parametrize("deployment", ["colocated", "moe-attention"])
async def test_a_reader_that_is_slow_holds_up_nobody(tiny: TinyCheckpoint, deployment: str) -> None:
    """What comes out waits in its request's own queue: neither its own tokens nor another's come later."""
    flows = {"colocated": ["dies=2"], "moe-attention": ["attention.domains=1", "dataflow=true"]}

    async def times(*order: int) -> list[list[int]]:
        """When each request has its tokens, if they are read one after the other."""
        engine = build_engine(tiny, deployment, "int8", overrides=[*flows[deployment], "max_model_len=64"])
        await engine.start()
        requests = [engine.submit([i, 2, 3], SHORT, f"{i}") for i in range(3)]
        found: dict[int, list[int]] = {}
        for i in order:
            found[i] = [delta.at_ns async for delta in requests[i]]
        await engine.stop()
        return [found[i] for i in range(3)]

    assert await times(2, 1, 0) == await times(0, 1, 2)


async def test_leaving_the_iteration_aborts(engine: Engine) -> None:
    async def reader() -> None:
        async for _ in engine.submit([1], LONG, "b"):
            pass

    task = asyncio.create_task(reader())
    while engine.stats().num_running == 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.stats().kv_cache_usage == 0


async def test_abort_before_the_first_step_and_of_waiting_ones(engine: Engine) -> None:
    requests = [engine.submit([i], LONG, f"w{i}") for i in range(50)]
    for request in requests[::2]:
        request.abort()
    await asyncio.sleep(0.05)
    for request in requests:
        request.abort()
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert engine.stats().kv_cache_usage == 0


async def test_aborts_do_not_change_the_bits_of_others(engine: Engine) -> None:
    async def tokens(request) -> list[int]:
        return [token async for delta in request for token in delta.token_ids]

    alone = await tokens(engine.submit([7, 8, 9], SHORT, "alone"))
    noise = [engine.submit([i, i + 1], LONG, f"n{i}") for i in range(6)]
    kept = engine.submit([7, 8, 9], SHORT, "kept")
    deltas = aiter(kept)
    first = await anext(deltas)
    for request in noise[:3]:
        request.abort()
    rest = [token async for delta in deltas for token in delta.token_ids]
    for request in noise:
        request.abort()
    assert first.token_ids + rest == alone


async def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    request = engine.submit([1], LONG, "same")
    with pytest.raises(RequestError, match="in use"):
        engine.submit([1], LONG, "same")
    request.abort()
    engine.submit([1], LONG, "same").abort()


async def test_idle_engine_wakes_for_new_work(engine: Engine) -> None:
    for i in range(3):
        deltas = [delta async for delta in engine.submit([i], SHORT, f"r{i}")]
        assert sum(len(delta.token_ids) for delta in deltas) == 5
        await asyncio.sleep(0.01)
        assert engine.is_healthy()


async def test_a_lost_die_ends_every_request_with_the_reason(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2"])
    await engine.start()
    requests = [engine.submit([i], LONG, f"r{i}") for i in range(4)]
    seen = aiter(requests[0])
    await anext(seen)

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("the die caught fire")

    engine.je.tes[0].executors[1].step = broken  # type: ignore[method-assign]
    for request in requests:
        with pytest.raises(XDeepServeError, match="caught fire"):
            async for _ in request:
                pass
    assert not engine.is_healthy()
    with pytest.raises(XDeepServeError, match="caught fire"):
        engine.submit([1], SHORT, "late")
    assert engine.stats().kv_cache_usage == 0
    await engine.stop()


async def test_a_silent_rank_is_named_at_a_deadline_in_virtual_time(tiny: TinyCheckpoint) -> None:
    """A die that never takes part in dispatch: its peer's error names op, rank, peer, field and event IDs."""
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2"])
    await engine.start()
    clock = engine.plan.pod.clock

    async def silent(*_: object) -> None:
        never = clock.waiter(lambda: Waiting("nap", 1, "-", "-", "-", "-"))
        await clock.wait(never, idle=True)

    engine.je.tes[0].executors[1].step = silent  # type: ignore[method-assign]
    with pytest.raises(DeadlineError) as caught:
        async for _ in engine.submit([1], SHORT, "r"):
            pass
    error = caught.value
    assert (error.op, error.rank, error.peer, error.field) == ("dispatch", 0, (1,), "event ID")
    await engine.stop()


def test_logits_that_are_no_numbers_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(out: np.ndarray, *args: object) -> None:
        out[:] = -1

    monkeypatch.setattr(sampler, "sample", sample)
    with (
        LLM("tiny-random", "monolithic", overrides=["max_model_len=32"]) as llm,
        pytest.raises(XDeepServeError, match="rank 0: no token for position 3 of a sequence: logits are not"),
    ):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
