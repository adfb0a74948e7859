"""FusedDispatch and FusedCombine: a rank's handle on the exchange that pushes (CM 4.2.1)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.bf16 import from_bf16, to_bf16
from xdeepserve.comm.board import Board
from xdeepserve.comm.channel import Observer, Steps
from xdeepserve.comm.checks import check_event_id, integer
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import weighted_sum
from xdeepserve.comm.fused.fused_combine import check_answers, fused_combine
from xdeepserve.comm.fused.fused_dispatch import FusedReceived, check_tokens, fused_dispatch
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.turns import Phase, Step, next_phase
from xdeepserve.errors import DeploymentError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Region

T = TypeVar("T")
Float32 = npt.NDArray[np.float32]


def combine_answers(answers: Float32, weights: Float32, shared: Float32 | None) -> Float32:
    """answers [T, K, H], weights [T, K], shared [T, H] -> [T, H]: keys in order, then the shared expert."""
    total = weighted_sum(answers, weights)
    return total if shared is None else total + shared


class FusedKernels(NamedTuple):
    """The arithmetic that the operators fuse, handed in because it belongs to the model."""

    quantize: Callable[[Float32], tuple[npt.NDArray[np.int8], Float32]] | None = None
    """float32 [T, H] -> int8 [T, H], float32 scale [T]. None for layouts that do not quantise."""
    to_bf16: Callable[[Float32], npt.NDArray[np.uint16]] = to_bf16
    from_bf16: Callable[[npt.NDArray[np.uint16]], Float32] = from_bf16
    combine: Callable[[Float32, Float32, Float32 | None], Float32] = combine_answers


class FusedXCCL:
    """FusedDispatch and FusedCombine of one rank. All ranks of the group run the same ones in the same order.

    `layout.plan` must have been called on the plans of all the group's dies. `num_cores` AIV cores take part
    (all by default). `timeout_ns` is how long, in virtual time, an operation waits for its peers.
    `on_step(op, step)` is called when one of an operator's three steps is complete; if it returns an
    awaitable, the operator pauses on it.
    """

    def __init__(
        self,
        die: Die,
        rank: int,
        group: Group,
        layout: FusedLayout,
        kernels: FusedKernels | None = None,
        *,
        num_cores: int | None = None,
        timeout_ns: int = 1_000_000_000,
        on_step: Observer | None = None,
    ) -> None:
        self.kernels = kernels or FusedKernels()
        if layout.quantize and self.kernels.quantize is None:
            raise DeploymentError("a quantised exchange needs kernels to quantise with")
        total = die.spec.num_cores("aiv")
        num_cores = None if num_cores is None else integer("fused exchange", "num_cores", num_cores)
        if num_cores is not None and not 1 <= num_cores <= total:
            raise DeploymentError(f"{num_cores} AIV cores asked for: a die has 1 to {total}")
        self.die, self.layout = die, layout
        self.num_cores, self.timeout_ns = (
            num_cores or total,
            integer("fused exchange", "timeout_ns", timeout_ns),
        )
        self.steps = Steps(die, on_step)
        self.phase = Phase.READY
        self._last_event_id = {Step.DISPATCH: 0, Step.COMBINE: 0}
        self._join(rank, group)
        self.board = Board(die, group.dies, layout.region("flags"), layout.board)
        self.topk_idx: npt.NDArray[np.int32] = np.zeros((0, layout.top_k), np.int32)
        self.received: FusedReceived | None = None

    def _join(self, rank: int, group: Group) -> None:
        layout, die = self.layout, self.die.index
        if not 0 <= rank < group.num_ranks or group.dies[rank] != die:
            raise DeploymentError(f"die {die} is not rank {rank} of the group of dies {list(group.dies)}")
        if group.num_ranks > layout.num_ranks or group.max_experts_per_rank > layout.experts_per_rank:
            raise DeploymentError(
                f"the layout is for {layout.num_ranks} ranks of {layout.experts_per_rank} experts, the group "
                f"has {group.num_ranks} of up to {group.max_experts_per_rank}"
            )
        self.rank, self.group = rank, group
        self.expert_rank = np.asarray(group.expert_rank, np.int64)
        # An expert's number among those of its rank.
        self.local_idx = np.zeros(len(group.expert_rank), np.int64)
        for peer in range(group.num_ranks):
            mine = self.expert_rank == peer
            self.local_idx[mine] = np.arange(mine.sum())

    async def dispatch(self, x: Float32, topk_idx: npt.NDArray[np.int32], event_id: int) -> FusedReceived:
        """Push every token to the ranks of its experts; the tokens that came for this rank's experts.

        x: float32 [T, H], T from 0 to the layout's batch. topk_idx: int32 [T, K], physical experts, all of a
        token different. event_id: from 1, greater than that of any earlier dispatch, the same on all ranks.

        The result's arrays are views of preallocated memory, valid until the next dispatch. Raises
        DeadlineError if a rank does not take part in time, ProtocolError if one does something else,
        AddressError for arguments that the layout does not hold. After one of the first two the handle must
        be reset; a refused call has not happened.
        """

        def check() -> None:
            check_tokens(self, x, topk_idx)

        return await self._run(Step.DISPATCH, event_id, fused_dispatch(self, x, topk_idx, event_id), check)

    async def combine(
        self, expert_out: Float32, topk_weights: Float32, event_id: int, shared: Float32 | None = None
    ) -> Float32:
        """Push the experts' answers to where the tokens came from; the own tokens, combined.

        expert_out: float32 [N, H], one row for each received row, in that order. topk_weights: float32 [T, K]
        of the own tokens. shared: float32 [T, H], the shared expert's output, added last.
        event_id: greater than that of any earlier combine; it may be the dispatch's.
        Returns float32 [T, H], a view of preallocated memory: the sum over a token's keys in order of weight
        x answer (rounded to bfloat16 on the way if the layout is quantised). Raises as `dispatch` does.
        """

        def check() -> None:
            check_answers(self, expert_out, topk_weights, shared)

        operation = fused_combine(self, expert_out, topk_weights, shared)
        return await self._run(Step.COMBINE, event_id, operation, check)

    def reset(self, group: Group | None = None) -> None:
        """Forget a failed or unfinished exchange and go on, in a smaller `group` if given.

        All ranks of the group must do so when none is in an exchange.
        """
        phase = next_phase(self.phase, Step.RESET, self.rank)
        if group is not None:
            if self.die.index not in group.dies:
                raise DeploymentError(f"die {self.die.index} is not in the group of dies {list(group.dies)}")
            self._join(group.dies.index(self.die.index), group)
        self.phase = phase
        self.board.clear(self.group.dies)
        self.clear_token_flags()

    # ---- shared by the two operators ----------------------------------------------------------------

    async def _run(
        self, step: Step, event_id: int, operation: Coroutine[Any, Any, T], check: Callable[[], None]
    ) -> T:
        try:
            last = self._last_event_id[step]
            check_event_id(f"fused {step.name.lower()}", self.rank, event_id)
            if event_id <= last:
                raise ProtocolError(
                    f"fused {step.name.lower()}: rank {self.rank} was given event {event_id} after {last}: "
                    "event IDs must increase"
                )
            phase = next_phase(self.phase, step, self.rank, f"fused {step.name.lower()}")
            check()  # nothing has changed if it refuses the arguments
        except BaseException:
            operation.close()
            raise
        self.phase = phase
        self._last_event_id[step] = event_id
        self.steps.begin()
        try:
            result = await operation
        except BaseException:
            self.phase = next_phase(self.phase, Step.FAIL, self.rank)
            raise
        self.phase = next_phase(self.phase, Step.DONE, self.rank)
        return result

    def crossing(self, counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Dies and the number of messages for each, of those that get any; counts: [R]."""
        gets = counts > 0
        return np.asarray(self.group.dies, np.int64)[gets], counts[gets]

    async def spend_fixed(self, since_ns: int) -> None:
        """All that an operator does beside its push takes an exchange's fixed part, or longer."""
        await self.die.clock.sleep_until(since_ns + self.die.spec.exchange_fixed_ns())

    def region(self, part: str, die: int | None = None) -> Region:
        """A region of this rank, or of another die of the group: flags, dispatch, output ..."""
        memory = self.die.fabric.memories[self.die.index if die is None else die]
        name = self.layout.region(part)
        for area in (memory.metadata, memory.managed, memory.app):
            if name in area.regions:
                return area.regions[name]
        raise DeploymentError(f"die {memory.node} has not planned the fused layout '{self.layout.name}'")

    def clear_token_flags(self) -> None:
        region = self.region("token_flags")
        self.die.memory.write(region.offset, bytes(region.nbytes))
