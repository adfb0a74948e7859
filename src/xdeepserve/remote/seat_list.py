"""The monitor's table of seats and its messages (EaaS 3.4, 4.4): which server has which seat, and who is
refused.

    server -> monitor    Register; Ready, when it has its experts, then LoopTurns again and again; Leave
    monitor -> server    Seated, Go; Refused
    client -> monitor    Attend, then Seen for each list
    monitor -> client    SeatList, at every change; Refused

A message is a line of JSON. No request of a client passes the monitor, and servers do not agree on a list of
members: each server comes and goes by itself. The table below uses neither sockets nor time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.comm.services.layout import Presence


class Register(msgspec.Struct, tag=True):
    """A server asks for a seat: the numbered seat, or any free one.

    `experts_of` lists the experts of every seat, which are also part of `identity`. `epoch` is the epoch of a
    seat that the server had before its connection, or the monitor, ended.
    """

    name: str
    identity: str
    address: str
    experts_of: tuple[tuple[int, ...], ...]
    seat: int | None = None
    epoch: int = 0


class Ready(msgspec.Struct, tag=True):
    """A server says: the experts of my seat are loaded, and I serve."""


class LoopTurns(msgspec.Struct, tag=True):
    """A server's beat: the loop of the server still turns."""


class Leave(msgspec.Struct, tag=True):
    """A server asks for permission to leave."""


class Attend(msgspec.Struct, tag=True):
    """A client process asks for lists of seats."""

    identity: str


class Seen(msgspec.Struct, tag=True):
    """A client process says: all my clients use the list of this version."""

    version: int


class Seated(msgspec.Struct, tag=True):
    """The monitor gives a server its seat; `epoch` counts the servers that the seat has had.

    The server sends a beat every `beat_s` seconds.
    """

    seat: int
    epoch: int
    beat_s: float


class Go(msgspec.Struct, tag=True):
    """The monitor lets a server go: no client asks the server any more."""


class Refused(msgspec.Struct, tag=True):
    why: str


class SeatView(msgspec.Struct):
    """A seat as clients see it; `presence` as in `Presence`.

    A seat with a name that is absent has a server that is still loading.
    """

    presence: int
    epoch: int
    name: str
    address: str


class SeatList(msgspec.Struct, tag=True):
    version: int
    seats: list[SeatView]


ToMonitor = Register | Ready | LoopTurns | Leave | Attend | Seen
ToServer = Seated | Go | Refused
ToClient = SeatList | Refused


class SeatTable:
    """Seats of the servers of a model. The first server that registers defines the model."""

    def __init__(self) -> None:
        self.version = 0
        self.identity: str | None = None
        self.experts_of: tuple[tuple[int, ...], ...] = ()
        self.seats: list[SeatView] = []
        self.changed_at: list[int] = []  # the version in which a seat was changed last

    def check_identity(self, who: str, identity: str) -> str | None:
        """Return why a server or client of another model does not belong here, or None."""
        if self.identity in (None, identity):
            return None
        return f"{who} is of another model, precision or layout: {identity}, and not {self.identity}"

    def register(self, asked: Register) -> int | Refused:
        """Give a seat to a server, or refuse it."""
        if why := self.check_identity(f"server {asked.name}", asked.identity):
            return Refused(why)
        if self.identity is None:
            self.identity, self.experts_of = asked.identity, asked.experts_of
            self.seats = [SeatView(Presence.ABSENT, 0, "", "") for _ in asked.experts_of]
            self.changed_at = [0] * len(self.seats)
        if asked.seat is not None and 0 <= asked.seat < len(self.seats):
            seat = self.seats[asked.seat]
            if (seat.name, seat.address, seat.epoch) == (asked.name, asked.address, asked.epoch):
                return asked.seat  # it is there, by a connection that has ended without anybody hearing of it
        there = {seat.name: number for number, seat in enumerate(self.seats) if seat.name}
        if asked.name in there:
            return Refused(f"a server of the name {asked.name} is there already, at seat {there[asked.name]}")
        free = [number for number in range(len(self.seats)) if not self.seats[number].name]
        if asked.seat is None and not free:
            return Refused(f"all {len(self.seats)} seats are taken")
        number = free[0] if asked.seat is None else asked.seat
        if not 0 <= number < len(self.seats):
            return Refused(f"there is no seat {number}: seats are 0 to {len(self.seats) - 1}")
        if number not in free:
            return Refused(f"seat {number} is taken, by server {self.seats[number].name}")
        epoch = self.seats[number].epoch
        epoch = asked.epoch if asked.epoch and asked.epoch >= epoch else epoch + 1
        self._change(number, SeatView(Presence.ABSENT, epoch, asked.name, asked.address))
        return number

    def forget(self, number: int) -> None:
        """Free the seat of a server that is gone."""
        self._change(number, SeatView(Presence.ABSENT, self.seats[number].epoch, "", ""))

    def _change(self, number: int, seat: SeatView) -> None:
        self.version += 1
        self.seats[number], self.changed_at[number] = seat, self.version

    def mark(self, number: int, presence: Presence) -> bool:
        """Note a server's new presence; return whether it has changed."""
        seat = self.seats[number]
        if seat.presence == presence:
            return False
        self._change(number, msgspec.structs.replace(seat, presence=int(presence)))
        return True

    def leave(self, number: int) -> str | None:
        """Lead clients away from a server that wants to leave. Returns why the server may not leave, or
        None."""
        missed = [each for each in self.missed_without({number}) if each in self.experts_of[number]]
        if missed:
            return f"server {self.seats[number].name} cannot leave: nobody else has {listed(missed)}"
        self.mark(number, Presence.LEAVING)
        return None

    def missed_without(self, out: set[int]) -> list[int]:
        """List the experts without a holder if the servers `out` left."""
        stay = [n for n, seat in enumerate(self.seats) if seat.presence == Presence.THERE and n not in out]
        every = {expert for experts in self.experts_of for expert in experts}
        return sorted(every.difference(*(self.experts_of[number] for number in stay)))

    def as_list(self) -> SeatList:
        return SeatList(self.version, self.seats)


def listed(experts: Sequence[int]) -> str:
    """Name experts in words; expert -1 is the shared expert."""
    routed = [str(expert) for expert in experts if expert >= 0]
    words = [f"expert{'s' * (len(routed) > 1)} {', '.join(routed)}"] if routed else []
    return " and ".join([*words, *["the shared expert"] * (-1 in experts)])
