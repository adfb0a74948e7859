"""Run a case: plan the ranks' memories, run their programs, and keep the images and outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cells import Cells
from xdeepserve.golden.locate import ManifestRegion
from xdeepserve.golden.recorder import AREAS, Arrays, Recorder, Recording
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.hw.pod import Pod


class Done(NamedTuple):
    """Result of a case's run: its recording, its regions and its parameters."""

    recording: Recording
    regions: list[list[ManifestRegion]]  # by rank
    parameters: dict[str, Any]


def rng_of(stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(stream))


def floats(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Draw multiples of 2**-20 in [-4, 4), which are exact in any library."""
    return (rng.integers(-(2**22), 2**22, shape) / 2**20).astype(np.float32)


def _regions(pod: Pod, dies: tuple[int, ...], cells: dict[str, Cells]) -> list[list[ManifestRegion]]:
    result = []
    for die in dies:
        memory = pod.memory(die)
        areas = {area: getattr(memory, area) for area in AREAS}
        result.append(
            [
                ManifestRegion(name, region.name, region.start, region.nbytes, cells[region.name])
                for name, area in areas.items()
                for region in area.regions.values()
            ]
        )
    return result


def run_case(
    layout: Any,
    dies: tuple[int, ...],
    cells: dict[str, Cells],
    inputs: Arrays,
    program: Callable[[Die, int, Recorder], Coroutine[Any, Any, Arrays]],
    seed: int | None,
    more: Mapping[str, Any],
    participants: Mapping[tuple[str, int], int] | None = None,
    plan: Callable[[int, MemoryPlan], None] | None = None,
) -> Done:
    """Plan each rank's memory, by default as `layout` does, and run `program` on it for its outputs.

    `more` holds parameters for the manifest beside those of the layout.
    """

    async def main() -> Done:
        pod = Pod(clock=Clock(seed))
        for rank, die in enumerate(dies):
            if plan is None:
                layout.plan(pod.plan(die))
            else:
                plan(rank, pod.plan(die))
        pod.materialise()
        recorder = Recorder(pod, dies, participants)
        ranks = enumerate(pod.dies[die] for die in dies)
        tasks = [die.spawn(program(die, rank, recorder)) for rank, die in ranks]
        outputs: Arrays = {}
        for rank, found in enumerate(await asyncio.gather(*tasks)):
            outputs |= {f"rank{rank}.{name}": value for name, value in found.items()}
        parameters = {"dies": list(dies)} | msgspec.to_builtins(layout) | dict(more)
        return Done(Recording(inputs, recorder.steps, outputs), _regions(pod, dies, cells), parameters)

    return asyncio.run(main())
