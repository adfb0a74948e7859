"""The program of an expert die in lockstep, which meets the others for what its kernels do."""

from __future__ import annotations

from xdeepserve.engine.die.expert_memory import STOP
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.run.gang.disaggregated import DisaggregatedGang
from xdeepserve.hw.clock import Process


class LockstepExpertProgram(ExpertProgram):
    """Waits at the doorbell, and meets the others as often as a step has runs.

    Its three persistent kernels are the rows of a timetable here, not tasks. Their flags count items all the
    same, as many as a run has had.
    """

    gang: DisaggregatedGang
    index: int

    def start_streams(self) -> list[Process]:
        """Start the kernels of this die, each as a process."""
        return [self._spawn(self._meet, "experts")]

    async def _meet(self) -> None:
        """Serve step after step until the doorbell says stop."""
        step, memory, mem = self._first_step, self.die.memory, self.mem
        num_items = step * self._items_per_step
        while await mem.doorbell.reaches(self.die, step + 1) != STOP:
            for _ in range(self.gang.num_passes):
                num_items += await self.gang.serve(self.index)
                for flag in (mem.received, mem.computed, mem.sent):
                    flag.write(memory, num_items)
            step += 1
        for flag in (mem.received, mem.computed):
            flag.write(memory, STOP)

    @property
    def _items_per_step(self) -> int:
        return len(self.layers) * self.gang.num_microbatches * self.gang.num_domains
