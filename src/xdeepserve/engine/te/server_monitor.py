"""The monitor of expert servers: heartbeats, and masks that tell clients which servers are lost (EaaS 3.4).

The monitor asks each server by a word in its memory, the bell, which the server's loop copies between two
batches. A server that answers late is slow; a server that does not answer is lost. Then the mask in every
client's memory is set, and taken back should the server answer after all. The monitor looks only while steps
run, since only steps wait for servers. It does not know which client has asked which server, and no request
goes through it.

Servers register with the monitor (4.4, steps 1 and 2 of the handshake), which tells every client where they
are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from xdeepserve.comm.services.layout import BELL, SEAT, Presence, ServiceLayout
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.deploy.deployment import ServiceConfig
from xdeepserve.engine.dp.events import Events, ServerHeard
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.run.by_services import SeatsOutside
from xdeepserve.engine.run.wiring import ByteWiring
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import LostDieError

NEVER_NS = 1 << 62
QUIET = 8  # looks without a step that ends, after which they become rarer


class ServerMonitor:
    """Watches the expert servers of a TE and their clients, if the TE has any.

    A lost server takes no part in rollbacks of `recovery`, and `reconfiguration` puts no replicas of experts
    there, until it is heard of again.
    """

    def __init__(
        self, plan: TEPlan, tell: Events, recovery: Rollback, reconfiguration: Reconfiguration | None
    ) -> None:
        self._pod, self._tell, self._name = plan.pod, tell, plan.name
        self._recovery, self._reconfiguration = recovery, reconfiguration
        self._layout: ServiceLayout | None = plan.services
        self._times = plan.sizes.walk.services or ServiceConfig()
        self._die_of = {} if self._layout is None else plan.team.expert_at  # by server, as they come and go
        self._count = 0  # questions so far
        self._asked: dict[int, int] = {}  # the latest one, by server
        self._missed: dict[int, int] = {}  # answers, in a row
        self._masked: set[int] = set()  # servers
        self._clients = {} if self._layout is None else dict(enumerate(plan.dies))  # dies by rank
        self._silent: dict[GroupRank, int] = {}  # looks in a row, by client
        self.leaving: set[int] = set()
        self._epochs: dict[int, int] = {}  # of seats, where it is not the first
        self._next_ns = 0
        self._steps, self._num_quiet = 0, 0  # that had ended at the latest look; looks since one has

    def start(self) -> None:
        """Tell clients about servers absent from the start."""
        if self._layout is not None:
            for server in set(range(self._layout.servers.num_ranks)) - self._die_of.keys():
                self._write_mask(server, Presence.ABSENT)

    @property
    def num_servers(self) -> int:
        return len(self._die_of)

    @property
    def masked(self) -> Collection[int]:
        """Servers considered lost by the monitor."""
        return self._masked

    @property
    def next_ns(self) -> int:
        """Virtual time of the next look, in ns."""
        return self._next_ns if self._die_of else NEVER_NS

    # ---- heartbeats ---------------------------------------------------------------------------------

    def look(self, num_steps: int) -> Iterator[Loss]:
        """Check all servers' answers, if it is time, and ask all of them again.

        `num_steps` have ended so far. Yields the loss of each server that is not masked yet, then that of
        clients that have been silent for too long. If no step has ended for long, servers are not the cause
        of the wait, and they are asked ever more seldom.
        """
        now = self._pod.clock.now
        if now < self.next_ns:
            return
        self._num_quiet = self._num_quiet + 1 if num_steps == self._steps else 0
        self._steps = num_steps
        for server in self._die_of:
            is_silent = self._asked.get(server, 0) > 0 and not self._has_answered(server)
            self._missed[server] = self._missed.get(server, 0) + 1 if is_silent else 0
            is_lost = self._missed[server] >= self._times.lost_heartbeats
            if is_lost and server not in self.masked:
                yield self._loss(server)
            elif not is_lost and server in self.masked:
                self._mask(server, False)
        silent = self._silent_clients()
        self._count += 1
        for server, die in self._die_of.items():
            at, self._asked[server] = self._bell(die), self._count
            answered = BELL.unpack(self._pod.memory(die).read(at, BELL.size))[1]
            self._pod.memory(die).write(at, BELL.pack(self._count, answered))
        factor = 1 << min(10, max(0, self._num_quiet - QUIET - self._times.lost_heartbeats))
        self._next_ns = now + factor * max(1, round(1e6 * self._times.heartbeat_ms))
        if silent:
            dies = tuple(self._clients[rank] for rank in silent)
            said = f"the memory of clients {', '.join(map(str, dies))} of {self._name} does not answer"
            yield Loss("missed", self._name, dies, LostDieError(said))

    def _silent_clients(self) -> list[GroupRank]:
        """Find clients with memory silent to reads for several looks in a row.

        Slow clients are left to the heartbeat of their DP group.
        """
        silent = {GroupRank(rank) for rank, die in self._clients.items() if die in self._pod.memories.silent}
        self._silent = {rank: self._silent.get(rank, 0) + 1 for rank in silent}
        times = self._times.lost_heartbeats
        return [rank for rank, missed in self._silent.items() if missed >= times]

    def find_lost(self) -> Iterator[Loss]:
        """Yield the loss of each server with silent memory at once: a rollback would wait for it."""
        for server, die in self._die_of.items():
            if die in self._pod.memories.silent and server not in self.masked:
                self._missed[server] = self._times.lost_heartbeats
                yield self._loss(server)

    def _loss(self, server: int) -> Loss:
        die = self._die_of[server]
        said = f"expert server {server} of {self._name} is lost: die {die} does not answer the monitor"
        return Loss("server", self._name, (die,), LostDieError(said))

    def mask(self, loss: Loss) -> None:
        """Tell all clients that servers are lost, so that clients ask others."""
        for server in [server for server, die in self._die_of.items() if die in loss.dies]:
            self._mask(server, True)

    def give_up(self, dies: Collection[int]) -> None:
        """Look no more at clients without which the TE goes on."""
        self._clients = {rank: die for rank, die in self._clients.items() if die not in dies}

    def _bell(self, die: int) -> int:
        assert self._layout is not None
        return self._pod.memory(die).metadata.regions[self._layout.region("slots")].offset

    def _has_answered(self, server: int) -> bool:
        """Whether a server has copied the latest question; a lost die's memory answers no read."""
        die = self._die_of[server]
        memory, is_there = self._pod.memory(die), die not in self._pod.memories.silent
        return is_there and BELL.unpack(memory.read(self._bell(die), BELL.size))[1] >= self._asked[server]

    def _mask(self, server: int, is_lost: bool) -> None:
        """Tell all clients whether a server is lost."""
        self._masked ^= {server}
        self._write_mask(server, self.presence(server))
        (self.leave_out if is_lost else self.take_in)(self._die_of[server])
        self._tell.show(ServerHeard(self._name, server, self._die_of[server], is_lost))

    def leave_out(self, die: int) -> None:
        """Exclude a server's die from rollbacks and from replicas of experts."""
        self._recovery.leave_out(die)
        if self._reconfiguration is not None:
            self._reconfiguration.leave_out(die)

    def take_in(self, die: int) -> None:
        """Include a server's die again: it is not lost after all, or has just joined."""
        self._recovery.take_in(die)
        if self._reconfiguration is not None:
            self._reconfiguration.take_in(die)

    # ---- who is there -------------------------------------------------------------------------------

    def presence(self, server: int) -> Presence:
        """Return a server's presence, as clients see it."""
        if server not in self._die_of:
            return Presence.ABSENT
        if server in self.masked:
            return Presence.LOST
        return Presence.LEAVING if server in self.leaving else Presence.THERE

    def epoch(self, server: int) -> int:
        """Count the servers seated here so far, the current one included."""
        return self._epochs.get(server, 1)

    def seat(self, server: int) -> None:
        """Register a new server: tell all clients where it is, then that they may ask it."""
        assert self._layout is not None
        self._epochs[server] = self.epoch(server) + 1
        self.forget(server)
        seat = SEAT.pack(self._die_of[server], self._epochs[server])
        for client in self._layout.clients:
            memory = self._pod.memory(client)
            region = memory.metadata.regions[self._layout.region("seats")]
            memory.write(region.offset + server * SEAT.size, seat)
        self._write_mask(server, Presence.THERE)

    def lead_away(self, server: int) -> None:
        """Tell clients to stop asking a server, because it is to leave."""
        self.leaving.add(server)
        self._write_mask(server, self.presence(server))

    def forget(self, server: int) -> None:
        """Clear the state of a seat: its server is gone, or another one takes its place."""
        self._masked.discard(server)
        self.leaving.discard(server)
        self._asked.pop(server, None)
        self._missed.pop(server, None)
        self._write_mask(server, Presence.ABSENT)

    def _write_mask(self, server: int, presence: Presence) -> None:
        assert self._layout is not None
        for client in self._layout.clients:
            memory = self._pod.memory(client)
            region = memory.metadata.regions[self._layout.region("mask")]
            memory.write(region.offset + server, bytes([presence]))


class OutsideMonitor(ServerMonitor):
    """Monitor of server processes outside the pod: it reports what the client process has heard of them."""

    def __init__(self, outside: SeatsOutside, *args: Any) -> None:
        super().__init__(*args)
        self._outside = outside

    @property
    def num_servers(self) -> int:
        return sum(seat.presence != Presence.ABSENT for seat in self._outside.seats)

    @property
    def masked(self) -> set[int]:
        """Seats of servers considered lost."""
        seats = enumerate(self._outside.seats)
        return {number for number, seat in seats if seat.presence == Presence.LOST}

    def presence(self, server: int) -> Presence:
        return Presence(self._outside.seats[server].presence)

    def epoch(self, server: int) -> int:
        return self._outside.seats[server].epoch


def server_monitor(
    plan: TEPlan, tell: Events, recovery: Rollback, reconfiguration: Reconfiguration | None
) -> ServerMonitor:
    """Create the monitor of a TE, for servers inside the pod or in other processes."""
    outside = plan.wiring.seats_outside if isinstance(plan.wiring, ByteWiring) else None
    if outside is None:
        return ServerMonitor(plan, tell, recovery, reconfiguration)
    return OutsideMonitor(outside, plan, tell, recovery, reconfiguration)
