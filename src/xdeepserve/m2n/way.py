"""The way to experts over network cards, by M2N, for attention and experts on different hardware."""

from __future__ import annotations

import msgspec

from xdeepserve.comm.means import Means
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import ExpertEnd, Trampoline
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.engine.ways.away import counted, row_sizes
from xdeepserve.hw.queue import Queue
from xdeepserve.m2n.layout import M2NLayout
from xdeepserve.m2n.sides import M2NAttention, M2NExpert, M2NMesh
from xdeepserve.step.linear import Threads


def m2n_layout(team: Team, microbatch: int, domain: int) -> M2NLayout:
    """Make the layout of M2N between a domain's attention dies and all expert dies."""
    name = f"m2n.mb{microbatch}.domain{domain}"
    return M2NLayout(team.domain(domain), team.holders, name=name, **row_sizes(team))


class M2NWay:
    """M2N of each microbatch of each domain, each with its own buffers and queues."""

    def __init__(self, team: Team, tallies: list[list[Tally]]) -> None:
        self.team, self.tallies, self._walk = team, tallies, team.sizes.walk
        self.layouts = [
            [m2n_layout(team, m, d) for d in range(self._walk.num_domains)]
            for m in range(self._walk.num_microbatches)
        ]
        for layout in (layout for by_domain in self.layouts for layout in by_domain):
            for die in layout.attention:
                layout.plan_attention(team.pod.plan(die))
            for die in team.expert_dies:
                layout.plan_expert(team.pod.plan(die))
        self.max_rows = len(layout.attention) * layout.rows.rows_per_block
        self._meshes: dict[str, M2NMesh] = {}

    def _mesh(self, layout: M2NLayout) -> M2NMesh:
        """Return the queues of a layout; made on first use, when memories exist."""
        if layout.name not in self._meshes:
            self._meshes[layout.name] = M2NMesh(self.team.pod.rdma, layout)
        return self._meshes[layout.name]

    @property
    def means(self) -> Means:
        """Means of communication, used by both sides."""
        return Means(timeout_ns=self._walk.timeout_ns)

    def attention_end(self, rank: DieRank, microbatch: int, pace: Pace) -> Trampoline:
        """Make the end of M2N on an attention die."""
        domain, index = divmod(rank, self.team.dies_per_domain)
        mesh = self._mesh(self.layouts[microbatch][domain])
        side = M2NAttention(self.team.pod.dies[self.team.dies[rank]], index, mesh, quantize_rows, self.means)
        return counted(side, self.tallies[microbatch][domain])

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, pace: Pace, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make an expert die's program: three persistent kernels; CPUs send and receive between them."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        sides = [
            [M2NExpert(die, index, self._mesh(layout), quantize_rows, self.means) for layout in by_domain]
            for by_domain in self.layouts
        ]
        ends = [[ExpertEnd(side.a2e, side.e2a, side.reset) for side in by_domain] for by_domain in sides]
        return ExpertProgram(die, mem, ends, self.tallies, threads, pace, reports)
