"""Repeats transfers beside steps after failures with an error code."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from xdeepserve.errors import GlitchError


async def again_after_glitches(transfer: Callable[[], Awaitable[None]]) -> None:
    """Make a transfer, and repeat it as long as it fails with an error code.

    The transfer must not change anything that it reads.
    """
    while True:
        with contextlib.suppress(GlitchError):
            await transfer()
            return
