"""What a rank of a collective may do next, as a table."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What a rank does."""

    IDLE = "idle"
    RUNNING = "in a collective"
    FAILED = "failed"


class Move(enum.Enum):
    START = "start a collective"
    DONE = "complete a collective"
    FAIL = "fail"
    RESET = "be reset"


MOVES = {
    (State.IDLE, Move.START): State.RUNNING,
    (State.RUNNING, Move.DONE): State.IDLE,
    (State.RUNNING, Move.FAIL): State.FAILED,
    (State.IDLE, Move.RESET): State.IDLE,
    (State.FAILED, Move.RESET): State.IDLE,
}
