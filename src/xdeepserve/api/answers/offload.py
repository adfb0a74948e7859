"""Offloading of long work from the event loop, which carries every other request's tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from xdeepserve.engine.serving.request import ServingTokenizer

P = ParamSpec("P")
R = TypeVar("R")

# Tokenising this much takes about 5 ms, and a whole 1 MiB body more than half a second.
MAX_CHARS_ON_LOOP = 16_384
MAX_TOKENS_ON_LOOP = 4_096  # naming, checking or writing down so many takes about a millisecond

# A thread's work in Python comes in pieces, with a rest before each. A step of the engine lets go of the
# interpreter at each of its kernels, some 20 times, and may wait for a piece each time: a quarter of a
# millisecond to name so many tokens. Without a rest it waits 5 ms.
TOKENS_IN_PIECE = 1_024
REST_SECONDS = 1e-5

# One thread: however many ask, the event loop shares the interpreter with one of them at a time.
_IN_TURN = ThreadPoolExecutor(1, thread_name_prefix="tokenize")


async def run_for_text(
    tokenizer: ServingTokenizer | None,
    num_chars: int,
    work: Callable[P, R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Call `work(...)` to tokenise text: here if that is surely quick, else in a thread.

    The library releases the GIL while it tokenises.
    """
    is_quick = tokenizer is None or not tokenizer.has_regexes
    if num_chars <= MAX_CHARS_ON_LOOP and is_quick:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def run_for_tokens(
    tokenizer: ServingTokenizer, length: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call `work(...)` to handle each of `length` tokens, or of characters that become tokens, in Python. It
    runs here if that is surely quick, else in a single thread, one call at a time."""
    if length <= MAX_TOKENS_ON_LOOP and not tokenizer.has_regexes:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_IN_TURN, partial(work, *args, **kwargs))


def pieces(tokens: list[int]) -> Iterator[list[int]]:
    """Yield tokens in pieces for a loop in Python, with a rest before each but the first, in which other
    threads run."""
    for begin in range(0, len(tokens), TOKENS_IN_PIECE):
        if begin:
            time.sleep(REST_SECONDS)
        yield tokens[begin : begin + TOKENS_IN_PIECE]
