"""Dispatch and combine between all dies with DP groups, with real bytes (XDS 3.2, CM 4.2.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, assert_never

from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.means import Means
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import Exchange
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.model.canonical import Array


class Among:
    """Dispatch and combine between all ranks in one of their microbatches, by pull or by push.

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
        self.layout: Layout | FusedLayout
        self._make: Callable[..., XCCL | FusedXCCL]
        match team.sizes.walk.exchange:
            case "pull":
                self.layout = Layout.for_group(self.group, max_tokens=most, name=f"xccl{mark}", **sizes)
                self._make = XCCL
            case "push":
                self.layout = FusedLayout.for_group(
                    self.group, local_batch=most, name=f"fused{mark}", **sizes
                )
                self._make = FusedXCCL
            case other:
                assert_never(other)
        for die in team.dies:
            self.layout.plan(team.pod.plan(die))
        self._handles: dict[DieRank, XCCL | FusedXCCL] = {}
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
        """Return the experts' answers to a rank's tokens, [T, K, H]; pushed, their sums [T, H]."""
        handle = self._handles[rank]
        handle.means = means
        if isinstance(handle, FusedXCCL):
            return await handle.combine(expert_out, topk_weights, event_id)
        return await handle.combine(expert_out, event_id)

    def bill(self, rank: DieRank, received: int) -> tuple[float, float, float]:
        """Return a rank's work to bill after its latest dispatch, which brought `received` rows.

        Token copies for routed experts; the number of experts with rows; rows for a copy of the shared
        expert.
        """
        event, num_shared = self._latest[rank]
        routed = received - num_shared
        held = int((self._handles[rank].own_experts < self._num_slots).sum())
        return self._tally.billed(event, routed), min(routed, held), num_shared
