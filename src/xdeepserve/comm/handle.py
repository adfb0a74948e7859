"""Base of handles with two alternating operations: dispatch and combine, or A2E and E2A."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.means import Means
from xdeepserve.comm.steps import Observer, Steps
from xdeepserve.comm.turns import Phase, Step, Turns
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.die import Die

T = TypeVar("T")
Float32: TypeAlias = npt.NDArray[np.float32]
Quantize: TypeAlias = Callable[[Float32], tuple[npt.NDArray[np.int8], Float32]]
"""float32 [T, H] -> int8 [T, H], float32 scale [T]: handed in, because it belongs to the model."""


class Handle:
    """Die's end of an exchange: its turns, its means, and the notes of its steps.

    `quantize` is needed by layouts that quantise, and None for others.
    """

    def __init__(
        self,
        die: Die,
        turns: Turns,
        quantize: Quantize | None,
        is_quantised: bool,
        means: Means,
        on_step: Observer | None,
    ) -> None:
        if is_quantised and quantize is None:
            raise DeploymentError("a quantised exchange needs a kernel to quantise with")
        self.die, self.turns, self.means = die, turns, means.checked(die)
        self.quantize = quantize if is_quantised else None
        self.steps = Steps(die, on_step, means.lane)

    @property
    def phase(self) -> Phase:
        return self.turns.state

    @property
    def num_cores(self) -> int:
        """Number of AIV cores used for the exchange."""
        return self.means.cores or self.die.spec.num_cores("aiv")

    async def work(self, name: str, fn: Callable[[], T], flops: float, nbytes: float = 0) -> T:
        """Run a part of the running kernel on the vector cores (`Die.compute`)."""
        how: dict[str, Any] = {"core": "aiv", "cores": self.means.cores, "args": self.die.trace.place}
        return await self.die.compute(name, fn, flops=flops, nbytes=nbytes, is_fused=True, **how)

    async def _run(
        self,
        step: Step,
        event_id: int,
        operation: Callable[[], Awaitable[T]],
        check: Callable[[], None] | None = None,
    ) -> T:
        """Run an operation from start (see `Turns.begin`) to end or failure."""
        self.turns.begin(step, event_id, check)
        self.steps.begin()
        with self.turns.ending(Step.DONE, Step.FAIL):
            return await operation()
