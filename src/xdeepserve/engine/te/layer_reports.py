"""Layers whose KV may leave, as dies report them: off the TE's loop, which waits for the end of the step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import LayerDone, Shutdown
from xdeepserve.engine.numbers import group_of
from xdeepserve.hw.queue import Queue


class LayerReports:
    """Hears of the layers of a TE's dies as they end, and lets their KV go."""

    def __init__(
        self, reports: Queue[msgspec.Struct], groups: Sequence[DPGroup], executors: Sequence[Executor]
    ) -> None:
        self._reports, self._groups = reports, groups
        self._tp = len(groups[0].dies)
        for executor in executors:
            executor.layer_reports = reports

    def stop(self) -> None:
        """Have `run` end."""
        self._reports.put(Shutdown())

    async def run(self) -> None:
        """Pass on every report, until `stop`."""
        while isinstance(done := await self._reports.get(), LayerDone):
            self._groups[group_of(done.rank, self._tp)].end_layer(done.step, done.layer)
