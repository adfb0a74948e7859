"""Clients of expert servers that are lost, one by one, while their TE goes on (EaaS 3.4, 5.4).

Nobody waits for a client: servers serve whoever comes, and DP groups are loops of their own. So a TE can
miss one, as it can miss a server. The monitor hears that its die does not answer, or its heartbeat is silent;
then all servers release its slots, and what its DP group had goes on elsewhere, from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from xdeepserve.comm.services.service_server import ServiceServer
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.dp.events import ClientLost
from xdeepserve.engine.te.steps_apart import StepsApart
from xdeepserve.engine.te.steps_together import StepsTogether

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE


class LostClients:
    """Those of one TE: DP groups of one die each."""

    def __init__(self, te: TE, turns: StepsApart | StepsTogether) -> None:
        self._te, self._turns = te, turns
        self.lost: set[int] = set()
        self.is_open = False  # the job executor gives the TE work, and can give it to somebody else

    def go_on_without(self, ranks: Iterable[int]) -> bool:
        """These are lost; False, and nothing has happened, if none is another one or the TE needs them."""
        te, new = self._te, set(ranks) - self.lost
        if not new or not self._can_miss(len(new)) or te.recovery.phase != "serving":
            return False
        for rank in sorted(new):
            self._lose(rank)
        te.wake()
        return True

    def can_miss(self, die: int) -> bool:
        """Whether it is a client's, and the TE would go on without it."""
        te = self._te
        return die in te.plan.dies and te.plan.dies.index(die) not in self.lost and self._can_miss(1)

    def introduce(self, program: ExpertProgram) -> None:
        """A server that has just come hears who is lost."""
        for rank in sorted(self.lost):
            self._release(program, rank)

    def _can_miss(self, num: int) -> bool:
        te = self._te
        is_enough = len(te.groups) - len(self.lost) > num
        return te.plan.can_miss_clients and self.is_open and te.life == "ready" and is_enough

    def _lose(self, rank: int) -> None:
        te, die, group = self._te, self._te.plan.dies[rank], self._te.groups[rank]
        self.lost.add(rank)
        te.plan.pod.lose([die])
        for process in te.plan.pod.dies[die].running:
            process.cancel()
        te.health.give_up(rank)
        te.prober.give_up(rank)
        te.recovery.leave_out(die)
        assert isinstance(self._turns, StepsApart)
        self._turns.end(rank)
        for program in te.expert_programs:
            self._release(program, rank)
        group.scheduler.abandon()
        group.scheduler.move_out()
        te.tell.show(ClientLost(te.sizes.place.name, rank, die))

    def _release(self, program: ExpertProgram, rank: int) -> None:
        if program.die.index in self._te.plan.pod.memories.silent:
            return  # lost as well; who comes in its place is told
        assert isinstance(program, ExpertServerProgram)
        assert isinstance(program.server, ServiceServer)
        program.server.release(rank)
