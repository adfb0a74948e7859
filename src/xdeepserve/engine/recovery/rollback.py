"""Stage 3, token recomputation: all dies of a TE go back to the iteration before, and run it again (XDS 6.2).

    1  a die reports a known error code; the TE plans no more steps
    2  the host writes the next epoch to the rollback field of every die, and a RollBack to every queue
    3  each die ends its current work, and reports the epoch
    4  when all dies have reported, before a deadline, what drivers have reported is put right (`te.repairs`);
       Resume makes the dies forget their exchanges under way; the programs of expert dies begin again with
       the step that comes next
    5  the same steps are launched under new numbers

A step's writes need not be undone. KV goes to positions that belong to no sequence before the step has ended
on all dies. Tokens leave only then, and neither sampling nor arithmetic depends on when a step is run. There
are two exceptions: the states that MTP keeps from step to step are restored (`die.drafts`), and the load of
experts counts repeated work twice. Blocks that are copied on write are copied again, because the previous
step may write them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from xdeepserve.engine.deploy.deployment import RecoveryConfig
from xdeepserve.engine.messages import Resume, RollBack, RolledBack
from xdeepserve.engine.numbers import Epoch, StepNo
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.recovery.rollback_field import Epochs, RollbackField
from xdeepserve.errors import DeadlineError, DriverReport, GlitchError
from xdeepserve.hw.fault_kinds import ERROR_CODES
from xdeepserve.hw.pod import Pod
from xdeepserve.machine import follow

RollbackPhase: TypeAlias = Literal[
    "serving",
    "gathering",  # dies have been called, and not all have come
    "gathered",
]
ROLLBACK: dict[tuple[RollbackPhase, str], RollbackPhase] = {
    ("serving", "call"): "gathering",
    ("gathering", "gather"): "gathered",
    ("gathered", "resume"): "serving",
}
Hear: TypeAlias = Callable[[int | None], Awaitable[msgspec.Struct]]
"""Function that waits for the TE's next message, until a deadline in ns."""


class Rollback:
    """Host's part of token recomputation for the TE `name`; `dies` are its dies with DP groups.

    `taking_part` lists all dies that roll back, as the TE's book of members has them. Each rollback has the
    next of `epochs`, which TEs that share expert servers have in common.
    """

    def __init__(
        self,
        name: str,
        pod: Pod,
        dies: Sequence[int],
        taking_part: Callable[[], Sequence[int]],
        config: RecoveryConfig,
        timeout_ns: int,
        epochs: Iterator[int],
    ) -> None:
        self.name, self._pod, self._config, self._timeout_ns = name, pod, config, timeout_ns
        self._dies = [pod.dies[die] for die in dies]
        self._taking_part = taking_part
        self.phase: RollbackPhase = "serving"
        self.epoch, self._epochs = Epoch(0), epochs
        self.count = 0  # rollbacks so far
        self.reason: str | None = None  # of the rollback that is under way
        self._num_in_a_row = 0  # since a step has ended
        self._awaited: set[int] = set()  # dies

    def leave_out(self, die: int) -> None:
        """Wait no longer for a die that takes no part any more."""
        self._awaited.discard(die)

    def step_ended(self) -> None:
        """Note the end of a step, after which rollbacks in a row are counted anew."""
        self._num_in_a_row = 0

    def why_not(self, loss: Loss) -> str | None:
        """Explain why running steps again would not mend a die's error code; None if it would."""
        error, config = loss.error, self._config
        assert isinstance(error, GlitchError)
        if not ERROR_CODES[error.code].is_transient:
            return f"{error.code} does not say whether the die can go on"
        if config.stage != 3:
            return f"recovery.stage={config.stage} does without token recomputation"
        # What a driver has reported is put right, and does not come again.
        if not isinstance(error, DriverReport) and self._num_in_a_row >= config.max_rollbacks:
            return f"steps have been run again {self._num_in_a_row} times, and none has ended since"
        return None

    async def roll_back(self, error: GlitchError, first_steps: Sequence[StepNo], hear: Hear) -> None:
        """Call all dies back and wait until none runs anything (steps 2 and 3).

        `first_steps` has, for each die with a DP group, the first step that counts as not run. Raises
        DeadlineError, naming the silent dies, if some do not answer.
        """
        self._move("call")
        self._num_in_a_row += not isinstance(error, DriverReport)
        self.reason = str(error)
        former, self.epoch = self.epoch, Epoch(next(self._epochs))
        self.count += 1
        self._awaited = {*self._taking_part()}
        for number in self._taking_part():
            RollbackField(self._pod.dies[number]).write(Epochs(self.epoch, former))
        for die, step in zip(self._dies, first_steps, strict=True):
            if die.index in self._awaited:
                die.put(RollBack(self.epoch, StepNo(step)))
        deadline_ns = self._pod.clock.now + self._timeout_ns
        while self._awaited:
            await self._hear(hear, deadline_ns)
        self._move("gather")

    async def _hear(self, hear: Hear, deadline_ns: int) -> None:
        try:
            await hear(deadline_ns)
        except GlitchError:
            pass  # of the epoch that is over
        except DeadlineError:
            if self._pod.clock.now < deadline_ns:
                raise
            raise DeadlineError(
                op="rollback",
                rank=f"inbox of {self.name}",
                peer=sorted(self._awaited),
                field="epoch",
                expected=self.epoch,
                seen="silence",
                at_ns=self._pod.clock.now,
            ) from None

    def hear(self, report: RolledBack) -> None:
        """Note a die's report of having reached an epoch."""
        if report.epoch == self.epoch:
            self._awaited.discard(report.die)

    def resume(self, step: StepNo) -> None:
        """Let all dies go on, with step number `step` (step 4)."""
        self._move("resume")
        self.reason = None
        taking_part = self._taking_part()
        for die in self._dies:
            if die.index in taking_part:
                die.put(Resume(self.epoch))
        for number in taking_part:
            field = RollbackField(self._pod.dies[number])
            if field.read().epoch <= self.epoch:  # else a server has begun anew since, for another TE
                field.write(Epochs(self.epoch, self.epoch, step))

    def _move(self, event: str) -> None:
        refusal = f"TE {self.name} cannot {event}: its rollback is {self.phase}"
        self.phase = follow(ROLLBACK, self.phase, event, lambda: refusal)
