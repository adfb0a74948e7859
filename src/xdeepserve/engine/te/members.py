"""Book of members of a task executor (TE): which dies belong to it, and in what state as the host believes.

A member is a die's stay at a seat. The seat of an expert server keeps its experts while servers come and go;
it has at most one incumbent, and at most one heir whose weights are on their way. A die with a DP group is a
client; its seat is its rank, for ever.

Several TEs may be clients of the same expert servers (`ServerSet`). One of them is the keeper: the servers'
dies count as its own, and its parts act on them. When the keeper is lost or leaves, another TE keeps them.

MEMBERS says what may happen to a member, PRESENCE what the clients' mask says of a server meanwhile, and
HEARS which parts of the TE are told of each move, in this order. All parts are told at one moment of virtual
time. Everybody else asks the book; no other container says who belongs to a TE.

Four things are kept apart from the book, because they are not what the host believes:

    truth                   `pod.lost`, `memories.silent`: in a TE only detectors read it, and move members
    belief of clients       bytes on their dies (`comm/services/known_servers.py`); it may be older, or newer
    counters of detectors   questions without an answer so far (`server_monitor`, `heartbeat`)
    servers outside         processes outside of the pod come and go by themselves; the client process hears
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, Literal, NamedTuple, TypeAlias

from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import GroupRank, Seat, StepNo
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.te.life import Life
from xdeepserve.engine.ways.services.real import SeatsOutside
from xdeepserve.machine import follow

MemberKind: TypeAlias = Literal["client", "server"]
At: TypeAlias = Literal[
    "held",  # a die reserved for a vacant seat
    "coming",  # the heir of a seat: weights are on their way
    "there",
    "silent",  # the monitor has not heard of it for too long
    "leaving",  # it answers what it has been asked
    "leaving, silent",
    "parting",  # it serves no more, but something may still run on its die or read its memory
    "lost",  # a client without which the TE goes on
    "gone",  # its die is the pod's again
]
Move: TypeAlias = Literal[
    "call", "seat", "fail", "miss", "answer", "lead away", "replace", "go", "lose", "free"
]
MEMBERS: Final[dict[tuple[At, Move], At]] = {
    ("held", "call"): "coming",  # a server joins on the die that its seat was planned with
    ("coming", "seat"): "there",
    ("coming", "fail"): "gone",
    ("there", "miss"): "silent",
    ("silent", "answer"): "there",  # it was slow
    ("there", "lead away"): "leaving",
    ("silent", "lead away"): "leaving, silent",  # nobody needs its answers to end its work
    ("leaving", "miss"): "leaving, silent",
    ("leaving, silent", "answer"): "leaving",
    ("leaving", "go"): "parting",
    ("leaving, silent", "go"): "parting",
    # An heir comes for a silent server alone, but takes the seat even if that one has answered meanwhile.
    ("there", "replace"): "parting",
    ("silent", "replace"): "parting",
    ("leaving", "replace"): "parting",
    ("leaving, silent", "replace"): "parting",
    ("there", "lose"): "lost",
    ("parting", "free"): "gone",
    ("held", "free"): "gone",  # with its TE
}
PRESENCE: Final[dict[At, Presence]] = {  # of incumbents; a seat with another member alone is ABSENT
    "there": Presence.THERE,
    "silent": Presence.LOST,
    "leaving": Presence.LEAVING,
    "leaving, silent": Presence.LOST,
}
TAKES_PART: Final[frozenset[At]] = frozenset({"there", "leaving"})
"""States of dies that roll back and get replicas of experts."""

Listener: TypeAlias = Literal[
    "mask",  # tell clients of the presence at the seat
    "address",  # tell clients where the seat's new server is
    "epoch field",  # let a new server begin in the TE's epoch
    "program",  # make the program of a new server, which reads its epoch then
    "slots",  # slots of lost clients are free
    "process",  # start the program of a new server
    "doorbell",  # end the program of a server
    "pod",  # note that the die is lost, and end what runs there
    "heartbeats",
    "rollback",  # wait no longer for the die
    "replicas",  # send no more tokens to the die's replicas
    "holder",  # the seat's replicas are on another die
    "steps",  # end the loop of the die's DP group
    "requests",  # of the die's DP group go on elsewhere
    "show heard",  # the other events are for observers alone, too
    "show moved",
    "show lost",
]
OF_EACH_TE: Final[frozenset[Listener]] = frozenset({"mask", "address"})
"""Parts that hear of servers in every TE of a set; other parts hear of them in the keeper alone."""
HEARS: Final[dict[tuple[MemberKind, Move], tuple[Listener, ...]]] = {
    ("server", "miss"): ("mask", "rollback", "replicas", "show heard"),
    ("server", "answer"): ("mask", "show heard"),
    ("server", "lead away"): ("mask",),
    ("server", "go"): ("doorbell", "rollback", "replicas", "mask", "show moved"),
    ("server", "replace"): ("rollback", "replicas", "mask"),
    ("server", "seat"): (
        "epoch field",
        "program",
        "slots",
        "process",
        "holder",
        "address",
        "mask",
        "show moved",
    ),
    ("client", "lose"): (*("pod", "heartbeats", "rollback", "steps", "slots", "requests", "show lost"),),
}


@dataclass(eq=False)
class Stay:
    """A die's stay at a seat. `epoch` counts the servers that a seat has had, this one included."""

    kind: MemberKind
    seat: Seat
    die: int
    at: At
    epoch: int = 1
    mem: ExpertMemory | None = None  # of a server; clients' memories are in the plan
    program: ExpertProgram | None = None  # of a server, from the start of its TE on
    process: asyncio.Task[None] | None = None  # that runs the program

    @property
    def is_seated(self) -> bool:
        """Whether the die is its seat's incumbent, as clients see it."""
        return self.at in PRESENCE

    @property
    def takes_part(self) -> bool:
        """Whether the die takes part in rollbacks, and may get replicas of experts."""
        return self.at in TAKES_PART


Act: TypeAlias = Callable[[Stay], object]


class Sharer(NamedTuple):
    """TE that shares expert servers, by its functions for the set and for what works on the servers."""

    life: Callable[[], Life]
    may_begin: Callable[[], bool]  # expert servers may come and leave: nothing that the TE keeps is restored
    under_way: Callable[[], set[tuple[GroupRank, StepNo]]]  # steps launched and not ended
    keep: Callable[[], None]  # the servers of a TE that has left them
    hear: Callable[[Exception], None]  # an error that has ended a server's program


@dataclass
class Questions:
    """Questions of the monitor to the servers of a set, whichever TE's loop has asked them."""

    count: int = 0  # so far
    asked: dict[Stay, int] = field(default_factory=dict)  # the latest one, by server
    missed: dict[Stay, int] = field(default_factory=dict)  # answers, in a row
    next_ns: int = 0


@dataclass(eq=False)
class ServerSet:
    """Expert servers, and the TEs whose DP groups are their clients.

    `stays` are the servers in the order in which they were seated; `keeper` is the TE whose own they are.
    `books` are those of the TEs that run, or load, and `numbers` the numbers that TEs have: the clients of TE
    number k come after those of k TEs. `released` are the numbers of clients whose slots no server has.
    `epochs` counts the rollbacks of all TEs, so that a server is called back by no epoch twice.
    """

    num_tes: int  # at most
    stays: list[Stay]
    keeper: Members | None = None
    books: list[Members] = field(default_factory=list)
    numbers: dict[int, str] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    seat_epochs: dict[int, int] = field(default_factory=dict)  # where it is not the first
    epochs: Iterator[int] = field(default_factory=partial(count, 1))
    questions: Questions = field(default_factory=Questions)
    is_over: bool = False  # no TE is left, and none can come

    @classmethod
    def of(cls, team: Team) -> ServerSet:
        """Make the set of the servers that a TE brings."""
        stays = [Stay("server", Seat(seat), die, "there") for seat, die in team.expert_at.items()]
        stays += [Stay("server", Seat(seat), team.holders.dies[seat], "held") for seat in team.vacant]
        return cls(team.sizes.groups.num_tes, stays)

    @property
    def free_number(self) -> int | None:
        """The lowest number that no TE has; None if there is none, or no TE can come any more."""
        free = (number for number in range(self.num_tes) if number not in self.numbers)
        return None if self.is_over else next(free, None)

    def enter(self, book: Members) -> None:
        """Add a TE that runs, or loads, to the set."""
        if book not in self.books:
            self.books.append(book)

    def leave(self, book: Members) -> bool:
        """Let a TE go, and another one keep the servers; return whether there is another one."""
        if book not in self.books:
            return self.keeper is not book
        if self.books == [book]:
            self.is_over = True
            return False
        self.books.remove(book)
        if self.keeper is book:
            self.keeper = self.books[0]
            if self.keeper.sharer is not None:
                self.keeper.sharer.keep()
        return True

    def give_up(self, book: Members) -> None:
        """Let the number of a TE whose dies are given back be another one's."""
        self.is_over = self.is_over or self.keeper is book
        self.numbers = {number: name for number, name in self.numbers.items() if name != book.name}

    def under_way(self) -> set[tuple[str, GroupRank, StepNo]]:
        """Steps under way, each of which may have asked a server: TE, DP group and number."""
        return {(book.name, *step) for book in self.books if book.sharer for step in book.sharer.under_way()}


class Members:
    """Members of one TE by kind and seat; `move` is the only way to change the state of one.

    The servers are those of a `set`, with other TEs or without. In a TE with servers `outside` of the pod,
    the book has clients alone, and answers for seats by what the client process has heard.
    """

    def __init__(
        self, team: Team, num_seats: int, outside: SeatsOutside | None, servers: ServerSet | None = None
    ) -> None:
        self.num_seats = num_seats  # for servers that may come and go; 0 if experts are no services
        self.name, self._tp, self._outside = team.sizes.place.name, team.sizes.groups.tp, outside
        self.clients = [Stay("client", Seat(rank), die, "there") for rank, die in enumerate(team.dies)]
        self.set = servers or ServerSet.of(team)
        self.set.keeper = self.set.keeper or self
        self.set.numbers[team.number] = self.name
        self.client_numbers = [team.client(rank) for rank in team.ranks]  # among all clients of the set
        self._listeners: Mapping[Listener, Act] = {}
        self.sharer: Sharer | None = None  # while the TE is planned alone

    @property
    def keeper(self) -> Members:
        """Book of the TE that keeps the servers of the set."""
        return self.set.keeper or self

    @property
    def keeps(self) -> bool:
        """Whether this TE keeps the servers of its set."""
        return self.set.keeper is self

    @property
    def _servers(self) -> list[Stay]:
        return self.set.stays

    def listen(self, listeners: Mapping[Listener, Act]) -> None:
        """Tell these parts of later moves; what is not among them is no part of this TE."""
        self._listeners = listeners

    def move(self, member: Stay, move: Move) -> None:
        """Change a member's state and tell all that hear it; ProtocolError if MEMBERS has no such row."""
        who = f"{member.kind} {member.seat} of {self.name} on die {member.die}"
        refusal = f"{who} cannot {move}: it is {member.at}"
        member.at = follow(MEMBERS, member.at, move, lambda: refusal)
        if move == "seat":
            self.set.seat_epochs[member.seat] = member.epoch = self.epoch(member.seat) + 1
            self._servers.remove(member)
            self._servers.append(member)
        elif member.at == "gone":
            self._servers.remove(member)
        for listener in HEARS.get((member.kind, move), ()):
            for book in self._told(member, listener):
                if listener in book._listeners:
                    book._listeners[listener](member)

    def _told(self, member: Stay, listener: Listener) -> Sequence[Members]:
        """List the TEs whose part hears of a member's move."""
        if member.kind == "client":
            return (self,)
        others = self.set.books if listener in OF_EACH_TE else ()
        return others or (self.keeper,)

    def call(self, seat: Seat, die: int) -> Stay:
        """Enter the heir of a seat: the die that was held for the seat, or another one."""
        for member in self._at_seat(seat):
            if member.at == "held" and member.die == die:
                self.move(member, "call")
                return member
        self._servers.append(Stay("server", seat, die, "coming"))
        return self._servers[-1]

    def miss(self, loss: Loss) -> None:
        """Count the servers on the dies of a loss as silent, so that clients ask others."""
        for server in [server for server in self.servers if server.die in loss.dies]:
            self.move(server, "miss")

    def lose(self, loss: Loss) -> None:
        """Go on without the clients on the dies of a loss."""
        for client in self.those_of(loss):
            self.move(client, "lose")

    # ---- questions ----------------------------------------------------------------------------------

    @property
    def servers(self) -> list[Stay]:
        """Servers that have a seat, silent ones included."""
        return [server for server in self._servers if server.is_seated]

    @property
    def spare(self) -> list[Stay]:
        """Dies of the TE on which no server is seated, or will be: they are held, or their servers part."""
        return [server for server in self._servers if server.at in ("held", "parting")]

    @property
    def programs(self) -> list[ExpertProgram]:
        """Programs of the servers that have a seat."""
        return [server.program for server in self.servers if server.program is not None]

    @property
    def lost_clients(self) -> list[Stay]:
        """Clients without which the TE goes on."""
        return [client for client in self.clients if client.at == "lost"]

    @property
    def taking_part(self) -> list[int]:
        """Dies that take part in rollbacks: clients, then the servers that the TE keeps."""
        members = (*self.clients, *(self.servers if self.keeps else ()))
        return [member.die for member in members if member.takes_part]

    def gets_replicas(self, seat: Seat) -> bool:
        """Whether a server that takes part is at a seat."""
        server = self.incumbent(seat)
        return server is not None and server.takes_part

    def those_of(self, loss: Loss) -> list[Stay]:
        """Clients on the dies of a loss that had not been lost before."""
        return [client for client in self.clients if client.at == "there" and client.die in loss.dies]

    def is_lost(self, group: GroupRank) -> bool:
        """Whether the TE goes on without a DP group."""
        return self.clients[group * self._tp].at == "lost"

    def server_on(self, die: int) -> Stay | None:
        """The server seated on a die."""
        return next((server for server in self.servers if server.die == die), None)

    def incumbent(self, seat: Seat) -> Stay | None:
        """The server that has a seat now."""
        return next((server for server in self._at_seat(seat) if server.is_seated), None)

    def heir(self, seat: Seat) -> Stay | None:
        """The server on its way to a seat."""
        return next((server for server in self._at_seat(seat) if server.at == "coming"), None)

    def held(self, seat: Seat) -> Stay | None:
        """The die reserved for a vacant seat."""
        return next((server for server in self._at_seat(seat) if server.at == "held"), None)

    def _at_seat(self, seat: Seat) -> Iterator[Stay]:
        return (server for server in self._servers if server.seat == seat)

    def presence(self, seat: Seat) -> Presence:
        """Return the presence that clients are told for a seat."""
        if self._outside is not None:
            return Presence(self._outside.seats[seat].presence)
        server = self.incumbent(seat)
        return Presence.ABSENT if server is None else PRESENCE[server.at]

    def epoch(self, seat: Seat) -> int:
        """Count the servers that a seat has had so far."""
        return self.set.seat_epochs.get(seat, 1) if self._outside is None else self._outside.seats[seat].epoch

    def seats(self, presence: Presence) -> list[Seat]:
        """List the seats with a presence."""
        return [seat for seat in map(Seat, range(self.num_seats)) if self.presence(seat) is presence]

    @property
    def lost_servers(self) -> list[Seat]:
        """Seats with servers that clients leave out."""
        return self.seats(Presence.LOST)

    @property
    def silent(self) -> list[Stay]:
        """Servers that the monitor has not heard of for too long, also where an heir is on its way."""
        return [server for server in self.servers if PRESENCE[server.at] is Presence.LOST]

    @property
    def num_servers(self) -> int:
        """Number of servers that have a seat, lost ones included; 0 if experts are no services."""
        return self.num_seats - len(self.seats(Presence.ABSENT))
