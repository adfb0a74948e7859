"""Random histories of requests, small enough to be run twice: for what must not depend on the event loop."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from xdeepserve import SamplingParams
from xdeepserve.chaos.draw import APART, SMALL, TES
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.history import History

DEPLOYMENTS: list[tuple[str, tuple[str, ...]]] = [
    ("monolithic", ()),
    ("monolithic", ("execution.overlap=true", "mtp=1")),
    ("monolithic", ("cache.num_blocks=8", "cache.num_host_blocks=8", "cache.preemption=swap")),
    ("colocated", ("dies=2", "mtp=1")),
    ("colocated", ("dies=2", "execution.overlap=true", "scheduler.dispatch=two-level")),
    ("colocated", ("dies=2", "experts.redundant_slots=1", "experts.balance_interval=0.001")),
    ("pd", TES),
    ("pd", (*TES, "transfer=layer", "execution.decode.overlap=true")),
    ("moe-attention", APART),
    ("moe-attention", (*APART, "dataflow=true", "mtp=1")),
    ("transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", "attention.microbatches=1")),
]


def batches(seed: int) -> tuple[list[History], dict[int, int]]:
    """Batches of one pod, one after the other, and who gives up: number of the request, from 1 -> ns from
    when it is first scheduled. A function of `seed` alone."""
    rng = random.Random(seed)
    deployment, overrides = DEPLOYMENTS[seed % len(DEPLOYMENTS)]
    asked = [[_request(rng) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 2))]
    arrivals = [[rng.choice((0, round(10 ** rng.uniform(3, 7)))) for _ in batch] for batch in asked]
    numbers = range(1, 1 + sum(map(len, asked)))
    aborts = {number: round(10 ** rng.uniform(3, 6.7)) for number in numbers if rng.random() < 0.25}
    clock_seed = rng.choice((None, rng.randrange(1000)))
    return [
        History(deployment, (*SMALL, *overrides), *zip(*batch, strict=True), ns, clock_seed=clock_seed)
        for batch, ns in zip(asked, arrivals, strict=True)
    ], aborts


def _request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    shared = [7] * rng.choice((0, 16, 20))  # prompts with one beginning meet in the prefix cache
    prompt = shared + [rng.randrange(100) for _ in range(rng.randint(1, 12))]
    params = SamplingParams(
        max_tokens=rng.randint(1, 6),
        temperature=rng.choice((0.0, 1.0)),
        n=rng.choice((1, 1, 2)),
        logprobs=rng.choice((None, 2)),
        priority=rng.choice((0, 0, -1)),
        ignore_eos=True,
    )
    return prompt, params


def abort_on_the_way(engine: Engine, aborts: dict[int, int]) -> None:
    """Have the engine's requests, counted as they come, abort at their moments of virtual time."""
    clock, submit, num_requests = engine.plan.pod.clock, engine.submit, 0

    def counting_submit(*args: Any, **kwargs: Any) -> Request:
        nonlocal num_requests
        request = submit(*args, **kwargs)
        num_requests += 1
        if num_requests in aborts:
            delay_ns, first = aborts[num_requests], request.sequences[0]

            async def abort() -> None:
                await clock.sleep(delay_ns)
                request.abort()

            def begin(seq: Sequence) -> None:
                clock.spawn(abort(), name="client that goes away")
                request.begin(seq)

            first.on_scheduled = begin
        return request

    engine.submit = counting_submit  # type: ignore[method-assign]


async def turns(count: int) -> None:
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)
