"""Checks of callers' arguments, common to all protocols."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from xdeepserve.errors import AddressError, DeploymentError, ProtocolError

MAX_EVENT_ID = 2**64 - 1


def check_event_id(op: str, rank: object, event_id: object) -> int:
    """Return an event ID as Python's integer. Raises ProtocolError unless it is an integer from 1 to 2**64 -
    1."""
    if not is_integer(event_id) or not 1 <= event_id <= MAX_EVENT_ID:  # type: ignore[operator]
        raise ProtocolError(
            f"{op}: rank {rank} was given event {event_id!r}: event IDs are integers from 1 to 2**64 - 1"
        )
    return operator.index(event_id)  # type: ignore[arg-type]


def check_later(who: str, event_id: int, last: int, where: str = "") -> None:
    """Check the order of event IDs. Raises ProtocolError unless `event_id` is greater than the last one
    given."""
    if event_id <= last:
        raise ProtocolError(f"{who} was given event {event_id} after {last}{where}: event IDs must increase")


def is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integer(op: str, name: str, value: object) -> int:
    """Convert a number from a caller to Python's integer, whose sums never wrap around as NumPy's do.

    Raises AddressError if the number is not whole.
    """
    if not is_integer(value):
        raise AddressError(f"{op}: {name} must be an integer, not {value!r}")
    return operator.index(value)  # type: ignore[arg-type]


def check_count(what: str, field: str, value: object) -> None:
    """Check a size of a layout: an int of at least 1. Raises DeploymentError if not.

    It must be Python's, because products of NumPy's integers wrap around.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise DeploymentError(f"{what}: {field} must be an int, not {value!r}")
    if value < 1:
        raise DeploymentError(f"{what}: {field} must be at least 1, not {value}")


def check_array(op: str, name: str, x: object) -> None:
    """Check for a NumPy array. Raises AddressError for any other argument."""
    if not isinstance(x, np.ndarray | np.generic):
        raise AddressError(f"{op}: {name} must be a NumPy array, not {type(x).__name__}")


def check_rank(die: int, rank: int, dies: Sequence[int], what: str = "rank", where: str = "dies") -> None:
    """Check a die's rank in its group. Raises DeploymentError unless the die has the given rank."""
    if not 0 <= rank < len(dies) or dies[rank] != die:
        raise DeploymentError(f"die {die} is not {what} {rank} of {where} {list(dies)}")
