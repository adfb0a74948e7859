"""Stand-ins for memory, exchanges and sampling in timing-only runs."""

from __future__ import annotations

import msgspec
import numpy as np

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.exchange_choices import EXCHANGES
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.sampler import Chooser
from xdeepserve.engine.die.shape_memory import ModelShapes, ShapeExpertMemory, ShapeMemory
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.walk.ends import Exchange, GroupEnd, Trampoline
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.among.clock import AmongClock, DrawnLoads
from xdeepserve.engine.ways.flow.clock import FlowClock
from xdeepserve.engine.ways.group.clock import GroupClock
from xdeepserve.engine.ways.routing import PlacedRouting, TimingConfig, generator
from xdeepserve.engine.ways.to_experts import ClockWay, way_of
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.step.linear import Threads

DUMMY_TOKEN = 7  # what every sampled token is


class DummyChooser:
    """Chooser of timing-only runs: dummy tokens, and drafts accepted by chance, with a seed."""

    def __init__(self, mem: DieMemory, timing: TimingConfig, die: int) -> None:
        self.mem, self.timing, self.die = mem, timing, die
        self.faults: dict[int, XDeepServeError] = {}

    def choose(self, plan: StepPlan, logits: Array) -> None:
        """Write dummy tokens and seeded numbers of accepted drafts to the result buffers."""
        drafts, most = np.asarray(plan.num_drafts), max(1, self.mem.steps.mtp)
        self.mem.result("sampled", plan.step, len(plan.logit_rows))[:] = DUMMY_TOKEN
        rng = generator(self.timing.seed, 1 << 32 | self.die, plan.step)
        is_right = rng.random((len(drafts), most)) < self.timing.acceptance
        is_offered = np.arange(most) < drafts[:, None]
        # A draft counts only if all before it do.
        accepted = np.logical_and.accumulate(is_right & is_offered, axis=1).sum(axis=1)
        self.mem.result("num_accepted", plan.step, len(drafts))[:] = accepted

    def draw(self, out: Array, logits: Array, plan: StepPlan, rows: object, ahead: int) -> None:
        """Write dummy tokens to `out`, without any logits."""
        out[:] = DUMMY_TOKEN


def _check_placed(timing: TimingConfig, setting: str) -> None:
    """Raise DeploymentError if the TE's dies are a sample of more, since experts have no known places
    then."""
    for key in ("of_dies", "routed_dies"):
        if getattr(timing, key) is not None:
            raise DeploymentError(f"timing: {key} and {setting} exclude each other")


class ClockWiring:
    """Wiring of timing-only runs: shapes, meetings and formulas.

    `servers_of` is the wiring of a TE whose expert servers this one shares.
    """

    services: ServiceLayout | None = None  # which time alone does not know

    def __init__(self, team: Team, timing: TimingConfig, servers_of: ClockWiring | None = None) -> None:
        self.team, self.timing = team, timing
        walk, experts, pod, config = team.sizes.walk, team.sizes.experts, team.pod, team.config
        self._shapes = ModelShapes(team)
        spec = pod.spec_of(team.dies[0])
        sizes = config.hidden_size, config.int8_answers
        cost = CommCost(spec, team.topology, *sizes, way=walk.exchange)
        self.timelines: dict[int, list[Timeline]] = {rank: [] for rank in team.ranks}
        self.expert_timelines: list[Timeline] = []  # of dies that have experts alone
        timeout_ns, held = walk.timeout_ns, [len(own) for own in experts.slots_of]
        self._placed: list[PlacedRouting] = []  # of each domain, where there are redundant slots
        is_away = experts.where == "away"
        if experts.has_slots or (is_away and walk.flows):
            _check_placed(timing, "experts.redundant_slots" if experts.has_slots else walk.turns)
            domains = range(walk.num_domains)
            self._placed = [PlacedRouting(config, experts, timing, team.vacant) for _ in domains]
        placed = self._placed[0] if self._placed else None
        primary = experts.num_primary_dies
        shared = experts.num_shared_dies if experts.where == "among" else 0
        if shared:
            _check_placed(timing, "experts.shared_dies")
        lanes = {None: "XCCL", "engines": "SDMA"}
        self.loads = [
            DrawnLoads(cost, config, len(team.dies), timing, m, held, placed, primary, shared)
            for m in range(walk.num_parts)
        ]
        self.among = [
            AmongClock(
                *(pod.clock, team.dies, timeout_ns, loads.settle, config.num_experts_per_tok),
                lanes.get(walk.overlap, f"XCCL microbatch {m}"),
                EXCHANGES[walk.exchange],
            )
            for m, loads in enumerate(self.loads)
        ]
        self.has_shared = not (experts.where == "among" and self.loads[0].num_shared)
        # A sample's pod may have redundant experts, beside dies with copies of the shared one.
        num_routed, num_dies = timing.routed_dies or 0, timing.of_dies or 0
        self.has_replicas = config.n_routed_experts < num_routed < num_dies and experts.where == "among"
        self._groups = {
            group: [
                GroupClock(pod.clock, CollectiveCost(group, spec, pod.topology), group, timeout_ns)
                for _ in range(walk.num_parts)
            ]
            for group in {team.sharing(rank) for rank in team.ranks}
        }
        self.away: ClockWay | None = None
        if servers_of is not None and isinstance(servers_of.away, FlowClock):
            self.away = servers_of.away.shared_with(team, cost)
        elif is_away:
            self.away = way_of(walk).clock(team, cost, timing, self._placed)

    def memory(self, rank: DieRank) -> DieMemory:
        """Plan a die's memory: index lists and results; all else is a shape."""
        domain, index = divmod(rank, self.team.dies_per_domain)
        routing = self._placed[domain] if self._placed and not index else None
        return ShapeMemory(self.team.pod.plan(self.team.dies[rank]).app, self._shapes, rank, routing)

    def expert_memory(self, index: int) -> ExpertMemory:
        """Plan an expert die's memory: flags; all else is a shape."""
        team = self.team
        plan = team.pod.plan(team.expert_at[index])
        return ShapeExpertMemory(
            plan, team.config, team.recipe, team.sizes.experts, index, team.sizes.walk.num_items
        )

    def pace(self, rank: DieRank, microbatch: int | None) -> Pace:
        """Create a timeline for the die, or for one of its overlapping microbatches."""
        overlap = None if microbatch is None else self.team.sizes.walk.overlap
        die = self.team.pod.dies[self.team.dies[rank]]
        timeline = Timeline(die, takes_turns=overlap == "engines", shares_hbm=overlap == "cores")
        self.timelines[rank].append(timeline)
        return timeline

    def exchange(self, rank: DieRank, pace: Pace, microbatch: int | None) -> Exchange:
        """Make a rank's end of dispatch and combine, as meetings; a whole step (None) has those of the first
        microbatch."""
        assert isinstance(pace, Timeline)
        return self.among[microbatch or 0].end(rank, pace)

    def group(self, rank: DieRank, pace: Pace, microbatch: int) -> GroupEnd:
        """Make a rank's end of its DP group's collectives, as meetings."""
        assert isinstance(pace, Timeline)
        group = self._groups[self.team.sharing(rank)][microbatch]
        return group.end(rank % self.team.sizes.groups.num_sharing, pace)

    def trampoline(self, rank: DieRank, pace: Pace, microbatch: int) -> Trampoline:
        """Make an attention die's end of the way to experts, as meetings or sendings."""
        assert isinstance(pace, Timeline)
        assert self.away is not None
        return self.away.attention_end(rank, microbatch, pace)

    def shared_expert(self, rank: DieRank) -> int | None:
        """Return None: in time-only runs the hub counts the tokens of the shared expert."""

    def chooser(self, rank: DieRank, mem: DieMemory) -> Chooser:
        """Return a chooser with the random numbers of the DP group's first die, the same on all its ranks."""
        return DummyChooser(mem, self.timing, self.team.group_of(rank)[0])

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die, whose experts only take time."""
        assert self.away is not None
        self.expert_timelines.append(Timeline(self.team.pod.dies[self.team.expert_at[index]]))
        return self.away.expert_program(index, mem, threads, self.expert_timelines[-1], reports)
