"""Turns of a rank's two operations: dispatch and combine alternate, and so do A2E and E2A.

The rules are a table (`machine`), without bytes, time or I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from xdeepserve.comm.checks import check_event_id, check_later
from xdeepserve.machine import Machine


class Phase(enum.IntEnum):
    """Phase of a rank: the present or last operation."""

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


class Turns(Machine[Phase, Step]):
    """State of a rank in the alternation of its two operations, with the event IDs of both."""

    def __init__(self, rank: object, first: str = "dispatch", second: str = "combine") -> None:
        super().__init__(PHASE, Phase.READY, f"rank {rank}")
        self.rank = rank
        self.names = {Step.DISPATCH: first, Step.COMBINE: second}
        self.last_event_id = {Step.DISPATCH: 0, Step.COMBINE: 0}
        self.event_before = 0  # of the operation under way: the last of its kind before it

    def begin(self, step: Step, event_id: int, check: Callable[[], None] | None = None) -> None:
        """Start an operation under an event ID.

        `check` may raise about the arguments; then nothing has changed, and nothing is used up.
        """
        name, last = self.names[step], self.last_event_id[step]
        check_event_id(name, self.rank, event_id)
        check_later(f"{name}: {self.who}", event_id, last)
        self.after(step, name)
        if check is not None:
            check()
        self.move(step)
        self.event_before, self.last_event_id[step] = last, event_id

    def reset(self, posted: Mapping[Step, int], rank: object = None) -> None:
        """Forget a failed exchange. `posted` has the newest event IDs posted by peers, and `rank` is the
        rank's new number if it goes on in a smaller group."""
        self.move(Step.RESET)
        if rank is not None:
            self.rank, self.who = rank, f"rank {rank}"
        for step, event_id in posted.items():
            self.last_event_id[step] = max(self.last_event_id[step], event_id)
