"""Records the memories of ranks after each step of a protocol."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.hw.memory import Memory
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.waiting import Waiter, Waiting

Arrays = dict[str, npt.NDArray[Any]]
AREAS = ("metadata", "managed", "app")


class Step(NamedTuple):
    """The memories when a step is complete: images["rank0.managed"] is uint8."""

    name: str
    images: Arrays


class Recording(NamedTuple):
    """All that a case leaves."""

    inputs: Arrays
    steps: list[Step]
    outputs: Arrays


class Recorder:
    """Takes images of all ranks' memories. `dies[rank]` is a rank's die."""

    def __init__(self, pod: Pod, dies: tuple[int, ...]) -> None:
        self.pod, self.dies = pod, dies
        self.steps: list[Step] = []
        self._paused: list[Waiter] = []

    def snapshot(self, name: str) -> None:
        images = {
            f"rank{rank}.{area}": _image(self.pod.memory(die), area)
            for rank, die in enumerate(self.dies)
            for area in AREAS
        }
        self.steps.append(Step(f"{len(self.steps) + 1:02d}-{name.replace(' ', '-')}", images))

    def lockstep(self, op: str, step: int) -> Awaitable[None]:
        """An observer for all ranks: each pauses after a step until the last has completed it.

        So an image shows every rank's step complete and nobody's next one begun, whatever the timing.
        """
        return self._pause(f"{op} {step}" if step != 7 else f"{op} 6-7")

    async def _pause(self, name: str) -> None:
        if len(self._paused) + 1 < len(self.dies):
            clock = self.pod.clock
            waiter = clock.waiter(lambda: Waiting("lockstep", "-", "-", name, "all ranks", len(self._paused)))
            self._paused.append(waiter)
            await clock.wait(waiter)
            return
        self.snapshot(name)
        paused, self._paused = self._paused, []
        for waiter in paused:
            waiter.wake()


def _image(memory: Memory, area: str) -> npt.NDArray[np.uint8]:
    start = getattr(memory, area).base
    nbytes = getattr(memory, area).nbytes
    return np.frombuffer(bytes(memory.buffer[start : start + nbytes]), np.uint8)
