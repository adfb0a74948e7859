"""Ways of tokens to experts on dies of their own, and back: a class for each way.

    trampolines   A2E and E2A with barriers, by steps (xDeepServe 5.2)
    flow          without barriers, an expert die serves each attention die as it comes (5.3)
    services      slots on expert servers, which clients write and read by themselves (EaaS 3)
    cards         M2N: each attention die writes to each expert die by its network card (MegaScale-Infer 5)

A way plans the buffers of all dies, and makes the end of each. `WAYS` has the way for each kind of turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import msgspec

from xdeepserve import wings
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.side import Side
from xdeepserve.comm.trampoline.token_flow import FlowExpertSide, FlowTrampoline
from xdeepserve.engine.deploy.roles import Turns
from xdeepserve.engine.deploy.sizes import WalkSizes
from xdeepserve.engine.die.dataflow import DataflowExpertProgram
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.arithmetic import quantize_rows
from xdeepserve.engine.run.by_services import ByServices
from xdeepserve.engine.run.ends import CountedSide, row_sizes
from xdeepserve.engine.walk.runner import Computing, Trampoline
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


class Way(Protocol):
    """Plans a way's buffers on all dies when constructed, and makes the end of each die."""

    max_rows: int
    """Token copies that an expert die takes at once, at most."""

    def attention_end(self, rank: DieRank, microbatch: int) -> Trampoline: ...

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram: ...


class ByTrampolines:
    """Way by A2E and E2A: a layout for each microbatch of each DP domain, `a2e[microbatch][domain]`."""

    plan_expert: ClassVar[Callable[[A2ELayout, MemoryPlan], None]] = A2ELayout.plan_expert

    def __init__(self, team: Team, tallies: list[list[Tally]]) -> None:
        self.team, self.tallies, self._walk = team, tallies, team.sizes.walk
        self.a2e = [
            [self._layout(m, d) for d in range(self._walk.num_domains)]
            for m in range(self._walk.num_microbatches)
        ]
        for layout in (layout for by_domain in self.a2e for layout in by_domain):
            for die in layout.sides.attention:
                layout.plan_attention(team.pod.plan(die))
            for die in team.expert_dies:
                type(self).plan_expert(layout, team.pod.plan(die))
        layout = self.a2e[0][0]
        copies = min(layout.top_k, layout.sides.experts.max_experts_per_rank)
        self.max_rows = len(layout.sides.attention) * layout.max_tokens * copies

    def _layout(self, microbatch: int, domain: int) -> A2ELayout:
        return A2ELayout(
            sides=Sides(self.team.domain(domain), self.team.holders),
            name=f"a2e.mb{microbatch}.domain{domain}",
            pushes=self._walk.exchange == "push",
            **row_sizes(self.team),
        )

    @property
    def means(self) -> Means:
        """Carrier and timeout for the ends on both sides."""
        assert self._walk.carrier != "rdma"
        return Means(carrier=self._walk.carrier, timeout_ns=self._walk.timeout_ns)

    def attention_end(self, rank: DieRank, microbatch: int) -> Trampoline:
        """Make an attention die's end of A2E and E2A."""
        domain, index = divmod(rank, self.team.dies_per_domain)
        die = self.team.pod.dies[self.team.dies[rank]]
        side = AttentionSide(die, index, self.a2e[microbatch][domain], quantize_rows, self.means)
        return CountedSide(side, self.tallies[microbatch][domain])

    def expert_sides(self, index: int, kind: type[Side]) -> list[list[Any]]:
        """Make the ends of an expert die, by microbatch and domain."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        return [
            [kind(die, index, layout, quantize_rows, self.means) for layout in by_domain]
            for by_domain in self.a2e
        ]

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die that serves exchanges step by step."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        if self._walk.is_lockstep:
            from xdeepserve.engine.run.lockstep.disaggregated import LockstepExpertProgram

            return LockstepExpertProgram(die, mem, [], [], threads, Computing(die), reports)
        sides = self.expert_sides(index, ExpertSide)
        return ExpertProgram(die, mem, sides, self.tallies, threads, Computing(die), reports)


class Flowing(ByTrampolines):
    """Way by A2E and E2A without barriers: no die waits for dies that its tokens do not go to."""

    plan_expert = A2ELayout.plan_flow_expert

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die in dataflow mode, which serves tokens in the order they come."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        flows, trampolines = (
            [side for by_domain in self.expert_sides(index, kind) for side in by_domain]
            for kind in (FlowExpertSide, FlowTrampoline)
        )
        return DataflowExpertProgram(
            die, mem, flows, trampolines, self._walk.num_domains, threads, Computing(die), reports
        )


def way_of(walk: WalkSizes) -> Callable[[Team, list[list[Tally]]], Way]:
    """Return the factory for the way of a TE."""
    if walk.carrier == "rdma":
        by_cards: Callable[[Team, list[list[Tally]]], Way] = wings.part("way over cards")
        return by_cards
    return WAYS[walk.turns]


WAYS: dict[Turns, Callable[[Team, list[list[Tally]]], Way]] = {
    "away-and-back": ByTrampolines,
    "dataflow": Flowing,
    "services": ByServices,
}
