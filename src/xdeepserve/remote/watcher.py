"""A client process's connection to the monitor: it keeps links to present servers, and the masks of its
clients.

Only this module writes seats and masks, always in this order: the link, the seat, the mask. If the monitor
lists a server whose link has broken, the module links to it again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from xdeepserve.comm.services.layout import SEAT, Presence, ServiceLayout
from xdeepserve.errors import DeploymentError, InputError, ProtocolError, XDeepServeError, as_named
from xdeepserve.hw.clock import Hears
from xdeepserve.hw.die import Die
from xdeepserve.hw.pod import Pod
from xdeepserve.remote.handshake import PATIENCE_S, split
from xdeepserve.remote.monitor_service import check_reachable, dial, hear, say
from xdeepserve.remote.outside_reach import OutsideReach
from xdeepserve.remote.seat_list import Attend, Refused, SeatList, SeatView, Seen, ToClient
from xdeepserve.remote.server_link import ServerLink, open_link

AGAIN_S = 0.2  # between two attempts
START_S = 600.0  # until all experts are there; kernels may have to be compiled


class Watcher:
    """Seats of a task executor (TE) whose servers are outside of its pod.

    `revived(seat)` is called for a link that is back.
    """

    def __init__(
        self,
        pod: Pod,
        layout: ServiceLayout,
        experts_of: Sequence[Sequence[int]],
        revived: Callable[[int], None],
    ) -> None:
        self.pod, self._layout, self._revived = pod, layout, revived
        self.links: dict[int, ServerLink] = {}  # by node
        self.experts_of = experts_of
        count = len(layout.servers.dies)
        self.seats = [SeatView(Presence.ABSENT, 1, "", "") for _ in range(count)]
        self._linked: dict[int, tuple[str, int]] = {}  # to whom, by seat: address and epoch
        self._refused: dict[int, str] = {}  # why a server has no link, by seat
        self._tasks: list[asyncio.Task[None]] = []
        self._listed: SeatList | None = None
        self._changed = asyncio.Event()
        self.failure: XDeepServeError | None = None  # why there will be no list of seats

    def reach(self, die: Die) -> OutsideReach:
        """Make the access of a client die to the servers."""
        return OutsideReach(die, self.links)

    def start(self, monitor: str, token: str, identity: str, hears: Hears) -> None:
        """Begin to listen to the monitor, within an event loop; `hears` is told of the error that ends it."""
        self._client = f"{os.getpid()} {secrets.token_hex(8)}"
        self._token, self._monitor, self._identity = token, monitor, identity
        self._hears = hears
        self._tasks = [asyncio.ensure_future(self._owned(each)) for each in (self._listen(), self._follow())]

    async def _owned(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.failure = as_named(error)
            self._hears(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.links.values():
            link.close("its client has ended")
        await asyncio.sleep(0.01)  # until the event loop has let all of them go

    @property
    def missing(self) -> list[int]:
        """Experts held by no linked server."""
        there = [n for n, seat in enumerate(self.seats) if seat.presence == Presence.THERE]
        every = {expert for experts in self.experts_of for expert in experts}
        return sorted(every.difference(*(self.experts_of[number] for number in there)))

    async def ready(self, check: Callable[[], None]) -> None:
        """Wait until a linked server holds each expert. `check` raises if that cannot happen any more.

        Raises XDeepServeError if the monitor refuses, or if experts are still missing after `START_S`
        seconds.
        """
        deadline = time.monotonic() + START_S
        while missing := self.missing:
            check()
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise XDeepServeError(
                    f"the monitor at {self._monitor} knows no server of experts {missing} after "
                    f"{START_S:g} s; {'; '.join(self._refused.values()) or 'none was refused'}"
                )
            await asyncio.sleep(0.01)

    # ---- the monitor --------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Receive every list of seats; dial again when the connection has ended."""
        while True:
            try:
                reader, self._writer = await dial(*split(self._monitor), self._token)
                try:
                    await self._hear(reader)
                finally:
                    self._writer.close()
                if self._listed is None:
                    raise ProtocolError("it ends the connection")
            except (OSError, TimeoutError, ProtocolError) as error:
                if self._listed is None:
                    self.failure = check_reachable(self._monitor, error)
                    return
            except InputError as error:  # the monitor refuses, or cannot be one
                self.failure = error
                if self._listed is not None:  # clients go on with the list that they have
                    print(f"xdeepserve: note: {error}", file=sys.stderr, flush=True)
                return
            await asyncio.sleep(AGAIN_S)

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Receive lists from the monitor until the connection ends. Raises DeploymentError if the monitor
        refuses."""
        say(self._writer, Attend(self._identity))
        async with asyncio.timeout(PATIENCE_S):
            said = await hear(reader, ToClient, "the monitor")
        while said is not None:
            if isinstance(said, Refused):
                raise DeploymentError(f"the monitor at {self._monitor} refuses: {said.why}")
            self._listed = said
            self._changed.set()
            said = await hear(reader, ToClient, "the monitor")

    async def _follow(self) -> None:
        """Bring links and masks up to the latest list, and restore broken links."""
        while True:
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            listed = self._listed
            if listed is None:
                continue
            for number, seat in enumerate(listed.seats[: len(self.seats)]):
                self._lead_away(number, seat)
            seats = enumerate(listed.seats[: len(self.seats)])
            await asyncio.gather(*(self._take(number, seat) for number, seat in seats))
            say(self._writer, Seen(listed.version))

    def _lead_away(self, number: int, seat: SeatView) -> None:
        """Mask a leaving or lost server that must not be asked any more, before anything else is done."""
        known = self.seats[number]
        if seat.presence != Presence.THERE and (known.presence, known.epoch) != (seat.presence, seat.epoch):
            self._show(number, seat)

    async def _take(self, number: int, seat: SeatView) -> None:
        """Link to a present server, and then allow clients to ask it."""
        node, whom = self._layout.servers.dies[number], (seat.address, seat.epoch)
        if seat.presence not in (Presence.THERE, Presence.LOST) or not seat.address:
            return
        is_new = self._linked.get(number) != whom
        if is_new or self.links[node].broken is not None:
            try:
                link = await open_link(seat.address, self._client, self._identity, self._token)
            except (OSError, ProtocolError, InputError) as error:
                why = f"server {seat.name} at seat {number}: {error}"
                if self._refused.get(number) != why:
                    print(f"xdeepserve: note: no link to {why}", file=sys.stderr, flush=True)
                self._refused[number] = why
                if self._listed is not None:
                    self._show(number, SeatView(Presence.LOST, seat.epoch, seat.name, seat.address))
                return
            self.links[node], self._linked[number] = link, whom
            self._refused.pop(number, None)
            if not is_new:
                self._revived(number)
        self._show(number, seat)

    def _show(self, number: int, seat: SeatView) -> None:
        """Write a seat and mask to all clients' memories."""
        if self.seats[number] == seat:
            return
        self.seats[number] = seat
        packed = SEAT.pack(self._layout.servers.dies[number], seat.epoch)
        for client in self._layout.clients:
            memory = self.pod.memory(client)
            regions = memory.metadata.regions
            memory.write(regions[self._layout.region("seats")].offset + number * SEAT.size, packed)
            memory.write(regions[self._layout.region("mask")].offset + number, bytes([seat.presence]))
