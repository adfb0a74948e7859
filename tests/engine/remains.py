"""What requests must not leave behind."""

from __future__ import annotations

import asyncio

from xdeepserve.engine.dp.group import Left
from xdeepserve.engine.serving.engine import Engine


def check_nothing_is_left(engine: Engine) -> None:
    """No block, transfer, claim or note of any request."""
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0
    assert engine.left() == Left()


async def settled(engine: Engine) -> None:
    """Let what has no request any more come to its end."""
    for _ in range(5000):
        if engine.stats().kv_cache_usage == 0 and not engine.je.transfers:
            break
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
