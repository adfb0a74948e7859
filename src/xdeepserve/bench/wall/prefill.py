"""`xdeepserve bench prefill`: tokens of prompts per second, until each prompt has its first token.

Each row is the median of REPEATS runs, or of as many as fit in SECONDS, after a warm-up. No prompt comes
twice, so no prefix cache helps. With `--peers` other engines read the same prompts (see `peers`). For a model
larger than caches, the limit by products and memory stands beside it (see `step_limits`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from xdeepserve.bench.report import Row
from xdeepserve.bench.wall import generation, step_limits
from xdeepserve.bench.wall.generation import Contender, prompts
from xdeepserve.bench.wall.peers import Generate, Rates
from xdeepserve.model.presets import resolve_model

BATCHES = (1, 8, 32)
LENGTHS = (128, 512, 2047)  # the longest leaves room for a token in a context of 2,048
MOST = 1 << 14  # tokens of all prompts of a row: more would say nothing new, and take minutes
CHUNK = 512  # rows of a step, for this engine: more than a tile, and fewer than what caches hold
REPEATS, SECONDS = 5, 10.0


def all_rows(model: str = "tiny", peers: Path | None = None, peer: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row per engine, batch and length (see generation.rows), and the limit by products and
    memory."""
    yield from generation.rows(SUITE, model, peers, peer)
    yield from step_limits.prefill_rows(resolve_model(model).config, generation.num_threads(), cases(), CHUNK)


def cases() -> Iterator[tuple[int, int]]:
    """Yield each batch with each length, except pairs of more tokens than MOST."""
    return ((batch, length) for batch in BATCHES for length in LENGTHS if batch * length <= MOST)


def rates(generate: Generate, vocab_size: int) -> Rates:
    """Yield the prefill rate of each batch and length."""
    first = 0
    for batch, length in cases():
        numbers = range(first, first + batch * (1 + REPEATS))
        yield f"batch={batch}/prompt={length}", prefill_rate(generate, vocab_size, batch, length, numbers)
        first = numbers.stop  # a longer prompt of the same number would begin with one that is cached


def prefill_rate(generate: Generate, vocab_size: int, batch: int, length: int, numbers: range) -> float:
    """Measure tokens per second of `batch` prompts at once; `numbers` are the prompts' numbers."""
    times: list[float] = []
    for first in numbers[::batch]:
        ids = prompts(batch, vocab_size, length, first)
        start = time.perf_counter()
        generate(ids, 1)
        times.append(time.perf_counter() - start)
        if sum(times[1:]) >= SECONDS:
            break
    return batch * length / statistics.median(times[1:])


DEPLOYMENTS = (Contender("monolithic"), Contender("colocated", ("lockstep=true",)))
LIMITS = (f"scheduler.max_num_batched_tokens={CHUNK}", "cache.num_blocks=2048")
SUITE = generation.Task(
    "prefill", rates, DEPLOYMENTS, num_seqs=max(BATCHES), context=max(LENGTHS) + 1, limits=LIMITS
)
