"""Cached prefixes of a simulated DP group in a memory pool: the scheduler's tier beyond HBM, by counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.platform.step_group import StepGroup, TracedSequence
from xdeepserve.platform.traces import TracedRequest


class TEPool(NamedTuple):
    """A memory pool as a TE sees it.

    `match(request)` counts the tokens of a prompt that the pool has. `bring(num_tokens, call)` calls a
    function when as many have come, between steps.
    """

    match: Callable[[TracedRequest], int]
    bring: Callable[[int, Callable[[], None]], None]


class StepPool:
    """Reads of a DP group in the pool. Prompts are given to the pool by the fleet, when they are computed."""

    def __init__(self, group: StepGroup, pool: TEPool, wake: Callable[[StepGroup], None]) -> None:
        self._group, self._pool, self._wake = group, pool, wake
        self.num_queries = self.num_hits = 0  # in tokens
        self._coming: set[int] = set()  # tickets

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way here."""
        return bool(self._coming)

    def is_coming(self, seq: Sequence) -> bool:
        """Whether a sequence's next blocks are on their way for another sequence."""
        return bool(self._coming) and self._group.rtc.is_expected(seq.token_ids[:-1])

    def load(self, seq: Sequence, num_ready: int, num_spared: int) -> int | None:
        """Start to load the blocks behind a sequence's first `num_ready`; return a ticket, or None if none
        come."""
        assert isinstance(seq, TracedSequence)
        rtc = self._group.rtc
        room = rtc.num_available - num_spared
        if seq.has_asked_pool or room < 1:
            return None
        seq.has_asked_pool = True
        tokens = seq.token_ids[:-1]
        stop = min(self._pool.match(seq.request), len(tokens)) // rtc.block_size
        self.num_queries += len(tokens) - num_ready * rtc.block_size
        wanted = rtc.missing(tokens, num_ready, stop)[:room]
        if not wanted:
            return None
        seq.num_own = num_ready * rtc.block_size
        ticket, slots = rtc.expect(tokens, wanted)
        self._coming.add(ticket)
        num_tokens = len(slots) * rtc.block_size
        self.num_hits += num_tokens
        self._pool.bring(num_tokens, lambda: self._came(ticket))
        return ticket

    def _came(self, ticket: int) -> None:
        self._coming.remove(ticket)
        self._group.scheduler.finish_transfer(ticket)
        self._wake(self._group)

    def store(self, seq: Sequence) -> None:
        """Do nothing: the fleet gives computed prompts to the pool."""

    def num_copiers(self, ticket: int) -> int:
        """Return 0, since no die takes part in copies."""
        return 0

    def copy(self, ticket: int) -> bool:
        """Return False, since no die has copies to make."""
        return False

    def copied(self, ticket: int) -> None:
        """Do nothing, since no die makes copies."""

    def spoil(self, tickets: Iterable[int]) -> None:
        """Do nothing, since no block of a simulated die is lost by itself."""

    def abandon(self, *_: Any) -> None:
        """Do nothing, since a lost TE is not asked any more."""
