"""Whose turn it is: dispatch and combine alternate on a rank, and so do A2E and E2A.

The rules are a table, without bytes, time or I/O. A transition that is not in it is a ProtocolError.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from xdeepserve.comm.checks import check_event_id
from xdeepserve.errors import ProtocolError


class Phase(enum.IntEnum):
    """What a rank does, or has done last."""

    READY = 0  # no tokens are away: may dispatch
    DISPATCHING = 1
    HOLDING = 2  # holds others' tokens: must combine
    COMBINING = 3
    FAILED = 4  # an operation ended in an error: must be reset together with its peers


class Step(enum.IntEnum):
    DISPATCH = 0
    COMBINE = 1
    DONE = 2
    FAIL = 3
    RESET = 4


PHASE = {
    (Phase.READY, Step.DISPATCH): Phase.DISPATCHING,
    (Phase.DISPATCHING, Step.DONE): Phase.HOLDING,
    (Phase.DISPATCHING, Step.FAIL): Phase.FAILED,
    (Phase.HOLDING, Step.COMBINE): Phase.COMBINING,
    (Phase.COMBINING, Step.DONE): Phase.READY,
    (Phase.COMBINING, Step.FAIL): Phase.FAILED,
    (Phase.READY, Step.RESET): Phase.READY,
    (Phase.HOLDING, Step.RESET): Phase.READY,
    (Phase.FAILED, Step.RESET): Phase.READY,
}


def next_phase(phase: Phase, step: Step, rank: object, name: str | None = None) -> Phase:
    """ProtocolError, naming the rank and its step by `name`, if the phase does not allow it."""
    try:
        return PHASE[phase, step]
    except KeyError:
        raise ProtocolError(
            f"rank {rank} cannot {name or step.name.lower()} while {phase.name.lower()}"
        ) from None


def no_arguments() -> None:
    """The check of an operation that has no arguments."""


class Turns:
    """A rank's place in the alternation of its two operations, and the event IDs that these have had."""

    def __init__(self, rank: object, first: str = "dispatch", second: str = "combine") -> None:
        self.rank = rank
        self.names = {Step.DISPATCH: first, Step.COMBINE: second}
        self.phase = Phase.READY
        self.last_event_id = {Step.DISPATCH: 0, Step.COMBINE: 0}

    def begin(self, step: Step, event_id: int, check: Callable[[], None] = no_arguments) -> int:
        """Start an operation; the event ID of the one before of its kind.

        `check` may raise, about the arguments: nothing has changed then, and nothing is used up.
        """
        name, last = self.names[step], self.last_event_id[step]
        check_event_id(name, self.rank, event_id)
        if event_id <= last:
            raise ProtocolError(
                f"{name}: rank {self.rank} was given event {event_id} after {last}: event IDs must increase"
            )
        phase = next_phase(self.phase, step, self.rank, name)
        check()
        self.phase = phase
        self.last_event_id[step] = event_id
        return last

    def end(self, is_done: bool) -> None:
        self.phase = next_phase(self.phase, Step.DONE if is_done else Step.FAIL, self.rank)

    def reset(self, posted: dict[Step, int]) -> None:
        """Forget a failed exchange; `posted` are the newest event IDs that peers have posted."""
        self.phase = next_phase(self.phase, Step.RESET, self.rank)
        for step, event_id in posted.items():
            self.last_event_id[step] = max(self.last_event_id[step], event_id)
