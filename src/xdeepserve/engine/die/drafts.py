"""Multi-token prediction on a die: after the main model, k passes of MTP make k drafts (xDeepServe 4.6).

Draft d of a sequence whose tokens 0 .. n - 1 are known is a guess at token n + d - 1. Depth d runs layer d on
rows i, each made of the hidden state that depth d - 1 has there (depth 0 is the main model) and of token
i + d:

    depth 1   rows up to n - 2, whose last one takes token n - 1, just sampled      -> a draft of token n
    depth 2   the same rows; the last one takes the draft of token n for its truth  -> a draft of token n + 1

Each depth has a KV cache of its own, also where one layer serves both. An entry of depth 2 that was made of a
draft is wrong if the draft is rejected: the next step *mends* it, from the hidden state that the first depth
left in the `tail` of the row's KV block, where it travels with the block. Only the entry of a block's last
row stays as it is, since a full block may have other users. Entries decide about drafts, never about tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xdeepserve.engine.messages import StepPlan
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MTP
from xdeepserve.step.frame import Batch
from xdeepserve.step.passes import IN_PASS, PASS

if TYPE_CHECKING:
    from xdeepserve.engine.die.program import Executor


class DraftRow(NamedTuple):
    """A row of one depth."""

    seq: int
    state: int  # its place among the hidden states of the depth before
    token: int  # what follows, as far ahead as the depth looks
    position: int
    slot: int


class DraftRows(NamedTuple):
    """The rows of one depth, those of a sequence consecutive and ascending in position.

    `ends` has the last row of each sequence that sampled: there the next draft is made.
    """

    rows: list[DraftRow]
    ends: dict[int, int]

    def is_first(self, index: int) -> bool:
        """Whether a row is the first of its sequence."""
        return index == 0 or self.rows[index - 1].seq != self.rows[index].seq

    def is_last(self, index: int) -> bool:
        """Whether a row is the last of its sequence."""
        return index + 1 == len(self.rows) or self.rows[index + 1].seq != self.rows[index].seq


def first_rows(plan: StepPlan, accepted: list[int], sampled: list[int]) -> DraftRows:
    """Depth 1: all rows of the step but rejected drafts, whose successors are unknown."""
    row_of = {row: r for r, row in enumerate(plan.logit_rows)}
    sizes = np.bincount(np.asarray(plan.seq_of, np.int64), minlength=len(plan.num_drafts)).tolist()
    made, first = DraftRows([], {}), 0
    for seq, num_rows in enumerate(sizes):
        for row in range(first, first + num_rows - plan.num_drafts[seq] + accepted[seq]):
            token = plan.next_token_ids[row]
            if token < 0:
                token = sampled[row_of[row]]
                made.ends[seq] = len(made.rows)
            made.rows.append(DraftRow(seq, row, token, plan.positions[row], plan.slots[row]))
        first += num_rows
    return made


def mends(plan: StepPlan, depth_1: DraftRows, accepted: list[int], block_size: int) -> dict[int, DraftRow]:
    """By sequence, the first row of this step, if the entry of depth 2 before it is wrong and writable."""
    return {
        row.seq: row
        for index, row in enumerate(depth_1.rows)
        if depth_1.is_first(index)
        and plan.num_drafts[row.seq]
        and not accepted[row.seq]
        and row.slot % block_size
    }


def next_rows(
    plan: StepPlan, depth_1: DraftRows, drafts: list[int], mended: dict[int, DraftRow]
) -> DraftRows:
    """Depth 2, from depth 1 and its drafts by sequence. The states of `mended` follow those of depth 1."""
    made = DraftRows([], {})
    tail_of = {seq: len(depth_1.rows) + number for number, seq in enumerate(mended)}
    for index, row in enumerate(depth_1.rows):
        seq = row.seq
        if depth_1.is_first(index) and seq in mended:
            made.rows.append(DraftRow(seq, tail_of[seq], row.token, row.position - 1, row.slot - 1))
        if not depth_1.is_last(index):
            token = depth_1.rows[index + 1].token
        elif seq in depth_1.ends:
            token = drafts[seq]
            made.ends[seq] = len(made.rows)
        else:
            token = plan.token_after[seq]
        if token >= 0:
            made.rows.append(row._replace(state=index, token=token))
    return made


class Drafter:
    """The MTP layers of one die, and the passes through them."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.config = executor, executor.config
        self.ws, self.num_drafts = executor.ws, executor.mem.sizes.mtp
        layers, first = executor.weights.mtp, executor.config.num_hidden_layers
        self.layers = (layers + layers[:1] * self.num_drafts)[: self.num_drafts]
        self.caches = executor.caches[first:]

    async def propose(self, plan: StepPlan, batch: Batch, hidden: Array, first_event: int) -> None:
        """Write drafts int32 [sequences, k] of the main model's hidden [T, H]; -1 where nothing was sampled.

        Exchanges of the passes have the events `first_event` and up.
        """
        executor = self.executor
        found = executor.result("num_accepted", len(plan.num_drafts)).tolist()
        # A step that samples nothing leaves there what was there.
        accepted = [a if d else 0 for a, d in zip(found, plan.num_drafts, strict=True)]
        sampled = executor.result("sampled", len(plan.logit_rows)).tolist()
        drafts = executor.result("drafts", len(plan.num_drafts), self.num_drafts)
        drafts[:] = -1
        rows, states = first_rows(plan, accepted, sampled), hidden
        for depth, mtp in enumerate(self.layers):
            if executor.launcher is not None:
                await executor.launcher.next_graph()
            event = first_event + depth * (mtp.layer.moe is not None)
            h = await self._forward(mtp, depth, rows, states, batch.block_tables, event)
            if rows.ends:
                await self._draw(plan, mtp, depth, rows, h, drafts, accepted)
            else:
                executor.runner.skip("Draft")
            if depth + 1 < self.num_drafts:
                mended = mends(plan, rows, accepted, executor.mem.sizes.block_size)
                states = await self._keep_states(mtp, rows, h, mended)
                rows = next_rows(plan, rows, drafts[:, depth].tolist(), mended)

    async def _forward(
        self, mtp: MTP, depth: int, made: DraftRows, states: Array, tables: Array, event: int
    ) -> Array:
        """h [rows, H]: one MTP layer, after its projection of token and state."""
        executor, count = self.executor, len(made.rows)
        h = self.ws.take("h", count, self.config.hidden_size)
        seq, state, token, position, slot = np.array(made.rows, np.int32).reshape(count, 5).T.copy()
        if count:
            await executor.runner.spend(
                "MTPInput", "aic", IN_PASS, lambda: executor.ends.mtp_input(h, mtp, states, state, token)
            )
        else:
            executor.runner.skip("MTPInput")
        batch = Batch.of(position, slot, seq, tables)
        await executor.run_layers(h, [mtp.layer], [self.caches[depth]], batch, event)
        return h

    async def _draw(
        self,
        plan: StepPlan,
        mtp: MTP,
        depth: int,
        made: DraftRows,
        h: Array,
        drafts: Array,
        accepted: list[int],
    ) -> None:
        """Sample a draft for each sequence that has sampled a token."""
        executor, ends = self.executor, made.ends
        logits = self.ws.take("draft_logits", len(ends), self.config.vocab_size)
        last = {plan.seq_of[row]: r for r, row in enumerate(plan.logit_rows)}
        # The rows that the sequences' last tokens were sampled from.
        logit_rows = [last[seq] - plan.num_drafts[seq] + accepted[seq] for seq in ends]

        await executor.runner.spend(
            "Draft", "aic", PASS, lambda: executor.ends.mtp_head(logits, mtp, h, list(ends.values()))
        )
        proposed = np.empty(len(ends), np.int32)
        executor.chooser.draw(proposed, logits, plan, logit_rows, ahead=2 + depth)
        drafts[list(ends), depth] = proposed

    async def _keep_states(self, mtp: MTP, made: DraftRows, h: Array, mended: dict[int, DraftRow]) -> Array:
        """The states of the next depth [rows + mended, H]; each sequence's last one stays in its block."""
        size, tail = self.executor.mem.sizes.block_size, self.executor.mem.tail
        count = len(made.rows)
        # Every row to be mended stands for a rejected draft, so that there is room for all.
        states = self.ws.take("hidden", count + len(mended), self.config.hidden_size)

        def run() -> None:
            k.rms_norm(states[:count], h, mtp.norm, self.config.rms_norm_eps)
            for number, row in enumerate(mended.values()):
                states[count + number] = tail[row.slot // size]
            for index, row in enumerate(made.rows):
                if made.is_last(index):
                    tail[row.slot // size] = states[index]

        if count:
            await self.executor.runner.spend("DraftState", "aiv", IN_PASS, run)
        return states
