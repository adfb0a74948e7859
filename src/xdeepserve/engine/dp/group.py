"""A DP group: one scheduler, one RTC, and the die that computes for them, or several (TP > 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from xdeepserve.comm.distflow import Endpoint
from xdeepserve.engine.balance.dp import LONG_PROMPT, GroupStatus, prefill_cost
from xdeepserve.engine.deployment import Sizes
from xdeepserve.engine.dp.rtc import RTC, Copy
from xdeepserve.engine.dp.scheduler import LoadCost, Scheduled, Scheduler, SeqResult, make_plan
from xdeepserve.engine.dp.sequence import SampledToken
from xdeepserve.engine.dp.sequence import Sequence as Seq
from xdeepserve.engine.programs.memory_plan import DieMemory
from xdeepserve.engine.programs.messages import LOGPROB_SLOTS, CopyBlocks, empty_plan
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address

SAVE_PER_STEP = 4  # cached blocks that are sent to host DRAM beside a step, at most


class DPGroup:
    """Schedules its sequences, launches steps on its dies, reads what the first of them wrote.

    All dies of a group get the same commands, and hold the same blocks in the same slots.
    """

    def __init__(
        self,
        rank: int,
        dies: Sequence[Die],
        mems: Sequence[DieMemory],
        sizes: Sizes,
        load_cost: LoadCost | None,
    ) -> None:
        self.rank, self.dies, self.mems, self.sizes = rank, dies, mems, sizes
        self.mem = mems[0]
        self.rtc = RTC(sizes.num_blocks, sizes.block_size, sizes.num_host_blocks)
        self.scheduler = Scheduler(sizes, self.rtc, load_cost)
        self._num_done: Counter[int] = Counter()  # dies that have made the copies of a ticket
        self.endpoints: list[Endpoint] = []  # of DistFlow, one for each TE at the other side
        self._offers: dict[int, tuple[Endpoint, str]] = {}  # to arriving sequences, by seq_id
        self._tickets: dict[int, int] = {}  # of receiving sequences, by seq_id
        self._shares: list[Scheduled] = []
        self._copies: list[Copy] = []

    def status(self) -> GroupStatus:
        """What the leader of the DP groups wants to know."""
        scheduler, rtc = self.scheduler, self.rtc
        seqs = list(scheduler.sequences())
        missing = [len(seq.token_ids) - seq.num_computed for seq in seqs]
        prefills = [(n, seq.num_computed) for n, seq in zip(missing, seqs, strict=True) if n > 1]
        needed = sum(
            rtc.blocks_for(min(seq.num_prompt + seq.max_tokens, self.sizes.max_model_len)) for seq in seqs
        )
        held = sum(len(seq.holding.slots) for seq in seqs)
        return GroupStatus(
            rank=self.rank,
            num_free_places=self.num_free_places,
            num_sequences=len(seqs),
            num_blocks=rtc.num_blocks,
            num_used_blocks=rtc.num_blocks - rtc.num_available,
            num_reserved_blocks=max(0, needed - held),
            queued_cost=sum(prefill_cost(n, cached) for n, cached in prefills),
            queued_tokens=sum(n for n, _ in prefills),
            has_long=any(n >= LONG_PROMPT for n, _ in prefills),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.scheduler.running) + self.scheduler.num_waiting

    @property
    def num_free_places(self) -> int:
        """Sequences that could still join a step."""
        return self.sizes.max_seqs - self.num_sequences

    def plan(self) -> bool:
        """Schedule a step; whether it has rows. Transfers between tiers start at once, beside it."""
        step = self.scheduler.schedule()
        self._shares, self._copies = step.shares, step.copies
        if self.sizes.num_host_blocks:
            step.transfers += self.scheduler.save_cached(SAVE_PER_STEP)
        for ticket, copies in step.transfers:
            self._put(CopyBlocks(ticket=ticket, copies=copies))
        for ticket, seq in step.receives:
            endpoint, source = self._offers.pop(seq.seq_id)
            self._tickets[seq.seq_id] = ticket
            slots = seq.holding.slots
            pieces = [piece for rank in range(len(self.dies)) for piece in self.block_pieces(slots, rank)]
            endpoint.receive(seq.seq_id, source, pieces)
        return bool(self._shares)

    def _put(self, command: msgspec.Struct, delay_ns: int = 0) -> None:
        for die in self.dies:
            die.put(command, delay_ns)

    def finish_copies(self, ticket: int) -> None:
        """One of the dies has made the copies of a ticket; the last one ends it."""
        self._num_done[ticket] += 1
        if self._num_done[ticket] == len(self.dies):
            del self._num_done[ticket]
            self.scheduler.finish_transfer(ticket)

    def block_pieces(self, slots: Sequence[int], rank: int) -> list[tuple[Address, int]]:
        """Raw addresses and sizes of KV blocks on one of the dies, in the order of `slots`."""
        return [piece for slot in slots for piece in self.mems[rank].block_pieces("hbm", slot)]

    def arrive(self, seq: Seq, endpoint: Endpoint, source: str) -> None:
        """Take over a sequence that was prefilled elsewhere; `source` offers its blocks to `endpoint`."""
        self._offers[seq.seq_id] = (endpoint, source)
        self.scheduler.arrive(seq)

    def decline(self, seq: Seq) -> bool:
        """Do without an offer; False if its blocks are on their way already."""
        return self._offers.pop(seq.seq_id, None) is not None

    def poll_transfers(self) -> None:
        """Look into the completion queues of DistFlow. Raises what has gone wrong with a transfer."""
        for endpoint in self.endpoints:
            for completion in endpoint.poll():
                if completion.error is not None:
                    raise completion.error
                if completion.is_source:
                    self.scheduler.release(completion.tag)
                else:
                    self.scheduler.finish_transfer(self._tickets.pop(completion.tag))

    @property
    def num_planned_rows(self) -> int:
        """Token rows of the planned step."""
        return sum(share.num_tokens + share.num_drafts for share in self._shares)

    def launch(self, step_idx: int, delay_ns: int = 0) -> None:
        """Send the planned step to the dies; an empty one without work. `delay_ns`: of its launch."""
        if self._copies:
            self._put(CopyBlocks(ticket=None, copies=self._copies))
        if self._shares:
            self._note_first_steps()
            self._put(make_plan(step_idx, self._shares, self.sizes.block_size), delay_ns)
        else:
            self._put(empty_plan(step_idx), delay_ns)

    def _note_first_steps(self) -> None:
        """The waiting of sequences that are scheduled for the first time has ended."""
        for share in self._shares:
            seq = share.seq
            if seq.scheduled_ns is None:
                seq.scheduled_ns = self.dies[0].clock.now
                if seq.on_scheduled is not None:
                    seq.on_scheduled(seq)

    def finish(self) -> None:
        """Read the results of the step that the dies have completed, and advance the sequences."""
        if self._shares:
            self.scheduler.finish_step(self._shares, self._read_results(self._shares))
        self._shares = []

    def _read_results(self, shares: list[Scheduled]) -> list[SeqResult]:
        take = self.mem.workspace.take
        num_rows = sum(len(share.logit_rows) for share in shares)
        sampled = take("sampled", num_rows).tolist()
        accepted = take("num_accepted", len(shares)).tolist()
        drafts = take("drafts", len(shares)).tolist()
        results, first = [], 0
        for index, share in enumerate(shares):
            ends = share.reaches_end
            # Without logit rows in the whole step nothing was sampled, and the die wrote no acceptance.
            result = SeqResult(num_accepted=accepted[index] if share.num_drafts else 0)
            if ends and self.sizes.mtp and drafts[index] >= 0:
                result.draft = drafts[index]
            num_valid = len(share.logit_rows) - share.num_drafts + result.num_accepted
            for offset in range(num_valid):
                row = first + offset
                is_prompt = share.logit_rows[offset] < share.num_tokens - 1 or not ends
                result.rows.append(self._read_row(share.seq, row, sampled[row], is_prompt))
            first += len(share.logit_rows)
            results.append(result)
        return results

    def _read_row(self, seq: Seq, row: int, token_id: int, is_prompt: bool) -> SampledToken:
        """Row `row` of the die's output region."""
        take, params = self.mem.workspace.take, seq.params
        keep = seq.keep_logits == "all" or (seq.keep_logits == "sampled" and not is_prompt)
        logits = None
        if keep:
            logits = take("logits", row + 1, self.mem.config.vocab_size)[row].copy()
        wanted = params.prompt_logprobs if is_prompt else params.logprobs
        if wanted is None:
            return SampledToken(token_id, is_prompt, logits)
        ids = take("logprob_ids", row + 1, LOGPROB_SLOTS)[row, : wanted + 1].tolist()
        values = take("logprobs", row + 1, LOGPROB_SLOTS)[row, : wanted + 1].tolist()
        return SampledToken(
            ids[0],
            is_prompt,
            logits,
            logprob=values[0],
            rank=int(take("ranks", row + 1)[row]),
            top=tuple(zip(ids[1:], values[1:], strict=True)),
        )

    def check_integrity(self) -> None:
        """Every block is accounted for."""
        self.scheduler.check_integrity()
