"""Multi-token prediction on a die: after the main model, k passes of MTP make k drafts (xDeepServe 4.6).

Draft d of a sequence with known tokens 0 .. n - 1 is a guess at token n + d - 1. Depth d runs MTP layer d on
rows i. A row is made of the hidden state of depth d - 1 at i (depth 0 is the main model) and of token i + d:

    depth 1   rows up to n - 2, whose last one takes token n - 1, just sampled      -> a draft of token n
    depth 2   the same rows; the last one takes the draft of token n for its truth  -> a draft of token n + 1

Each depth has a KV cache of its own, also where one layer serves both. A depth-2 entry made of a draft is
wrong if the draft is rejected. The next step *mends* it from a hidden state of the first depth. That state is
left in the `tail` of the row's KV block, and travels with the block. Only the entry of a block's last row
stays wrong, since a full block may have other users. Entries decide about drafts, never about tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.sampler import Chooser
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.walk.launcher import Launcher
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MTP, Layer, ModelWeights
from xdeepserve.step.frame import Batch, KVCache
from xdeepserve.step.passes import MTP_HEAD, MTP_INPUT, MTP_STATES

# Runs layers on the rows of a pass: layers, their caches, the event of their first exchange.
RunLayers = Callable[[Sequence[Layer], Sequence[KVCache], int], Awaitable[None]]


class DraftRow(NamedTuple):
    """Input row of an MTP depth: a hidden state and the token that follows it."""

    seq: int
    state: int  # its place among the hidden states of the depth before
    token: int  # what follows, as far ahead as the depth looks
    position: int
    slot: int


class DraftRows(NamedTuple):
    """Input rows of an MTP depth; each sequence's rows are consecutive, in ascending position.

    `ends` has the last row of each sequence that sampled a token; the next draft is made there.
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
    """Build the rows of depth 1: all rows of the step except rejected drafts, whose next tokens are
    unknown."""
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
    """Find sequences with a wrong, writable depth-2 KV entry just before this step.

    Return the step's first row of each such sequence.
    """
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
    """Build the rows of depth 2 from depth 1's rows and drafts [sequences].

    The states of `mended` rows follow the states of depth 1.
    """
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


def rows_before(overwritten: dict[int, dict[int, Array]], step: StepNo) -> dict[int, Array]:
    """Return, by KV block, the row that lay there before step number `step`.

    Only blocks that this step or a later one has overwritten are in it. `overwritten` has, by step and block,
    the rows that the step found.
    """
    rows: dict[int, Array] = {}
    for number in sorted((n for n in overwritten if n >= step), reverse=True):
        rows |= overwritten[number]
    return rows


class Drafter:
    """Runs the MTP layers of one die to make drafts; `caches` are the KV caches of MTP's depths."""

    def __init__(
        self,
        mem: DieMemory,
        weights: ModelWeights,
        caches: Sequence[KVCache],
        runner: Runner,
        chooser: Chooser,
    ) -> None:
        self.mem, self.caches, self.runner, self.chooser = mem, caches, runner, chooser
        self.frame, self.num_drafts = runner.frame, mem.steps.mtp
        self.layers = (weights.mtp + weights.mtp[:1] * self.num_drafts)[: self.num_drafts]
        # Rows of `tail` that the latest steps have overwritten, as they were: by step and block.
        self.overwritten: dict[int, dict[int, Array]] = {}

    async def propose(
        self,
        plan: StepPlan,
        batch: Batch,
        first_event: int,
        run_layers: RunLayers,
        launcher: Launcher | None,
    ) -> None:
        """Write drafts int32 [sequences, k] from the main model's hidden states; -1 where nothing was
        sampled.

        The exchanges of these passes have event IDs from `first_event` on.
        """
        result = self.mem.result
        found = result("num_accepted", plan.step, len(plan.num_drafts)).tolist()
        # A step that samples nothing leaves there what was there.
        accepted = [a if d else 0 for a, d in zip(found, plan.num_drafts, strict=True)]
        sampled = result("sampled", plan.step, len(plan.logit_rows)).tolist()
        drafts = result("drafts", plan.step, len(plan.num_drafts), self.num_drafts)
        drafts[:] = -1
        rows = first_rows(plan, accepted, sampled)
        for depth, mtp in enumerate(self.layers):
            if launcher is not None:
                await launcher.next_graph()
            await self._embed(mtp, rows, batch.block_tables)
            event = first_event + depth * (mtp.layer.moe is not None)
            await run_layers([mtp.layer], [self.caches[depth]], event)
            await self._draw(plan, depth, rows, drafts, accepted)
            if depth + 1 < self.num_drafts:
                mended = mends(plan, rows, accepted, self.mem.kv.sizes.block_size)
                await self._keep_states(plan.step, rows, mended)
                rows = next_rows(plan, rows, drafts[:, depth].tolist(), mended)

    async def _embed(self, mtp: MTP, made: DraftRows, tables: Array) -> None:
        """Begin a pass: project the tokens and states of its rows to what its layer reads [T, H]."""
        frame, count = self.frame, len(made.rows)
        h = self.mem.workspace.take("h", count, self.mem.config.hidden_size)
        seq, frame.state_rows, token, position, slot = (
            np.array(made.rows, np.int32).reshape(count, 5).T.copy()
        )
        frame.begin_pass(mtp, mtp.layer, h, Batch.of(position, slot, seq, tables), token)
        await self.runner.run(MTP_INPUT)

    async def _draw(
        self, plan: StepPlan, depth: int, made: DraftRows, drafts: Array, accepted: list[int]
    ) -> None:
        """Sample a draft for each sequence that has sampled a token."""
        frame, ends = self.frame, made.ends
        frame.logit_rows = list(ends.values())
        frame.logits = self.mem.workspace.take("draft_logits", len(ends), self.mem.config.vocab_size)
        await self.runner.run(MTP_HEAD)
        if not ends:
            return
        last = {plan.seq_of[row]: r for r, row in enumerate(plan.logit_rows)}
        # The rows that the sequences' last tokens were sampled from.
        logit_rows = [last[seq] - plan.num_drafts[seq] + accepted[seq] for seq in ends]
        proposed = np.empty(len(ends), np.int32)
        self.chooser.draw(proposed, frame.logits, plan, logit_rows, ahead=2 + depth)
        drafts[list(ends), depth] = proposed

    def undo(self, step: StepNo) -> None:
        """Restore the rows of `tail` that steps from number `step` on have overwritten."""
        for block, row in rows_before(self.overwritten, step).items():
            self.mem.kv.tail[block] = row
        self.overwritten = {number: rows for number, rows in self.overwritten.items() if number < step}

    async def _keep_states(self, step: StepNo, made: DraftRows, mended: dict[int, DraftRow]) -> None:
        """Collect the hidden states of the next depth [rows + mended, H]; keep each sequence's last state in
        its block."""
        frame, rows = self.frame, made.rows
        size, frame.tail = self.mem.kv.sizes.block_size, self.mem.kv.tail
        # Every row to be mended stands for a rejected draft, so that there is room for all.
        frame.hidden = self.mem.workspace.take("hidden", len(rows) + len(mended), self.mem.config.hidden_size)
        frame.mended_blocks = [row.slot // size for row in mended.values()]
        frame.kept_rows = [index for index in range(len(rows)) if made.is_last(index)]
        frame.kept_blocks = [rows[index].slot // size for index in frame.kept_rows]
        frame.overwritten = {}
        latest = {number: rows for number, rows in self.overwritten.items() if number == step - 1}
        self.overwritten = {**latest, step: frame.overwritten}  # two steps at most are under way
        await self.runner.run(MTP_STATES)
