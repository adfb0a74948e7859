"""Dispatch and combine between all dies with DP groups, with real bytes (XDS 3.2, CM 4.2.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cells import Cells
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.exchange.rows import Float32, Int32, TokenCopies
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.means import Means
from xdeepserve.engine.deploy import deployment
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import Exchange
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.model.canonical import Array


class ExchangeLayout(Protocol):
    """Layout of an exchange among ranks that all send tokens and have experts."""

    @classmethod
    def for_group(
        cls,
        group: Group,
        most: int,  # tokens of a rank
        /,
        *,
        top_k: int,
        hidden: int,
        quantize: bool = True,
        name: str = ...,  # its regions' names begin so
        int8_answers: bool = False,
    ) -> Self: ...

    def plan(self, memory: MemoryPlan) -> None: ...

    def cells(self) -> dict[str, Cells]: ...


class ExchangeHandle(Protocol):
    """Handle of a rank on an exchange. Answers come back as [T, K, H], or as sums [T, H] by weights."""

    die: Die
    means: Means

    @property
    def rank(self) -> int: ...

    @property
    def own_experts(self) -> npt.NDArray[np.int64]: ...

    async def dispatch(
        self, x: Float32 | npt.NDArray[np.int8], topk_idx: Int32, event_id: int
    ) -> TokenCopies: ...

    async def combine(self, expert_out: Float32, *, topk_weights: Float32, event_id: int) -> Float32: ...

    def reset(self) -> None: ...


class Ends(NamedTuple):
    """Layout and handle of an exchange: `handle(die, rank, group, layout, quantize, means)`."""

    layout: type[ExchangeLayout]
    handle: Callable[..., ExchangeHandle]
    name: str  # of its regions


ENDS: Final[Mapping[deployment.Exchange, Ends]] = {
    "pull": Ends(Layout, XCCL, "xccl"),
    "push": Ends(FusedLayout, FusedXCCL, "fused"),
}


class Among:
    """Dispatch and combine between all ranks in one of their microbatches.

    Constructing it plans the buffers on all dies, with names that end with `mark`. A physical expert lives on
    the rank whose slots hold it. The ends also count the tokens, for the bill.
    """

    def __init__(self, team: Team, mark: str, tally: Tally) -> None:
        self.team, self._tally = team, tally
        self.group = team.holders
        sizes: dict[str, Any] = {
            "top_k": team.num_copies,
            "hidden": team.config.hidden_size,
            "quantize": team.recipe == "int8",
            "int8_answers": team.config.int8_answers,
        }
        most = team.sizes.groups.max_slice
        kind = ENDS[team.sizes.walk.exchange]
        self.layout = kind.layout.for_group(self.group, most, name=f"{kind.name}{mark}", **sizes)
        self._make = kind.handle
        for die in team.dies:
            self.layout.plan(team.pod.plan(die))
        self._handles: dict[DieRank, ExchangeHandle] = {}
        self._latest: dict[DieRank, tuple[int, int]] = {}  # dispatch: its event, rows of the shared expert

    @cached_property
    def _num_slots(self) -> int:
        """Number of physical routed experts, which every exchange asks for."""
        return self.team.sizes.experts.num_slots

    def end(self, rank: DieRank, means: Means) -> Exchange:
        """Make a rank's end of the exchange; another end of the same rank uses its buffers by other means."""
        die = self.team.pod.dies[self.team.dies[rank]]
        if rank not in self._handles:
            self._handles[rank] = self._make(die, rank, self.group, self.layout, quantize_rows, means)
        means = means.checked(die)
        return Exchange(
            partial(self.dispatch, rank, means),
            partial(self.combine, rank, means),
            partial(self.bill, rank),
            partial(self.reset, rank),
        )

    def reset(self, rank: DieRank, epoch: int) -> None:
        """Forget a rank's unfinished exchange, after a rollback."""
        self._handles[rank].reset()

    async def dispatch(
        self, rank: DieRank, means: Means, x: Array, topk_idx: Array, event_id: int
    ) -> TokenCopies:
        """Send tokens to the ranks with their experts; return the rows for the rank's own experts."""
        self._tally.come(event_id, len(x))
        handle = self._handles[rank]
        handle.means = means
        received = await handle.dispatch(x, topk_idx, event_id)
        num_shared = int((received.expert_idx >= self._num_slots).sum())
        self._latest[rank] = event_id, num_shared
        return received

    async def combine(
        self, rank: DieRank, means: Means, expert_out: Array, topk_weights: Array, event_id: int
    ) -> Array:
        """Return the experts' answers to a rank's tokens, [T, K, H], or their sums [T, H]."""
        handle = self._handles[rank]
        handle.means = means
        return await handle.combine(expert_out, topk_weights=topk_weights, event_id=event_id)

    def bill(self, rank: DieRank, received: int) -> tuple[float, float, float]:
        """Return a rank's work to bill after its latest dispatch, which brought `received` rows.

        Token copies for routed experts; the number of experts with rows; rows for a copy of the shared
        expert.
        """
        event, num_shared = self._latest[rank]
        routed = received - num_shared
        held = int((self._handles[rank].own_experts < self._num_slots).sum())
        return self._tally.billed(event, routed), min(routed, held), num_shared
