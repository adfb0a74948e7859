"""Ends of a die in exchanges of tokens with experts; they also count the tokens for the bill."""

from __future__ import annotations

from typing import Any, Protocol

from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.model.canonical import Array


class RankExchange:
    """A rank's end of dispatch and combine, by pull or by push, with the bill for the rows that it brings."""

    def __init__(self, xccl: XCCL | FusedXCCL, tally: Tally, num_slots: int) -> None:
        self._num_slots = num_slots  # physical experts, without the copies of the shared one
        self.xccl, self._tally, self._event, self._num_shared = xccl, tally, 0, 0

    def reset(self, epoch: int) -> None:
        """Forget an unfinished exchange, after a rollback."""
        self.xccl.reset()

    async def dispatch(self, x: Array, topk_idx: Array, event_id: int) -> TokenCopies:
        """Send tokens to the ranks with their experts; return the rows for this rank's experts."""
        self._event = event_id
        self._tally.come(event_id, len(x))
        received = await self.xccl.dispatch(x, topk_idx, event_id)
        self._num_shared = int((received.expert_idx >= self._num_slots).sum())
        return received

    async def combine(self, expert_out: Array, topk_weights: Array, event_id: int) -> Array:
        """Return the experts' answers to this rank's tokens, [T, K, H]; pushed, their sums [T, H]."""
        if isinstance(self.xccl, FusedXCCL):
            return await self.xccl.combine(expert_out, topk_weights, event_id)
        return await self.xccl.combine(expert_out, event_id)

    def bill(self, received: int) -> tuple[float, float, float]:
        """Return the work to bill after the latest dispatch, which brought `received` rows.

        Token copies for routed experts; the number of experts with rows; rows for a copy of the shared
        expert.
        """
        routed, held = received - self._num_shared, int((self.xccl.own_experts < self._num_slots).sum())
        return self._tally.billed(self._event, routed), min(routed, held), self._num_shared


class AwaySide(Protocol):
    """An attention die's end of a way to experts on dies of their own."""

    def reset(self) -> None:
        """Forget an unfinished exchange, after a rollback."""

    async def a2e(self, x: Array, topk_idx: Array, topk_weights: Array, event_id: int) -> None:
        """Send tokens [T, H] to their experts."""

    async def e2a(self, event_id: int) -> Array:
        """Return the sum of all experts' outputs, [T, H]."""


class CountedSide:
    """An attention die's end of A2E and E2A that also counts the tokens sent, for the bill."""

    def __init__(self, side: AwaySide, tally: Tally) -> None:
        self.side, self._tally = side, tally

    def reset(self, epoch: int) -> None:
        """Forget an unfinished exchange, after a rollback."""
        self.side.reset()

    async def a2e(self, x: Array, topk_idx: Array, topk_weights: Array, event_id: int) -> None:
        """Count tokens [T, H] and send them to their experts."""
        self._tally.come(event_id, len(x))
        await self.side.a2e(x, topk_idx, topk_weights, event_id)

    async def e2a(self, event_id: int) -> Array:
        """Return the sum of all experts' outputs, [T, H]."""
        return await self.side.e2a(event_id)


def row_sizes(team: Team) -> dict[str, Any]:
    """Return the properties of rows on their way to expert dies, as keyword arguments of a layout.

    A layout has room for the tokens of a microbatch. The shared expert counts as an expert more in `top_k`,
    if it has dies of its own.
    """
    return {
        "max_tokens": -(-team.sizes.steps.max_tokens // team.sizes.walk.num_microbatches),
        "top_k": team.num_copies,
        "hidden": team.config.hidden_size,
        "quantize": team.recipe == "int8",
        "int8_answers": team.config.int8_answers,
    }
