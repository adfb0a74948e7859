"""Transfers beside steps that fail with an error code."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from xdeepserve.errors import GlitchError


async def again_after_glitches(transfer: Callable[[], Awaitable[None]]) -> None:
    """Make a transfer, and make it again as often as it fails so; it must change nothing that it reads."""
    while True:
        with contextlib.suppress(GlitchError):
            await transfer()
            return
