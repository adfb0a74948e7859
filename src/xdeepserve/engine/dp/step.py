"""A step of a DP group: the rows of its sequences, and the message that tells the die.

A step may be planned while the one before it runs, from counts only (DeepServe 4.2, asynchronous execution).
Only the die knows, when it begins the next step, which tokens were sampled and how many drafts were accepted.
So a share whose first token is still to be sampled says where the die finds it, and leaves token ids,
positions and slots to the die (engine/die/carried.py). The share gets blocks as if all drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.plans import BlockCopy, StepPlan
from xdeepserve.errors import XDeepServeError


class Carried(NamedTuple):
    """Position in the previous step's results from which a share of the next step continues."""

    seq_idx: int  # of the sequence in that step
    logit_row: int  # of that step, which samples the token after those that are known now
    num_drafts: int  # that it verifies: so many tokens more may there be


class Scheduled(msgspec.Struct, frozen=True, eq=False):
    """A sequence's share of a step: `num_tokens` rows after the computed ones, then its drafts."""

    seq: Sequence
    num_tokens: int
    num_drafts: int
    logit_rows: range  # which of its rows have logits, counted from its first row
    start: int  # position of its first row; with `carried` the first one possible
    ends: bool  # with the last token there is, after which one is sampled
    carried: Carried | None = None

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_drafts

    @property
    def num_prompt_rows(self) -> int:
        """Number of logit rows to rate a prompt token instead of sampling."""
        return len(self.logit_rows) - (1 + self.num_drafts if self.ends else 0)


@dataclass
class PlannedStep:
    """A planned step of a DP group: its sequences' shares, and the copies and transfers beside it."""

    shares: list[Scheduled] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)  # on write: the die makes them before the step
    transfers: list[tuple[int, list[BlockCopy]]] = field(default_factory=list)  # by ticket: beside the step
    receives: list[Sequence] = field(default_factory=list)  # from another TE
    is_again: bool = False  # it has been launched before, and then rolled back
    ticket: int | None = None  # of the blocks that must not change hands before its end
    start_ns: int | None = None  # of its launch, and the blocks in use then; where somebody observes
    num_used_blocks: int = 0

    @property
    def num_rows(self) -> int:
        return sum(share.num_rows for share in self.shares)

    def carried(self, share: Scheduled) -> Carried:
        """Return where the next step finds the results with which `share` of this step ends."""
        seq_idx = next(index for index, each in enumerate(self.shares) if each is share)
        before = sum(len(each.logit_rows) for each in self.shares[:seq_idx])
        return Carried(seq_idx, before + share.num_prompt_rows, share.num_drafts)

    def keep(self, stays: Callable[[Sequence], bool], before: PlannedStep | None) -> None:
        """Drop sequences from a step to be run again, if they do not stay. `before` is the step ahead of it,
        already reduced, if that has not ended; otherwise the shares start from results known here."""
        carried = {} if before is None else {each.seq.seq_id: before.carried(each) for each in before.shares}
        kept = []
        for share in self.shares:
            if stays(share.seq) and share.carried is not None:
                found = carried.get(share.seq.seq_id)
                start = share.seq.num_computed if found is None else share.start
                share = msgspec.structs.replace(share, carried=found, start=start)
            if stays(share.seq):
                kept.append(share)
        self.shares = kept
        slots = {slot for share in kept for slot in share.seq.holding.slots}
        self.copies = [copy for copy in self.copies if copy.dst in slots]


@dataclass
class SeqResult:
    """Results written by a die for one scheduled sequence, rows in order of `logit_rows`."""

    rows: list[SampledToken] = field(default_factory=list)
    num_accepted: int = 0  # drafts that the main model agreed with
    drafts: list[int] = field(default_factory=list)  # MTP's proposal for the next step
    error: XDeepServeError | None = None  # why it cannot go on; the rest is void then


class SeqProgress(NamedTuple):
    """Progress of a sequence when the step under way ends, as far as counting can tell."""

    num_computed: int  # at least
    num_tokens: int  # at least: known ones, and the one that is being sampled
    num_scored: int  # prompt rows whose logits are known then
    num_drafts: int  # of MTP, for the next step
    carried: Carried | None  # None: all of its tokens are known

    @property
    def slack(self) -> int:
        """Number of drafts the step under way may accept in addition."""
        return self.carried.num_drafts if self.carried is not None else 0

    @classmethod
    def of(cls, seq: Sequence, share: Scheduled | None, step: PlannedStep | None, mtp: int) -> SeqProgress:
        """Predict the progress of `seq` after its `share` of `step` under way, with `mtp` drafts a step."""
        num_tokens = len(seq.token_ids)
        if share is None or step is None:
            return cls(seq.num_computed, num_tokens, seq.num_scored, len(seq.drafts), None)
        num_computed = seq.num_computed + share.num_tokens
        num_scored = seq.num_scored + share.num_prompt_rows
        if not share.ends:
            return cls(num_computed, num_tokens, num_scored, 0, None)
        return cls(num_computed, num_tokens + 1, num_scored, mtp, step.carried(share))


def share_of(
    seq: Sequence, progress: SeqProgress, steps: StepSizes, rows_left: int, logits_left: int
) -> Scheduled | None:
    """Schedule as much of `seq` as fits into the rows that a step has left; None if nothing fits."""
    missing = progress.num_tokens - progress.num_computed
    num_tokens = min(missing, rows_left)
    scored = max(0, progress.num_scored - progress.num_computed)  # rows whose logits are known already
    wants_prompt_logits = seq.is_scored and progress.num_scored < seq.num_prompt - 1
    if wants_prompt_logits:
        num_tokens = min(num_tokens, scored + logits_left)
    if steps.mtp > 1 and num_tokens == missing - 1:
        num_tokens -= num_tokens > 1  # the second draft layer wants to know two tokens after a chunk
    if num_tokens <= 0:
        return None
    ends = num_tokens == missing
    num_drafts = 0
    if ends:
        room = steps.max_model_len - progress.num_tokens - progress.slack
        num_drafts = max(0, min(progress.num_drafts, rows_left - num_tokens, logits_left - 1, room))
    first = num_tokens - 1 if ends else num_tokens
    if wants_prompt_logits:
        first = min(first, scored)
    logit_rows = range(first, num_tokens + num_drafts)
    if len(logit_rows) > logits_left:
        return None
    start, carried = progress.num_computed, progress.carried
    return Scheduled(seq, num_tokens, num_drafts, logit_rows, start, ends, carried)


def observed(step: PlannedStep, results: list[SeqResult]) -> tuple[events.ShareOfStep, ...]:
    """Summarise a step's shares and results for observers."""
    return tuple(
        events.ShareOfStep(
            share.seq.seq_id,
            share.start,
            share.num_tokens,
            share.start < share.seq.num_prompt,
            tuple(share.seq.drafts[: share.num_drafts]),
            result.num_accepted,
            tuple(row.token_id for row in result.rows if not row.is_prompt),
            tuple(result.drafts),
        )
        for share, result in zip(step.shares, results, strict=True)
    )


def written_blocks(plan: StepPlan, block_size: int) -> set[int]:
    """Return the blocks a step may write: for each sequence, from the block of its first row on."""
    firsts = {seq: position for position, seq in reversed([*zip(plan.positions, plan.seq_of, strict=True)])}
    return {block for seq, first in firsts.items() for block in plan.block_tables[seq][first // block_size :]}


def make_plan(
    step_idx: int,
    shares: list[Scheduled],
    block_size: int,
    tables: Mapping[int, list[int]] | None = None,
) -> StepPlan:
    """Flatten the shares of a step into the message that a die program reads. `tables` gives slots by seq_id
    if they differ from those that sequences hold now."""
    plan = StepPlan(step=StepNo(step_idx))
    for index, share in enumerate(shares):
        seq, first_row = share.seq, len(plan.token_ids)
        table = seq.holding.slots if tables is None else tables[seq.seq_id]
        start, stop = share.start, share.start + share.num_tokens
        if share.carried is not None:
            tokens, slots = [-1] * share.num_rows, [-1] * share.num_rows
            plan.carried_seq.append(share.carried.seq_idx)
            plan.carried_row.append(share.carried.logit_row)
        else:
            tokens = seq.token_ids[start:stop] + seq.drafts[: share.num_drafts]
            places = range(start, start + len(tokens))
            slots = [table[place // block_size] * block_size + place % block_size for place in places]
            plan.carried_seq.append(-1)
            plan.carried_row.append(-1)
        following = seq.token_ids[start + 1 : stop + 1]
        plan.token_ids.extend(tokens)
        plan.next_token_ids.extend(following + [-1] * (len(tokens) - len(following)))
        plan.positions.extend(range(start, start + len(tokens)))
        plan.slots.extend(slots)
        plan.seq_of.extend([index] * len(tokens))
        plan.block_tables.append(list(table))
        plan.num_drafts.append(share.num_drafts)
        plan.token_after.append(seq.token_ids[stop + 1] if stop + 1 < len(seq.token_ids) else -1)
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
            plan.min_p.append(params.min_p)
            plan.seed.append(seq.seed)
            plan.choice.append(seq.choice)
        if seq.steering is not None and share.ends:
            # Of the rows that choose a token; those before them only say what the model thinks of the prompt.
            first_choice = len(plan.logit_rows) - 1 - share.num_drafts
            edits = seq.steering.edits(seq.token_ids, seq.drafts[: share.num_drafts], 1 + share.num_drafts)
            plan.edits.update(zip(range(first_choice, len(plan.logit_rows)), edits, strict=True))
    return plan
