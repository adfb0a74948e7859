"""A task executor's part in the set of its expert servers: it enters the set, keeps the servers, and leaves.

A TE that is alone keeps its servers from its start to its end. TEs that share servers follow each other as
keepers, and all servers begin anew when another TE keeps them: whatever they had reported to the former one,
they serve, and clients ask them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from xdeepserve.engine.numbers import Epoch
from xdeepserve.engine.recovery.rollback_field import Epochs, RollbackField
from xdeepserve.engine.te.hearing import Hearing
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.listeners import admit, release
from xdeepserve.engine.te.masters import Masters
from xdeepserve.engine.te.members import Sharer, Stay
from xdeepserve.engine.te.server_monitor import ServerMonitor
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.clock import Hears
from xdeepserve.hw.queue import Queue


class ServerKeeping:
    """Keeps the expert dies of a TE, of whatever kind, with their programs among the TE's `processes`.

    Programs report to `inbox`; `hears` is told of an error of a program that the TE keeps.
    """

    def __init__(
        self,
        plan: TEPlan,
        life: Lifetime,
        hearing: Hearing,
        masters: Masters,
        monitor: ServerMonitor,
        inbox: Queue[msgspec.Struct],
        processes: list[asyncio.Task[None]],
        hears: Hears,
    ) -> None:
        self._plan, self._members, self._monitor = plan, plan.members, monitor
        self._inbox, self._processes = inbox, processes
        self._members.sharer = Sharer(
            life=lambda: life.now,
            may_begin=lambda: hearing.may_begin,
            under_way=lambda: masters.under_way,
            keep=self._keep,
            hear=hears,
        )

    def enter(self) -> None:
        """Enter the set while weights are on their way. Raises XDeepServeError if its servers are gone."""
        if self._members.set.is_over:
            raise XDeepServeError(f"the expert servers that {self._plan.name} shares are gone")
        self._members.set.enter(self._members)

    def start(self) -> None:
        """Start the programs of the servers that the TE brings; elsewhere servers admit its clients."""
        self._members.set.enter(self._members)
        if not self._plan.team.brings_servers:
            admit(self._plan, self._monitor)
            return
        for server in self._members.servers:
            self.start_program(server)

    def start_program(self, server: Stay) -> None:
        """Start the program of an expert die; the TE that keeps it then hears its error."""
        program = server.program
        assert program is not None
        server.process = program.die.detach(program.run(), "experts", self._tell_keeper)
        self._processes.append(server.process)

    def _tell_keeper(self, error: Exception) -> None:
        sharer = self._members.keeper.sharer
        assert sharer is not None
        sharer.hear(error)

    def leave(self, suspects: Collection[int] = ()) -> bool:
        """Leave the servers to another TE that shares them; return whether there is one.

        Servers on dies that are `suspects`, or that have lost pages of their memory, serve nobody any more.
        """
        members, kept = self._members, self._members.keeps
        if members not in members.set.books or not members.set.leave(members):
            return not members.keeps
        if self._plan.services is not None:
            release(self._plan, self._monitor, range(len(self._plan.dies)))
        for server in members.servers if kept else ():
            if server.die in suspects or self._monitor.has_bad_pages(server.die):
                self._end(server)
        others = {server.process for server in members.servers}
        self._processes[:] = [process for process in self._processes if process not in others]
        return True

    def _end(self, server: Stay) -> None:
        """End the program of a server; clients ask others, and another server may come to its seat."""
        assert server.process is not None
        server.process.cancel()
        if server.takes_part:
            self._members.move(server, "miss")

    def _keep(self) -> None:
        """Keep the servers of a TE that has left them, and have them begin anew."""
        epoch = Epoch(next(self._members.set.epochs))
        for server in self._members.servers:
            assert server.program is not None
            assert server.process is not None
            server.program.reports = self._inbox
            self._processes.append(server.process)
            RollbackField(server.program.die).write(Epochs(epoch, epoch))
