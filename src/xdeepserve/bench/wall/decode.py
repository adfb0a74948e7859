"""`xdeepserve bench decode`: tokens per second of greedy decoding, for a model and some batches.

Prompts of 128 tokens are completed by NEW_TOKENS tokens each. The time of the prompts and the first token is
measured separately and subtracted. Blocks of the prompts stay in the prefix cache, so that all sequences
begin and end in the same step. Each row is the median of REPEATS runs, or of the runs that fit into SECONDS.
With `--peers` other engines decode the same prompts (see `peers`). For a model larger than caches, the limit
by memory stands beside it (see `step_limits`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from xdeepserve.bench.report import Row
from xdeepserve.bench.wall import generation, step_limits
from xdeepserve.bench.wall.generation import Contender, prompts
from xdeepserve.bench.wall.peers import Generate, Rates
from xdeepserve.model.presets import resolve_model

BATCHES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 128, 64
REPEATS, SECONDS = 3, 15


def all_rows(model: str = "tiny", peers: Path | None = None, peer: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row per engine and batch (see generation.rows), and the limit by memory."""
    yield from generation.rows(SUITE, model, peers, peer)
    context = PROMPT_TOKENS + NEW_TOKENS / 2
    yield from step_limits.decode_rows(
        resolve_model(model).config, generation.num_threads(), BATCHES, context
    )


def rates(generate: Generate, vocab_size: int) -> Rates:
    """Yield the decode rate of each batch."""
    for batch in BATCHES:
        ids = prompts(batch, vocab_size, PROMPT_TOKENS)
        yield f"batch={batch}", decode_rate(partial(generate, ids), batch)


def decode_rate(generate: Callable[[int], object], batch: int) -> float:
    """Measure tokens per second behind the first. `generate(n)` makes n tokens of each sequence."""
    generate(2)
    found: list[float] = []
    begun = time.perf_counter()
    while not found or (len(found) < REPEATS and time.perf_counter() - begun < SECONDS):
        times = []
        for count in (1, 1 + NEW_TOKENS):
            start = time.perf_counter()
            generate(count)
            times.append(time.perf_counter() - start)
        found.append(batch * NEW_TOKENS / (times[1] - times[0]))
    return statistics.median(found)


DEPLOYMENTS = (
    Contender("monolithic"),
    Contender("colocated", ("lockstep=true",)),
    Contender("colocated", ("lockstep=false",)),
)
SUITE = generation.Task(
    "decode", rates, DEPLOYMENTS, num_seqs=max(BATCHES), context=256, limits=("cache.num_blocks=1024",)
)
