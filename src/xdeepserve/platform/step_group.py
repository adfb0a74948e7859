"""A DP group without dies: the engine's scheduler plans each step, and steps alike are taken at once.

Steps are alike while every running sequence either decodes a token, with its drafts, or computes a chunk of
its prompt that leaves some of it. Nothing is admitted meanwhile: rows and places are the same as in the step
that was planned, and blocks become fewer. Such a run ends before a sequence does, before a prompt's last
chunk, and where blocks run out. Then the books are brought to its last step, and the scheduler finishes that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from xdeepserve.engine.balance.dp import LONG_PROMPT, GroupStatus, prefill_cost
from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp.events import EventLog, GroupId
from xdeepserve.engine.dp.group_books import GroupBooks
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.dp.step import PlannedStep, Scheduled, SeqResult
from xdeepserve.platform.step_rtc import StepRTC
from xdeepserve.platform.traced_tokens import Name, TracedTokens
from xdeepserve.platform.traces import TracedRequest

PARAMS: Final = SamplingParams(max_tokens=None)  # of all requests
TOKEN: Final = SampledToken(0, False, None)
ROUNDING: Final = 1e-9  # of shares of accepted drafts
NO_REQUEST: Final = TracedRequest(0, 1, 1, ())
LONGEST_RUN = 256  # steps that are taken at once, at most


@dataclass(eq=False)
class TracedSequence(Sequence):
    """A request's prefill, decode or both at a TE.

    `num_own` tokens of its prompt were in its DP group's cache when it asked a memory pool for the rest.
    """

    request: TracedRequest = NO_REQUEST
    num_steps: int = 0  # in which it has decoded
    num_own: int | None = None
    told_ns: float = 0.0  # when its newest tokens came


def traced_sequence(
    number: int,
    request: TracedRequest,
    block: int,
    on_tokens: Callable[[Sequence, list[SampledToken]], bool],
    is_prefilled: bool,
) -> TracedSequence:
    """Make the sequence of a request of a trace with blocks of `block` tokens. A prefilled one has its first
    token."""
    length = request.input_length
    token_ids = TracedTokens(number, length + is_prefilled, length, request.blocks, block)
    return TracedSequence(
        seq_id=number,
        choice=0,
        token_ids=token_ids,
        num_prompt=length,
        max_tokens=request.output_length,
        params=PARAMS,
        seed=0,
        on_tokens=on_tokens,
        num_computed=length if is_prefilled else 0,
        request=request,
    )


def opening(seq: Sequence, kv_block: int) -> Name:
    """Return the name of a sequence's first KV block."""
    assert isinstance(seq.token_ids, TracedTokens)
    return seq.token_ids.names(kv_block, 0, 1)[0]


class StepLoad(NamedTuple):
    """Load of a DP group in a step, and its growth from step to step.

    Units are those of `StepCounts`; `chunk` is the share that computes a part of a prompt, and leaves some.
    """

    rows: int = 0
    logits: int = 0
    context: float = 0.0
    kv_tokens: float = 0.0
    more_context: float = 0.0
    more_kv_tokens: float = 0.0
    prefills: bool = False
    chunk: Scheduled | None = None
    prompt: float = 0.0  # prefill cost of the parts of prompts

    def prompt_cost(self, done: int) -> float:
        """Return the prefill cost of the step that follows `done` others like it."""
        if not done or self.chunk is None:
            return self.prompt
        num, start = self.chunk.num_tokens, self.chunk.start
        return self.prompt - prefill_cost(num, start) + prefill_cost(num, start + done * num)


class StepGroup(GroupBooks):
    """DP group of a TE at the grain of a step; a decode step brings `tokens_each` tokens on average.

    After `plan` a run of up to `horizon` steps alike is under way, of which `done` have ended.
    """

    def __init__(
        self, name: GroupId, steps: StepSizes, rtc: StepRTC, tell: EventLog, tokens_each: float
    ) -> None:
        super().__init__(name, steps, rtc, tell)
        self.rtc: StepRTC = rtc
        self.receive: Callable[[list[Sequence]], None] = lambda seqs: None  # told whose KV has got room
        self.openings = rtc.index.root.children  # by name: first blocks of prompts that are cached
        self._accepted, self._drafts = tokens_each - 1, [0] * steps.mtp
        self.step: PlannedStep | None = None
        self.load, self.horizon, self.done = StepLoad(), 0, 0
        self._moved, self._evicts = (
            0,
            False,
        )  # steps of the run that are in the books; whether blocks go in it
        self._status: GroupStatus | None = None  # before the first step of the run
        self._kv_load: float | None = None  # since sequences have come or gone
        self.ahead = 0  # steps of the run under way, beside those that have ended, as its TE sees it
        self.tail = 0.0  # time of a step after its last exchange
        self.begins = self.ends = 0.0  # when the step under way began, and the last one ended
        self.moves_until = self.sends_until = 0.0  # when all KV that moves here, or from here, will have come

    # ---- a run of steps -----------------------------------------------------------------------------

    def plan(self) -> bool:
        """Have the scheduler plan a step, and count how many steps are alike; return whether it has rows."""
        self.changed()
        scheduler, preempted = self.scheduler, self.scheduler.preemption.count
        keeps_out = bool(self.places.waiting or self.places.swapped)  # prefilled sequences, in this step
        step = scheduler.schedule()
        if step.receives:
            self.receive(step.receives)
        self.done, self._moved, self.step = 0, 0, step if step.shares else None
        if self.step is None:
            self.load, self.horizon = StepLoad(), 0
            return False
        is_whole = len(step.shares) == len(self.places.running)
        are_alike = is_whole and preempted == scheduler.preemption.count and not step.copies
        if keeps_out and self.places.arriving and not (self.places.waiting or self.places.swapped):
            are_alike = False
        self.load = self._load_of(step)
        self.horizon = self._num_alike(step) if are_alike else 1
        self._evicts = not self._fits(step, self.horizon - 1, self.rtc.num_free)
        return True

    def _load_of(self, step: PlannedStep) -> StepLoad:
        rows, logits, context, kv_tokens, more_context, more_kv_tokens = 0, 0, 0.0, 0.0, 0.0, 0.0
        prefills, chunk, prompt = False, None, 0.0
        for share in step.shares:
            num, start = share.num_rows, share.start
            if share.seq.scheduled_ns is None:
                share.seq.scheduled_ns = round(self.begins)
            grows: float = 1 + self._accepted
            if not share.ends:
                chunk, grows = share, num
            if share.start < share.seq.num_prompt:
                prefills, prompt = True, prompt + prefill_cost(share.num_tokens, start)
            rows += num
            logits += len(share.logit_rows)
            context += num * (start + (num + 1) / 2)
            kv_tokens += start + num
            more_context += num * grows
            more_kv_tokens += grows
        return StepLoad(
            rows, logits, context, kv_tokens, more_context, more_kv_tokens, prefills, chunk, prompt
        )

    def _num_alike(self, step: PlannedStep) -> int:
        """Count the steps, from a planned one on, that are like it."""
        count = LONGEST_RUN
        for share in step.shares:
            seq = share.seq
            assert isinstance(seq, TracedSequence)
            if not share.ends:
                count = min(count, (seq.num_prompt - share.start - 2) // share.num_tokens)
            elif share.num_tokens > 1 or share.num_drafts != self.steps.mtp or not seq.num_generated:
                return 1
            elif self.rtc.has_new(seq.holding, share.start):
                return 1  # its blocks came from elsewhere: those that are cached here are given up
            else:
                count = min(count, self._steps_left(seq, seq.max_tokens - seq.num_generated))
            if count <= 1:
                return 1
        room = self.rtc.num_available
        if not self._fits(step, count - 1, room):
            low, high = 1, count  # with `low` steps there is room
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._fits(step, middle - 1, room) else (low, middle)
            count = low
        return count

    def _num_tokens(self, steps: int) -> int:
        """Count the tokens that a sequence has got after so many steps of decoding."""
        return steps + math.floor(steps * self._accepted + ROUNDING)

    def _steps_left(self, seq: TracedSequence, num_tokens: int) -> int:
        """Count the steps in which a sequence that decodes gets `num_tokens` more."""
        if not self._accepted:
            return num_tokens
        wanted = self._num_tokens(seq.num_steps) + num_tokens
        return math.ceil(wanted / (1 + self._accepted) - ROUNDING) - seq.num_steps

    def _gained(self, share: Scheduled, count: int) -> int:
        """Count the positions by which a share moves on in `count` steps."""
        seq = share.seq
        assert isinstance(seq, TracedSequence)
        if not share.ends:
            return count * share.num_tokens
        if not self._accepted:
            return count
        return self._num_tokens(seq.num_steps + count) - self._num_tokens(seq.num_steps)

    def _fits(self, step: PlannedStep, count: int, room: int) -> bool:
        """Whether `room` has the blocks that are taken until a step is planned `count` steps after `step`."""
        if (self.load.rows * (count + 1)) // self.rtc.block_size + 2 * len(step.shares) <= room:
            return True  # at most as many, whatever is in the last block of each sequence
        blocks_for = self.rtc.blocks_for
        taken = 0
        for share in step.shares:
            stop = share.start + self._gained(share, count) + share.num_rows
            taken += blocks_for(stop) - len(share.seq.holding.slots)
        return taken <= room

    def _advance(self, share: Scheduled, count: int) -> Scheduled:
        """Move the books of a share's sequence on by `count` steps; return its share of the next one."""
        seq, gained = share.seq, self._gained(share, count)
        assert isinstance(seq, TracedSequence)
        assert isinstance(seq.token_ids, TracedTokens)
        seq.num_computed += gained
        if share.ends:
            seq.token_ids.grow(gained)
            seq.num_steps += count
        has_room = self.rtc.alloc_blocks(seq.holding, seq.num_computed + share.num_rows)
        assert has_room
        if self.steps.caches_prefixes and self.rtc.has_new(seq.holding, seq.num_computed):
            self.rtc.publish(seq.holding, seq.token_ids, seq.num_computed)
        return msgspec.structs.replace(share, start=seq.num_computed)

    @property
    def shows(self) -> bool:
        """Whether blocks are published or withdrawn within the run under way."""
        return self.load.chunk is not None or self._evicts

    def may_show(self, name: Name) -> bool:
        """Whether steps under way evict blocks behind this opening one, or compute a prompt that has it."""
        if self._evicts and name in self.openings:
            return True
        chunk = self.load.chunk
        return chunk is not None and opening(chunk.seq, self.rtc.block_size) == name

    def show(self) -> None:
        """Publish the blocks of prompts that ended steps have computed, and withdraw those
        that have been evicted."""
        if self.step is not None and self.done and self.shows:
            self._move_books()

    def show_under_way(self) -> None:
        """Publish and withdraw blocks as `show` does, as of the plan of the step under way."""
        self.show()
        if self._evicts and self.done < self.horizon:
            self._move_shares(self.done)

    def _move_books(self) -> None:
        """Move the books of all sequences on to the last step that has ended, as it was planned."""
        self._move_shares(self.done - 1)
        chunk = self.load.chunk
        if chunk is not None and self.steps.caches_prefixes:
            stop = chunk.start + self.done * chunk.num_tokens
            self.rtc.publish(chunk.seq.holding, chunk.seq.token_ids, stop)

    def _move_shares(self, num_steps: int) -> None:
        """Move the shares on to the step after so many of the run, as it is planned."""
        step, count = self.step, num_steps - self._moved
        assert step is not None
        if count:
            step.shares[:] = [self._advance(share, count) for share in step.shares]
            self.scheduler.stats.rows_per_step[self.load.rows] += count
            self._moved, self._status = num_steps, None

    def finish(self) -> None:
        """Bring the books to the last step that has ended, and have the scheduler finish it."""
        step = self.step
        assert step is not None
        self._move_books()
        results = [self._result(share) for share in step.shares]
        self.step, self.load, self.horizon, self.done = None, StepLoad(), 0, 0
        self.changed()
        self.scheduler.finish_step(step, results)

    def _result(self, share: Scheduled) -> SeqResult:
        """Make the result of a share: tokens without ids, and as many accepted drafts as there are on
        average."""
        seq = share.seq
        assert isinstance(seq, TracedSequence)
        if not share.ends:
            return SeqResult()
        accepted = 0
        if share.num_drafts:
            accepted = min(share.num_drafts, self._gained(share, 1) - 1)
            seq.num_steps += 1
        return SeqResult([TOKEN] * (1 + accepted), accepted, self._drafts)

    # ---- for the TE-shell, and the job executor -----------------------------------------------------

    def status(self) -> GroupStatus:
        """Report the load after the steps that have ended, and after the one under way as far as counts
        tell."""
        if self._is_last_under_way:
            self._move_shares(self.done)
            return super().status()
        if self._status is None:
            self._status = super().status()
        chunk, status, done = self.load.chunk, self._status, self.done + self.ahead
        if self.step is None or not done or (chunk is None and self.steps.role != "decode"):
            return status
        changes: dict[str, float] = {}
        if chunk is not None:
            seq, computed = chunk.seq, chunk.start + done * chunk.num_tokens
            now, then = seq.num_prompt - seq.num_computed, seq.num_prompt - computed
            changes["queued_tokens"] = status.queued_tokens - now + then
            changes["queued_cost"] = (
                status.queued_cost - prefill_cost(now, seq.num_computed) + prefill_cost(then, computed)
            )
            if now >= LONG_PROMPT > then:
                others = (each for each in self.places.sequences() if each is not seq)
                changes["has_long"] = any(
                    len(each.token_ids) - each.num_computed >= LONG_PROMPT for each in others
                )
        if self.steps.role == "decode":
            changes |= self._blocks_now(status)
        return msgspec.structs.replace(status, **changes) if changes else status

    @property
    def _is_last_under_way(self) -> bool:
        """Whether the last step of a run is under way, in which sequences may come to their ends."""
        return self.ahead > 0 and self.done + self.ahead == self.horizon

    def missing(self, seq: Sequence) -> tuple[int, int]:
        num, num_computed = super().missing(seq)
        if self._is_last_under_way and self.step is not None:
            for share in self.step.shares:
                if share.seq is seq:
                    return num + share.ends - share.num_tokens, num_computed + share.num_tokens
        return num, num_computed

    @property
    def num_leaving(self) -> int:
        if not self._is_last_under_way or self.step is None:
            return 0
        is_over = self.steps.role == "prefill"
        return sum(
            share.ends and (is_over or share.seq.num_generated + 1 >= share.seq.max_tokens)
            for share in self.step.shares
        )

    @property
    def kv_load(self) -> float:
        if self._kv_load is None:
            self._kv_load = super().kv_load
        return self._kv_load

    @property
    def num_taken_blocks(self) -> int:
        """Number of KV blocks in use, those that the run has taken until the step under way included."""
        count, blocks_for = self.done - self._moved, self.rtc.blocks_for
        if self.step is None or not count:
            return self.num_used_blocks
        return self.num_used_blocks + sum(
            blocks_for(share.start + self._gained(share, count) + share.num_rows)
            - len(share.seq.holding.slots)
            for share in self.step.shares
        )

    def _blocks_now(self, status: GroupStatus) -> dict[str, float]:
        """Count used, reserved and promised blocks after the steps that have ended."""
        assert self.step is not None
        more = promised = 0
        for share in self.step.shares:
            seq, blocks_for = share.seq, self.rtc.blocks_for
            held, length = len(seq.holding.slots), len(seq.token_ids)
            planned = self.done + self.ahead - 1 - self._moved
            then = blocks_for(share.start + self._gained(share, planned) + share.num_rows)
            wanted = blocks_for(length + (self._gained(share, self.done - self._moved) if share.ends else 0))
            more += then - held
            promised += max(0, wanted - then) - max(0, blocks_for(length) - held)
        return {
            "num_used_blocks": status.num_used_blocks + more,
            "num_reserved_blocks": max(0, status.num_reserved_blocks - more),
            "num_promised_blocks": status.num_promised_blocks + promised,
        }

    def num_reusable(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence are cached here; at once where its first block is not."""
        if opening(seq, self.rtc.block_size) in self.openings:
            return super().num_reusable(seq)
        return 0

    def changed(self) -> None:
        """Note that sequences have come or gone, or that their blocks have."""
        self._status = self._kv_load = None
