"""Layers whose KV may leave, as dies report them: off the TE's loop, which waits for the end of the step."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from xdeepserve.engine.messages import LayerDone, Shutdown
from xdeepserve.hw.queue import Queue

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE


class LayerReports:
    """Hears of the layers of a TE's dies as they end, and lets their KV go."""

    def __init__(self, te: TE) -> None:
        self._te = te
        self._reports: Queue[msgspec.Struct] = Queue(te.plan.pod.clock, f"layers of {te.sizes.place.name}")
        for executor in te.executors:
            executor.layer_reports = self._reports

    def start(self) -> list[asyncio.Task[None]]:
        """Spawn the process, if layers leave one by one."""
        te = self._te
        if not te.sizes.kv.sends_layers:
            return []
        return [te.plan.pod.clock.spawn(self._run(), name=f"layers of {te.sizes.place.name}")]

    def stop(self) -> None:
        """Have it end."""
        self._reports.put(Shutdown())

    async def _run(self) -> None:
        te = self._te
        try:
            while isinstance(done := await self._reports.get(), LayerDone):
                te.groups[done.rank // te.sizes.groups.tp].end_layer(done.step, done.layer)
        except Exception as error:
            te.fail(error)
