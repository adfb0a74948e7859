"""Tools of the engine's tests: schedulers without dies, tasks that are slowed down, tokens of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xdeepserve import LLM
from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp.preemption import VictimPolicy, last
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.engine.dp.sequence import OrderPolicy, SampledToken, Sequence, by_arrival
from xdeepserve.engine.dp.step import PlannedStep, SeqResult
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import XDeepServeError


def loads(num_blocks: int, num_tokens: int) -> bool:
    """The rule that cached blocks are always loaded from the host."""
    return True


def make_scheduler(
    max_tokens: int,
    max_seqs: int,
    num_blocks: int,
    mtp: int = 0,
    host: int = 0,
    swap: bool = False,
    victim: VictimPolicy = last,
) -> Scheduler:
    steps = StepSizes(
        max_model_len=num_blocks * 16,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_part=max_tokens,
        max_logit_rows=max_tokens,
        mtp=mtp,
        preempts_by_swap=swap,
    )
    return Scheduler(steps, RTC(num_blocks, 16, host), loads if host else None, victim=victim)


def token(seq: Sequence, position: int) -> int:
    """What the model says at a position: a function of the sequence and nothing else."""
    return seq.seq_id * 1000 + position


def play_die(step: PlannedStep, num_drafts: int = 0) -> list[SeqResult]:
    """What a die would write; two of three drafts are right."""
    results = []
    for share in step.shares:
        seq, result = share.seq, SeqResult()
        if share.ends:
            end = len(seq.token_ids)
            result.rows.append(SampledToken(token(seq, end), False, None))
            for draft in seq.drafts[: share.num_drafts]:
                if draft != token(seq, end + result.num_accepted):
                    break
                result.num_accepted += 1
                result.rows.append(SampledToken(token(seq, end + result.num_accepted), False, None))
            following = end + 1 + result.num_accepted
            places = range(following, following + num_drafts)
            result.drafts = [token(seq, place) if place % 3 else 0 for place in places]
        results.append(result)
    return results


def make_sequence(
    seq_id: int,
    num_prompt: int,
    max_tokens: int,
    cache_key: str | None = None,
    order: OrderPolicy = by_arrival,
) -> tuple[Sequence, list[int]]:
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
        params=SamplingParams(max_tokens=max_tokens, prompt_cache_key=cache_key),
        seed=0,
        on_tokens=on_tokens,
        order=order,
    )
    return seq, received


def short(scheduler: Scheduler, number: int, num_prompt: int, num_new: int) -> Sequence:
    """One more request, whose prompt is like no other's."""
    seq, _ = make_sequence(number, num_prompt, num_new)
    seq.token_ids = [number * 1000 + 7 * i for i in range(num_prompt)]
    scheduler.add(seq)
    return seq


def play(scheduler: Scheduler, under_way: list[int]) -> None:
    """A step; what it has sent to the other tier or asked for arrives by the next one."""
    for ticket in under_way:
        scheduler.finish_transfer(ticket)
    step = scheduler.schedule()
    under_way[:] = [ticket for ticket, _ in step.transfers]
    under_way += [scheduler.places.ticket_of(seq.seq_id) for seq in step.receives]
    if step.shares:
        scheduler.finish_step(step, play_die(step))
    scheduler.check_integrity()


def delay_steps(engine: Engine, te: int, delay_ns: Callable[[int], int], num_dies: int | None = None) -> None:
    """Make every step of a TE's dies take longer, or of the first ones."""
    for executor in engine.je.tes[te].executors[:num_dies]:
        step, clock = executor.step, executor.die.clock

        async def slow(plan: StepPlan, step: Any = step, clock: Any = clock) -> None:
            await clock.sleep(delay_ns(plan.step))
            await step(plan)

        executor.step = slow  # type: ignore[method-assign]


async def tokens_of(request: Any) -> list[int]:
    return [t async for delta in request for t in delta.token_ids]


def tokens_and_errors(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """For each request its choices' tokens and logits, or why it failed."""

    async def serve() -> list[Any]:
        requests = [
            llm.engine.submit(*each, f"asked {number}", "sampled", is_bounded=False)
            for number, each in enumerate(asked)
        ]
        results: list[Any] = []
        for request in requests:
            try:
                tokens = [(delta.index, *delta.token_ids) async for delta in request]
                results.append((sorted(tokens), [np.stack(o.logits).tobytes() for o in request.outputs]))
            except XDeepServeError as error:
                results.append(str(error))
        await llm.engine.settle()
        return results

    return llm.run(serve())
