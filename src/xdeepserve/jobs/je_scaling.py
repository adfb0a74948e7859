"""How many job executors (JEs) a cluster has, by the requests in flight: a pure function of time and load.

A JE more needs more than UP requests for each, and one fewer leaves less than DOWN for each of the others.
DOWN is far below UP, and each load must last, so that the number does not go up and down.
"""

from __future__ import annotations

from typing import Final, NamedTuple

UP: Final = 32  # requests in flight for each JE
DOWN: Final = 8
UP_S: Final = 2.0  # that a load lasts before it counts
DOWN_S: Final = 30.0


class LoadSince(NamedTuple):
    """Seconds since when the load has been too high or too low without a break; None where it is not."""

    high: float | None = None
    low: float | None = None


def wanted_jes(
    now: float, in_flight: int, count: int, least: int, most: int, since: LoadSince
) -> tuple[int, LoadSince]:
    """Return how many JEs there should be where there are `count`, and the load's times for the next call."""
    is_high = count < most and in_flight > UP * count
    is_low = count > least and in_flight < DOWN * (count - 1)
    high = (now if since.high is None else since.high) if is_high else None
    low = (now if since.low is None else since.low) if is_low else None
    if high is not None and now - high >= UP_S:
        return count + 1, LoadSince()
    if low is not None and now - low >= DOWN_S:
        return count - 1, LoadSince()
    return count, LoadSince(high, low)
