"""Lets a TE with expert servers go on when some of its clients are lost (EaaS 3.4, 5.4).

No die waits for a client: servers serve all clients that ask, and DP groups have loops of their own. So a TE
can miss a client, as it can miss a server. A client is lost when the monitor finds that its die does not
answer, or when its heartbeat is silent. Then all servers release its slots, and its requests go on elsewhere,
from their tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.comm.services.server import ServiceServer
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.dp.events import ClientLost, Events
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.recovery.ladder import Loss
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

    def why_not(self, loss: Loss) -> str | None:
        """Explain why the TE cannot go on without the dies of a loss; None if it can."""
        te, num_lost = self._plan.name, len(self._new(loss))
        if not self._plan.can_miss_clients:
            return f"the dies of {te} are no clients of expert servers, each on its own"
        if not num_lost:
            return "the loss is of no client that was still there"
        if not self.is_open or self._life.now != "ready":
            return f"{te} is {self._life.now}, and gives no requests to other clients"
        if len(self._groups) - len(self.lost) <= num_lost:
            return f"{te} would have no client left"
        return None

    def go_on_without(self, loss: Loss) -> None:
        """Give up the clients of a loss."""
        for client in self._new(loss):
            self._lose(client)

    def _new(self, loss: Loss) -> list[GroupRank]:
        """Return the clients of a loss that have not been given up yet; each is a DP group of one die."""
        ranks = (GroupRank(rank) for rank, die in enumerate(self._plan.dies) if die in loss.dies)
        return [rank for rank in ranks if rank not in self.lost]

    def tell_lost(self, program: ExpertProgram) -> None:
        """Tell a newly joined server which clients are lost."""
        for client in sorted(self.lost):
            self._release(program, client)

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
