"""Exercise 11: replicas to dies. The story is beside this file."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.balance.eplb import Counts, Holdings


def place(
    token_count: Counts,
    chosen: Sequence[int],
    primary: Sequence[int],
    free: Sequence[int],
    base: Sequence[float] = (),
) -> Holdings:
    """List by die the experts of `chosen` that go to its redundant slots, in order of placement.

    token_count int64 [E, T]: tokens of each expert of a layer in each time slice. chosen: experts to
    replicate; one may come again. primary[e]: the die of expert e's primary. free[d]: the redundant slots of
    die d.
    base[d], or (): tokens of other work that come to die d for each token of token_count anywhere. Loads
    are float64, the sum over all slices.
    """
    raise NotImplementedError
