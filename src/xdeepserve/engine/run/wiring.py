"""A TE's memories and the ends of its exchanges: all that its dies have besides their programs.

`ByteWiring` has real memories, the protocols of `comm` and kernels that compute; `ClockWiring` (clock/) has
shapes, meetings and formulas. Programs are the same on both.
"""

from __future__ import annotations

from functools import partial

import msgspec

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import CollectiveLayout
from xdeepserve.comm.exchange_choices import Carrier
from xdeepserve.comm.means import Means
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.sampler import Chooser, Sampler
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import Exchange, GroupEnd, Trampoline
from xdeepserve.engine.walk.runner import Computing, Pace
from xdeepserve.engine.walk.schedule import microbatch_cores
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.among.real import Among
from xdeepserve.engine.ways.group.real import Groups
from xdeepserve.engine.ways.services.real import SeatsOutside, Services
from xdeepserve.engine.ways.to_experts import RealWay, way_of
from xdeepserve.engine.ways.trampolines.real import Trampolines
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


class ByteWiring:
    """Wiring with real bytes; constructing it plans the exchanges' buffers on all dies."""

    def __init__(self, team: Team) -> None:
        self.team, walk, placed = team, team.sizes.walk, team.sizes.experts
        self.has_shared, self.has_replicas = not placed.num_shared_dies, False
        top_k, holders = team.config.num_experts_per_tok, max(1, placed.num_primary_dies)
        self._tallies = [
            [Tally(team.pod.spec_of(team.dies[0]), holders, top_k) for _ in range(walk.num_domains)]
            for _ in range(walk.num_microbatches)
        ]
        self.among: list[Among] = []  # one, or one for each microbatch that overlaps
        self.away: RealWay | None = None  # to experts on dies of their own
        self.collectives = self._plan_collectives()  # none, one, or as with `among`
        self._groups = [Groups(partial(self._collectives_of, layout)) for layout in self.collectives]
        if placed.where == "away":
            self.away = way_of(walk).real(team, self._tallies)
        elif placed.where == "among":
            self.among = [Among(team, mark, self._tallies[m][0]) for m, mark in enumerate(self._marks)]

    # ---- plans --------------------------------------------------------------------------------------

    @property
    def _marks(self) -> list[str]:
        """Suffixes of the buffer names of each overlapping microbatch."""
        num_parts = self.team.sizes.walk.num_parts
        return [""] if num_parts == 1 else [f".mb{m}" for m in range(num_parts)]

    def _plan_collectives(self) -> list[CollectiveLayout]:
        """Plan the collectives among ranks that share projections; there are none if no ranks do.

        Rows of hidden states, of latents or of head outputs are exchanged; buffers fit the widest.
        """
        c, groups = self.team.config, self.team.sizes.groups
        size = groups.num_sharing
        if size == 1:
            return []
        heads = c.num_attention_heads * c.v_head_dim
        widest = max(c.hidden_size * size, c.down_columns * size, heads)
        nbytes = groups.max_slice * widest * 4
        layouts = [CollectiveLayout(size, nbytes, name=f"tp{mark}") for mark in self._marks]
        for layout in layouts:
            for die in self.team.dies:
                layout.plan(self.team.pod.plan(die))
        return layouts

    @property
    def a2e(self) -> list[list[A2ELayout]]:
        """Buffers of A2E and E2A, by microbatch and domain; empty where tokens do not go that way."""
        return self.away.a2e if isinstance(self.away, Trampolines) else []

    @property
    def services(self) -> ServiceLayout | None:
        """Memory layout shared by clients and servers where experts are services; None elsewhere."""
        return self.away.layout if isinstance(self.away, Services) else None

    @property
    def seats_outside(self) -> SeatsOutside | None:
        """Seats of expert servers in processes outside of the pod; None where servers are dies of the pod."""
        return self.away.seats_outside if isinstance(self.away, Services) else None

    def memory(self, rank: DieRank) -> DieMemory:
        """Plan the memory of a die with a DP group."""
        team = self.team
        return DieMemory(team.pod.plan(team.dies[rank]).app, team, rank)

    def expert_memory(self, index: int) -> ExpertMemory:
        """Plan the memory of an expert die that is there from the start."""
        return self.server_memory(index, self.team.expert_at[index])

    def server_memory(self, index: int, die: int) -> ExpertMemory:
        """Plan the memory of expert die number `index` on the given die."""
        team = self.team
        assert self.away is not None
        plan, max_rows = team.pod.plan(die), self.away.max_rows
        return ExpertMemory(
            *(plan, team.config, team.recipe, team.sizes.experts, index, team.sizes.walk.num_items),
            max_rows=max_rows,
            is_flow=team.sizes.walk.flows,
        )

    # ---- ends ---------------------------------------------------------------------------------------

    def _die(self, rank: DieRank) -> Die:
        return self.team.pod.dies[self.team.dies[rank]]

    def pace(self, rank: DieRank, microbatch: int | None) -> Pace:
        """Return the pace for dies that compute: kernels run, then their virtual time passes."""
        by_cores = microbatch is not None and self.team.sizes.walk.overlap == "cores"
        return Computing(self._die(rank), shares_hbm=by_cores)

    def exchange(self, rank: DieRank, pace: Pace, microbatch: int | None) -> Exchange:
        """Make a rank's end of dispatch and combine; for a whole step (None) with the buffers of the first
        microbatch.

        If microbatches overlap by cores, it uses the AIV cores of stream 1. If they overlap by engines, the
        DMA engine carries pulled rows, and AIV cores carry pushed ones.
        """
        die, walk = self._die(rank), self.team.sizes.walk
        cores: int | None = None
        carrier: Carrier = "mte"
        if walk.overlap == "engines" and microbatch is not None:
            carrier = "urma"
        elif walk.overlap == "cores" and microbatch is not None:
            cores = microbatch_cores(die, walk.attention_cores, False, "aiv")
        lane = "XCCL" if walk.overlap is None else f"XCCL microbatch {microbatch or 0}"
        means = Means(cores, carrier, walk.timeout_ns, lane)
        return self.among[microbatch or 0].end(rank, means)

    def group(self, rank: DieRank, pace: Pace, microbatch: int) -> GroupEnd:
        """Make a rank's end of its group's collectives."""
        return self._groups[microbatch].end(rank)

    def _collectives_of(self, layout: CollectiveLayout, rank: DieRank) -> Collectives:
        """Make the collectives of a rank.

        They belong to attention, so with overlap by cores they use the AIV cores of stream 0.
        """
        die, walk = self._die(rank), self.team.sizes.walk
        cores = None
        if walk.overlap == "cores":
            cores = microbatch_cores(die, walk.attention_cores, True, "aiv")
        return Collectives(die, self.team.sharing(rank), layout, Means(cores, timeout_ns=walk.timeout_ns))

    def trampoline(self, rank: DieRank, pace: Pace, microbatch: int) -> Trampoline:
        """Make an attention die's end of the way to experts on dies of their own."""
        assert self.away is not None
        return self.away.attention_end(rank, microbatch, pace)

    def shared_expert(self, rank: DieRank) -> int | None:
        """Return the physical number of the shared expert for a rank's tokens; None if it is on the same
        die."""
        return self.team.shared_expert(rank)

    def chooser(self, rank: DieRank, mem: DieMemory) -> Chooser:
        """Return the sampler for drawing tokens from logits."""
        return Sampler(rank, mem)

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die, with its end of the way."""
        assert self.away is not None
        die = self.team.pod.dies[mem.die]
        if self.team.sizes.walk.is_lockstep:
            from xdeepserve.engine.run.lockstep.disaggregated import LockstepExpertProgram

            return LockstepExpertProgram(die, mem, [], [], threads, Computing(die), reports)
        return self.away.expert_program(index, mem, threads, Computing(die), reports)
