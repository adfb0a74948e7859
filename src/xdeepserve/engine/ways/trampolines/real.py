"""Way to experts on dies of their own by A2E and E2A, with real bytes and barriers, by steps (XDS 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.side import Side
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import ExpertEnd, Trampoline
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.engine.ways.away import counted, row_sizes
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


class Trampolines:
    """Plans a layout for each microbatch of each DP domain, `a2e[microbatch][domain]`, and makes the ends."""

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
            pushes=self._walk.pushes,
            **row_sizes(self.team),
        )

    @property
    def means(self) -> Means:
        """Carrier and timeout for the ends on both sides."""
        assert self._walk.carrier != "rdma"
        return Means(carrier=self._walk.carrier, timeout_ns=self._walk.timeout_ns)

    def attention_end(self, rank: DieRank, microbatch: int, pace: Pace) -> Trampoline:
        """Make an attention die's end of A2E and E2A."""
        domain, index = divmod(rank, self.team.dies_per_domain)
        die = self.team.pod.dies[self.team.dies[rank]]
        side = AttentionSide(die, index, self.a2e[microbatch][domain], quantize_rows, self.means)
        return counted(side, self.tallies[microbatch][domain])

    def expert_sides(self, index: int, kind: type[Side]) -> list[list[Any]]:
        """Make the sides of an expert die, by microbatch and domain."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        return [
            [kind(die, index, layout, quantize_rows, self.means) for layout in by_domain]
            for by_domain in self.a2e
        ]

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, pace: Pace, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die that serves exchanges step by step."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        ends = [
            [ExpertEnd(side.a2e, side.e2a, side.reset) for side in by_domain]
            for by_domain in self.expert_sides(index, ExpertSide)
        ]
        return ExpertProgram(die, mem, ends, self.tallies, threads, pace, reports)
