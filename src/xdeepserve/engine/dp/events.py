"""What happens to requests between the job executor, TEs and DP groups: facts, as data (xDeepServe 5.1).

Whoever has something to tell has got one `Events` at its construction, and tells each fact once, as it comes
about. Observers hear of it first, then the job executor acts on it: what that causes has happened on return.
Virtual time does not pass meanwhile. `pd_transfer.py` numbers the steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec

from xdeepserve.comm.distflow import Completion
from xdeepserve.engine.numbers import GroupRank

log = logging.getLogger("xdeepserve.engine")


class GroupId(NamedTuple):
    """A DP group of a pod. Its text is what DistFlow calls the group's endpoints."""

    te: str = ""
    rank: GroupRank = GroupRank(0)

    def __str__(self) -> str:
        return f"{self.te}/dp{self.rank}"


class Event(msgspec.Struct, frozen=True):
    """Something has happened to a sequence: a choice of a request."""

    seq_id: int


class AtGroup(Event, frozen=True):
    """Something has happened to a sequence in a DP group."""

    group: GroupId


class Assigned(Event, frozen=True):
    """Step 1: the job executor has given it to a TE."""

    te: str


class Given(AtGroup, frozen=True):
    """Steps 2 and 5: a TE-shell has given it to a DP group."""


class Booked(AtGroup, frozen=True):
    """Where decode admits requests: the group has reserved blocks for it, and no TE computes it yet."""


class Preempted(AtGroup, frozen=True):
    """No block was left: it gives up `num_computed` positions, or moves them to host DRAM (`is_swapped`)."""

    num_computed: int
    is_swapped: bool


class KVLost(AtGroup, frozen=True):
    """Its blocks are lost while it runs: what has left of them by layer is worth nothing."""


class MovedOut(Event, frozen=True):
    """Its TE is leaving: it has given up all blocks there, and goes on elsewhere from its tokens."""

    te: str


class LastChunkLaunched(AtGroup, frozen=True):
    """Where KV moves by layer: the step that computes the rest of its prompt, `num_tokens` with what has been
    computed before, is on its way to the dies."""

    step: int
    num_tokens: int


class LayerEnded(AtGroup, frozen=True):
    """All dies of its group have ended a layer of that step."""

    layer: int


class Prefilled(AtGroup, frozen=True):
    """Its prompt has been computed on a TE that only prefills, where its blocks are kept."""


class Registered(AtGroup, frozen=True):
    """Step 3: its blocks, in these slots, can be sent. No byte moves yet."""

    slots: tuple[int, ...]


class Sent(Event, frozen=True):
    """Step 4: the job executor has sent it to a decode TE."""

    te: str


class TransferBegan(AtGroup, frozen=True):
    """A group has told DistFlow of its side of a transfer; for the destination that is step 6."""

    peer: str
    is_source: bool
    nbytes: int


class TransferEnded(AtGroup, frozen=True):
    """Step 8: a group has learnt of the end of its side, good or bad."""

    completion: Completion


class Released(AtGroup, frozen=True):
    """The source has got its blocks back."""


class Withdrawn(AtGroup, frozen=True):
    """It has ended on the source while its layers were on their way."""


class Ended(Event, frozen=True):
    """Its request wants nothing more of it: it is finished, or aborted."""


class ShareOfStep(msgspec.Struct, frozen=True):
    """A sequence's rows in a step: `num_tokens` from position `start` on, then its drafts."""

    seq_id: int
    start: int
    num_tokens: int
    is_prefill: bool
    drafts: tuple[int, ...]
    num_accepted: int  # of these
    token_ids: tuple[int, ...]  # new ones, which the main model has sampled
    proposed: tuple[int, ...]  # by MTP, for the next step


class StepEnded(msgspec.Struct, frozen=True):
    """A DP group has ended a step that had rows; its results come into effect next. Only observers hear."""

    group: GroupId
    step: int
    start_ns: int  # of virtual time, when its launch reached the dies
    end_ns: int
    num_used_blocks: int  # when it was launched
    shares: tuple[ShareOfStep, ...]


class TEChanged(msgspec.Struct, frozen=True):
    """A TE has come to another point of its life (te/life.py). Only observers hear."""

    te: str
    life: str


class FailoverEnded(msgspec.Struct, frozen=True):
    """No TE is awaited any more in the place of one that was given up; `reason`: why one does not come. Only
    observers hear."""

    reason: str | None


class TERolledBack(msgspec.Struct, frozen=True):
    """Something of a TE has failed, and the steps under way will be run again, in a new epoch. Only observers
    hear."""

    te: str
    epoch: int
    reason: str
    begun_ns: int  # of virtual time, when the TE heard of the failure


class ServerHeard(msgspec.Struct, frozen=True):
    """The monitor holds an expert server for lost, or no longer so. Only observers hear."""

    te: str
    server: int
    die: int
    is_lost: bool


class ClientLost(msgspec.Struct, frozen=True):
    """A client of expert servers, a DP group, is lost, and its TE goes on without. Only observers hear."""

    te: str
    rank: int
    die: int


class ServerMoved(msgspec.Struct, frozen=True):
    """An expert server has come to a seat of its TE, or has left it. Only observers hear."""

    te: str
    server: int
    die: int
    epoch: int  # of the seat
    is_there: bool


Observed: TypeAlias = (
    Event | StepEnded | TEChanged | FailoverEnded | TERolledBack | ServerHeard | ServerMoved | ClientLost
)
Observer: TypeAlias = Callable[[Observed], None]


def notify(listener: Callable[..., object], *args: object, about: object) -> bool:
    """Call somebody who listens to requests; False if the call raised an error, which is logged.

    Listeners (metrics, the page, a user's callbacks) run inside the loops that serve all requests: an error
    that one of them raises must end neither a task executor nor another request. `about` is the request or
    event, for the log.
    """
    try:
        listener(*args)
    except (Exception, asyncio.CancelledError):
        log.exception("%s: a listener failed: %r", about, listener)
        return False
    return True


class Events:
    """Where events are told. `act` is who acts on them; `observers` only look on, and must change nothing."""

    def __init__(self, observers: list[Observer] | None = None) -> None:
        self.observers = [] if observers is None else observers
        self.act: Callable[[Event], None] = lambda event: None

    def __call__(self, event: Event) -> None:
        self.show(event)
        self.act(event)

    def show(self, event: Observed) -> None:
        """Tell observers alone. One that raises an error is not called any more."""
        for observe in tuple(self.observers):
            if not notify(observe, event, about=event) and observe in self.observers:
                self.observers.remove(observe)
