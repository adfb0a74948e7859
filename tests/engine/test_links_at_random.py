"""Links fail and recover at random while requests come, end and are aborted: right tokens or an error."""

import asyncio
import random
from typing import Any

import pytest

from tests.engine.remains import check_nothing_is_left, settled
from xdeepserve import SamplingParams
from xdeepserve.comm.distflow.rules import Cause
from xdeepserve.engine.job.links import PDLink
from xdeepserve.errors import TransferError
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

SMALL = ["max_model_len=128", "cache.num_blocks=16"]
PODS = [
    ["prefill.count=2", "prefill.dies=1", "decode.count=2", "decode.dies=1"],
    ["prefill.dies=2", "prefill.tp=2", "decode.count=3", "decode.dies=2", "decode.tp=2", "mtp=1"],
    ["prefill.dies=1", "decode.count=2", "decode.dies=1", "execution.overlap=true", "mtp=2"],
    ["prefill.dies=1", "prefill.hardware=910b", "decode.count=2", "scheduler.decode=round-robin"],
]
WORDS = [Cause.WANT, Cause.OFFER, Cause.READY, Cause.DONE, Cause.REFUSE, Cause.REVOKE, Cause.STOPPED]
MODES = ["raises", "hangs", "is slow", "loses some", *WORDS, None, None, None]


class Fault:
    """What is wrong with a link at the moment: a word that it loses, or what happens to its bytes."""

    def __init__(self, link: PDLink, rng: random.Random) -> None:
        self.mode: object = None
        move, clock = link.flow.backend.move, link.flow.pod.clock

        async def faulty(copies: Any, name: str) -> None:
            if self.mode == "raises":
                raise OSError("no carrier")
            if self.mode == "hangs":
                await clock.sleep(10**15)
            if self.mode == "is slow":  # around the deadline
                await clock.sleep(rng.choice([10**6, 9 * 10**9, 10**10, 11 * 10**9]))
            await move(copies, name)

        link.flow.backend.move = faulty  # type: ignore[method-assign]
        for endpoint in link.ends.values():
            put = endpoint.inbox.put

            def filtered(message: Any, delay_ns: int = 0, put: Any = put) -> None:
                is_lost = self.mode is message.kind or (self.mode == "loses some" and rng.random() < 0.3)
                if not is_lost:
                    put(message, delay_ns=delay_ns)

            endpoint.inbox.put = filtered  # type: ignore[method-assign]


async def choices_of(request: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for delta in request:
        found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


def params(index: int) -> SamplingParams:
    max_tokens = (1, 4, 12, 30)[index % 4]
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.7, seed=index, ignore_eos=True, n=1 + (index % 3 == 0)
    )


@pytest.mark.thin(3)
@pytest.mark.parametrize("transfer", ["request", "layer"])
@pytest.mark.parametrize("pod", range(len(PODS)))
async def test_right_tokens_or_an_error_and_nothing_is_left(
    tiny: TinyCheckpoint, pod: int, transfer: str
) -> None:
    rng = random.Random(pod)
    overrides = [*PODS[pod], *SMALL, f"transfer={transfer}"]
    engine = build_engine(tiny, "pd", "int8", overrides=overrides, clock_seed=pod)
    await engine.start()
    prompts = [[rng.randrange(300) for _ in range(rng.choice([1, 3, 17, 40, 60, 90]))] for _ in range(8)]
    wanted = [await choices_of(engine.submit(p, params(i), f"well {i}")) for i, p in enumerate(prompts)]
    faults = [Fault(link, rng) for link in engine.je.links]
    num_whole = 0
    for turn in range(2):
        sent = []
        for number in range(10):
            if number % 3 == 0:
                rng.choice(faults).mode = rng.choice(MODES)
            index = rng.randrange(len(prompts))
            request = engine.submit(prompts[index], params(index), f"{turn}-{number}")
            sent.append((index, request, asyncio.ensure_future(choices_of(request))))
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                rng.choice(sent)[1].abort()
            engine.check_integrity()
        for index, _, reader in sent:
            try:
                found = await reader
            except TransferError:
                continue
            num_whole += found == wanted[index]
            assert all(wanted[index][choice][: len(ids)] == ids for choice, ids in found.items())
        for fault in faults:
            fault.mode = None
        await settled(engine)
        check_nothing_is_left(engine)
        assert engine.is_healthy()
    assert num_whole > 5
    await engine.stop()
