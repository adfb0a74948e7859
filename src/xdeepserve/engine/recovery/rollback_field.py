"""A die's rollback field: 32 bytes of its metadata area in which the host says which epoch it is.

    epoch    u64   what began with the latest rollback; nothing of an earlier one goes on
    resumed  u64   the latest epoch that all dies have come to, so that work may go on in it
    step     u64   the step that it goes on with

Only the host writes it, and only in a rollback: without faults it is all zeros.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

from xdeepserve.engine.numbers import Epoch
from xdeepserve.errors import GlitchError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import MemoryPlan

WORD = struct.Struct("<Q")
WORDS = struct.Struct("<QQQ")
NAME = "rollback"


class Epochs(NamedTuple):
    """Contents of a rollback field: epoch, resumed epoch and next step."""

    epoch: Epoch = Epoch(0)
    resumed: Epoch = Epoch(0)
    step: int = 0


def plan_rollback_field(plan: MemoryPlan) -> None:
    """Reserve a die's rollback field; raise OutOfMemoryError if the metadata area has no room."""
    plan.metadata.alloc(NAME, 32, align=32)


class RollbackField:
    """Rollback field of a die, in its materialised memory."""

    def __init__(self, die: Die) -> None:
        self.die, self.region = die, die.memory.metadata.regions[NAME]
        self.word = die.memory.read(self.region.offset, WORD.size)  # the epoch, as it is at any moment

    def write(self, epochs: Epochs) -> None:
        """Write the field, from the host's side."""
        self.die.memory.write(self.region.offset, WORDS.pack(*epochs))

    @staticmethod
    def first_word(epoch: int) -> bytes:
        """Return the bytes of `word` in a given epoch."""
        return WORD.pack(epoch)

    def read(self) -> Epochs:
        return Epochs(*WORDS.unpack_from(self.die.memory.read(self.region.offset, WORDS.size)))

    async def resumes(self, epoch: int) -> Epochs:
        """Wait on the die, without a deadline, until work may go on in `epoch` or a later epoch begins."""

        def is_over(offset: int, nbytes: int) -> bool:
            seen = self.read()
            return seen.resumed >= epoch or seen.epoch > epoch

        def describe() -> Waiting:
            return Waiting("rollback", self.die.index, "host", "resumed", epoch, self.read().resumed)

        where = self.region.offset, WORDS.size
        while True:
            with contextlib.suppress(GlitchError):  # in a look at the field, which is still as it was
                await self.die.wait_fields(*where, is_over, deadline_ns=None, describe=describe, idle=True)
                return self.read()
