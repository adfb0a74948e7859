"""Multi-token prediction on a die: after the main model, k passes of MTP make k drafts (xDeepServe 4.6).

Draft d of a sequence with known tokens 0 .. n - 1 is a guess at token n + d - 1. Depth d runs MTP layer d on
rows i. A row is made of the hidden state of depth d - 1 at i (depth 0 is the main model) and of token i + d:

    depth 1   rows up to n - 2, whose last one takes token n - 1, just sampled      -> a draft of token n
    depth 2   the same rows; the last one takes the draft of token n for its truth  -> a draft of token n + 1

Each depth has a KV cache of its own, also where one layer serves both. A depth-2 entry made of a draft is
wrong if the draft is rejected. The next step *mends* it from a hidden state of the first depth. That state is
left in the `tail` of the row's KV block, and travels with the block. Only the entry of a block's last row
stays wrong, since a full block may have other users. Entries decide about drafts, never about tokens.

Kernels make the rows of each depth from index lists in HBM (model/kernels/drafts.py), so that the host is not
asked between the passes. Only the number of rows is looked at here, as sizes of buffers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.sampler import Chooser
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.walk.launcher import Launcher
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels import drafts as kernels
from xdeepserve.model.kernels.drafts import ENDS, KEPT, MENDED, ROWS
from xdeepserve.model.tensors import MTP, Layer, ModelWeights
from xdeepserve.step.frame import Batch, KVCache
from xdeepserve.step.passes import MTP_HEAD, MTP_INPUT, MTP_STATES

# Runs layers on the rows of a pass: layers, their caches, the event of their first exchange.
RunLayers = Callable[[Sequence[Layer], Sequence[KVCache], int], Awaitable[None]]


class DraftLists(NamedTuple):
    """Index lists of a step in a die's memory, int32, by which kernels make the rows of MTP's passes."""

    seq_of: Array  # [T]
    positions: Array
    slots: Array
    next_token_ids: Array
    num_drafts: Array  # [S]
    token_after: Array
    num_accepted: Array
    logit_rows: Array  # [R]
    sampled: Array
    drafts: Array  # [S, K]
    rows: list[Array]  # by depth [5, T]
    ends: Array  # [3, S]
    mended: Array  # [S]
    kept: Array  # [2, S]
    counts: Array  # [4]

    @classmethod
    def of(cls, mem: DieMemory, plan: StepPlan) -> DraftLists:
        """View the buffers of a step in a die's memory."""
        take, result, mtp = mem.workspace.take, mem.result, mem.steps.mtp
        rows, seqs, logit_rows = plan.num_tokens, len(plan.num_drafts), len(plan.logit_rows)
        return cls(
            take("seq_of", rows),
            take("positions", rows),
            take("slots", rows),
            take("next_token_ids", rows),
            take("num_drafts", seqs),
            take("token_after", seqs),
            result("num_accepted", plan.step, seqs),
            take("logit_rows", logit_rows),
            result("sampled", plan.step, logit_rows),
            result("drafts", plan.step, seqs, mtp),
            [take(f"draft_rows/{depth}", 5, rows) for depth in range(mtp)],
            take("draft_ends", 3, seqs),
            take("draft_mended", seqs),
            take("draft_kept", 2, seqs),
            take("draft_counts", 4),
        )

    def write(self, plan: StepPlan) -> None:
        """Write the plan's lists that only drafts need; the other lists of the step are there already."""
        self.next_token_ids[:], self.logit_rows[:] = plan.next_token_ids, plan.logit_rows
        self.num_drafts[:], self.token_after[:] = plan.num_drafts, plan.token_after
        self.counts[:] = 0

    def first_rows(self) -> tuple[Array, ...]:
        """Return the arguments of the kernel `first_rows`."""
        made = self.rows[0], self.ends, self.counts, self.drafts
        rows = self.seq_of, self.positions, self.slots, self.next_token_ids
        return *made, *rows, self.num_drafts, self.num_accepted, self.logit_rows, self.sampled

    def next_rows(self) -> tuple[Array, ...]:
        """Return the arguments of the kernel `next_rows`, without the size of KV blocks."""
        made = self.rows[1], self.ends, self.mended, self.kept, self.counts
        return *made, self.rows[0], self.drafts, self.token_after, self.num_drafts, self.num_accepted


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

    def begin(self, plan: StepPlan) -> None:
        """Begin a step: write the index lists that its kernels need."""
        self.lists = DraftLists.of(self.mem, plan)
        self.lists.write(plan)

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
        lists = self.lists
        await self._launch(kernels.first_rows, lists.first_rows(), plan.num_tokens)
        for depth, mtp in enumerate(self.layers):
            if launcher is not None:
                await launcher.next_graph()
            num_rows = int(lists.counts[ROWS])
            await self._embed(mtp, lists.rows[depth][:, :num_rows], batch.block_tables)
            event = first_event + depth * (mtp.layer.moe is not None)
            await run_layers([mtp.layer], [self.caches[depth]], event)
            await self._draw(plan, depth, lists)
            if depth + 1 < self.num_drafts:
                block_size = self.mem.kv.sizes.block_size
                await self._launch(kernels.next_rows, lists.next_rows(), plan.num_tokens, block_size)
                await self._keep_states(plan.step, num_rows, lists)

    async def _launch(
        self, kernel: Callable[..., None], lists: Sequence[Array], num_rows: int, *sizes: int
    ) -> None:
        """Launch a kernel that makes the rows of a pass; each of its lists is read or written once."""
        if num_rows:
            duration_ns = self.runner.die.spec.kernel_ns(0, sum(each.nbytes for each in lists), "aiv")
            await self.runner.launch(
                "DraftRows", "aiv", duration_ns, partial(kernel, *lists, *sizes), num_rows
            )

    async def _embed(self, mtp: MTP, rows: Array, tables: Array) -> None:
        """Begin a pass: project the tokens and states of its rows [5, T] to what its layer reads [T, H]."""
        frame, (seq, frame.state_rows, token, position, slot) = self.frame, rows
        h = self.mem.workspace.take("h", rows.shape[1], self.mem.config.hidden_size)
        frame.begin_pass(mtp, mtp.layer, h, Batch.of(position, slot, seq, tables), token)
        await self.runner.run(MTP_INPUT)

    async def _draw(self, plan: StepPlan, depth: int, lists: DraftLists) -> None:
        """Sample a draft for each sequence that has sampled a token."""
        count = int(lists.counts[ENDS])
        frame, (ends, seqs, logit_rows) = self.frame, lists.ends[:, :count]
        frame.logit_rows = ends
        frame.logits = self.mem.workspace.take("draft_logits", count, self.mem.config.vocab_size)
        await self.runner.run(MTP_HEAD)
        if count:
            proposed = np.empty(count, np.int32)
            self.chooser.draw(proposed, frame.logits, plan, logit_rows.tolist(), ahead=2 + depth)
            lists.drafts[seqs, depth] = proposed

    def undo(self, step: StepNo) -> None:
        """Restore the rows of `tail` that steps from number `step` on have overwritten."""
        for block, row in rows_before(self.overwritten, step).items():
            self.mem.kv.tail[block] = row
        self.overwritten = {number: rows for number, rows in self.overwritten.items() if number < step}

    async def _keep_states(self, step: StepNo, num_rows: int, lists: DraftLists) -> None:
        """Collect the hidden states of the next depth [rows + mended, H]; keep each sequence's last state in
        its block."""
        frame, count = self.frame, lists.counts.tolist()
        frame.tail = self.mem.kv.tail
        # Every row to be mended stands for a rejected draft, so that there is room for all.
        size = num_rows + count[MENDED], self.mem.config.hidden_size
        frame.hidden = self.mem.workspace.take("hidden", *size)
        frame.mended_blocks = lists.mended[: count[MENDED]]
        frame.kept_rows, frame.kept_blocks = lists.kept[:, : count[KEPT]]
        frame.overwritten = {}
        latest = {number: rows for number, rows in self.overwritten.items() if number == step - 1}
        self.overwritten = {**latest, step: frame.overwritten}  # two steps at most are under way
        await self.runner.run(MTP_STATES)
