"""Keeping long work off the event loop, on which every other request's tokens travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Tokenising this much takes about 5 ms, and a whole 1 MiB body more than half a second.
MAX_CHARS_ON_LOOP = 16_384


async def run_for_text(num_chars: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work(...)`, here if the text is short and in a thread if it is long (the tokenizer drops the GIL)."""
    if num_chars <= MAX_CHARS_ON_LOOP:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
