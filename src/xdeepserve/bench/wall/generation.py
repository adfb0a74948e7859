"""Generating engines, measured alike on this computer: this project's deployments, and peers beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from xdeepserve.bench.report import Row
from xdeepserve.bench.wall.peers import Generate, Rates, chosen, peer_rows
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.errors import InputError
from xdeepserve.llm import LLM


class Measure(Protocol):
    """Measures an engine: yields named rates in tokens per second, for a vocabulary size."""

    def __call__(self, generate: Generate, vocab_size: int) -> Rates: ...


class Contender(NamedTuple):
    """A deployment's name, together with settings of it."""

    name: str
    settings: tuple[str, ...] = ()


class Task(NamedTuple):
    """A measurement, and the limits that every engine gets for it."""

    name: str
    measure: Measure
    deployments: Sequence[Contender]
    num_seqs: int
    context: int
    limits: tuple[str, ...] = ()  # more settings of each deployment


def rows(suite: Task, model: str, peers: Path | None, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rates of each deployment on all threads of this process, and of the first one also on one
    thread; then those of peers.

    Raises InputError if `peers` is no directory, or `model` is none although `peers` is given, or if no peer
    has a name of `only`.
    """
    chosen(only)
    if only and peers is None:
        raise InputError("--peer needs --peers, the directory of their environments")
    if peers is not None:
        if not peers.is_dir():
            raise InputError(f"--peers: {peers} is not a directory")
        if not Path(model).is_dir():
            raise InputError(f"--peers needs --model DIRECTORY, a checkpoint for all of them, found {model}")
    count, vocab_size = num_threads(), 0
    alone = [(suite.deployments[0], 1)] if count > 1 else []
    for (name, settings), threads in (*alone, *((each, count) for each in suite.deployments)):
        limits = (f"max_model_len={suite.context}", f"scheduler.max_num_seqs={suite.num_seqs}", *suite.limits)
        with LLM(model, name, overrides=[*settings, f"threads={threads}", *limits]) as llm:
            vocab_size = llm.engine.vocab_size
            label = f"{suite.name}/{', '.join([name, *settings])}/int8/threads={threads}"
            for what, rate in suite.measure(partial(_greedy, llm), vocab_size):
                yield Row(f"{label}/{what}", rate, "tok/s", "measured")
    if peers is not None:
        here = partial(suite.measure, vocab_size=vocab_size)
        sizes = (suite.num_seqs, suite.context)
        yield from peer_rows(suite.name, peers, Path(model), count, *sizes, here, only)


def num_threads() -> int:
    """Return the number of threads that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prompts(batch: int, vocab_size: int, length: int, first: int = 0) -> list[list[int]]:
    """Make `batch` prompts of token ids without special ones, beginning with prompt number `first`.

    Prompts of different numbers differ in their first token, so that a prefix cache never helps.
    """
    return [
        [10 + (101 * i + 13 * j) % (vocab_size - 10) for j in range(length)]
        for i in range(first, first + batch)
    ]


def _greedy(llm: LLM, ids: Sequence[Sequence[int]], num_tokens: int) -> object:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return llm.generate([list(prompt) for prompt in ids], params)
