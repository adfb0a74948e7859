"""Record the memories of all ranks after each step of a protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.hw.clock import Waiter, Waiting
from xdeepserve.hw.memory import Memory
from xdeepserve.hw.pod import Pod

Arrays = dict[str, npt.NDArray[Any]]
AREAS = ("metadata", "managed", "app")


class RecordedStep(NamedTuple):
    """Memories of all ranks when a step is complete: images["rank0.managed"] is uint8."""

    name: str
    images: Arrays


class Recording(NamedTuple):
    """Everything recorded of a case: inputs, images after each step, and outputs."""

    inputs: Arrays
    steps: list[RecordedStep]
    outputs: Arrays


class Recorder:
    """Takes images of all ranks' memories; `dies[rank]` is a rank's die.

    `participants` maps a step to its number of ranks, where not all have it.
    """

    def __init__(
        self,
        pod: Pod,
        dies: tuple[int, ...],
        participants: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.pod, self.dies, self.participants = pod, dies, participants or {}
        self.steps: list[RecordedStep] = []
        self._paused: dict[tuple[str, int], list[Waiter]] = {}

    def snapshot(self, op: str, step: int) -> None:
        name = f"{op} {step}" if step != 7 or op == "receive" else f"{op} 6-7"
        images = {
            f"rank{rank}.{area}": _image(self.pod.memory(die), area)
            for rank, die in enumerate(self.dies)
            for area in AREAS
        }
        self.steps.append(RecordedStep(f"{len(self.steps) + 1:02d}-{name.replace(' ', '-')}", images))

    async def lockstep(self, op: str, step: int) -> None:
        """Hold each rank after a step until the last rank has completed it, then take the images.

        So an image shows the step complete on every rank that has it, and the next step begun on no rank,
        whatever the timing.
        """
        paused = self._paused.setdefault((op, step), [])
        if len(paused) + 1 < self.participants.get((op, step), len(self.dies)):
            clock = self.pod.clock
            waiter = clock.waiter(lambda: Waiting("lockstep", "-", "-", f"{op} {step}", "all", len(paused)))
            paused.append(waiter)
            await clock.wait(waiter)
            return
        self.snapshot(op, step)
        del self._paused[op, step]
        for waiter in paused:
            waiter.wake()


def _image(memory: Memory, area: str) -> npt.NDArray[np.uint8]:
    start = getattr(memory, area).base
    nbytes = getattr(memory, area).nbytes
    return np.frombuffer(bytes(memory.buffer[start : start + nbytes]), np.uint8)
