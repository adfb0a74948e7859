"""Hears from dies of each finished layer, so the layer's KV can leave before the step ends.

This runs outside the TE's loop, because that loop waits for the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import LayerDone, Shutdown
from xdeepserve.engine.numbers import group_of
from xdeepserve.hw.queue import Queue


class LayerReports:
    """Passes each die's report of a finished layer to its DP group, which sends the layer's KV."""

    def __init__(
        self, reports: Queue[msgspec.Struct], groups: Sequence[DPGroup], executors: Sequence[Executor]
    ) -> None:
        self._reports, self._groups = reports, groups
        self._tp = len(groups[0].dies)
        for executor in executors:
            executor.layer_reports = reports

    def stop(self) -> None:
        """End `run` after the reports so far."""
        self._reports.put(Shutdown())

    async def run(self) -> None:
        """Pass on every report, until `stop`."""
        while isinstance(done := await self._reports.get(), LayerDone):
            self._groups[group_of(done.rank, self._tp)].end_layer(done.step, done.layer)
