"""The event loop of our own: uvloop where there is one, since it turns twice as fast.

Virtual time does not depend on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new loop of the fastest kind that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop until it is done; its result."""
    results = []

    async def keep() -> None:
        # Not as a task's result: where signal handlers are put back, Python formats that task, and all in it.
        results.append(await main)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(keep())
    return results[0]
