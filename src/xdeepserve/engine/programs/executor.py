"""The die program, the same on all ranks: wait for a plan, run it, write the results, tell the host."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np

from xdeepserve.comm.xccl import XCCL
from xdeepserve.engine.programs.launcher import Launcher
from xdeepserve.engine.programs.layers import Batch, Layers
from xdeepserve.engine.programs.memory_plan import DieMemory, KVCache
from xdeepserve.engine.programs.messages import (
    LOGPROB_SLOTS,
    CopyBlocks,
    CopyDone,
    Shutdown,
    StepDone,
    StepFailed,
    StepPlan,
)
from xdeepserve.engine.programs.ops import Threads, Work, linear_work
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.queue import Queue
from xdeepserve.model import kernels as k
from xdeepserve.model import sampling
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels import sample
from xdeepserve.model.weights import Layer


class Executor:
    """One die's share of the model. `reports` is the host's queue."""

    def __init__(
        self,
        rank: int,
        die: Die,
        mem: DieMemory,
        xccl: XCCL | None,
        threads: Threads,
        reports: Queue[msgspec.Struct],
    ) -> None:
        self.rank, self.die, self.mem, self.config = rank, die, mem, mem.config
        self.ws, self.reports = mem.workspace, reports
        self.launcher: Launcher | None = None  # None: launches cost nothing
        self.weights = mem.assemble()
        self.caches = mem.kv_caches()
        self.layers = Layers(die, mem, xccl, threads, self.weights.cos, self.weights.sin)
        # Event IDs count the MoE layers of all steps, MTP's included, from 1 on.
        w = self.weights
        self._events_per_step = self._num_exchanges([*w.layers, *([w.mtp.layer] if w.mtp else [])])

    async def run(self) -> None:
        """Serve commands until Shutdown."""
        while True:
            command = await self.die.next_command()
            if isinstance(command, Shutdown):
                return
            try:
                await self._obey(command)
            except Exception as error:
                self.reports.put(StepFailed(self.rank, error))
                return

    async def _obey(self, command: msgspec.Struct) -> None:
        match command:
            case StepPlan():
                await self.step(command)
                self.reports.put(StepDone(self.rank, command.step))
            case CopyBlocks(ticket=None):
                await self._copy_blocks(command)
            case CopyBlocks(ticket=ticket):
                self.die.spawn(self._beside(ticket, self._copy_blocks(command)), name="copy blocks")
            case _:
                raise ProtocolError(f"die {self.die.index} does not know the command {command!r}")

    async def _beside(self, ticket: int | None, transfer: Coroutine[Any, Any, None]) -> None:
        """A transfer beside the steps, and the report of its end."""
        try:
            await transfer
        except Exception as error:
            self.reports.put(StepFailed(self.rank, error))
        else:
            assert ticket is not None
            self.reports.put(CopyDone(self.rank, ticket))

    async def _copy_blocks(self, command: CopyBlocks) -> None:
        pieces = []
        for src_tier, src, dst_tier, dst in command.copies:
            sources = self.mem.block_pieces(src_tier, src)
            targets = self.mem.block_pieces(dst_tier, dst)
            for (source, nbytes), (target, _) in zip(sources, targets, strict=True):
                pieces.append(Copy(source, target, nbytes))
        await self.die.dma.copy(pieces, name="KV blocks")

    async def step(self, plan: StepPlan) -> None:
        """One forward pass: the main model, sampling, and MTP's proposal for the next step."""
        w, batch = self.weights, self._upload(plan)
        first_event = plan.step * self._events_per_step + 1
        if self.launcher is not None:
            self.launcher.begin()
        h = self.ws.take("h", plan.num_tokens, self.config.hidden_size)
        hidden = self.ws.take("hidden", *h.shape)
        moved = Work(0.0, 2.0 * h.nbytes)
        if len(h):
            ids = np.asarray(plan.token_ids, np.int32)
            await self.layers.compute("Embed", lambda: k.gather_rows(h, w.embed, ids), moved, "aiv")
        await self.run_layers(h, w.layers, self.caches[: len(w.layers)], batch, first_event)
        if len(h):
            eps = self.config.rms_norm_eps
            await self.layers.compute("Norm", lambda: k.rms_norm(hidden, h, w.norm, eps), moved, "aiv")
        if plan.logit_rows:
            await self._sample(plan, hidden)
        if w.mtp is not None:
            if self.launcher is not None:
                await self.launcher.next_graph()
            await self._propose(plan, batch, hidden, first_event + self._num_exchanges(w.layers))

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on h [T, H]. Their exchanges have the events `first_event` and up, one each."""
        event = first_event
        for layer, cache in zip(layers, caches, strict=True):
            await self.layers.layer(h, layer, cache, batch, event)
            event += layer.moe is not None

    @staticmethod
    def _num_exchanges(layers: Sequence[Layer]) -> int:
        return sum(layer.moe is not None for layer in layers)

    def _upload(self, plan: StepPlan) -> Batch:
        """Bring the plan's index lists into HBM."""
        rows, take = plan.num_tokens, self.ws.take
        positions, slots, seq_of = (take(name, rows) for name in ("positions", "slots", "seq_of"))
        tables = take("block_tables", len(plan.block_tables), self.mem.sizes.max_blocks_per_seq)
        positions[:], slots[:], seq_of[:] = plan.positions, plan.slots, plan.seq_of
        for row, table in zip(tables, plan.block_tables, strict=True):
            row[: len(table)] = table
        return Batch.of(positions, slots, seq_of, tables)

    async def _sample(self, plan: StepPlan, hidden: Array) -> None:
        """Logits of the wanted rows, their tokens, log probabilities, and which drafts they confirm."""
        rows, take, head = len(plan.logit_rows), self.ws.take, self.weights.head
        logits = take("logits", rows, self.config.vocab_size)
        chosen = take("logit_hidden", rows, self.config.hidden_size)

        def run() -> None:
            k.gather_rows(chosen, hidden, np.asarray(plan.logit_rows, np.int32))
            self.layers.ops.matmul(logits, chosen, head.w)
            self._draw(take("sampled", rows), logits, plan, range(rows), ahead=1)
            self._report_logprobs(plan, logits)
            take("num_accepted", len(plan.num_drafts))[:] = self._accepted(plan)

        await self.layers.compute("Sample", run, linear_work(rows, head))

    def _draw(self, out: Array, logits: Array, plan: StepPlan, rows: range | list[int], ahead: int) -> None:
        """Sample the token `ahead` positions after each logit row of `rows` from logits [len(rows), V]."""
        positions = [plan.positions[plan.logit_rows[r]] + ahead for r in rows]
        sample(
            out,
            logits,
            np.array([plan.temperature[r] for r in rows], np.float32),
            np.array([plan.top_k[r] for r in rows], np.int32),
            np.array([plan.top_p[r] for r in rows], np.float64),
            np.array([plan.seed[r] % 2**64 for r in rows], np.uint64),
            np.array([plan.choice[r] for r in rows], np.uint64),
            np.array(positions, np.uint64),
        )

    def _report_logprobs(self, plan: StepPlan, logits: Array) -> None:
        rows, take = len(logits), self.ws.take
        ids, values = take("logprob_ids", rows, LOGPROB_SLOTS), take("logprobs", rows, LOGPROB_SLOTS)
        ranks, sampled = take("ranks", rows), take("sampled", rows)
        for r, count in enumerate(plan.num_logprobs):
            if count < 0:
                continue
            target = plan.targets[r] if plan.targets[r] >= 0 else int(sampled[r])
            log_probs = sampling.log_probs(logits[r])
            top = np.argsort(-logits[r], kind="stable")[:count]
            ids[r, 0], values[r, 0] = target, log_probs[target]
            ids[r, 1 : 1 + len(top)], values[r, 1 : 1 + len(top)] = top, log_probs[top]
            ranks[r] = 1 + int(np.count_nonzero(logits[r] > logits[r, target]))

    def _accepted(self, plan: StepPlan) -> list[int]:
        """Per sequence, its drafts that equal what the main model samples at their position."""
        sampled = self.ws.take("sampled", len(plan.logit_rows))
        row_of = {row: r for r, row in enumerate(plan.logit_rows)}
        accepted = [0] * len(plan.num_drafts)
        for row, seq in enumerate(plan.seq_of):
            is_last = row + 1 == plan.num_tokens or plan.seq_of[row + 1] != seq
            if is_last and plan.num_drafts[seq]:
                accepted[seq] = int(sampled[row_of[row - 1]] == plan.token_ids[row])
        return accepted

    async def _propose(self, plan: StepPlan, batch: Batch, hidden: Array, event_id: int) -> None:
        """MTP: from the hidden state of row i and the token that follows it, a draft of the token after that.

        Rejected drafts are no rows here: what follows them is unknown. Every other row enters MTP's own KV
        cache; the last row of each sequence that sampled a token proposes a draft.
        """
        mtp, c, take = self.weights.mtp, self.config, self.ws.take
        assert mtp is not None
        num_accepted = take("num_accepted", len(plan.num_drafts))
        sampled = take("sampled", len(plan.logit_rows))
        row_of = {row: r for r, row in enumerate(plan.logit_rows)}
        rows: list[int] = []
        following: list[int] = []
        last: dict[int, tuple[int, int]] = {}  # sequence -> its last row here, its logit row
        for row, seq in enumerate(plan.seq_of):
            is_last = row + 1 == plan.num_tokens or plan.seq_of[row + 1] != seq
            if is_last and plan.num_drafts[seq] and not num_accepted[seq]:
                continue
            token = plan.next_token_ids[row]
            if token < 0:
                last[seq] = (len(rows), row_of[row])
                token = int(sampled[row_of[row]])
            rows.append(row)
            following.append(token)
        count = len(rows)
        index = np.asarray(rows, np.int32)
        mtp_batch = Batch.of(
            batch.positions[index], batch.slots[index], batch.seq_of[index], batch.block_tables
        )
        h = take("h", count, c.hidden_size)
        if count:
            await self.layers.compute(
                "MTPInput",
                lambda: self._mtp_input(h, hidden, index, np.asarray(following, np.int32)),
                linear_work(count, mtp.eh_proj),
            )
        await self.run_layers(h, [mtp.layer], [self.caches[-1]], mtp_batch, event_id)
        drafts = take("drafts", len(plan.num_drafts))
        drafts[:] = -1
        if not last:
            return
        logits = take("draft_logits", len(last), c.vocab_size)

        def run() -> None:
            states = np.empty((len(last), c.hidden_size), np.float32)
            k.gather_rows(states, h, np.array([row for row, _ in last.values()], np.int32))
            k.rms_norm(states, states, mtp.norm, c.rms_norm_eps)
            self.layers.ops.matmul(logits, states, mtp.head.w)
            proposed = np.empty(len(last), np.int32)
            self._draw(proposed, logits, plan, [r for _, r in last.values()], ahead=2)
            drafts[list(last)] = proposed

        await self.layers.compute("Draft", run, linear_work(len(last), mtp.head))

    def _mtp_input(self, h: Array, hidden: Array, rows: Array, following: Array) -> None:
        """h = eh_proj . concat[enorm(embedding of the following token), hnorm(hidden)]."""
        mtp, c, take = self.weights.mtp, self.config, self.ws.take
        assert mtp is not None
        both = take("both", len(rows), 2 * c.hidden_size)
        part = take("embedding", len(rows), c.hidden_size)
        k.gather_rows(part, mtp.embed, following)
        k.rms_norm(part, part, mtp.enorm, c.rms_norm_eps)
        both[:, : c.hidden_size] = part
        k.gather_rows(part, hidden, rows)
        k.rms_norm(part, part, mtp.hnorm, c.rms_norm_eps)
        both[:, c.hidden_size :] = part
        self.layers.ops.matmul(h, both, mtp.eh_proj.w)
