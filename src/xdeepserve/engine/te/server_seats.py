"""Expert servers that come and go, one by one, while their TE runs (EaaS 3.4, 4.4): nobody waits for that.

A TE has a seat for each of its servers, which says what experts there are; vacant ones, too, if the
deployment plans for some. Who comes takes a free die, loads the seat's experts and registers with the
monitor, in the place of one that is lost or where nobody is. Who leaves is asked nothing more; it goes when
all steps have ended that were under way then, since only these may have asked it. No step waits, and none is
run again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.die.expert_memory import STOP, ExpertMemory
from xdeepserve.engine.dp.events import ServerMoved
from xdeepserve.engine.recovery.rollback_field import Epochs, RollbackField
from xdeepserve.engine.te.reports import ServerReport
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import LostDieError, RequestError, XDeepServeError
from xdeepserve.step.linear import Threads

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE

Bring = Callable[[TEPlan, int, ExpertMemory], Awaitable[None]]
"""Bring the weights of one more die of a TE, in virtual time."""
PAUSE_NS = 50_000  # between two looks at what has to end first
PATIENCE_NS = 120_000_000_000
BY_THEMSELVES = "expert servers that are processes come by xdeepserve expert-server, and leave by SIGTERM"


class ServerSeats:
    """Those of one TE."""

    def __init__(self, te: TE, threads: Threads) -> None:
        self._te, self._plan, self._pod, self._threads = te, te.plan, te.plan.pod, threads
        self._coming: dict[int, int] = {}  # dies of those who are on their way, by seat

    def leave_out(self, die: int) -> None:
        """The monitor holds a server for lost: it is not called back, and no replicas of experts go there."""
        self._te.recovery.leave_out(die)
        if self._te.reconfiguration is not None:
            self._te.reconfiguration.leave_out(die)

    def take_in(self, die: int) -> None:
        """It is not lost after all."""
        self._te.recovery.take_in(die)
        if self._te.reconfiguration is not None:
            self._te.reconfiguration.take_in(die)

    @property
    def num_seats(self) -> int:
        """Whether somebody is there or not."""
        return 0 if self._plan.services is None else self._plan.services.servers.num_ranks

    def reports(self) -> list[ServerReport]:
        """What each seat is at."""
        sizes, monitor, found = self._plan.sizes, self._te.monitor, []
        for number in range(self.num_seats):
            presence = monitor.presence(number).name.lower()
            experts, copies = (
                sizes.experts.experts_of[number],
                sizes.experts.copies_of[number] if sizes.experts.copies_of else (),
            )
            found.append(
                ServerReport(
                    te=sizes.place.name,
                    server=number,
                    presence="coming" if number in self._coming else presence,
                    die=self._coming.get(number, self._plan.team.expert_at.get(number)),
                    epoch=monitor.epoch(number),
                    experts=(*experts, *copies),
                    is_shared=sizes.experts.is_shared(number),
                )
            )
        return found

    # ---- who comes ----------------------------------------------------------------------------------

    async def join(self, wanted: int | None, bring: Bring) -> int:
        """From within a process: a server for the seat of that number, or the first where nobody is, or at
        last where one is lost. Its number, when clients ask it.

        RequestError, and nothing has happened, if there is no such seat; DeploymentError if there is no die;
        XDeepServeError if it does not come to that.
        """
        number = self._find_seat(wanted)
        die = self._take_die(number)
        self._coming[number] = die
        mem: ExpertMemory | None = None
        try:
            mem = self._plan.plan_server(number, die)
            await bring(self._plan, die, mem)
            while self._te.recovery.phase != "serving" and self._te.life == "ready":
                await self._pod.clock.sleep(PAUSE_NS)
            self._check_whole(number, die)
            former = self._seat(number, die, mem)
        except BaseException:
            self._plan.give_back(die, mem)
            raise
        finally:
            del self._coming[number]
        if former is not None:
            await self._bury(former)
        return number

    def _find_seat(self, wanted: int | None) -> int:
        te, name = self._te, self._plan.sizes.place.name
        if not self.num_seats:
            raise RequestError(f"TE {name} has no expert servers: its experts are no services", param="te")
        if self._plan.sizes.walk.transport != "pod":
            raise RequestError(f"{name}: {BY_THEMSELVES}", param="te")
        if te.life != "ready":
            raise RequestError(f"no expert server can join TE {name}: it is {te.life}", param="te")
        te.monitor.find_lost()
        free = [
            number
            for presence in (Presence.ABSENT, Presence.LOST)
            for number in range(self.num_seats)
            if te.monitor.presence(number) is presence and number not in self._coming
        ]
        if wanted is None and not free:
            raise RequestError(
                f"TE {name} has no seat for another expert server: all {self.num_seats} are taken "
                "(experts.vacancies plans for more)",
                param="server",
            )
        number = free[0] if wanted is None else self._known(wanted)
        if number not in free:
            where = f"is there already, on die {self._plan.team.expert_at.get(number)}"
            if number in self._coming:
                where = f"is on its way already, to die {self._coming[number]}"
            raise RequestError(f"expert server {number} of TE {name} {where}", param="server")
        return number

    def _known(self, number: int) -> int:
        if not 0 <= number < self.num_seats:
            has = f"it has {self.num_seats}, from 0 on" if self.num_seats else "its experts are no services"
            raise RequestError(
                f"TE {self._plan.sizes.place.name} has no expert server {number}: {has}", param="server"
            )
        return number

    def _take_die(self, number: int) -> int:
        """The one that is held for it, or any that is free."""
        pod, plan = self._pod, self._plan
        home = plan.sizes.place.expert_dies[number]
        if home in plan.spare_dies and home not in pod.lost and home not in plan.replaced_dies:
            plan.spare_dies.remove(home)
            return home
        (die,) = pod.find_free(1)
        pod.hold([die], f"{plan.sizes.place.name} of {plan.checkpoint.name}")
        return die

    def _check_whole(self, number: int, die: int) -> None:
        """Whether it may join, now that its weights are there."""
        te, memories = self._te, self._pod.memories
        name = f"expert server {number} of TE {self._plan.sizes.place.name}"
        if te.life != "ready":
            raise XDeepServeError(f"{name} cannot join: its TE is {te.life}")
        if die in self._pod.lost or die in memories.bad_pages:
            raise LostDieError(f"{name} cannot join: die {die} is lost, or a page of its memory")

    def _seat(self, number: int, die: int, mem: ExpertMemory) -> int | None:
        """It begins to serve, at one moment for all. The die of who was there before."""
        te, plan, epoch = self._te, self._plan, self._te.recovery.epoch
        former = self._vacate(number)
        plan.team.expert_at[number], plan.expert_memories[number] = die, mem
        RollbackField(self._pod.dies[die]).write(Epochs(epoch, epoch))
        program = plan.net.expert_program(number, mem, self._threads, te.inbox)
        te.clients.introduce(program)
        te.begin(program)
        if te.reconfiguration is not None:
            te.reconfiguration.replace(number, die, mem)
        self.take_in(die)
        te.monitor.seat(number)
        te.tell.show(ServerMoved(plan.sizes.place.name, number, die, te.monitor.epoch(number), is_there=True))
        return former

    # ---- who goes -----------------------------------------------------------------------------------

    async def leave(self, number: int) -> None:
        """From within a process: a server goes, when nobody waits for it.

        RequestError, and nothing has happened, if it is not there, or if nobody else had what it has.
        """
        self._check_leaves(number)
        te, clock = self._te, self._pod.clock
        te.monitor.lead_away(number)
        under_way = te.under_way
        while te.is_running and (under_way & te.under_way or te.recovery.phase != "serving"):
            await clock.sleep(PAUSE_NS)
        die = self._plan.team.expert_at.get(number)
        if not te.is_running or die is None:
            raise XDeepServeError(
                f"TE {self._plan.sizes.place.name} was lost before its expert server {number} left"
            )
        program = next(each for each in te.expert_programs if each.die.index == die)
        program.mem.doorbell.write(self._pod.memory(die), STOP)
        self._vacate(number)
        te.monitor.forget(number)
        te.tell.show(
            ServerMoved(self._plan.sizes.place.name, number, die, te.monitor.epoch(number), is_there=False)
        )
        await self._bury(die)

    def _check_leaves(self, number: int) -> None:
        monitor, sizes = self._te.monitor, self._plan.sizes
        who = f"expert server {self._known(number)} of TE {sizes.place.name} cannot leave"
        if sizes.walk.transport != "pod":
            raise RequestError(f"{who}: {BY_THEMSELVES}", param="te")
        if self._te.life != "ready":
            raise RequestError(f"{who}: its TE is {self._te.life}", param="te")
        monitor.find_lost()
        presence = monitor.presence(number)
        if presence in (Presence.ABSENT, Presence.LEAVING) or number in self._coming:
            what = "on its way there" if number in self._coming else presence.name.lower()
            raise RequestError(f"{who}: it is {what}", param="server")
        missed = self._missed_without(number)
        if presence is Presence.THERE and missed:
            raise RequestError(f"{who}: nobody else has {missed}", param="server")

    def can_miss(self, die: int) -> bool:
        """Whether it is an expert server's whose experts others have for certain: copies from the start."""
        at = {each: number for number, each in self._plan.team.expert_at.items()} if self.num_seats else {}
        return die in at and not self._missed_without(at[die])

    def _missed_without(self, number: int) -> str:
        """What no other server has that is there and stays."""
        sizes, lost = self._plan.sizes, self._plan.pod.lost
        others = [
            each
            for each in range(self.num_seats)
            if each != number
            and self._te.monitor.presence(each) is Presence.THERE
            and self._plan.team.expert_at.get(each) not in lost
        ]
        if sizes.experts.is_shared(number):
            return "" if any(map(sizes.experts.is_shared, others)) else "the shared expert"

        def held(each: int) -> set[int]:
            return {
                *sizes.experts.experts_of[each],
                *(sizes.experts.copies_of[each] if sizes.experts.copies_of else ()),
            }

        missed = sorted(held(number).difference(*map(held, others)))
        return f"expert{'s' * (len(missed) > 1)} {', '.join(map(str, missed))}" if missed else ""

    def _vacate(self, number: int) -> int | None:
        """Nobody is at a seat any more; the die of who was there, which the TE still holds."""
        te, plan = self._te, self._plan
        die = plan.team.expert_at.pop(number, None)
        if die is None:
            return None
        te.expert_programs = [program for program in te.expert_programs if program.die.index != die]
        self.leave_out(die)
        plan.replaced_dies[die] = plan.expert_memories.pop(number)
        plan.spare_dies.add(die)
        return die

    async def _bury(self, die: int) -> None:
        """Its memory and the die are free when nobody is at it any more."""
        pod, plan, pause_ns = self._pod, self._plan, PAUSE_NS
        is_lost = die in pod.lost
        while die in plan.spare_dies and pause_ns < PATIENCE_NS:
            if not (pod.dies[die].running or pod.memories.is_in_use(die)):
                plan.spare_dies.remove(die)
                plan.give_back(die, plan.replaced_dies.pop(die))
                return
            if is_lost or pause_ns > PAUSE_NS << 6:
                for process in pod.dies[die].running:
                    process.cancel()
            await pod.clock.sleep(pause_ns)
            pause_ns *= 2
