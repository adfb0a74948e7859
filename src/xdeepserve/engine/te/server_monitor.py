"""The monitor of expert servers: heartbeats, and the masks by which clients hear who is lost (EaaS 3.4).

It asks each server by a word in its memory, the bell, which the server's loop copies when it is between two
batches; what answers late is slow, what does not answer is lost. Then the mask in every client's memory is
set, and taken back should the server answer after all. It looks only while steps run: who waits for a server
is in one. Which client has asked which server it does not know, and no request goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdeepserve.comm.services.layout import BELL, ServiceLayout
from xdeepserve.engine.deploy.deployment import ServiceConfig
from xdeepserve.engine.dp.events import Events, ServerHeard
from xdeepserve.engine.te.te_plan import TEPlan

NEVER_NS = 1 << 62
QUIET = 8  # looks without a step that ends, after which they become rarer


class ServerMonitor:
    """The servers of one TE, if it has any. `leave_out` and `take_in` are told of dies that are lost, and of
    those that were only slow."""

    def __init__(
        self,
        plan: TEPlan,
        tell: Events,
        leave_out: Callable[[int], None],
        take_in: Callable[[int], None],
    ) -> None:
        self._pod, self._tell, self._name = plan.pod, tell, plan.sizes.name
        self._leave_out, self._take_in = leave_out, take_in
        self._layout: ServiceLayout | None = plan.services
        self._times = plan.sizes.services or ServiceConfig()
        self._dies: Sequence[int] = () if self._layout is None else self._layout.servers.dies
        self._asked = 0  # the latest question
        self._missed = [0] * len(self._dies)  # in a row
        self.masked: set[int] = set()  # servers
        self._next_ns = 0
        self._steps, self._num_quiet = 0, 0  # that had ended at the latest look; looks since one has

    @property
    def num_servers(self) -> int:
        return len(self._dies)

    @property
    def next_ns(self) -> int:
        """When to look again."""
        return self._next_ns if self._dies else NEVER_NS

    def look(self, num_steps: int) -> None:
        """If it is time, see who has answered, and ask all again; `num_steps` have ended so far.

        Where none ends for long, it is not servers that are waited for: they are asked ever more seldom.
        """
        now = self._pod.clock.now
        if now < self.next_ns:
            return
        self._num_quiet = self._num_quiet + 1 if num_steps == self._steps else 0
        self._steps = num_steps
        for server, die in enumerate(self._dies):
            is_silent = self._asked > 0 and not self._has_answered(die)
            self._missed[server] = self._missed[server] + 1 if is_silent else 0
            is_lost = self._missed[server] >= self._times.lost_heartbeats
            if is_lost != (server in self.masked):
                self._mask(server, is_lost)
        self._asked += 1
        for die in self._dies:
            at = self._bell(die)
            answered = BELL.unpack(self._pod.memory(die).read(at, BELL.size))[1]
            self._pod.memory(die).write(at, BELL.pack(self._asked, answered))
        factor = 1 << min(10, max(0, self._num_quiet - QUIET - self._times.lost_heartbeats))
        self._next_ns = now + factor * max(1, round(1e6 * self._times.heartbeat_ms))

    def find_lost(self) -> None:
        """Mask at once the servers whose memory does not answer: who calls all dies back waits for each."""
        for server, die in enumerate(self._dies):
            if die in self._pod.memories.silent and server not in self.masked:
                self._missed[server] = self._times.lost_heartbeats
                self._mask(server, True)

    def _bell(self, die: int) -> int:
        assert self._layout is not None
        return self._pod.memory(die).metadata.regions[self._layout.region("slots")].offset

    def _has_answered(self, die: int) -> bool:
        """Whether a read of the bell finds the latest question; from a lost die no read comes back."""
        memory = self._pod.memory(die)
        is_there = die not in self._pod.memories.silent
        return is_there and BELL.unpack(memory.read(self._bell(die), BELL.size))[1] >= self._asked

    def _mask(self, server: int, is_lost: bool) -> None:
        """Tell all clients that a server is lost, or that it is not."""
        assert self._layout is not None
        for client in self._layout.clients:
            memory = self._pod.memory(client)
            region = memory.metadata.regions[self._layout.region("mask")]
            memory.write(region.offset + server, bytes([is_lost]))
        self.masked ^= {server}
        (self._leave_out if is_lost else self._take_in)(self._dies[server])
        self._tell.show(ServerHeard(self._name, server, self._dies[server], is_lost))
