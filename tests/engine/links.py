"""Shapes, requests and counters for KV that moves between prefill and decode."""

from typing import Any

from xdeepserve import SamplingParams
from xdeepserve.engine.job.links import PDLink

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [10, 11], [5] * 90, [8] * 40, list(range(64))]
PARAMS = SamplingParams(max_tokens=8, temperature=0.5, seed=1, ignore_eos=True)
ARRIVALS = [0, 0, 0, 20_000, 50_000, 100_000, 200_000, 300_000]  # ns
ONE_EACH = ["prefill.dies=1", "decode.dies=1", "max_model_len=128", "cache.num_blocks=16"]
TWO_BY_TWO = [*ONE_EACH, "prefill.count=2", "decode.count=2"]
MANY = (PROMPTS * 2, PARAMS)
WAYS = ["request", "layer"]


def count_moves(link: PDLink) -> list[int]:
    """Grows by one with each move on this link."""
    move, calls = link.flow.backend.move, list[int]()

    async def counting(copies: Any, name: str) -> None:
        calls.append(len(calls))
        await move(copies, name)

    link.flow.backend.move = counting  # type: ignore[method-assign]
    return calls
