"""Detector of lost expert servers and clients: heartbeats, and what clients are told of servers (EaaS 3.4).

The monitor asks each server by a word in its memory, the bell, which the server's loop copies between two
batches. A server that answers late is slow; a server that does not answer is lost. Which servers are lost
stands in the TE's book (`te.members`), and the mask in every client's memory follows the book. The monitor
looks only while steps run, since only steps wait for servers. It does not know which client has asked which
server, and no request goes through it. TEs that share servers have the questions in common: whichever of them
looks first when it is time asks for all.

Servers register with the monitor (4.4, steps 1 and 2 of the handshake), which tells every client where they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xdeepserve.comm.services.layout import BELL, SEAT, Presence, ServiceLayout
from xdeepserve.engine.deploy.deployment import ServiceConfig
from xdeepserve.engine.numbers import Seat
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.te.members import PRESENCE, Stay
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import LostDieError

NEVER_NS = 1 << 62
QUIET = 8  # looks without a step that ends, after which they become rarer


class ServerMonitor:
    """Watches the expert servers of a TE and their clients, if the TE has any."""

    def __init__(self, plan: TEPlan) -> None:
        self._pod, self._name, self._members = plan.pod, plan.name, plan.members
        self._layout: ServiceLayout | None = plan.services
        self._times = plan.sizes.walk.services or ServiceConfig()
        self._dies, self._questions = plan.dies, plan.members.set.questions
        self._silent: dict[Stay, int] = {}  # looks in a row, by client
        self._next_ns = 0
        self._steps, self._num_quiet = 0, 0  # that had ended at the latest look; looks since one has

    def start(self) -> None:
        """Tell clients about servers that are not there, or not the first ones at their seats."""
        for seat in map(Seat, range(self._members.num_seats)):
            server, presence = self._members.incumbent(seat), self._members.presence(seat)
            if server is not None and server.epoch > 1:
                self.tell_address(server)
            if server is None or presence is not Presence.THERE:
                self._write_mask(seat, presence)

    @property
    def _servers(self) -> Sequence[Stay]:
        return () if self._layout is None else self._members.servers

    @property
    def next_ns(self) -> int:
        """Virtual time of the next look, in ns."""
        return self._next_ns if self._servers else NEVER_NS

    # ---- heartbeats ---------------------------------------------------------------------------------

    def look(self, num_steps: int) -> Iterator[Loss]:
        """Check all servers' answers and ask all of them again, if it is time, and look at the clients.

        `num_steps` have ended so far. Yields the loss of each server that is silent now, then that of clients
        that have been silent for too long. If no step has ended for long, servers are not the cause
        of the wait, and they are asked ever more seldom.
        """
        now = self._pod.clock.now
        if now < self.next_ns:
            return
        self._num_quiet = self._num_quiet + 1 if num_steps == self._steps else 0
        self._steps = num_steps
        questions, missed = self._questions, dict[Stay, int]()
        is_due = now >= questions.next_ns and not self._is_restoring
        for server in self._servers if is_due else ():
            is_silent = questions.asked.get(server, 0) > 0 and not self._has_answered(server)
            missed[server] = questions.missed.get(server, 0) + 1 if is_silent else 0
            is_lost = missed[server] >= self._times.lost_heartbeats
            if is_lost and not self._is_masked(server):
                yield self._loss(server)
            elif not is_lost and self._is_masked(server):
                self._members.move(server, "answer")
        silent = self._silent_clients()
        factor = 1 << min(10, max(0, self._num_quiet - QUIET - self._times.lost_heartbeats))
        self._next_ns = now + factor * max(1, round(1e6 * self._times.heartbeat_ms))
        if is_due:
            questions.missed, questions.next_ns = missed, self._next_ns
            self._ask()
        if silent:
            dies = tuple(client.die for client in silent)
            said = f"the memory of clients {', '.join(map(str, dies))} of {self._name} does not answer"
            yield Loss("missed", self._name, dies, LostDieError(said))

    @property
    def _is_restoring(self) -> bool:
        """Whether another TE keeps the servers and has called them back, so that they answer nobody."""
        keeper = self._members.keeper
        return keeper is not self._members and keeper.sharer is not None and not keeper.sharer.may_begin()

    def _ask(self) -> None:
        """Ask all servers the next question."""
        questions = self._questions
        questions.count += 1
        for server in self._servers:
            at, memory = self._bell(server.die), self._pod.memory(server.die)
            answered = BELL.unpack(memory.read(at, BELL.size))[1]
            memory.write(at, BELL.pack(questions.count, answered))
        questions.asked = dict.fromkeys(self._servers, questions.count)

    def _silent_clients(self) -> list[Stay]:
        """Find clients with memory silent to reads for several looks in a row.

        Slow clients are left to the heartbeat of their DP group.
        """
        silent = self._pod.memories.silent
        found = [each for each in self._members.clients if each.at == "there" and each.die in silent]
        self._silent = {client: self._silent.get(client, 0) + 1 for client in found}
        return [client for client in found if self._silent[client] >= self._times.lost_heartbeats]

    def find_lost(self) -> Iterator[Loss]:
        """Yield the loss of each server with silent memory at once: a rollback would wait for it."""
        for server in self._servers:
            if server.die in self._pod.memories.silent and not self._is_masked(server):
                self._questions.missed[server] = self._times.lost_heartbeats
                yield self._loss(server)

    def die_is_well(self, die: int) -> bool:
        """Whether a die that serves nothing yet, or no more, is not lost, as a test of it would show."""
        return die not in self._pod.lost

    def memory_answers(self, die: int) -> bool:
        """Whether a die's memory answers reads."""
        return die not in self._pod.memories.silent

    def has_bad_pages(self, die: int) -> bool:
        """Whether pages of a die's memory have lost their content, and are not restored."""
        return die in self._pod.memories.bad_pages

    @staticmethod
    def _is_masked(server: Stay) -> bool:
        return PRESENCE[server.at] is Presence.LOST

    def _loss(self, server: Stay) -> Loss:
        die = server.die
        said = f"expert server {server.seat} of {self._name} is lost: die {die} does not answer the monitor"
        return Loss("server", self._name, (die,), LostDieError(said))

    def _bell(self, die: int) -> int:
        assert self._layout is not None
        return self._pod.memory(die).metadata.regions[self._layout.region("slots")].offset

    def _has_answered(self, server: Stay) -> bool:
        """Whether a server has copied the latest question; a lost die's memory answers no read."""
        die = server.die
        memory = self._pod.memory(die)
        return (
            self.memory_answers(die)
            and BELL.unpack(memory.read(self._bell(die), BELL.size))[1] >= self._questions.asked[server]
        )

    # ---- what clients are told ----------------------------------------------------------------------

    def tell_presence(self, server: Stay) -> None:
        """Tell all clients the presence at a server's seat."""
        self._write_mask(server.seat, self._members.presence(server.seat))

    def tell_address(self, server: Stay) -> None:
        """Tell all clients where a seat's new server is."""
        assert self._layout is not None
        seat = SEAT.pack(server.die, server.epoch)
        for client in self._dies:
            memory = self._pod.memory(client)
            region = memory.metadata.regions[self._layout.region("seats")]
            memory.write(region.offset + server.seat * SEAT.size, seat)

    def _write_mask(self, seat: Seat, presence: Presence) -> None:
        assert self._layout is not None
        for client in self._dies:
            memory = self._pod.memory(client)
            region = memory.metadata.regions[self._layout.region("mask")]
            memory.write(region.offset + seat, bytes([presence]))
