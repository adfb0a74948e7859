"""State of a slot, by which client and server take turns (EaaS 3.2): a table without bytes, time or I/O.

    client                              server
    0 EMPTY     payload, header, then
      WRITE     ----------------------> 1 WRITTEN   polls its own memory, forms batches
                                          ANSWER    answers, then
    2 DONE      <----------------------             the client reads, by itself
      READ      ----------------------> 0 EMPTY

In states 0 and 2 a slot is the client's, in 1 the server's: who has it is the only one that writes to it.
So a client that has waited too long must leave its slot alone until it is 2 after all, or until the server
has registered anew, by which all its slots are empty, and what was in them is of a generation that is over.

The paper has no words for four more arrows. A client that has nothing for a server says so with a request of
no rows, and there is nothing to read (NOTE). A request of an old generation is for nobody (STALE). A server
takes no part any more with a client that is lost (RELEASE) or writes what cannot be (REFUSE).
"""

from __future__ import annotations

import enum

from xdeepserve.errors import ProtocolError
from xdeepserve.machine import follow


class SlotState(enum.IntEnum):
    """Values of a slot's state byte."""

    EMPTY = 0
    WRITTEN = 1
    DONE = 2
    OFFLINE = 3


class SlotEvent(enum.Enum):
    WRITE = "write"  # the client's
    READ = "read"
    ANSWER = "answer"  # the server's
    NOTE = "note"
    STALE = "drop a stale request"
    REFUSE = "refuse"
    RELEASE = "release"
    REGISTER = "register"


SLOT = {
    (SlotState.EMPTY, SlotEvent.WRITE): SlotState.WRITTEN,
    (SlotState.DONE, SlotEvent.READ): SlotState.EMPTY,
    (SlotState.WRITTEN, SlotEvent.ANSWER): SlotState.DONE,
    (SlotState.WRITTEN, SlotEvent.NOTE): SlotState.EMPTY,
    (SlotState.WRITTEN, SlotEvent.STALE): SlotState.EMPTY,
    (SlotState.WRITTEN, SlotEvent.REFUSE): SlotState.OFFLINE,
    # A client that is lost writes no more, whatever its slot says.
    (SlotState.EMPTY, SlotEvent.RELEASE): SlotState.OFFLINE,
    (SlotState.WRITTEN, SlotEvent.RELEASE): SlotState.OFFLINE,
    (SlotState.DONE, SlotEvent.RELEASE): SlotState.OFFLINE,
    # A server that begins anew has forgotten everybody.
    (SlotState.EMPTY, SlotEvent.REGISTER): SlotState.EMPTY,
    (SlotState.WRITTEN, SlotEvent.REGISTER): SlotState.EMPTY,
    (SlotState.DONE, SlotEvent.REGISTER): SlotState.EMPTY,
    (SlotState.OFFLINE, SlotEvent.REGISTER): SlotState.EMPTY,
}
OF_CLIENT = (SlotEvent.WRITE, SlotEvent.READ)  # the other events are the server's


def next_state(state: int, event: SlotEvent, who: str) -> SlotState:
    """Return the state after an event. Raises ProtocolError, naming `who`, for an impossible state or
    event."""
    names = {each.value: f"{each.value} ({each.name.lower()})" for each in SlotState}
    found = names.get(state, f"{state}, which is no state")
    refusal = f"{who} cannot {event.value}: it is {found}"
    if state not in names:
        raise ProtocolError(refusal)
    return follow(SLOT, SlotState(state), event, lambda: refusal)
