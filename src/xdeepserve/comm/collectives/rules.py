"""What a rank of a collective may do next, as a table."""

from __future__ import annotations

import enum


class CollectiveState(enum.Enum):
    """What a rank does."""

    IDLE = "idle"
    RUNNING = "in a collective"
    FAILED = "failed"


class CollectiveMove(enum.Enum):
    START = "start a collective"
    DONE = "complete a collective"
    FAIL = "fail"
    RESET = "be reset"


MOVES = {
    (CollectiveState.IDLE, CollectiveMove.START): CollectiveState.RUNNING,
    (CollectiveState.RUNNING, CollectiveMove.DONE): CollectiveState.IDLE,
    (CollectiveState.RUNNING, CollectiveMove.FAIL): CollectiveState.FAILED,
    (CollectiveState.IDLE, CollectiveMove.RESET): CollectiveState.IDLE,
    (CollectiveState.FAILED, CollectiveMove.RESET): CollectiveState.IDLE,
}
