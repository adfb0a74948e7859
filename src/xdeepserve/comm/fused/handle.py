"""FusedDispatch and FusedCombine: handle of a rank on the exchange by push (CM 4.2.1)."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.exchange.handle import Titles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.fused.combine import check_answers, fused_combine
from xdeepserve.comm.fused.dispatch import FusedReceived, check_tokens, fused_dispatch
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.fused.place import FusedPlace
from xdeepserve.comm.handle import Float32, Handle, Quantize
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.steps import Observer
from xdeepserve.comm.turns import Step, Turns
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Region

TITLES = Titles("fused dispatch", "fused combine")


class FusedXCCL(Handle):
    """FusedDispatch and FusedCombine of a rank. All ranks of the group run the same ones in the same order.

    `layout.plan` must have been called on the plans of all the group's dies. `on_step(op, step)` is called
    when one of an operator's three steps is complete; if it returns an awaitable, the operator pauses on it.
    """

    def __init__(
        self,
        die: Die,
        rank: int,
        group: Group,
        layout: FusedLayout,
        quantize: Quantize | None = None,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
        titles: Titles = TITLES,
    ) -> None:
        turns = Turns(f"{titles.rank} {rank}" if titles.rank else rank, titles.dispatch, titles.combine)
        super().__init__(die, turns, quantize, layout.quantize, means, on_step)
        self.layout, self.place = layout, FusedPlace(die, rank, group, layout, titles)
        self.topk_idx: npt.NDArray[np.int32] = np.zeros((0, layout.top_k), np.int32)
        self.received: FusedReceived | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def own_experts(self) -> npt.NDArray[np.int64]:
        return self.place.own_experts

    def region(self, part: str) -> Region:
        """Return a region of the rank: flags, dispatch, output ..."""
        return self.place.region(part)

    async def dispatch(
        self,
        x: Float32 | npt.NDArray[np.int8],
        topk_idx: npt.NDArray[np.int32],
        event_id: int,
        scale: Float32 | None = None,
    ) -> FusedReceived:
        """Push every token to the ranks of its experts; return the tokens that came for this rank's experts.

        x: float32 [T, H], T from 0 to the layout's batch. topk_idx: int32 [T, K], physical experts, all of a
        token different. event_id: from 1, greater than that of any earlier dispatch, the same on all ranks.
        scale: float32 [T] if x is int8 and was quantised before (a trampoline forwards what it received).

        The result's arrays are views of preallocated memory, valid until the next dispatch. Raises
        DeadlineError if a rank does not take part in time, ProtocolError if one does something else,
        AddressError for arguments that the layout does not hold. After one of the first two the handle must
        be reset; a refused call has not happened.
        """

        async def run() -> FusedReceived:
            self.topk_idx = topk_idx.copy()  # for FusedCombine, when the caller may have reused it
            self.received = await fused_dispatch(self, self.place, x, scale, topk_idx, event_id)
            return self.received

        check = partial(check_tokens, self.place, x, scale, topk_idx)
        return await self._run(Step.DISPATCH, event_id, run, check)

    async def combine(
        self, expert_out: Float32, topk_weights: Float32, event_id: int, shared: Float32 | None = None
    ) -> Float32:
        """Push the experts' answers to the ranks of their tokens; return the own tokens, combined.

        expert_out: float32 [N, H], one row for each received row, in that order. topk_weights: float32 [T, K]
        of the own tokens. shared: float32 [T, H], the shared expert's output, added last.
        event_id: greater than that of any earlier combine; it may be the dispatch's.
        Returns float32 [T, H], a view of preallocated memory: the sum over a token's keys in order of weight
        x answer (rounded to bfloat16 on the way if the layout is quantised). Raises as `dispatch` does.
        """

        def check() -> None:
            assert self.received is not None  # the phase says so
            shape = self.topk_idx.shape
            check_answers(self.place, len(self.received), shape, expert_out, topk_weights, shared)

        async def run() -> Float32:
            assert self.received is not None
            last = self.received, self.topk_idx
            return await fused_combine(self, self.place, *last, expert_out, topk_weights, shared)

        return await self._run(Step.COMBINE, event_id, run, check)

    def reset(self, group: Group | None = None) -> None:
        """Forget a failed or unfinished exchange and go on, in a smaller `group` if given.

        All ranks of the group must do so when none is in an exchange.
        """
        self.turns.after(Step.RESET)
        if group is not None:
            if self.die.index not in group.dies:
                raise DeploymentError(f"die {self.die.index} is not in the group of dies {list(group.dies)}")
            self.place.join(group.dies.index(self.die.index), group)
        self.turns.reset({}, self.rank)
        self.place.board.clear(self.place.group.dies)
        self.place.clear_token_flags()
