"""Sequence: a choice of a request, as a DP group sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.stats import count_drafts
from xdeepserve.engine.dp.steering import Steering
from xdeepserve.errors import XDeepServeError
from xdeepserve.model.canonical import Array

KeepLogits: TypeAlias = Literal["none", "sampled", "all"]


class Queued(NamedTuple):
    """Facts about a sequence in a queue, for policies that choose the order."""

    priority: int  # lower goes first
    number: int  # in order of arrival
    num_prompt: int
    max_tokens: int


Rank: TypeAlias = tuple[float, ...]
# A policy of the table ORDER, from facts that never change: the sequence with the least rank goes first.
OrderPolicy: TypeAlias = Callable[[Queued], Rank]


def by_arrival(seq: Queued) -> Rank:
    """Rank a sequence by priority, then by arrival."""
    return seq.priority, seq.number


def shortest_first(seq: Queued) -> Rank:
    """Rank a sequence by priority, then by the length of its prompt, then by arrival."""
    return seq.priority, seq.num_prompt, seq.number


@dataclass(eq=False)
class Sequence:
    """Tokens, KV blocks and progress of one choice.

    `[0, num_computed)` of `token_ids` have valid KV in the blocks of `holding`. A sequence that decodes has
    exactly one token more than that: the one sampled last.
    """

    seq_id: int
    choice: int
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    params: SamplingParams
    seed: int
    on_tokens: Callable[[Sequence, list[SampledToken]], bool]  # True when the sequence is finished
    on_scheduled: Callable[[Sequence], None] | None = None  # called when it first takes part in a step
    on_failed: Callable[[XDeepServeError], None] = lambda error: None  # it cannot go on: ends its request
    keep_logits: KeepLogits = "none"
    steering: Steering | None = None  # what becomes of its logits before a token is drawn
    arrival_ns: int = 0  # virtual time, as is the next
    scheduled_ns: int | None = None
    priority: int = 0  # lower goes first
    order: OrderPolicy = by_arrival
    je: int | None = None  # number of the job executor that it has reached; None: one is drawn
    holding: Holding = field(default_factory=Holding)
    leader: Sequence | None = None  # of its request, with whom it shares the prompt
    host_slots: list[int] = field(default_factory=list)  # of a swapped sequence, in order of position
    num_computed: int = 0
    num_cached: int = 0  # positions of the request's prompt that were cached at its first admission
    is_counted: bool = False  # its prompt, among queries of the prefix cache; the first choice's alone is
    has_asked_by_id: bool = False
    has_asked_pool: bool = False
    num_pooled: int = 0  # blocks of the memory pool that it has given there, or found there
    num_scored: int = 0  # prompt rows whose logits have been reported; not again after a preemption
    drafts: list[int] = field(default_factory=list)  # MTP's, for the next step
    is_finished: bool = False
    lost_kv: XDeepServeError | None = None  # why what is on its way of its blocks is worth nothing
    num_preemptions: int = 0
    num_drafts: list[int] = field(default_factory=list)  # offered to the main model, by position in the step
    num_accepted: list[int] = field(default_factory=list)

    def leave_blocks(self) -> None:
        """Go on without the KV blocks, which another holder has taken over."""
        self.holding = Holding()

    def leave_group(self) -> None:
        """Go on in another group, from the tokens alone."""
        self.leave_blocks()
        self.num_computed, self.drafts, self.leader, self.lost_kv = 0, [], None, None
        self.has_asked_by_id = self.has_asked_pool = False

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts verified by a step, and the accepted ones among them."""
        count_drafts(self.num_drafts, self.num_accepted, num_drafts, num_accepted)

    @property
    def cache_id(self) -> str | None:
        """Name of the prefix in RTC; None for every choice but the first."""
        return self.params.prompt_cache_key if self.choice == 0 else None

    @property
    def rank(self) -> Rank:
        """Position in every queue, by the policy `order`; the least goes first."""
        return self.order(Queued(self.priority, self.seq_id, self.num_prompt, self.max_tokens))

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Whether logits of the prompt's own rows are wanted."""
        return self.params.prompt_logprobs is not None or self.keep_logits == "all"

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether some prompt rows' logits are wanted and have not been reported yet."""
        return self.is_scored and self.num_scored < self.num_prompt - 1


class SampledToken(msgspec.Struct, frozen=True):
    """A result row: a new token, or (`is_prompt`) the model's rating of a prompt token."""

    token_id: int
    is_prompt: bool
    logits: Array | None  # float32 [vocab], a copy, if the sequence keeps them
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
