"""Way to experts as services: clients, servers, and their knowledge of replicas (EaaS 3)."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from xdeepserve import wings
from xdeepserve.comm.means import Means
from xdeepserve.comm.services.client import Patience, ServiceClient
from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.comm.services.reach import OverURMA, Reach
from xdeepserve.comm.services.server import Batching, ServiceServer
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.replicas import NOTHING, first_map
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import Trampoline
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.engine.ways.away import counted, row_sizes
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


def service_layout(team: Team) -> ServiceLayout:
    """Return the memory layout shared by clients and servers, inside the pod or outside."""
    walk = team.sizes.walk
    assert walk.services is not None
    return ServiceLayout(
        clients=team.dies,
        servers=team.holders,
        num_slots=walk.num_microbatches,
        announces=walk.services.batch_clients > 1,
        num_tes=team.num_tes,
        **row_sizes(team),
    )


def experts_held(placed: ExpertSizes) -> tuple[tuple[int, ...], ...]:
    """Return the routed experts of each seat, copies included; -1 for the shared expert."""
    copies = placed.copies_of or ((),) * len(placed.experts_of)
    return tuple(
        (-1,) if placed.is_shared(number) else (*held, *copies[number])
        for number, held in enumerate(placed.experts_of)
    )


def identity(layout: ServiceLayout, placed: ExpertSizes, recipe: str, checkpoint: str) -> str:
    """Return a digest of the facts that client and server processes must agree on.

    These are the model by its digest, the recipe, the experts of each server, and the place of each byte.
    """
    parts = [recipe, checkpoint, layout, experts_held(placed), placed.layers, placed.order]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


class Seat(Protocol):
    """State of a seat in the list of seats: its server's presence (`Presence`) and epoch."""

    @property
    def presence(self) -> int: ...

    @property
    def epoch(self) -> int: ...


class SeatsOutside(Protocol):
    """Seats of a TE with servers in processes outside of its pod (remote/watcher.py)."""

    @property
    def seats(self) -> Sequence[Seat]: ...

    def reach(self, die: Die) -> Reach:
        """Return the means for a client die to reach the memory of servers."""


class Services:
    """Way to expert servers: every attention die is a client of all, with a slot for each microbatch."""

    def __init__(self, team: Team, tallies: list[list[Tally]]) -> None:
        self.team, self.tallies = team, tallies
        walk, placed = team.sizes.walk, team.sizes.experts
        assert walk.services is not None
        self.times, self.layout = walk.services, service_layout(team)
        for die in team.dies:
            self.layout.plan_client(team.pod.plan(die))
        for die in team.expert_dies if team.brings_servers else ():
            self.layout.plan_server(team.pod.plan(die))
        self.max_rows = self.layout.num_clients * self.layout.rows_per_slot
        self.means = Means(timeout_ns=walk.timeout_ns)
        self.num_layers = len(placed.order)
        self._same = self._replicas()
        self._known: dict[int, KnownServers] = {}  # of each client
        self.clients: dict[tuple[int, int], ServiceClient] = {}  # by rank and microbatch
        self.seats_outside: SeatsOutside | None = None  # where servers are outside of the pod
        if team.has_servers_outside:
            held = experts_held(placed)
            self.seats_outside = wings.part("seats outside")(team.pod, self.layout, held, self._revive)
        self._servers: dict[int, ServiceServer] = {}  # by number, the latest

    def _replicas(self) -> dict[int, list[int]]:
        """Group physical experts equal from the start, in every layer; return the group of each.

        Copies of the shared expert form a group, too.
        """
        placed = self.team.sizes.experts
        by_expert: dict[int, list[int]] = defaultdict(list)
        for physical, expert in enumerate(first_map(placed)[0]):
            if expert != NOTHING:
                by_expert[expert].append(physical)
        shared = range(placed.num_slots, len(placed.expert_rank))
        groups = [*by_expert.values(), list(shared)]
        return {physical: group for group in groups for physical in group}

    def replicas(self, rank: DieRank, layer: int, physical: int) -> Sequence[int]:
        """Return all physical experts equal to a given one in a layer, as a client knows them.

        Replicas loaded by EPLB come and go. For them the client reads its own die's map. The map leads only
        to whole replicas, and does not change within a step.
        """
        placed = self.team.sizes.experts
        if physical >= placed.num_slots or placed.copies_of or not placed.has_slots:
            return self._same.get(physical, (physical,))
        number = placed.order[layer]
        memory, num_experts = self.team.pod.memory(self.team.dies[rank]), self.team.config.n_routed_experts
        shape = len(placed.layers), num_experts, placed.max_replicas
        counts = memory.view(memory.app.regions["logcnt"], np.int32, shape[:2])[number]
        is_replica = np.arange(placed.max_replicas) < counts[:, None]
        log2phy = memory.view(memory.app.regions["log2phy"], np.int32, shape)[number]
        experts = np.flatnonzero(((log2phy == physical) & is_replica).any(1))
        return log2phy[experts[0], : counts[experts[0]]].tolist() if len(experts) else (physical,)

    def attention_end(self, rank: DieRank, microbatch: int, pace: Pace) -> Trampoline:
        """Make a client's end for a microbatch, with its slots on the servers."""
        number = self.team.client(rank)
        domain, die = rank // self.team.dies_per_domain, self.team.pod.dies[self.team.dies[rank]]
        if rank not in self._known:
            seats = self.seats_outside
            reach = OverURMA(die, self.layout) if seats is None else seats.reach(die)
            self._known[rank] = KnownServers(reach, number, self.layout)
        times, is_outside = self.times, self.seats_outside is not None
        answer_ns = round(1e6 * (times.process_timeout_ms if is_outside else times.answer_timeout_ms))
        patience = Patience(min(answer_ns, self.means.timeout_ns), self.means.timeout_ns)
        client = ServiceClient(
            *(number, microbatch, self._known[rank], self.num_layers, partial(self.replicas, rank), patience),
            *(quantize_rows, self.means),
        )
        self.clients[rank, microbatch] = client
        return counted(client, self.tallies[microbatch][domain])

    def _revive(self, server: int) -> None:
        """Tell all clients to look for a server again, because its link is back."""
        for known in self._known.values():
            known.find(server)

    def late_servers(self) -> list[int]:
        """List servers that clients leave out because an answer is late."""
        return sorted({server for client in self.clients.values() for server in client.late()})

    async def look_at_late(self) -> None:
        """Look again at servers outside of the pod whose answers are late."""
        for client in self.clients.values():
            await client.look_at_late()

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, pace: Pace, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert server, which serves requests in its slots."""
        die, former = self.team.pod.dies[mem.die], self._servers.get(index)
        batching = Batching(self.times.batch_clients, round(1e3 * self.times.batch_timeout_us))
        server = self._servers[index] = ServiceServer(
            *(die, index, self.layout, self.num_layers, batching, quantize_rows, self.means),
            generation=0 if former is None else former.generation,
        )
        return ExpertServerProgram(die, mem, server, threads, pace, reports)
