"""Chooses the DP group of each request, from the groups' reports alone (xDeepServe 4.3).

*Prefill*, single level and collaborative: requests wait in one shared queue. In each step with waiting
requests, the leader (DP-0) gathers the status of all groups. It deals out as many requests as fit in the
step, and makes the groups' step times equal. The dearest request goes first, to the group on which the step
stays shortest, cached prefixes counted. The older scheduler had two levels, and is kept as a baseline: a
request was sent to a group on arrival, in turn, and waited there.

*Decode*: groups at their batch limit are left out. Of the rest the one with the lowest KV use is chosen,
counting the blocks that admitted requests will still need. Baselines take these groups in turn, or all
groups.

The tables `DISPATCH` and `DECODE` (`engine/deploy/policies.py`) have the names of these policies. `turn` is
the rank after the group chosen last, for policies that choose in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.engine.numbers import GroupRank

# Relative cost of a prefill: c(n, prefix) = n + ATTENTION * n * (prefix + n / 2). Linear layers cost a token
# as much wherever it stands; attention costs it its context. For DeepSeek-V3, attention to some 4,400
# positions (128 * (576 + 512) * 2 * 61 operations each) costs what a token's linear layers do (37e9 * 2).
ATTENTION = 1 / 4400
LONG_PROMPT = 4096  # new tokens; such requests are kept apart from short ones


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a DP group as reported to the leader."""

    rank: GroupRank
    num_free_places: int  # sequences that it could still admit
    num_sequences: int
    num_blocks: int
    num_used_blocks: int
    num_reserved_blocks: int = 0  # that its admitted sequences may still ask for
    num_promised_blocks: int = 0  # of these, for tokens that there are already: of sequences that must wait
    queued_cost: float = 0.0  # prefill cost of what it has been given and not yet computed
    queued_tokens: int = 0
    has_long: bool = False  # it is prefilling a long prompt

    @property
    def kv_load(self) -> float:
        """Share of the group's KV blocks in use or reserved; above 1 if reservations exceed the blocks."""
        return (self.num_used_blocks + self.num_reserved_blocks) / self.num_blocks


class Candidate(msgspec.Struct, frozen=True):
    """Request waiting for a DP group, with its size and cached tokens."""

    num_tokens: int  # of its prompt
    num_blocks: int = 0  # that it needs over its whole life
    num_cached: tuple[int, ...] = ()  # tokens of its prompt that each rank has cached; (): none anywhere

    def cost_on(self, rank: GroupRank) -> float:
        """Return the relative cost of the request's prefill on a DP group."""
        cached = self.num_cached[rank] if self.num_cached else 0
        return prefill_cost(self.num_tokens - cached, cached)

    @property
    def is_long(self) -> bool:
        return self.num_tokens >= LONG_PROMPT


N = TypeVar("N", float, npt.NDArray[np.float64])


def prefill_cost(num_tokens: N, num_cached: N) -> N:
    """Return the relative time to prefill `num_tokens` after `num_cached` cached ones; scalars or arrays."""
    return num_tokens * (1.0 + ATTENTION * (num_cached + num_tokens / 2))


# A policy for prefill, from waiting requests in order of arrival, the groups' statuses, rows of a step, and
# turn: which request goes to which rank. Requests left out wait for the next step.
DispatchPolicy: TypeAlias = Callable[
    [Sequence[Candidate], Sequence[GroupStatus], int, int], list[tuple[int, GroupRank]]
]
# A policy for decode, from the groups' statuses, the KV blocks that a request needs in all and brings now,
# and turn: a rank. None: the request waits.
DecodePolicy: TypeAlias = Callable[[Sequence[GroupStatus], int, int, int], GroupRank | None]


def assign_prefill(
    candidates: Sequence[Candidate], statuses: Sequence[GroupStatus], max_tokens: int, turn: int = 0
) -> list[tuple[int, GroupRank]]:
    """Deal waiting requests to groups for the next step: pairs (index of candidate, rank).

    Requests are taken in order of arrival until the groups' rows of one step (`max_tokens` each) are used up
    or no group has a place. The rest wait for the next step. Of the requests taken, the dearest is placed
    first, on the group with the least to do. Long and short prompts share a group only if there is no other
    way.
    """
    places = {s.rank: s.num_free_places for s in statuses}
    cost = {s.rank: s.queued_cost for s in statuses}
    has_long = {s.rank: s.has_long for s in statuses}
    has_short = {s.rank: s.queued_tokens > 0 and not s.has_long for s in statuses}
    kv = {s.rank: s.kv_load for s in statuses}
    rows_left = sum(max(0, max_tokens - s.queued_tokens) for s in statuses if s.num_free_places > 0)
    window: list[int] = []
    for index, candidate in enumerate(candidates):
        if rows_left <= 0 or len(window) >= sum(max(0, n) for n in places.values()):
            break
        window.append(index)
        rows_left -= min(candidate.num_tokens, max_tokens)  # one group takes it, chunk by chunk
    pairs = []
    for index in sorted(window, key=lambda i: (-candidates[i].num_tokens, i)):
        candidate = candidates[index]
        open_ranks = [rank for rank, free in places.items() if free > 0]
        mixed = has_short if candidate.is_long else has_long
        apart = [rank for rank in open_ranks if not mixed[rank]] or open_ranks
        rank = min(apart, key=lambda r: (cost[r] + candidate.cost_on(r), kv[r], r))
        pairs.append((index, rank))
        places[rank] -= 1
        cost[rank] += candidate.cost_on(rank)
        kv[rank] += candidate.num_blocks / max(s.num_blocks for s in statuses)
        if candidate.is_long:
            has_long[rank] = True
        else:
            has_short[rank] = True
    return sorted(pairs)


def two_level(
    candidates: Sequence[Candidate], statuses: Sequence[GroupStatus], max_tokens: int, turn: int = 0
) -> list[tuple[int, GroupRank]]:
    """Deal requests to the groups in turn, whatever the groups have to do."""
    pairs = []
    for index in range(len(candidates)):
        rank = _next([s.rank for s in statuses], turn)
        pairs.append((index, rank))
        turn = rank + 1
    return pairs


def _next(ranks: Sequence[GroupRank], turn: int) -> GroupRank:
    """Return the first rank from `turn` on, or else the first of all."""
    return min(ranks, key=lambda rank: (rank < turn, rank))


def with_room(statuses: Sequence[GroupStatus], num_now: int) -> list[GroupStatus]:
    """Return groups with a free place and with room for `num_now` more KV blocks."""
    return [
        s
        for s in statuses
        if s.num_free_places > 0
        and s.num_used_blocks + s.num_promised_blocks + num_now + (s.num_sequences > 0) <= s.num_blocks
    ]


def pick_decode(
    statuses: Sequence[GroupStatus], num_blocks: int = 0, num_now: int = 0, turn: int = 0
) -> GroupRank | None:
    """Choose the rank to decode a request that brings `num_now` blocks and needs `num_blocks` in all.

    None if every group is full: at its batch limit, or without room for the blocks that exist already. Then
    the request waits where any group may take it, not in the queue of one. Reservations are no limit, since
    most requests end before they have used theirs. A group with room for the whole reservation is preferred.
    """
    able = with_room(statuses, num_now)
    fits = [s for s in able if s.num_used_blocks + s.num_reserved_blocks + num_blocks <= s.num_blocks]
    if not able:
        return None
    return min(fits or able, key=lambda s: (s.kv_load, s.num_sequences, s.rank)).rank


def next_open(
    statuses: Sequence[GroupStatus], num_blocks: int = 0, num_now: int = 0, turn: int = 0
) -> GroupRank | None:
    """Choose the next rank in turn among groups that are not full; None if all are."""
    able = [s.rank for s in with_room(statuses, num_now)]
    return _next(able, turn) if able else None


def next_of_all(
    statuses: Sequence[GroupStatus], num_blocks: int = 0, num_now: int = 0, turn: int = 0
) -> GroupRank | None:
    """Choose the next rank in turn among all groups, where a request may then wait for room."""
    return _next([s.rank for s in statuses], turn) if statuses else None
