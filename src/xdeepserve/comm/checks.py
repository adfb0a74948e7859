"""Checks of what callers hand in, by all protocols alike."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from xdeepserve.errors import AddressError, DeploymentError, ProtocolError

MAX_EVENT_ID = 2**64 - 1


def check_event_id(op: str, rank: object, event_id: object) -> int:
    """An event ID as Python's integer; ProtocolError unless it is from 1 and a field of 64 bits holds it."""
    if not is_integer(event_id) or not 1 <= event_id <= MAX_EVENT_ID:  # type: ignore[operator]
        raise ProtocolError(
            f"{op}: rank {rank} was given event {event_id!r}: event IDs are integers from 1 to 2**64 - 1"
        )
    return operator.index(event_id)  # type: ignore[arg-type]


def check_later(who: str, event_id: int, last: int, where: str = "") -> None:
    """ProtocolError unless an event ID is greater than the last one that was given."""
    if event_id <= last:
        raise ProtocolError(f"{who} was given event {event_id} after {last}{where}: event IDs must increase")


def is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integer(op: str, name: str, value: object) -> int:
    """A number that somebody gave as Python's, whose sums never wrap around as NumPy's do.

    AddressError unless it is whole.
    """
    if not is_integer(value):
        raise AddressError(f"{op}: {name} must be an integer, not {value!r}")
    return operator.index(value)  # type: ignore[arg-type]


def check_count(what: str, field: str, value: object) -> None:
    """DeploymentError unless a layout's number is from 1 and Python's, whose products never wrap around."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise DeploymentError(f"{what}: {field} must be an int, not {value!r}")
    if value < 1:
        raise DeploymentError(f"{what}: {field} must be at least 1, not {value}")


def check_array(op: str, name: str, x: object) -> None:
    """AddressError for what is no array."""
    if not isinstance(x, np.ndarray | np.generic):
        raise AddressError(f"{op}: {name} must be a NumPy array, not {type(x).__name__}")


def check_rank(die: int, rank: int, dies: Sequence[int], what: str = "rank", where: str = "dies") -> None:
    """DeploymentError unless a die is that rank of its group."""
    if not 0 <= rank < len(dies) or dies[rank] != die:
        raise DeploymentError(f"die {die} is not {what} {rank} of {where} {list(dies)}")
