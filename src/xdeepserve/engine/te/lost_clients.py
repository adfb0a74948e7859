"""Lets a TE with expert servers go on when some of its clients are lost (EaaS 3.4, 5.4).

No die waits for a client: servers serve all clients that ask, and DP groups have loops of their own. So a TE
can miss a client, as it can miss a server. A client is lost when the monitor finds that its die does not
answer, or when its heartbeat is silent. Then all servers release its slots, and its requests go on elsewhere,
from their tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdeepserve.comm.services.server import ServiceServer
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.dp.events import ClientLost, Events
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.te.expert_programs import ExpertPrograms
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.probe import Prober
from xdeepserve.engine.te.steps_apart import StepsApart
from xdeepserve.engine.te.steps_together import StepsTogether
from xdeepserve.engine.te.te_plan import TEPlan


class LostClients:
    """Clients of expert servers lost by a TE: DP groups of one die each."""

    def __init__(
        self,
        plan: TEPlan,
        tell: Events,
        life: Lifetime,
        groups: Sequence[DPGroup],
        health: Heartbeats,
        prober: Prober,
        recovery: Rollback,
        programs: ExpertPrograms,
        turns: StepsApart | StepsTogether,
    ) -> None:
        self._plan, self._tell, self._life, self._groups = plan, tell, life, groups
        self._health, self._prober, self._recovery = health, prober, recovery
        self._programs, self._turns = programs, turns
        self.lost: set[GroupRank] = set()
        self.is_open = False  # the job executor gives the TE work, and can give it to another one

    def go_on_without(self, groups: Iterable[GroupRank]) -> bool:
        """Give up the clients of these DP groups; return whether any was given up.

        Nothing happens if none of them is a new loss, if the TE needs them, or during a rollback. After True
        the caller has to wake the TE.
        """
        new = set(groups) - self.lost
        if not new or not self._can_miss(len(new)) or self._recovery.phase != "serving":
            return False
        for client in sorted(new):
            self._lose(client)
        return True

    def can_miss(self, die: int) -> bool:
        """Whether a die belongs to a client, and the TE would go on without it."""
        dies = self._plan.dies
        return die in dies and GroupRank(dies.index(die)) not in self.lost and self._can_miss(1)

    def tell_lost(self, program: ExpertProgram) -> None:
        """Tell a newly joined server which clients are lost."""
        for client in sorted(self.lost):
            self._release(program, client)

    def _can_miss(self, num: int) -> bool:
        is_enough = len(self._groups) - len(self.lost) > num
        return self._plan.can_miss_clients and self.is_open and self._life.now == "ready" and is_enough

    def _lose(self, client: GroupRank) -> None:
        pod, die, group = self._plan.pod, self._plan.dies[client], self._groups[client]
        self.lost.add(client)
        pod.lose([die])
        for process in pod.dies[die].running:
            process.cancel()
        self._health.give_up(client)
        self._prober.give_up(client)
        self._recovery.leave_out(die)
        assert isinstance(self._turns, StepsApart)
        self._turns.end(client)
        for program in self._programs:
            self._release(program, client)
        group.scheduler.abandon()
        group.scheduler.move_out()
        self._tell.show(ClientLost(self._plan.sizes.place.name, client, die))

    def _release(self, program: ExpertProgram, client: GroupRank) -> None:
        if program.die.index in self._plan.pod.memories.silent:
            return  # lost as well; a server that comes in its place is told
        assert isinstance(program, ExpertServerProgram)
        assert isinstance(program.server, ServiceServer)
        program.server.release(client)
