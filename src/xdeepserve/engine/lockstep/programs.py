"""The die programs of a lockstep: the engine's own, whose layers are run by the gang."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.lockstep.disaggregated import DisaggregatedGang
from xdeepserve.engine.lockstep.gang import Gang, Share
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.expert import STOP, ExpertProgram
from xdeepserve.engine.programs.layers import Batch
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.messages import StepFailed
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Layer


class LockstepExecutor(Executor):
    """A die with attention that meets the others for its layers."""

    gang: Gang

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on h [T, H]; see `Executor.run_layers`."""
        await self.gang.attend(self.rank, Share(h, layers, caches, batch, first_event))


class LockstepExpertProgram(ExpertProgram):
    """An expert die: waits at the doorbell, and meets the others as often as a step has runs.

    Its three persistent kernels are the rows of a timetable here, not tasks. Their flags count items all the
    same, as many as a run has had.
    """

    gang: DisaggregatedGang
    index: int
    runs_per_step = 1

    async def run(self) -> None:
        """Serve step after step until the doorbell says stop."""
        step, memory, mem, num_items = 1, self.die.memory, self.mem, 0
        try:
            while await mem.doorbell.reaches(self.die, step) != STOP:
                for _ in range(self.runs_per_step):
                    num_items += await self.gang.serve(self.index)
                    for flag in (mem.received, mem.computed, mem.sent):
                        flag.write(memory, num_items)
                step += 1
            for flag in (mem.received, mem.computed):
                flag.write(memory, STOP)
        except Exception as error:
            self.reports.put(StepFailed(self.die.index, error))
