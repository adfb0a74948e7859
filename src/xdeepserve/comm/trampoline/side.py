"""What the four ends of A2E and E2A have in common: attention or expert die, with trampolines or without."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from xdeepserve.comm.channel import Carrier, Observer, Steps
from xdeepserve.comm.checks import check_array
from xdeepserve.comm.exchange.handle import means_of
from xdeepserve.comm.exchange.rows import Float32, Int32, Kernels
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.turns import Phase, Step, Turns, no_arguments
from xdeepserve.errors import AddressError, DeploymentError
from xdeepserve.hw.die import Die

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
        if cores is None and label == "attention":
            cores = min(int(die.spec.attention_cores.value), die.spec.num_cores("aiv"))
        self.means = means_of(die, cores, carrier, timeout_ns)
        self.steps = Steps(die, on_step)
        self.turns = Turns(self.label, "A2E", "E2A")
        self.event_before = 0

    def at(self, **place: Any) -> None:
        """What comes belongs to this layer, microbatch and domain: for traces."""
        self.steps.place = place

    @property
    def phase(self) -> Phase:
        return self.turns.phase

    async def _run(
        self,
        step: Step,
        event_id: int,
        operation: Coroutine[Any, Any, T],
        check: Callable[[], None] = no_arguments,
    ) -> T:
        try:
            self.event_before = self.turns.begin(step, event_id, check)
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

    def _check_weights(self, topk_idx: Int32, topk_weights: Float32) -> None:
        check_array("A2E", "topk_weights", topk_weights)
        if topk_weights.dtype != np.float32 or topk_weights.shape != topk_idx.shape:
            found = f"{topk_weights.dtype} {topk_weights.shape}"
            raise AddressError(f"A2E: topk_weights must be float32 {topk_idx.shape}, not {found}")


def _no_quantize(x: Float32) -> Any:
    raise DeploymentError("this exchange has no kernel to quantise with")
