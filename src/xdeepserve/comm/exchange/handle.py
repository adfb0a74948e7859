"""XCCL: handle of a rank on the exchange of tokens between experts (XDS 3.2)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.channel import Inbox, Outbox
from xdeepserve.comm.checks import check_rank
from xdeepserve.comm.exchange.combine import combine
from xdeepserve.comm.exchange.dispatch import dispatch
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.exchange.rows import (
    Boxes,
    Direction,
    Float32,
    Int32,
    Received,
    SentRows,
    check_answers,
    check_tokens,
)
from xdeepserve.comm.handle import Handle, Quantize
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.steps import Observer
from xdeepserve.comm.turns import Step, Turns
from xdeepserve.comm.wire import Blocks, Field
from xdeepserve.errors import AddressError, DeploymentError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Region


class Titles(NamedTuple):
    """Names of the two operations and of the ranks, in traces and errors."""

    dispatch: str = "dispatch"
    combine: str = "combine"
    rank: str = ""


TITLES = Titles()


class XCCL(Handle):
    """Dispatch and combine of a rank. All ranks of the group run the same operations in the same order.

    `layout.plan` must have been called on the plans of all the group's dies. A group may be smaller than its
    layout: the survivors of a die that is lost make new handles, reset them and go on. `on_step(op, step)` is
    called when a step of the paper's seven is complete, for walkthroughs and fault tests.
    """

    def __init__(
        self,
        die: Die,
        rank: int,
        group: Group,
        layout: Layout,
        quantize: Quantize | None = None,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
        titles: Titles = TITLES,
    ) -> None:
        check_rank(die.index, rank, group.dies, where="the group of dies")
        most = layout.max_experts_per_rank
        if group.num_ranks > layout.num_ranks or group.max_experts_per_rank > most:
            raise DeploymentError(
                f"the layout is for {layout.num_ranks} ranks with {most} experts each, "
                f"the group has {group.num_ranks} with up to {group.max_experts_per_rank}"
            )
        self.rank, self.group, self.layout, self.titles = rank, group, layout, titles
        called: list[object] = [
            f"{titles.rank} {peer}" if titles.rank else peer for peer in range(group.num_ranks)
        ]
        self.called = called[rank]
        turns = Turns(self.called, titles.dispatch, titles.combine)
        super().__init__(die, turns, quantize, layout.quantize, means, on_step)

        def direction(op: str, blocks: Blocks) -> Direction:
            outbox = Outbox(die, blocks, rank, group.dies)
            return Direction(op, outbox, Inbox(die, blocks, group.dies, self.called, called))

        expert_rank = np.asarray(group.expert_rank, np.int64)
        self.own_experts = np.flatnonzero(expert_rank == rank)
        self.boxes = Boxes(
            layout,
            expert_rank,
            self.own_experts,
            group.num_ranks,
            direction(titles.dispatch, layout.dispatch),
            direction(titles.combine, layout.combine),
            SentRows(np.zeros(0, np.int64), np.zeros(group.num_ranks, np.int64), (0, layout.top_k)),
        )

    @property
    def received(self) -> Received | None:
        """Token copies received in the last dispatch."""
        return self.boxes.received

    async def dispatch(
        self,
        x: Float32 | npt.NDArray[np.int8],
        topk_idx: Int32,
        event_id: int,
        quantize: bool | None = None,
        scale: Float32 | None = None,
    ) -> Received:
        """Send every token to the ranks of its experts; return the token copies that came for this rank's
        experts.

        x: float32 [T, H], T may be 0. topk_idx: int32 [T, K], physical experts, all of a token different.
        event_id: from 1, greater than that of any earlier dispatch, and the same on all ranks.
        quantize: if given, must agree with the layout.
        scale: float32 [T] if x is int8 and was quantised before (a trampoline forwards what it received).

        The result's arrays are views of the rank's memory, valid until its next dispatch. Raises
        DeadlineError if a rank does not take part in time, ProtocolError if one does something else,
        AddressError for arguments that the layout does not hold. After one of the first two the handle must
        be reset; a refused call has not happened.
        """
        if quantize is not None and quantize != self.layout.quantize:
            raise AddressError(f"dispatch: the layout is for quantize={self.layout.quantize}, not {quantize}")
        num_experts, op = len(self.boxes.expert_rank), self.titles.dispatch
        check = partial(check_tokens, op, self.layout, num_experts, x, scale, topk_idx)
        return await self._run(
            Step.DISPATCH, event_id, lambda: dispatch(self, self.boxes, x, scale, topk_idx, event_id), check
        )

    async def combine(
        self, expert_out: Float32, event_id: int, topk_weights: Float32 | None = None
    ) -> Float32:
        """Send the experts' answers back to the ranks of their tokens.

        expert_out: float32 [N, H], one row for each received row, in that order.
        event_id: greater than that of any earlier combine; it may be the dispatch's.
        topk_weights: for exchanges that sum on arrival (`ExchangeHandle`); this one leaves the sum to the
        caller.
        Returns float32 [T, K, H]: what expert topk_idx[t, k] made of this rank's token t, not yet weighted or
        summed (rounded to bfloat16 on the way if the layout is quantised). Raises as `dispatch` does.
        """
        check = partial(check_answers, self.titles.combine, self.layout, self.received, expert_out)
        return await self._run(
            Step.COMBINE, event_id, lambda: combine(self, self.boxes, expert_out, event_id), check
        )

    def reset(self) -> None:
        """Forget a failed or unfinished exchange.

        All ranks must do so when none is in an exchange, then go on with an event ID that none has used.
        """
        dispatch, combine = self.boxes.dispatch.inbox, self.boxes.combine.inbox
        self.turns.reset({Step.DISPATCH: dispatch.newest, Step.COMBINE: combine.newest})

    # ---- for those who look on ----------------------------------------------------------------------

    def region(self, op: str, part: str) -> Region:
        """Return a region of the rank: fields, blocks or rows."""
        _, outbox, inbox = self._direction(op)
        return {"fields": inbox.region, "blocks": outbox.region, "rows": inbox.rows_region}[part]

    def block_offset(self, op: str, peer: int) -> int:
        """Return the offset of the block for `peer`, in this rank's memory."""
        return self._direction(op).outbox.pointer(peer)

    def fields(self, op: str) -> list[Field]:
        """Return the current contents of the peers' fields in this rank's memory."""
        return self._direction(op).inbox.fields()

    def _direction(self, op: str) -> Direction:
        return {"dispatch": self.boxes.dispatch, "combine": self.boxes.combine}[op]
