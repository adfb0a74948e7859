"""A pod for timing-only runs: the same dies, groups and programs, and next to no memory."""

from __future__ import annotations

import msgspec

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.build import PodPlan, Progress, TEPlan
from xdeepserve.engine.deployment import Deployment
from xdeepserve.engine.lanes import DEFAULT_DIES
from xdeepserve.engine.programs.ops import Threads
from xdeepserve.engine.sizes import Sizes
from xdeepserve.engine.timing.cost import LayerCost
from xdeepserve.engine.timing.exchange import ExchangeHub, TimingXCCL
from xdeepserve.engine.timing.groups import (
    CollectiveHub,
    TimingGroupExecutor,
    TimingGroupPipelineExecutor,
    TimingSPExecutor,
    TimingSPPipelineExecutor,
    TimingTPExecutor,
    TimingTPGroup,
    TimingTPPipelineExecutor,
)
from xdeepserve.engine.timing.memory import ModelShapes, TimingExpertMemory, TimingMemory
from xdeepserve.engine.timing.programs import (
    TimingAttentionExecutor,
    TimingExecutor,
    TimingExpertProgram,
    TimingPipelineExecutor,
)
from xdeepserve.engine.timing.routing import TimingConfig
from xdeepserve.engine.timing.timeline import Timeline
from xdeepserve.engine.timing.trampoline import TimingAttentionSide, TimingExpertSide, TrampolineHub
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.atlas import SERVER
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.queue import Queue
from xdeepserve.hw.topology import Topology
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe


class TimingTEPlan(TEPlan):
    """The dies of one TE."""

    def __init__(
        self,
        pod: Pod,
        config: ModelConfig,
        recipe: Recipe,
        sizes: Sizes,
        cost: LayerCost,
        timing: TimingConfig,
    ) -> None:
        self.pod, self.config, self.recipe, self.sizes = pod, config, recipe, sizes
        self.cost, self.timing, self._load_mode = cost, timing, "never"
        self.dies, end = tuple(sizes.dies), sizes.dies.stop
        self.expert_dies = tuple(range(end, end + sizes.num_expert_dies))
        self.exchanges, self.collectives, self.a2e = [], [], []
        held = 0 if sizes.has_expert_dies else max(map(len, sizes.experts_of))
        shapes = ModelShapes(config, recipe, sizes, held)
        self.memories = [TimingMemory(pod.plan(die).app, shapes, rank) for rank, die in enumerate(self.dies)]
        self.expert_memories = [
            TimingExpertMemory(pod.plan(die), config, recipe, sizes, index)
            for index, die in enumerate(self.expert_dies)
        ]
        count = sizes.num_microbatches if sizes.overlap is not None else 1
        self.groups = [  # collectives of each microbatch of each group
            [self._collective_hub(self.dies[i : i + sizes.tp]) for _ in range(count)]
            for i in range(0, sizes.num_dies, sizes.tp)
        ]
        self.hubs = [ExchangeHub(pod.clock, cost, self.dies, timing, m) for m in range(count)]
        per_domain = sizes.num_dies // sizes.num_domains
        num_routed = len(sizes.experts_of)
        self.trampolines = [
            [
                TrampolineHub(
                    pod.clock,
                    cost,
                    self.dies[d * per_domain : (d + 1) * per_domain],
                    self.expert_dies,
                    num_routed,
                    m * sizes.num_domains + d,
                    timing,
                )
                for d in range(sizes.num_domains)
            ]
            for m in range(sizes.num_microbatches if sizes.has_expert_dies else 0)
        ]

    def _collective_hub(self, dies: tuple[int, ...]) -> CollectiveHub:
        cost = CollectiveCost(dies, self.cost.spec, self.pod.topology)
        return CollectiveHub(self.pod.clock, cost, dies)

    @property
    def _has_exchange(self) -> bool:
        return not self.sizes.has_expert_dies and self.hubs[0].num_dies > 1 and any(self.sizes.experts_of)

    @property
    def _timing_kind(self) -> type[TimingExecutor]:
        if self.sizes.has_expert_dies:
            return TimingAttentionExecutor
        is_tp, overlaps = self.sizes.tp_mode == "tp", self.sizes.overlap is not None
        if self.sizes.tp > 1 and overlaps:
            return TimingTPPipelineExecutor if is_tp else TimingSPPipelineExecutor
        if self.sizes.tp > 1:
            return TimingTPExecutor if is_tp else TimingSPExecutor
        return TimingPipelineExecutor if overlaps else TimingExecutor

    def executors(self, threads: Threads, reports: Queue[msgspec.Struct]) -> list[TimingExecutor]:  # type: ignore[override]
        made = []
        per_domain = self.sizes.num_dies // self.sizes.num_domains
        for rank, (die, mem) in enumerate(zip(self.dies, self.memories, strict=True)):
            handle = self.pod.dies[die]
            timeline, xccl = Timeline(handle), None
            if self._has_exchange and self.sizes.overlap is None:
                xccl = TimingXCCL(timeline, rank, self.hubs[0])
            executor = self._timing_kind(rank, handle, mem, xccl, threads, reports)  # type: ignore[arg-type]
            if isinstance(executor, TimingGroupExecutor):
                hubs = self.groups[rank // self.sizes.tp]
                executor.group = TimingTPGroup(timeline, rank % self.sizes.tp, hubs[0])
                executor.first_die = self.dies[self.group_of(rank)][0]
                if isinstance(executor, TimingGroupPipelineExecutor):
                    executor.part_hubs = hubs
            executor.use(timeline, self.cost, self.timing)
            if isinstance(executor, TimingPipelineExecutor):
                by_engines = self.sizes.overlap == "engines"
                exchanges = [
                    TimingXCCL(Timeline(handle), rank, hub, "SDMA" if by_engines else f"XCCL microbatch {m}")
                    if self._has_exchange
                    else None
                    for m, hub in enumerate(self.hubs)
                ]
                executor.use_microbatches(exchanges, self.cost)
            elif isinstance(executor, TimingAttentionExecutor):
                domain, index = divmod(rank, per_domain)
                executor.sides = [
                    TimingAttentionSide(timeline, index, by_domain[domain])  # type: ignore[misc]
                    for by_domain in self.trampolines
                ]
                executor.shared_expert = None  # counted by the hub
                executor.layers.set_domain(domain)
            made.append(executor)
        return made

    def gang(self, *_: object) -> None:
        """Nobody: these runs are quick without one."""

    def expert_programs(self, threads: Threads, reports: Queue[msgspec.Struct]) -> list[TimingExpertProgram]:  # type: ignore[override]
        made = []
        for index, (die, mem) in enumerate(zip(self.expert_dies, self.expert_memories, strict=True)):
            handle = self.pod.dies[die]
            sides = [
                [TimingExpertSide(handle, index, hub) for hub in by_domain] for by_domain in self.trampolines
            ]
            program = TimingExpertProgram(handle, mem, sides, threads, reports)  # type: ignore[arg-type]
            program.cost = self.cost
            made.append(program)
        return made


class TimingPodPlan(PodPlan):
    """A pod whose runs take time and compute nothing. Any checkpoint will do: only its config is read."""

    needs_weights = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        deployment: Deployment,
        timing: TimingConfig | None = None,
        clock_seed: int | None = None,
        trace: bool = False,
        trace_dies: int = DEFAULT_DIES,
    ) -> None:
        self.timing = timing or TimingConfig()
        if deployment.experts is not None and deployment.experts.redundant_slots:
            raise DeploymentError(
                f"deployment {deployment.name}: timing-only runs draw the load of dies by a seed and a skew, "
                "and have no experts.redundant_slots"
            )
        super().__init__(checkpoint, deployment, "int8", clock_seed, trace, trace_dies=trace_dies)

    def _plan_te(self, sizes: Sizes) -> TimingTEPlan:
        spec = self.pod.spec_of(sizes.first_die)
        topology = Topology() if sizes.hardware == "cm384" else SERVER
        cost = LayerCost(self.config, spec, CommCost(spec, topology))
        return TimingTEPlan(self.pod, self.config, self.recipe, sizes, cost, self.timing)

    @property
    def kv_weight(self) -> float:
        mem = self.tes[0].memories[0]
        assert isinstance(mem, TimingMemory)
        return mem.piece_weight

    def materialise(self, progress: Progress | None = None) -> None:
        """Allocate index lists, results and flags; there are no weights."""
        self.pod.materialise()
        for te in self.tes:
            for die, mem in te.all_memories:
                mem.materialise(self.pod.memory(die))
