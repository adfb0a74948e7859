"""`xdeepserve bench decode`: tokens per second of greedy decoding, for a model and some batches.

Prompts of 8 tokens are completed by NEW_TOKENS tokens each; what the prompts and the first token take is
measured by itself and subtracted. Each row is the median of REPEATS. With `--peers` other engines decode the
same prompts, see `peers`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from xdeepserve.bench import generation
from xdeepserve.bench.generation import Contender, prompts
from xdeepserve.bench.peers import Generate, Rates
from xdeepserve.bench.report import Row

BATCHES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 8, 32
REPEATS = 3


def all_rows(model: str = "tiny", peers: Path | None = None) -> Iterator[Row]:
    """A row per engine and batch; see generation.rows."""
    return generation.rows(SUITE, model, peers)


def rates(generate: Generate, vocab_size: int) -> Rates:
    """The rate of each batch."""
    for batch in BATCHES:
        ids = prompts(batch, vocab_size, PROMPT_TOKENS)
        yield f"batch={batch}", decode_rate(partial(generate, ids), batch)


def decode_rate(generate: Callable[[int], object], batch: int) -> float:
    """Tokens per second behind the first. `generate(n)` makes n tokens of each sequence."""
    generate(2)
    found = []
    for _ in range(REPEATS):
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
SUITE = generation.Task("decode", rates, DEPLOYMENTS, num_seqs=max(BATCHES), context=256)
