"""The program of an expert die in lockstep, which meets the others for what its kernels do."""

from __future__ import annotations

from xdeepserve.engine.die.experts import STOP, ExpertProgram
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.run.gang.disaggregated import DisaggregatedGang


class LockstepExpertProgram(ExpertProgram):
    """Waits at the doorbell, and meets the others as often as a step has runs.

    Its three persistent kernels are the rows of a timetable here, not tasks. Their flags count items all the
    same, as many as a run has had.
    """

    gang: DisaggregatedGang
    index: int

    async def run(self) -> None:
        """Serve step after step until the doorbell says stop."""
        step, memory, mem, num_items = 1, self.die.memory, self.mem, 0
        loads = self.loads()
        try:
            while await mem.doorbell.reaches(self.die, step) != STOP:
                for _ in range(1 + mem.sizes.mtp):
                    num_items += await self.gang.serve(self.index)
                    for flag in (mem.received, mem.computed, mem.sent):
                        flag.write(memory, num_items)
                step += 1
            for flag in (mem.received, mem.computed):
                flag.write(memory, STOP)
        except Exception as error:
            self.reports.put(StepFailed(self.die.index, error))
        finally:
            for load in loads:
                load.cancel()
