"""Ways of tokens to experts on dies of their own, in timing-only runs: a class for each way.

They match the ways of `engine/run/away.py`, which move real bytes: by trampolines, with barriers; without
them; by services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from xdeepserve import wings
from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.services.cost import ServiceCost
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.comm.services.server import AT_ONCE, Batching
from xdeepserve.engine.deploy.roles import Turns
from xdeepserve.engine.deploy.sizes import WalkSizes
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.clock.flow_costs import ByRequest, ByTrampoline, WayCost
from xdeepserve.engine.run.clock.flow_ends import FlowClient, FlowServer
from xdeepserve.engine.run.clock.flow_hub import FlowHub
from xdeepserve.engine.run.clock.routing import PlacedRouting, TimingConfig
from xdeepserve.engine.run.clock.timeline import Timeline
from xdeepserve.engine.run.clock.trampoline_hub import ClockAttentionSide, ClockExpertSide, TrampolineHub
from xdeepserve.engine.run.ends import row_sizes
from xdeepserve.engine.walk.runner import Trampoline
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


class ClockAway(Protocol):
    """Makes the ends of a way; an attention die's end by its rank and microbatch."""

    def attention_end(self, rank: DieRank, microbatch: int, timeline: Timeline) -> Trampoline: ...

    def expert_program(
        self,
        index: int,
        mem: ExpertMemory,
        threads: Threads,
        timeline: Timeline,
        reports: Queue[msgspec.Struct],
    ) -> ExpertProgram: ...


class ClockTrampolines:
    """Way by A2E and E2A: a hub for each microbatch of each DP domain, `hubs[microbatch][domain]`."""

    attention_side: type[ClockAttentionSide] = ClockAttentionSide
    expert_side: type[ClockExpertSide] = ClockExpertSide

    def __init__(
        self, team: Team, cost: CommCost, timing: TimingConfig, placed: Sequence[PlacedRouting]
    ) -> None:
        self.team, walk, experts = team, team.sizes.walk, team.sizes.experts
        self.hubs = [
            [
                self._hub(
                    team.pod.clock,
                    cost,
                    team.config,
                    team.domain(d),
                    team.expert_dies,
                    experts.num_routed,
                    m * walk.num_domains + d,
                    timing,
                    walk.timeout_ns,
                    placed[d] if placed else None,
                    experts.num_slots,
                    "mte" if walk.carrier == "rdma" else walk.carrier,
                )
                for d in range(walk.num_domains)
            ]
            for m in range(walk.num_microbatches)
        ]

    def _hub(self, *args: Any) -> TrampolineHub:
        return TrampolineHub(*args)

    def attention_end(self, rank: DieRank, microbatch: int, timeline: Timeline) -> Trampoline:
        """Make an attention die's end of the meetings with expert dies."""
        domain, index = divmod(rank, self.team.dies_per_domain)
        return self.attention_side(timeline, index, self.hubs[microbatch][domain])

    def expert_program(
        self,
        index: int,
        mem: ExpertMemory,
        threads: Threads,
        timeline: Timeline,
        reports: Queue[msgspec.Struct],
    ) -> ExpertProgram:
        """Make an expert die's program: three persistent kernels, of which the middle one only takes time."""
        die = timeline.die
        sides = [[self.expert_side(die, index, hub) for hub in by_domain] for by_domain in self.hubs]
        tallies = [[hub.tally for hub in by_domain] for by_domain in self.hubs]
        return ExpertProgram(die, mem, sides, tallies, threads, timeline, reports)


class ClockFlows:
    """Way without barriers, with the costs of A2E and E2A (`way_cost`)."""

    batching = AT_ONCE

    def __init__(
        self, team: Team, cost: CommCost, timing: TimingConfig, placed: Sequence[PlacedRouting]
    ) -> None:
        self.team, self.placed = team, placed
        self.num_layers = len(team.sizes.experts.order)
        self.hub = FlowHub(
            team.pod.clock,
            self.way_cost(cost),
            len(team.dies),
            team.sizes.walk.num_microbatches,
            team.holders.num_ranks,
            announces=self.batching.clients > 1,
        )

    def way_cost(self, cost: CommCost) -> WayCost:
        """Return the costs of the way by trampolines."""
        team, carrier = self.team, self.team.sizes.walk.carrier
        assert carrier != "rdma"  # M2N has no trampolines
        return ByTrampoline(cost, len(team.expert_dies), team.num_copies, carrier)

    def attention_end(self, rank: DieRank, microbatch: int, timeline: Timeline) -> Trampoline:
        """Make an attention die's end, which waits only for the expert dies with its tokens."""
        team = self.team
        shared = team.shared_expert(rank)
        return FlowClient(
            timeline,
            self.hub,
            rank,
            microbatch,
            self.placed[rank // team.dies_per_domain],
            team.config.num_experts_per_tok,
            team.config.hidden_size,
            None if shared is None else team.holders.expert_rank[shared],
            team.sizes.walk.timeout_ns,
        )

    def expert_program(
        self,
        index: int,
        mem: ExpertMemory,
        threads: Threads,
        timeline: Timeline,
        reports: Queue[msgspec.Struct],
    ) -> ExpertProgram:
        """Make an expert die's program, which serves tokens in the order they come."""
        server = FlowServer(
            timeline.die,
            index,
            self.hub,
            self.num_layers,
            self.team.sizes.experts.num_slots,
            self.team.config.hidden_size,
            self.batching,
        )
        return ExpertServerProgram(timeline.die, mem, server, threads, timeline, reports)


class ClockServices(ClockFlows):
    """Way by requests to expert servers (EaaS)."""

    def __init__(self, team: Team, *args: Any) -> None:
        times = team.sizes.walk.services
        assert times is not None
        self.batching = Batching(times.batch_clients, round(1e3 * times.batch_timeout_us))
        super().__init__(team, *args)

    def way_cost(self, cost: CommCost) -> WayCost:
        """Return the costs of the way by URMA, to and from the servers' memories."""
        team = self.team
        layout = ServiceLayout(clients=team.dies, servers=team.holders, **row_sizes(team))
        server_of = team.pod.topology.server_of
        pairs = [server_of(client) != server_of(die) for client in team.dies for die in team.expert_dies]
        sums = team.sizes.walk.services is not None and team.sizes.walk.services.server_sums
        return ByRequest(ServiceCost(cost.spec, layout.rows, sum(pairs) / len(pairs), sums))


def clock_way(
    walk: WalkSizes,
) -> Callable[[Team, CommCost, TimingConfig, Sequence[PlacedRouting]], ClockAway]:
    """Return the factory for the way of a TE."""
    if walk.carrier == "rdma":
        cards: Callable[[Team, CommCost, TimingConfig, Sequence[PlacedRouting]], ClockAway]
        cards = wings.part("clock way over cards")
        return cards
    return CLOCK_WAYS[walk.turns]


CLOCK_WAYS: dict[Turns, Callable[[Team, CommCost, TimingConfig, Sequence[PlacedRouting]], ClockAway]] = {
    "away-and-back": ClockTrampolines,
    "dataflow": ClockFlows,
    "services": ClockServices,
}
