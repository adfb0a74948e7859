"""Ends of exchanges: records of functions that a die calls.

A way (`engine/ways`) makes them for a rank and a microbatch.

After a rollback `reset(epoch)` forgets what was under way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.model.canonical import Array


class Exchange(NamedTuple):
    """Rank's end of dispatch and combine, or of FusedDispatch and FusedCombine.

    dispatch(x, topk_idx, event)               tokens [T, H] to the ranks with their experts; returns the rows
                                               for the rank's own experts
    combine(expert_out, topk_weights, event)   answers [T, K, H] to the rank's own tokens; if fused, their
                                               sums [T, H] by topk_weights
    bill(received)                             of the latest dispatch, which brought so many rows: token
                                               copies for routed experts, the number of experts whose weights
                                               are read, and rows for a copy of the shared expert
    """

    dispatch: Callable[[Array, Array, int], Awaitable[TokenCopies]]
    combine: Callable[[Array, Array, int], Awaitable[Array]]
    bill: Callable[[int], tuple[float, float, float]]
    reset: Callable[[int], None]


class Trampoline(NamedTuple):
    """Attention die's end of the way to experts on dies of their own.

    a2e(x, topk_idx, topk_weights, event)   tokens [T, H] to their experts
    e2a(event)                              sums of all experts' outputs, [T, H]
    """

    a2e: Callable[[Array, Array, Array, int], Awaitable[None]]
    e2a: Callable[[int], Awaitable[Array]]
    reset: Callable[[int], None]


class GroupEnd(NamedTuple):
    """Die's end of collectives in a group that shares projections: a DP group of several dies, or several DP
    groups of one die each. A result is valid until the next collective.

    all_reduce(x, reduction)      reduction of all dies' `x`
    all_gather(part, num_rows)    a whole slice [slice, N] of each die, as [num_rows, N]; rows beyond a short
                                  slice may be anything
    to_slices(parts)              rows: each die gets its part; the parts that each die has for this one
    spread(parts)                 columns of rows [T, N]: each die gets its columns; this die's columns of
                                  each die's rows, whose number may differ by die
    reduce_scatter(x, counts)     this die's counts[rank] rows of the sum of all dies' `x` [n, ...]
    """

    all_reduce: Callable[[Array, Reduction], Awaitable[Array]]
    all_gather: Callable[[Array, int], Awaitable[Array]]
    to_slices: Callable[[Sequence[Array]], Awaitable[list[Array]]]
    spread: Callable[[Sequence[Array]], Awaitable[list[Array]]]
    reduce_scatter: Callable[[Array, Sequence[int]], Awaitable[Array]]
    reset: Callable[[int], None]


class ExpertEnd(NamedTuple):
    """Expert die's end of A2E and E2A: a2e(event) returns its rows, e2a(expert_out, event) answers them."""

    a2e: Callable[[int], Awaitable[TokenCopies]]
    e2a: Callable[[Array, int], Awaitable[None]]
    reset: Callable[[], None]


def first_event(epoch: int) -> int:
    """Return the first event ID for collectives of an epoch.

    Epochs are farther apart than the collectives that any epoch can have.
    """
    return epoch << 32
