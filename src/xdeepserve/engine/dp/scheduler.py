"""Continuous batching: which tokens of which sequences a DP group computes in its next step.

The scheduler returns a plan and alone mutates its counters. Running sequences come first, in the order in
which they were admitted; then waiting ones are admitted while rows, blocks and places last. A prompt longer
than the rows left is prefilled in chunks. When blocks run out, the sequence admitted last gives up its
blocks and waits, first in line, to be computed again: canonical arithmetic gives it the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from xdeepserve.engine.deployment import Sizes
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.programs.messages import StepPlan


@dataclass(frozen=True)
class Scheduled:
    """A sequence's share of a step: rows [start, start + num_tokens), then perhaps a draft."""

    seq: Sequence
    num_tokens: int
    num_drafts: int
    logit_rows: range  # which of its rows have logits, counted from its first row

    @property
    def reaches_end(self) -> bool:
        return self.seq.num_computed + self.num_tokens == len(self.seq.token_ids)


@dataclass
class SeqResult:
    """What a die wrote for one scheduled sequence, rows in order of `logit_rows`."""

    rows: list[SampledToken] = field(default_factory=list)
    num_accepted: int = 0  # drafts that the main model agreed with
    draft: int | None = None  # MTP's proposal for the next step


class Scheduler:
    """The queues of one DP group."""

    def __init__(self, sizes: Sizes, rtc: RTC) -> None:
        self.sizes, self.rtc = sizes, rtc
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Enqueue a new sequence."""
        self.waiting.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished, running ones first."""
        yield from self.running
        yield from self.waiting

    def schedule(self) -> list[Scheduled]:
        """Choose the next step and take its blocks."""
        step: list[Scheduled] = []
        rows_left, logits_left = self.sizes.max_tokens, self.sizes.max_logit_rows
        index, num_preemptions = 0, self.num_preemptions
        while index < len(self.running):
            seq = self.running[index]
            share = self._share(seq, rows_left, logits_left)
            if share is None:
                break
            if not self._take_blocks(seq, share):
                continue  # the last in line gave up its blocks, perhaps seq itself: look again
            step.append(share)
            rows_left -= share.num_tokens + share.num_drafts
            logits_left -= len(share.logit_rows)
            index += 1
        # Whoever waits comes after all that run, and takes no blocks that one of them has just given up.
        may_admit = index == len(self.running) and num_preemptions == self.num_preemptions
        while may_admit and self.waiting and len(self.running) < self.sizes.max_seqs:
            seq = self.waiting[0]
            share = self._share(seq, rows_left, logits_left)
            if share is None or not self.rtc.grow(seq.seq_id, seq.block_table, share.num_tokens):
                break
            self.waiting.popleft()
            self.running.append(seq)
            step.append(share)
            rows_left -= share.num_tokens
            logits_left -= len(share.logit_rows)
        return step

    def _share(self, seq: Sequence, rows_left: int, logits_left: int) -> Scheduled | None:
        """As much of `seq` as fits; None if nothing does."""
        missing = len(seq.token_ids) - seq.num_computed
        num_tokens = min(missing, rows_left)
        if seq.wants_prompt_logits and seq.num_computed < seq.num_prompt:
            num_tokens = min(num_tokens, logits_left)
        if num_tokens <= 0:
            return None
        ends = num_tokens == missing
        num_drafts = int(
            ends
            and seq.draft is not None
            and num_tokens < rows_left
            and logits_left >= 2
            and len(seq.token_ids) < self.sizes.max_model_len
        )
        first = num_tokens - 1 if ends else num_tokens
        if seq.wants_prompt_logits and seq.num_computed < seq.num_prompt:
            first = 0
        logit_rows = range(first, num_tokens + num_drafts)
        if len(logit_rows) > logits_left:
            return None
        return Scheduled(seq, num_tokens, num_drafts, logit_rows)

    def _take_blocks(self, seq: Sequence, share: Scheduled) -> bool:
        """Blocks for a running sequence, preempting from the end of the line. False: look again."""
        needed = seq.num_computed + share.num_tokens + share.num_drafts
        if self.rtc.grow(seq.seq_id, seq.block_table, needed):
            return True
        self._preempt(self.running[-1])
        return False

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.rtc.free(seq.seq_id, seq.block_table)
        seq.num_computed = 0
        seq.draft = None
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def finish_step(self, step: list[Scheduled], results: list[SeqResult]) -> None:
        """Advance every sequence by what its die computed, and hand out its new tokens."""
        for share, result in zip(step, results, strict=True):
            seq = share.seq
            if seq.is_finished:  # aborted while the step ran
                continue
            ends = share.reaches_end
            seq.num_computed += share.num_tokens + result.num_accepted
            seq.num_drafts += share.num_drafts
            seq.num_accepted += result.num_accepted
            seq.draft = result.draft
            if ends:
                seq.token_ids += [row.token_id for row in result.rows if not row.is_prompt]
            if result.rows and seq.on_tokens(seq, result.rows):
                self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, finished or aborted, and free its blocks at once. Harmless when repeated."""
        if seq.is_finished:
            return
        seq.is_finished = True
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.rtc.free(seq.seq_id, seq.block_table)

    def check_integrity(self) -> None:
        """Blocks belong to live sequences, and only they hold any."""
        self.rtc.check_integrity({seq.seq_id: seq.block_table for seq in self.sequences()})


def make_plan(step_idx: int, step: list[Scheduled], block_size: int) -> StepPlan:
    """Flatten the shares of a step into the message that a die program reads."""
    plan = StepPlan(step=step_idx, **{f: [] for f in StepPlan.__struct_fields__ if f != "step"})
    for index, share in enumerate(step):
        seq, first_row = share.seq, len(plan.token_ids)
        start, stop = seq.num_computed, seq.num_computed + share.num_tokens
        tokens = seq.token_ids[start:stop]
        following = seq.token_ids[start + 1 : stop + 1]
        if share.num_drafts and seq.draft is not None:
            tokens = [*tokens, seq.draft]
        plan.token_ids.extend(tokens)
        plan.next_token_ids.extend(following + [-1] * (len(tokens) - len(following)))
        for position in range(start, start + len(tokens)):
            plan.positions.append(position)
            plan.slots.append(seq.block_table[position // block_size] * block_size + position % block_size)
        plan.seq_of.extend([index] * len(tokens))
        plan.block_tables.append(list(seq.block_table))
        plan.num_drafts.append(share.num_drafts)
        params = seq.params
        for row in share.logit_rows:
            plan.logit_rows.append(first_row + row)
            position = start + row
            is_prompt = position + 1 < len(seq.token_ids)
            wanted = params.prompt_logprobs if is_prompt else params.logprobs
            plan.targets.append(seq.token_ids[position + 1] if is_prompt else -1)
            plan.num_logprobs.append(-1 if wanted is None else wanted)
            plan.temperature.append(params.temperature)
            plan.top_k.append(params.top_k)
            plan.top_p.append(params.top_p)
            plan.seed.append(seq.seed)
            plan.choice.append(seq.choice)
    return plan
