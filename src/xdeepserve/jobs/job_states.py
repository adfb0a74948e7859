"""Allowed changes of state of jobs, tasks and members; all others are refused.

job     queued -> running -> succeeded        a request's work (OpenAI's fine-tuning job)
                      `----> failed           with the reason
           `----------`----> cancelled        by its client, in either state
task    waiting -> running -> done            a step of it, in a process of its own
           ^----------'                       its process or its master was lost: once more
member  starting -> ready <-> suspect         a job executor's process (jobs/member_table.py)
             ^--------`-- lost <--'           it ended, failed or was silent: it is started again
             `--- gone                        it ended in order
"""

from __future__ import annotations

from typing import Literal

from xdeepserve.errors import XDeepServeError

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
TaskState = Literal["waiting", "running", "done", "failed", "cancelled"]
MemberState = Literal["starting", "ready", "suspect", "lost", "gone"]
Moves = dict[str, tuple[str, ...]]

JOB_MOVES: Moves = {
    "queued": ("running", "cancelled"),
    "running": ("succeeded", "failed", "cancelled"),
    "succeeded": (),
    "failed": (),
    "cancelled": (),
}
TASK_MOVES: Moves = {
    "waiting": ("running", "cancelled"),
    "running": ("waiting", "done", "failed", "cancelled"),
    "done": (),
    "failed": (),
    "cancelled": (),
}
MEMBER_MOVES: Moves = {
    "starting": ("ready", "lost", "gone"),
    "ready": ("suspect", "lost", "gone"),
    "suspect": ("ready", "lost", "gone"),
    "lost": ("starting", "gone"),
    "gone": ("starting",),
}


class IllegalMoveError(XDeepServeError):
    """Error: a job, a task or a member cannot go from its state to the requested state."""


def check_move(what: str, moves: Moves, old: str, new: str) -> None:
    """Raise IllegalMoveError, with a one-line message, unless the table has the move."""
    if new not in moves[old]:
        allowed = " or ".join(moves[old]) or "nothing: that is its end"
        raise IllegalMoveError(f"{what} is {old}, from which it goes to {allowed}, not to {new}")


def is_over(moves: Moves, state: str) -> bool:
    """Whether a state is final: no move leads out of it."""
    return not moves[state]
