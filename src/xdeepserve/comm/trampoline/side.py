"""Common parts of the ends of A2E and E2A: attention or expert die, with trampolines or without."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from xdeepserve.comm.channel import Inbox
from xdeepserve.comm.checks import check_array, check_rank
from xdeepserve.comm.exchange.rows import Float32, Int32
from xdeepserve.comm.handle import Handle, Quantize
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.steps import Observer
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.turns import Step, Turns
from xdeepserve.errors import AddressError
from xdeepserve.hw.die import Die


class Side(Handle):
    """Die's end of A2E and E2A, on either side: two operations that alternate.

    An attention die uses `Spec.attention_cores` AIV cores if `means` do not say how many; the carrier "urma"
    keeps its MTE2 free for the attention kernels (XDS 3.3). `sides` are the dies in use, if some of the
    layout's are lost. All dies of both sides run the same operations in the same order.
    """

    role: ClassVar[Literal["attention", "expert"]]
    inbox: Inbox

    def __init__(
        self,
        die: Die,
        rank: int,
        layout: A2ELayout,
        quantize: Quantize | None = None,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
        sides: Sides | None = None,
    ) -> None:
        self.rank, self.label = rank, f"{self.role} {rank}"
        self.layout, self.sides = layout, sides or layout.sides
        layout.check_sides(self.sides)
        is_attention = self.role == "attention"
        dies = self.sides.attention if is_attention else self.sides.experts.dies
        check_rank(die.index, rank, dies, f"{self.role} rank")
        if is_attention and means.cores is None:
            cores = min(int(die.spec.attention_cores.value), die.spec.num_cores("aiv"))
            means = means._replace(cores=cores)
        super().__init__(die, Turns(self.label, "A2E", "E2A"), quantize, layout.quantize, means, on_step)
        self._connect()

    def _connect(self) -> None:
        """Find the boxes for writing and reading."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget a failed exchange. All dies of both sides must do so while none is in an operation."""
        heard = Step.COMBINE if self.role == "attention" else Step.DISPATCH
        self.turns.reset({heard: self.inbox.newest})

    def _check_weights(self, topk_idx: Int32, topk_weights: Float32) -> None:
        check_array("A2E", "topk_weights", topk_weights)
        if topk_weights.dtype != np.float32 or topk_weights.shape != topk_idx.shape:
            found = f"{topk_weights.dtype} {topk_weights.shape}"
            raise AddressError(f"A2E: topk_weights must be float32 {topk_idx.shape}, not {found}")
