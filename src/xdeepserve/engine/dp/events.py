"""The only log of an engine: everything that happens, as typed events (xDeepServe 5.1).

Each part that tells events gets the `EventLog` on construction, and tells each fact once, when it happens.
Observers read it first: the page, traces of requests, the server's log, chaos and the tests of virtual times.
Then the job executor acts on events of sequences; all consequences have happened on return. Virtual time does
not pass meanwhile. `pd_transfer.py` numbers the steps.

How much of something there was (rows, cached tokens) is no event: parts count such quantities themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple, TypeAlias

import msgspec

from xdeepserve.engine.numbers import GroupRank, Seat, StepNo
from xdeepserve.engine.recovery.ladder import RUNGS, RungName

log = logging.getLogger("xdeepserve.engine")


class GroupId(NamedTuple):
    """Name of a DP group in a pod; its text also names the group's DistFlow endpoints."""

    te: str = ""
    rank: GroupRank = GroupRank(0)

    def __str__(self) -> str:
        return f"{self.te}/dp{self.rank}"


class Observed(msgspec.Struct, frozen=True):
    """Something has happened in a pod, and all observers are told.

    The page shows events that have a `kind`, a server's log those that are no sequence's (`Event`); both
    print `said`.
    """

    kind: ClassVar[str] = ""  # of the event's line on the page; an event without one has no line

    @property
    def said(self) -> str:
        """Sentence for people; empty if neither the page nor a log shows such events."""
        return ""

    @property
    def is_loss(self) -> bool:
        """Whether a log warns, since something has been lost."""
        return False


class Event(Observed, frozen=True):
    """Something has happened to a sequence, which is one choice of a request."""

    seq_id: int


class AtGroup(Event, frozen=True):
    """Something has happened to a sequence in a DP group."""

    group: GroupId


class Assigned(Event, frozen=True):
    """Step 1: the job executor has assigned a sequence to a TE."""

    te: str


class Given(AtGroup, frozen=True):
    """Steps 2 and 5: a TE-shell has given a sequence to a DP group."""


class Booked(AtGroup, frozen=True):
    """Where decode admits requests: a group has reserved blocks for a sequence that no TE computes yet."""


class Preempted(AtGroup, frozen=True):
    """No KV block was left: a sequence gave up `num_computed` positions, or moves them to host DRAM
    (`is_swapped`)."""

    kind: ClassVar[str] = "preemption"
    num_computed: int
    is_swapped: bool

    @property
    def said(self) -> str:
        return f"request {self.seq_id} gives up its blocks in {self.group}"


class KVLost(AtGroup, frozen=True):
    """A running sequence has lost its KV blocks; layers that were sent before the loss are void."""


class MovedOut(Event, frozen=True):
    """A sequence gave up all blocks because its TE is leaving; another TE will recompute it from its
    tokens."""

    te: str


class LastChunkLaunched(AtGroup, frozen=True):
    """Where KV moves by layer: the step with a prompt's last chunk is on its way to the dies. After this step
    `num_tokens` positions of the sequence are computed."""

    step: StepNo
    num_tokens: int


class LayerEnded(AtGroup, frozen=True):
    """All dies of a sequence's DP group have ended a layer of the step with its last prompt chunk."""

    layer: int


class Prefilled(AtGroup, frozen=True):
    """A prompt has been computed, and its first token is there. A prefill TE keeps the KV blocks until they
    are received."""


class Registered(AtGroup, frozen=True):
    """Step 3: a sequence's blocks, in these slots, can be sent. No byte moves yet."""

    slots: tuple[int, ...]


class Sent(Event, frozen=True):
    """Step 4: the job executor has sent a sequence to a decode TE."""

    te: str


class TransferBegan(AtGroup, frozen=True):
    """A DP group has told DistFlow of its side of a transfer; for the destination this is step 6."""

    peer: str
    is_source: bool
    nbytes: int


class Released(AtGroup, frozen=True):
    """The source group of a transfer has got its KV blocks back."""


class Withdrawn(AtGroup, frozen=True):
    """A sequence has ended on the source TE while its layers were on their way."""


class Ended(Event, frozen=True):
    """A sequence has ended: finished, or aborted together with its request."""


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


class StepEnded(Observed, frozen=True):
    """A DP group has ended a step that had rows; its results take effect next."""

    group: GroupId
    step: StepNo
    start_ns: int  # of virtual time, when its launch reached the dies
    end_ns: int
    num_used_blocks: int  # when it was launched
    shares: tuple[ShareOfStep, ...]


class StepCut(Observed, frozen=True):
    """A step of a TE that decides for each is launched in overlapping microbatches, not whole."""

    te: str
    step: StepNo
    num_parts: int


LIVES_SAID: Final = {
    "loading": "loads its weights",
    "draining": "takes no new work: it leaves when it has ended what it has",
    "gone": "has left",
}


class TEChanged(Observed, frozen=True):
    """A TE has reached another state of its life (te/life.py)."""

    kind: ClassVar[str] = "te"
    te: str
    life: str

    @property
    def said(self) -> str:
        return f"{self.te} {LIVES_SAID.get(self.life, f'is {self.life}')}"

    @property
    def is_loss(self) -> bool:
        return self.life == "lost"


def named(dies: Sequence[int]) -> str:
    """Name dies in words: "die 3", "dies 3 to 5" or "dies 3, 7"."""
    if len(dies) == 1:
        return f"die {dies[0]}"
    is_range = list(dies) == list(range(dies[0], dies[-1] + 1))
    return f"dies {dies[0]} to {dies[-1]}" if is_range else f"dies {', '.join(map(str, dies))}"


class DiesLost(Observed, frozen=True):
    """A TE is given up: the memory of `dies` does not answer, and the `others` must be tested before anybody
    uses them again."""

    kind: ClassVar[str] = "fault"
    te: str
    dies: tuple[int, ...]
    others: tuple[int, ...]

    @property
    def die(self) -> int:
        """First of the dies, for a list of events."""
        return min(self.dies or self.others)

    @property
    def said(self) -> str:
        parts = []
        if self.dies:
            parts.append(f"{named(self.dies)} of {self.te} {'is' if len(self.dies) == 1 else 'are'} lost")
        if self.others:
            of = "the TE" if self.dies else self.te
            verb = "is" if len(self.others) == 1 else "are"
            parts.append(f"{named(self.others)} {verb} given up with {of}")
        return "; ".join(parts)

    @property
    def is_loss(self) -> bool:
        return True


class DiesTested(Observed, frozen=True):
    """Dies of a TE that is gone have been tested (`hw/self_test.py`): the `well` ones are free again, and
    nobody uses the `failed` ones any more."""

    kind: ClassVar[str] = "fault"
    te: str
    well: tuple[int, ...]
    failed: tuple[int, ...]

    @property
    def die(self) -> int:
        """First of the dies, for a list of events."""
        return min(self.failed or self.well)

    @property
    def said(self) -> str:
        found = [
            f"{named(dies)} {'is' if len(dies) == 1 else 'are'} {what}"
            for dies, what in ((self.well, "well, and free again"), (self.failed, "not well, and lost"))
            if dies
        ]
        return f"a test of what {self.te} had: {'; '.join(found)}"


class KVKept(Observed, frozen=True):
    """A TE in the place of a lost one goes on with `num_blocks` blocks of KV that were on its dies."""

    kind: ClassVar[str] = "recovery"
    te: str
    num_blocks: int

    @property
    def said(self) -> str:
        blocks = "one block" if self.num_blocks == 1 else f"{self.num_blocks:,} blocks"
        return f"{self.te} goes on with {blocks} of KV that its dies have kept"


class LinkChanged(Observed, frozen=True):
    """A link from a prefill to a decode TE has failed, for a `reason`, or works again."""

    kind: ClassVar[str] = "link"
    prefill: str
    decode: str
    is_well: bool
    reason: str = ""

    @property
    def said(self) -> str:
        link = f"the link from {self.prefill} to {self.decode}"
        return f"{link} works again" if self.is_well else f"{link} has failed: {self.reason}"

    @property
    def is_loss(self) -> bool:
        return not self.is_well


class PrefixRead(Observed, frozen=True):
    """A DP group has read cached blocks from a group of another TE, or computes them, for a `reason` if an
    error is one."""

    group: GroupId
    source: GroupId
    num_blocks: int  # that have come
    nbytes: int  # of these, on all dies of the group
    reason: str = ""

    @property
    def said(self) -> str:
        return (
            f"{self.group} computes what {self.source} could not send: {self.reason}" if self.reason else ""
        )

    @property
    def is_loss(self) -> bool:
        return bool(self.reason)


class ReplicasChanged(Observed, frozen=True):
    """A TE's steps use other replicas of experts from the next one on; `num_slots` slots have changed
    (EPLB)."""

    kind: ClassVar[str] = "replicas"
    te: str
    num_slots: int

    @property
    def said(self) -> str:
        slots = "one slot has" if self.num_slots == 1 else f"{self.num_slots} slots have"
        return f"{self.te} uses other replicas of experts: {slots} changed"


class TEsWanted(Observed, frozen=True):
    """The AutoScaler wants another number of TEs of a role than there are, or one that should have come could
    not.

    `resumed` names TEs that were leaving and now stay, in the place of TEs that would have to come.
    """

    kind: ClassVar[str] = "scale"
    num_tes: int
    reason: str
    resumed: tuple[str, ...] = ()
    role: str = "both"

    @property
    def said(self) -> str:
        stay = f"; {', '.join(self.resumed)} {'stays' if len(self.resumed) == 1 else 'stay'}"
        kind = "TE" if self.role == "both" else f"{self.role} TE"
        count = f"one {kind} is" if self.num_tes == 1 else f"{self.num_tes} {kind}s are"
        return f"{count} wanted: {self.reason}{stay if self.resumed else ''}"


class TEJoined(Observed, frozen=True):
    """A TE that has come as load asked for takes requests from now on."""

    kind: ClassVar[str] = "scale"
    te: str

    @property
    def said(self) -> str:
        return f"{self.te} takes requests"


class FailoverEnded(Observed, frozen=True):
    """A lost TE's replacement is no longer awaited; `reason` says why none comes, if so."""

    reason: str | None

    @property
    def said(self) -> str:
        if self.reason is None:
            return "failover has ended: another TE is in the place of each that was given up"
        return f"failover has failed, and nothing comes in the place of what is lost: {self.reason}"


class Mended(Observed, frozen=True):
    """A rung of the ladder has mended a loss of a TE, which goes on (`recovery/ladder.py`)."""

    kind: ClassVar[str] = "recovery"
    te: str
    rung: RungName
    epoch: int  # of the TE's rollbacks, from now on
    reason: str
    begun_ns: int  # of virtual time, when the TE heard of the loss

    @property
    def said(self) -> str:
        return f"{self.te} {RUNGS[self.rung].told.format(epoch=self.epoch)}: {self.reason}"


class ServerHeard(Observed, frozen=True):
    """The monitor declares an expert server lost, or found again."""

    kind: ClassVar[str] = "server"
    te: str
    server: Seat
    die: int
    is_lost: bool

    @property
    def said(self) -> str:
        now = (
            f"is lost, die {self.die}; replicas are asked"
            if self.is_lost
            else f"answers again, die {self.die}"
        )
        return f"expert server {self.server} of {self.te} {now}"


class ClientLost(Observed, frozen=True):
    """A DP group using expert servers is lost, and its TE goes on without it."""

    kind: ClassVar[str] = "client"
    te: str
    rank: GroupRank
    die: int

    @property
    def said(self) -> str:
        return f"die {self.die} is lost; {self.te} goes on without DP group {self.rank}"

    @property
    def is_loss(self) -> bool:
        return True


class ServerMoved(Observed, frozen=True):
    """An expert server has taken a seat in its TE, or has left it."""

    kind: ClassVar[str] = "server"
    te: str
    server: Seat
    die: int
    epoch: int  # of the seat
    is_there: bool

    @property
    def said(self) -> str:
        now = "has come to" if self.is_there else "has left"
        return f"expert server {self.server} {now} {self.te}, die {self.die}"


Observer: TypeAlias = Callable[[Observed], None]


def notify(listener: Callable[..., object], *args: object, about: object) -> bool:
    """Call a listener; return False if the call raised an error, which is logged.

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


class EventLog:
    """Log of an engine: every event is told once, by a call.

    `observers` read each event first and must change nothing; one that raises an error is removed. Then the
    job executor acts on it (`act`). `counts` has how often each class of events has been told, `mended` how
    often each rung of the ladder has mended a loss. `lost` are dies that were found lost, `given_up` those
    that went with their TE and have not been tested since.
    """

    def __init__(self, observers: list[Observer] | None = None) -> None:
        self.observers = [] if observers is None else observers
        self.act: Callable[[Observed], None] = lambda event: None
        self.counts = Counter[type[Observed]]()
        self.mended = Counter[RungName]()
        self.lost, self.given_up = set[int](), set[int]()

    def __call__(self, event: Observed) -> None:
        self.counts[type(event)] += 1
        self._note(event)
        for observe in tuple(self.observers):
            if not notify(observe, event, about=event) and observe in self.observers:
                self.observers.remove(observe)
        self.act(event)

    def _note(self, event: Observed) -> None:
        """Update the counts and the sets of dies by an event."""
        match event:
            case Mended():
                self.mended[event.rung] += 1
            case ClientLost():
                self.lost.add(event.die)
            case DiesLost():
                self.lost.update(event.dies)
                self.given_up.update(event.others)
            case DiesTested():
                self.given_up.difference_update(event.well, event.failed)
                self.lost.difference_update(event.well)
                self.lost.update(event.failed)
