"""Preempted sequences come back when they can go on, not before, and alone they always can."""

import asyncio

import msgspec
import pytest

from tests.engine.remains import settled
from tests.engine.tools import delay_steps, make_scheduler, play, short, tokens_of
from tests.tools import one_die
from xdeepserve import SamplingParams
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

FEW_BLOCKS = [
    "max_model_len=160",
    "cache.num_blocks=12",
    "cache.prefix=false",
    "scheduler.max_num_batched_tokens=64",
]
SWAP = ["cache.preemption=swap", "cache.num_host_blocks=24"]
JOBS = [(70, 6), (70, 6), (70, 6), (70, 6), (130, 4)]  # tokens of the prompt, new ones


@pytest.mark.parametrize("more", [(), ("mtp=2",), ("transfer=layer", "mtp=1")])
async def test_with_a_slow_decode_prefill_swaps_nobody_in_who_cannot_go_on(
    tiny: TinyCheckpoint, more: tuple[str, ...]
) -> None:
    prompts = [[i + 5] * length for i, (length, _) in enumerate(JOBS)]
    params = [SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True) for _, new in JOBS]
    wanted = [o.outputs[0].token_ids for o in one_die(prompts, params)]
    settings = ["prefill.dies=1", "decode.dies=1", *FEW_BLOCKS, *SWAP, *more]
    engine = build_engine(tiny, "pd", "int8", overrides=settings)
    await engine.start()
    delay_steps(engine, 1, lambda step: 1_000_000_000)
    requests = [engine.submit(*job, str(i)) for i, job in enumerate(zip(prompts, params, strict=True))]
    readers = [asyncio.ensure_future(tokens_of(request)) for request in requests]
    while not all(reader.done() for reader in readers):
        assert engine.stats().num_preemptions <= len(JOBS), "in and out again"
        await asyncio.sleep(0)
    assert [reader.result() for reader in readers] == wanted
    assert 0 < engine.stats().num_preemptions <= len(JOBS)
    await settled(engine)
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0
    await engine.stop()


@pytest.mark.parametrize("mtp", [0, 2])
def test_a_swapped_prompt_waits_for_the_blocks_of_its_next_chunk(mtp: int) -> None:
    """The other's blocks are held until they have been sent; then the one alone needs all there are."""
    steps = make_scheduler(64, 4, 9, mtp, 9, swap=True).steps
    scheduler = Scheduler(msgspec.structs.replace(steps, role="prefill"), RTC(9, 16, 9))
    under_way: list[int] = []
    short(scheduler, 0, 60, 4)
    play(scheduler, under_way)
    assert list(scheduler.handover.sending) == [0]
    long = short(scheduler, 1, 9 * 16 - 2, 2)
    for _ in range(50):
        play(scheduler, under_way)
    assert scheduler.preemption.count == 1
    assert scheduler.places.swapped == [long]
    scheduler.handover.release(0)
    for _ in range(5):
        play(scheduler, under_way)
    assert scheduler.preemption.count == 1
    assert list(scheduler.handover.sending) == [1]
    scheduler.handover.release(1)
    scheduler.check_integrity()
    assert scheduler.rtc.num_available == 9
