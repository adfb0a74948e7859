"""Expert servers joining and leaving one by one while their TE runs; no step waits for them (EaaS 3.4, 4.4).

A TE has a seat for each of its servers, which says what experts the server has. There are vacant seats, too,
if the deployment plans for some. A joining server takes a free die, loads the seat's experts and registers
with the monitor. Its seat is vacant, or had a server that is lost. A leaving server is asked nothing more. It
goes when all steps that were under way then have ended, since only these may have asked it. No step is run
again. TEs that share servers have the same seats, and the steps of all of them count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.numbers import Seat
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.te.members import Sharer, Stay
from xdeepserve.engine.te.reports import ServerReport
from xdeepserve.engine.te.server_monitor import ServerMonitor
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import LostDieError, RequestError, XDeepServeError

Bring = Callable[[TEPlan, int, ExpertMemory], Awaitable[None]]
"""Function that brings the weights of a joining expert server to its die, in virtual time."""
PAUSE_NS = 50_000  # between two looks at what has to end first
PATIENCE_NS = 120_000_000_000
BY_THEMSELVES = "expert servers that are processes come by xdeepserve expert-server, and leave by SIGTERM"


class ServerSeats:
    """Seats for the expert servers of a TE."""

    def __init__(self, plan: TEPlan, monitor: ServerMonitor) -> None:
        self._plan, self._pod, self._members, self._monitor = plan, plan.pod, plan.members, monitor

    @property
    def _keeper(self) -> Sharer:
        """The TE that keeps the servers at this moment."""
        sharer = self._members.keeper.sharer
        assert sharer is not None
        return sharer

    @property
    def _is_kept(self) -> bool:
        """Whether a TE that runs keeps the servers."""
        return self._keeper.life() in ("ready", "draining")

    @property
    def _is_restoring(self) -> bool:
        """Whether servers must neither come nor go before something has been restored."""
        return self._is_kept and not self._keeper.may_begin()

    def reports(self) -> list[ServerReport]:
        """Report the state of each seat."""
        sizes, members, found = self._plan.sizes, self._members, []
        late = self._plan.late_servers
        for seat in map(Seat, range(members.num_seats)):
            heir = members.heir(seat)
            shown = heir or members.incumbent(seat)
            experts, copies = (
                sizes.experts.experts_of[seat],
                sizes.experts.copies_of[seat] if sizes.experts.copies_of else (),
            )
            found.append(
                ServerReport(
                    te=sizes.place.name,
                    server=seat,
                    presence=members.presence(seat).name.lower() if heir is None else heir.at,
                    die=None if shown is None else shown.die,
                    epoch=members.epoch(seat),
                    experts=(*experts, *copies),
                    is_shared=sizes.experts.is_shared(seat),
                    is_late=seat in late,
                )
            )
        return found

    # ---- who comes ----------------------------------------------------------------------------------

    async def join(self, wanted: int | None, bring: Bring) -> Seat:
        """Bring a server to a seat, from within a process; return the seat once clients ask the server.

        `wanted` is the seat; if None, the first vacant seat, or at last a seat with a lost server.
        RequestError, and nothing has happened, if there is no such seat. DeploymentError if no die is free.
        XDeepServeError if the server cannot join in the end.
        """
        seat = self._find_seat(wanted)
        heir = self._members.call(seat, self._take_die(seat))
        try:
            heir.mem = self._plan.plan_server(seat, heir.die)
            await bring(self._plan, heir.die, heir.mem)
            while self._is_restoring:
                await self._pod.clock.sleep(PAUSE_NS)
            self._check_whole(heir)
        except BaseException:
            self._members.move(heir, "fail")
            self._plan.give_back(heir.die, heir.mem)
            raise
        former = self._members.incumbent(seat)
        if former is not None:
            self._members.move(former, "replace")
        self._members.move(heir, "seat")
        if former is not None:
            await self._free_when_idle(former)
        return seat

    def _find_seat(self, wanted: int | None) -> Seat:
        members, place = self._members, self._plan.sizes.place
        name = place.name
        if not members.num_seats:
            raise RequestError(f"TE {name} has no expert servers: its experts are no services", param="te")
        if place.has_servers_outside:
            raise RequestError(f"{name}: {BY_THEMSELVES}", param="te")
        if self._keeper.life() != "ready":
            raise RequestError(
                f"no expert server can join TE {name}: it is {self._keeper.life()}", param="te"
            )
        free = [
            seat
            for presence in (Presence.ABSENT, Presence.LOST)
            for seat in members.seats(presence)
            if members.heir(seat) is None
        ]
        if wanted is None and not free:
            raise RequestError(
                f"TE {name} has no seat for another expert server: all {members.num_seats} are taken "
                "(experts.vacancies plans for more)",
                param="server",
            )
        seat = free[0] if wanted is None else self._known(wanted)
        if seat not in free:
            heir, incumbent = members.heir(seat), members.incumbent(seat)
            where = f"is there already, on die {None if incumbent is None else incumbent.die}"
            if heir is not None:
                where = f"is on its way already, to die {heir.die}"
            raise RequestError(f"expert server {seat} of TE {name} {where}", param="server")
        return seat

    def _known(self, number: int) -> Seat:
        num_seats = self._members.num_seats
        if not 0 <= number < num_seats:
            has = f"it has {num_seats}, from 0 on" if num_seats else "its experts are no services"
            raise RequestError(
                f"TE {self._plan.sizes.place.name} has no expert server {number}: {has}", param="server"
            )
        return Seat(number)

    def _take_die(self, seat: Seat) -> int:
        """Take the die reserved for a seat, or any free die."""
        pod, plan = self._pod, self._plan
        held = self._members.held(seat)
        if held is not None and self._monitor.die_is_well(held.die):
            return held.die
        (die,) = pod.find_free(1)
        pod.hold([die], f"{plan.sizes.place.name} of {plan.checkpoint.name}")
        return die

    def _check_whole(self, heir: Stay) -> None:
        """Check whether a server may still join after its weights have arrived."""
        name = f"expert server {heir.seat} of TE {self._plan.sizes.place.name}"
        if self._keeper.life() != "ready":
            raise XDeepServeError(f"{name} cannot join: its TE is {self._keeper.life()}")
        if not self._monitor.die_is_well(heir.die) or self._monitor.has_bad_pages(heir.die):
            raise LostDieError(f"{name} cannot join: die {heir.die} is lost, or a page of its memory")

    # ---- who goes -----------------------------------------------------------------------------------

    async def leave(self, number: int) -> None:
        """Remove a server, from within a process, when no step waits for it.

        RequestError, and nothing has happened, if the server is not there, or if no other server has its
        experts.
        """
        server = self._check_leaves(self._known(number))
        members = self._members
        members.move(server, "lead away")
        under_way = members.set.under_way()
        while self._is_kept and (under_way & members.set.under_way() or self._is_restoring):
            await self._pod.clock.sleep(PAUSE_NS)
        if not server.is_seated:
            return  # another server has its seat
        if not self._is_kept:
            name = self._plan.sizes.place.name
            raise XDeepServeError(f"TE {name} was lost before its expert server {server.seat} left")
        members.move(server, "go")
        await self._free_when_idle(server)

    def _check_leaves(self, seat: Seat) -> Stay:
        place, server = self._plan.sizes.place, self._members.incumbent(seat)
        who = f"expert server {seat} of TE {place.name} cannot leave"
        if place.has_servers_outside:
            raise RequestError(f"{who}: {BY_THEMSELVES}", param="te")
        if self._keeper.life() != "ready":
            raise RequestError(f"{who}: its TE is {self._keeper.life()}", param="te")
        if self._members.heir(seat) is not None:
            raise RequestError(f"{who}: it is on its way there", param="server")
        if server is None or server.at not in ("there", "silent"):
            raise RequestError(f"{who}: it is {'absent' if server is None else 'leaving'}", param="server")
        missed = self._missed_without(seat)
        if server.at == "there" and missed:
            raise RequestError(f"{who}: nobody else has {missed}", param="server")
        return server

    def why_not(self, loss: Loss) -> str | None:
        """Explain why clients could not do without a server that is lost; None if they could.

        Of a loss that has happened, each client finds out for itself, when it has tokens for the server.
        """
        if not loss.is_foreseen:
            return None
        server = self._members.server_on(loss.dies[0])
        assert server is not None
        missed = self._missed_without(server.seat)
        return f"no other server has {missed}" if missed else None

    def _missed_without(self, seat: Seat) -> str:
        """Name the experts of a seat that no other present server has; empty if there are none."""
        sizes = self._plan.sizes
        others = [each.seat for each in self._members.servers if each.seat != seat and each.at == "there"]
        if sizes.experts.is_shared(seat):
            return "" if any(map(sizes.experts.is_shared, others)) else "the shared expert"

        def held(each: int) -> set[int]:
            return {
                *sizes.experts.experts_of[each],
                *(sizes.experts.copies_of[each] if sizes.experts.copies_of else ()),
            }

        missed = sorted(held(seat).difference(*map(held, others)))
        return f"expert{'s' * (len(missed) > 1)} {', '.join(map(str, missed))}" if missed else ""

    async def _free_when_idle(self, former: Stay) -> None:
        """Return a die and memory to the pod once nothing runs there and no transfer uses it."""
        pod, die, pause_ns = self._pod, former.die, PAUSE_NS
        is_lost = not self._monitor.die_is_well(die)
        while former.at == "parting" and pause_ns < PATIENCE_NS:
            if not (pod.dies[die].running or pod.memories.is_in_use(die)):
                self._members.move(former, "free")
                self._plan.give_back(die, former.mem)
                return
            if is_lost or pause_ns > PAUSE_NS << 6:
                for process in pod.dies[die].running:
                    process.cancel()
            await pod.clock.sleep(pause_ns)
            pause_ns *= 2
