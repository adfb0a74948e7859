"""Two models on one pod: each has the bits of a pod of its own, and neither waits until the other is idle."""

from __future__ import annotations

import asyncio

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

PROMPT = [5, 9, 200, 31, 7]
LONG, SHORT = 200, 8


async def answer(engine: Engine, name: str, num_tokens: int, at: list[str]) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    found: list[int] = []
    async for delta in engine.submit(PROMPT, params, name):
        found += delta.token_ids
    at.append(name)
    return found


def alone(model: object, num_tokens: int) -> list[int]:
    with LLM(model, "colocated", overrides=["dies=2"]) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return list(llm.generate(PROMPT, params)[0].outputs[0].token_ids)


async def test_a_model_joins_answers_and_leaves_while_the_other_is_busy(tiny: TinyCheckpoint) -> None:
    host = build_engine(tiny, "colocated", "int8", overrides=["dies=2"], warm_up=True)
    await host.start()
    ended: list[str] = []
    busy = asyncio.create_task(answer(host, "long", LONG, ended))
    while not host.num_served:
        await asyncio.sleep(0)
    guest = build_engine("tiny", "colocated", "int8", overrides=["dies=2"], warm_up=True, pod=host.plan.pod)
    for _ in guest.pieces():
        await asyncio.sleep(0)
    await guest.start()
    for number in range(2):  # the second one comes to an engine that is idle on a pod that is not
        found = await answer(guest, f"short {number}", SHORT, ended)
    assert ended == ["short 0", "short 1"]
    guest.check_integrity()
    await guest.stop()
    long = await busy
    host.check_integrity()
    assert all(not holder.endswith(" of tiny") for holder in host.plan.pod.holders.values())
    await host.stop()
    assert np.array_equal(found, alone("tiny", SHORT))
    assert np.array_equal(long, alone(tiny, LONG))
