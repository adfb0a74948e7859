"""The two sides of a transfer as tables, without bytes, time or I/O (xDeepServe 5.1, steps 3, 6, 7, 8).

    source                           destination
    3 OFFERED: addresses only
                     <-- WANT ---    6 WANTED: it has room for the bytes
    7 SENDING        --- OFFER -->     MOVING: pulls them
      DONE           <-- DONE ---    8 DONE
    8 frees them                       uses them

The want may come before the offer is made: the source then answers when it is. A destination that has waited
too long withdraws its want: the source is as if it had not been asked, and may be asked again. An offer that
nobody wants for too long fails. An offer tells until when the source keeps the bytes: a destination that has
pulled them later fails, so it never succeeds where its source has given up.

What is offered may be in parts, which the owner has ready one after the other (KV by layer, DeepServe 4.4):

    7 SENDING        --- OFFER -->     MOVING: pulls the parts that are ready
                     --- READY -->       further ones are; with the last of them it is as above
      REVOKED        --- REVOKE ->     STOPPING: there will be no more; ends what is under way
      STOPPED        <- STOPPED --     STOPPED
"""

from __future__ import annotations

import enum

from xdeepserve.machine import Machine


class State(enum.Enum):
    OFFERED = "offered"
    SENDING = "sending"
    WANTED = "wanted"
    MOVING = "moving"
    REVOKED = "revoked"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Cause(enum.Enum):
    WANT = "want"  # messages
    WITHDRAW = "withdraw"
    OFFER = "offer"
    DONE = "done"
    REFUSE = "refuse"
    READY = "ready"
    REVOKE = "revoke"  # the caller's, too
    STOPPED = "stopped"
    MOVED = "moved"  # the backend's word
    BROKEN = "broken"
    TIMEOUT = "timeout"
    CANCEL = "cancel"  # the caller's


SOURCE = {
    (State.OFFERED, Cause.WANT): State.SENDING,
    (State.OFFERED, Cause.CANCEL): State.CANCELLED,
    (State.OFFERED, Cause.TIMEOUT): State.FAILED,
    (State.SENDING, Cause.DONE): State.DONE,
    (State.SENDING, Cause.REFUSE): State.FAILED,
    (State.SENDING, Cause.WITHDRAW): State.OFFERED,
    (State.SENDING, Cause.TIMEOUT): State.FAILED,
    (State.SENDING, Cause.READY): State.SENDING,
    (State.SENDING, Cause.REVOKE): State.REVOKED,
    (State.REVOKED, Cause.STOPPED): State.STOPPED,
    (State.REVOKED, Cause.WITHDRAW): State.STOPPED,
    (State.REVOKED, Cause.REFUSE): State.FAILED,
    (State.REVOKED, Cause.TIMEOUT): State.FAILED,
}
DESTINATION = {
    (State.WANTED, Cause.OFFER): State.MOVING,
    (State.WANTED, Cause.TIMEOUT): State.FAILED,
    (State.MOVING, Cause.MOVED): State.DONE,
    (State.MOVING, Cause.BROKEN): State.FAILED,
    (State.MOVING, Cause.READY): State.MOVING,
    (State.MOVING, Cause.REVOKE): State.STOPPING,
    (State.WANTED, Cause.REVOKE): State.STOPPED,
    (State.STOPPING, Cause.MOVED): State.STOPPED,
    (State.STOPPING, Cause.BROKEN): State.FAILED,
}
FINAL = {State.DONE, State.FAILED, State.CANCELLED, State.STOPPED}


TRANSFER = SOURCE | DESTINATION  # no state is in both, so the state tells which side it is


def transfer(state: State) -> Machine[State, Cause]:
    """Make the state machine for a side of a transfer, starting at `state`."""
    return Machine(TRANSFER, state, "a transfer", "{who} that is {state} cannot take '{event}'")
