"""What the four ends of A2E and E2A have in common: attention or expert die, with trampolines or without."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from ..errors import AddressError, DeploymentError
from ..hw.die import Die
from .channel import Carrier, Observer, Steps
from .layout.trampoline import A2ELayout, Sides
from .protocol import Phase, Step, Turns
from .rows import Float32, Int32, Kernels
from .xccl import means_of

T = TypeVar("T")


class Side:
    """What an attention die and an expert die have in common: two operations that alternate."""

    def __init__(
        self,
        die: Die,
        rank: int,
        label: str,
        dies: tuple[int, ...],
        layout: A2ELayout,
        kernels: Kernels | None,
        timeout_ns: int,
        on_step: Observer | None,
        cores: int | None,
        carrier: Carrier,
        sides: Sides,
    ) -> None:
        layout.check_sides(sides)
        if not 0 <= rank < len(dies) or dies[rank] != die.index:
            raise DeploymentError(f"die {die.index} is not {label} rank {rank} of dies {list(dies)}")
        if layout.quantize and kernels is None:
            raise DeploymentError("a quantised exchange needs kernels to quantise with")
        self.die, self.rank, self.label, self.layout = die, rank, f"{label} {rank}", layout
        self.sides, self.kernels = sides, kernels or Kernels(_no_quantize)
        self.means = means_of(die, cores, carrier, timeout_ns)
        self.steps = Steps(die, on_step)
        self.turns = Turns("A2E", "E2A")
        self.event_before = 0

    @property
    def phase(self) -> Phase:
        return self.turns.phase

    async def _run(self, step: Step, event_id: int, operation: Coroutine[Any, Any, T]) -> T:
        try:
            self.event_before = self.turns.begin(step, self.label, event_id)
        except BaseException:
            operation.close()
            raise
        self.steps.begin()
        is_done = False
        try:
            result = await operation
            is_done = True
        finally:
            self.turns.end(is_done)
        return result

    def _check_routing(self, topk_idx: Int32, topk_weights: Float32) -> None:
        experts = np.sort(topk_idx, axis=1)
        is_twice = (experts[:, 1:] == experts[:, :-1]).any(axis=1)
        if is_twice.any():
            token = int(is_twice.argmax())
            raise AddressError(f"A2E: token {token} goes to an expert twice: {topk_idx[token].tolist()}")
        if topk_weights.dtype != np.float32 or topk_weights.shape != topk_idx.shape:
            found = f"{topk_weights.dtype} {topk_weights.shape}"
            raise AddressError(f"A2E: topk_weights must be float32 {topk_idx.shape}, not {found}")


def _no_quantize(x: Float32) -> Any:
    raise DeploymentError("this exchange has no kernel to quantise with")
