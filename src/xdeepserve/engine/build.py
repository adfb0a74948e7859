"""From a model and a deployment to a pod: sizes first, then memory, then weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import CollectiveLayout
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.token_flow import FlowAttentionSide, FlowExpertSide
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.balance.storage import ExpertStorage
from xdeepserve.engine.balance.trigger import EPLBTrigger
from xdeepserve.engine.deployment import Deployment
from xdeepserve.engine.lanes import DEFAULT_DIES, name_lanes
from xdeepserve.engine.lockstep.colocated import ColocatedGang
from xdeepserve.engine.lockstep.disaggregated import DisaggregatedGang
from xdeepserve.engine.lockstep.gang import Gang
from xdeepserve.engine.lockstep.kernels.team import HAS_TEAMS
from xdeepserve.engine.lockstep.monolithic import MonolithicGang
from xdeepserve.engine.lockstep.programs import LockstepExecutor, LockstepExpertProgram
from xdeepserve.engine.programs.attention import AttentionExecutor
from xdeepserve.engine.programs.dataflow import DataflowExpertProgram
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.expert import ExpertMemory, ExpertProgram
from xdeepserve.engine.programs.group_pipeline import (
    GroupPipelineExecutor,
    MicrobatchSPLayers,
    MicrobatchTPLayers,
    SPPipelineExecutor,
    collective_cores,
)
from xdeepserve.engine.programs.layers import Layers
from xdeepserve.engine.programs.memory_plan import DieMemory
from xdeepserve.engine.programs.ops import Threads
from xdeepserve.engine.programs.pipeline import MicrobatchLayers, PipelineExecutor, exchange_means
from xdeepserve.engine.programs.sequence_parallel import SPExecutor, SPLayers
from xdeepserve.engine.programs.tensor_parallel import TPLayers
from xdeepserve.engine.programs.tp_group import GroupExecutor, GroupLayers, TPGroup
from xdeepserve.engine.programs.workspace import Workspace
from xdeepserve.engine.sizes import Sizes, fit
from xdeepserve.errors import CheckpointError, DeploymentError
from xdeepserve.hw.atlas import atlas_a2
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pages import SharedPages, prefer_huge_pages
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.queue import Queue
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.sharding import WHOLE
from xdeepserve.model.weights import Recipe, Store, fill, iter_weights, weight_specs

Progress = Callable[[int, int], None]  # bytes done, bytes in all
G = TypeVar("G", bound=GroupLayers)


class TEPlan:
    """The dies of one TE: their memories, and how they exchange tokens.

    Every `sizes.tp` of `dies` are a DP group. `expert_dies`, where MoE and attention are apart, come after.
    """

    def __init__(
        self, pod: Pod, checkpoint: Checkpoint, recipe: Recipe, sizes: Sizes, load_mode: str
    ) -> None:
        self.pod, self.checkpoint, self.recipe, self.sizes = pod, checkpoint, recipe, sizes
        self.config = config = checkpoint.config
        self._load_mode = load_mode
        self.dies, end = tuple(sizes.dies), sizes.dies.stop
        self.expert_dies = tuple(range(end, end + sizes.num_expert_dies))
        self.exchanges: list[tuple[Group, Layout]] = []  # one, or one for each microbatch that overlaps
        self.a2e: list[list[A2ELayout]] = []  # by microbatch and domain
        self.collectives = self._plan_collectives() if sizes.tp > 1 else []  # one, or as with exchanges
        if sizes.has_expert_dies:
            self.a2e = self._plan_a2e()
        elif sizes.num_dies > 1 and any(sizes.experts_of):
            names = ["xccl"]
            if sizes.overlap is not None:
                names = [f"xccl.mb{m}" for m in range(sizes.num_microbatches)]
            self.exchanges = [self._plan_exchange(name) for name in names]
        self.memories = [
            DieMemory(pod.plan(die).app, config, recipe, sizes, rank) for rank, die in enumerate(self.dies)
        ]
        rows = self._max_expert_rows
        self.expert_memories = [
            ExpertMemory(pod.plan(die), config, recipe, sizes, index, rows)
            for index, die in enumerate(self.expert_dies)
        ]
        if sizes.num_host_blocks:
            for die, mem in zip(self.dies, self.memories, strict=True):
                host = pod.topology.host(pod.topology.server_of(die))
                mem.plan_host(pod.plan(host).app, die)
        for die, holder in self.all_memories:
            if holder.redundant is not None:
                host = pod.topology.host(pod.topology.server_of(die))
                holder.redundant.plan_staging(pod.plan(host).app, die)

    def _plan_exchange(self, name: str) -> tuple[Group, Layout]:
        """Dispatch and combine between all dies: a physical expert lives on the rank whose slots hold it."""
        sizes = self.sizes
        group = Group(
            dies=self.dies,
            expert_rank=tuple(rank for rank, slots in enumerate(sizes.slots_of) for _ in slots),
        )
        layout = Layout.for_group(
            group,
            max_tokens=sizes.max_slice,
            top_k=self.config.num_experts_per_tok,
            hidden=self.config.hidden_size,
            quantize=self.recipe == "int8",
            name=name,
        )
        for die in self.dies:
            layout.plan(self.pod.plan(die))
        return group, layout

    def _plan_collectives(self) -> list[CollectiveLayout]:
        """What the ranks of a TP group exchange: rows of hidden states, of latents, or of head outputs."""
        c, sizes = self.config, self.sizes
        latents = (c.q_lora_rank or c.hidden_size) + c.kv_lora_rank + c.qk_rope_head_dim
        heads = c.num_attention_heads * c.v_head_dim
        widest = max(c.hidden_size * sizes.tp, latents * sizes.tp, heads)
        names = ["tp"] if sizes.overlap is None else [f"tp.mb{m}" for m in range(sizes.num_microbatches)]
        layouts = [CollectiveLayout(sizes.tp, sizes.max_slice * widest * 4, name=name) for name in names]
        for layout in layouts:
            for die in self.dies:
                layout.plan(self.pod.plan(die))
        return layouts

    @property
    def spec(self) -> Spec:
        """That of its dies."""
        return self.pod.spec_of(self.dies[0])

    def group_of(self, rank: int) -> slice:
        """The ranks of the DP group that a rank belongs to."""
        first = rank - rank % self.sizes.tp
        return slice(first, first + self.sizes.tp)

    def _plan_a2e(self) -> list[list[A2ELayout]]:
        """A2E and E2A of each microbatch of each domain, with buffers of their own.

        Physical experts: the routed ones and their replicas, then one for each copy of the shared expert.
        """
        sizes = self.sizes
        held = [rank for rank, slots in enumerate(sizes.slots_of) for _ in slots]
        held += range(len(sizes.experts_of), sizes.num_expert_dies)
        experts = Group(dies=self.expert_dies, expert_rank=tuple(held))
        per_domain = sizes.num_dies // sizes.num_domains
        layouts = [
            [
                A2ELayout(
                    sides=Sides(self.dies[d * per_domain : (d + 1) * per_domain], experts),
                    max_tokens=-(-sizes.max_tokens // sizes.num_microbatches),
                    top_k=self.config.num_experts_per_tok + (sizes.num_shared_dies > 0),
                    hidden=self.config.hidden_size,
                    quantize=self.recipe == "int8",
                    name=f"a2e.mb{m}.domain{d}",
                )
                for d in range(sizes.num_domains)
            ]
            for m in range(sizes.num_microbatches)
        ]
        for by_domain in layouts:
            for layout in by_domain:
                is_flow = self.sizes.is_dataflow
                for die in layout.sides.attention:
                    (layout.plan_naive_attention if is_flow else layout.plan_attention)(self.pod.plan(die))
                for die in self.expert_dies:
                    (layout.plan_naive_expert if is_flow else layout.plan_expert)(self.pod.plan(die))
        return layouts

    @property
    def _max_expert_rows(self) -> int:
        """Token copies that one exchange can bring to an expert die."""
        if not self.a2e:
            return 0
        layout = self.a2e[0][0]
        copies = min(layout.top_k, layout.sides.experts.max_experts_per_rank)
        return len(layout.sides.attention) * layout.max_tokens * copies

    @property
    def all_memories(self) -> list[tuple[int, DieMemory | ExpertMemory]]:
        """Every die of the TE and what lies on it."""
        return [
            *zip(self.dies, self.memories, strict=True),
            *zip(self.expert_dies, self.expert_memories, strict=True),
        ]

    def executors(self, threads: Threads, reports: Queue[msgspec.Struct]) -> list[Executor]:
        """The programs of the dies with DP groups."""
        made, means = [], Means(timeout_ns=self.sizes.exchange_timeout_ns)
        for rank, (die, mem) in enumerate(zip(self.dies, self.memories, strict=True)):
            xccl = None
            if self.exchanges and self.sizes.overlap is None and not self.sizes.is_lockstep:
                xccl = XCCL(self.pod.dies[die], rank, *self.exchanges[0], quantize_rows, means)
            executor = self._executor_kind(rank, self.pod.dies[die], mem, xccl, threads, reports)
            if isinstance(executor, AttentionExecutor):
                self._connect(executor, rank)
            elif isinstance(executor, PipelineExecutor):
                executor.parts = self._microbatches(executor, rank, threads)
                if isinstance(executor, GroupExecutor):
                    executor.layers = self._group_layers(GroupLayers, executor, rank, None, threads, 0)
            elif isinstance(executor, GroupExecutor):
                kind = TPLayers if self.sizes.tp_mode == "tp" else SPLayers
                executor.layers = self._group_layers(kind, executor, rank, xccl, threads, 0)
            if self.sizes.has_expert_dies:
                executor.layers.set_domain(rank // (self.sizes.num_dies // self.sizes.num_domains))
            made.append(executor)
        return made

    @property
    def _executor_kind(self) -> type[Executor]:
        if self.sizes.is_lockstep:
            return LockstepExecutor
        if self.a2e:
            return AttentionExecutor
        is_tp = self.sizes.tp_mode == "tp"
        if self.sizes.overlap is not None:
            if not self.collectives:
                return PipelineExecutor
            return GroupPipelineExecutor if is_tp else SPPipelineExecutor
        if not self.collectives:
            return Executor
        return GroupExecutor if is_tp else SPExecutor

    def _microbatches(self, executor: PipelineExecutor, rank: int, threads: Threads) -> list[Layers]:
        """Layers for each microbatch, with an exchange of its own."""
        die, mem, w = executor.die, executor.mem, executor.weights
        parts: list[Layers] = []
        for m in range(self.sizes.num_microbatches):
            xccl = None
            if self.exchanges:
                cores, carrier = exchange_means(die, self.sizes)
                means = Means(cores, carrier, self.sizes.exchange_timeout_ns, f"XCCL microbatch {m}")
                xccl = XCCL(die, rank, *self.exchanges[m], quantize_rows, means)
            space = mem.layer_workspace(m)
            if self.collectives:
                kind = MicrobatchTPLayers if self.sizes.tp_mode == "tp" else MicrobatchSPLayers
                parts.append(self._group_layers(kind, executor, rank, xccl, threads, m, space))
            else:
                parts.append(MicrobatchLayers(die, mem, xccl, threads, w.cos, w.sin, space))
        return parts

    def _group_layers(
        self,
        kind: type[G],
        executor: Executor,
        rank: int,
        xccl: XCCL | None,
        threads: Threads,
        microbatch: int,
        workspace: Workspace | None = None,
    ) -> G:
        """Layers of a die of a DP group of several, with its end of the group's collectives."""
        die, mem, w = executor.die, executor.mem, executor.weights
        group = TPGroup(
            Collectives(
                die,
                self.dies[self.group_of(rank)],
                self.collectives[microbatch],
                Means(collective_cores(die, self.sizes), timeout_ns=self.sizes.exchange_timeout_ns),
            )
        )
        return kind(die, mem, xccl, threads, w.cos, w.sin, workspace, group=group)

    def _connect(self, executor: AttentionExecutor, rank: int) -> None:
        """Give an attention die its ends of A2E, and its copy of the shared expert."""
        domain, rank_in_domain = divmod(rank, self.sizes.num_dies // self.sizes.num_domains)
        means = Means(timeout_ns=self.sizes.exchange_timeout_ns)
        side = FlowAttentionSide if self.sizes.is_dataflow else AttentionSide
        executor.sides = [
            side(executor.die, rank_in_domain, by_domain[domain], quantize_rows, means)
            for by_domain in self.a2e
        ]
        executor.shared_expert = self._shared_expert(rank)

    def _shared_expert(self, rank: int) -> int | None:
        """The physical expert that an attention die's tokens take for the shared one."""
        copies = self.sizes.num_shared_dies
        return self.sizes.slots_of[-1].stop + rank % copies if copies else None

    def gang(
        self, executors: Sequence[Executor], programs: Sequence[ExpertProgram], threads: int
    ) -> Gang | None:
        """Who runs the layers of all these dies, if they run in lockstep."""
        if not self.sizes.is_lockstep:
            return None
        gang: Gang
        if self.a2e:
            shared = [self._shared_expert(rank) for rank in range(len(executors))]
            gang = apart = DisaggregatedGang(executors, programs, self.a2e, shared, threads)
            for index, program in enumerate(programs):
                assert isinstance(program, LockstepExpertProgram)
                program.gang, program.index, program.runs_per_step = apart, index, 1 + self.sizes.mtp
        elif len(executors) == 1:
            gang = MonolithicGang(executors, None, threads if HAS_TEAMS else 1)
        else:
            gang = ColocatedGang(executors, self.exchanges[0] if self.exchanges else None, threads)
        for executor in executors:
            assert isinstance(executor, LockstepExecutor)
            executor.gang = gang
        return gang

    def expert_programs(self, threads: Threads, reports: Queue[msgspec.Struct]) -> list[ExpertProgram]:
        """The programs of the expert dies."""
        if self.sizes.is_lockstep:
            return [
                LockstepExpertProgram(self.pod.dies[die], mem, [], threads, reports)
                for die, mem in zip(self.expert_dies, self.expert_memories, strict=True)
            ]
        means = Means(timeout_ns=self.sizes.exchange_timeout_ns)
        if self.sizes.is_dataflow:
            layouts = [layout for by_domain in self.a2e for layout in by_domain]
            return [
                DataflowExpertProgram(
                    self.pod.dies[die],
                    mem,
                    [
                        FlowExpertSide(self.pod.dies[die], index, layout, quantize_rows, means)
                        for layout in layouts
                    ],
                    threads,
                    reports,
                )
                for index, (die, mem) in enumerate(zip(self.expert_dies, self.expert_memories, strict=True))
            ]
        return [
            ExpertProgram(
                self.pod.dies[die],
                mem,
                [
                    [
                        ExpertSide(self.pod.dies[die], index, layout, quantize_rows, means)
                        for layout in by_domain
                    ]
                    for by_domain in self.a2e
                ],
                threads,
                reports,
            )
            for index, (die, mem) in enumerate(zip(self.expert_dies, self.expert_memories, strict=True))
        ]

    def reconfiguration(self, trigger: EPLBTrigger, reports: Queue[msgspec.Struct]) -> Reconfiguration:
        """What changes the replicas of experts; there must be slots for them."""
        gates = list(zip(self.dies, self.memories, strict=True))
        holders = [(die, mem) for die, mem in self.all_memories if mem.redundant is not None]
        storage = ExpertStorage(self.checkpoint, self.recipe, self.sizes)
        return Reconfiguration(self.pod, self.sizes, gates, holders, storage, trigger, reports)

    def load_cost(self) -> BlockLoadCost | None:
        """The cost model of loading cached blocks from host DRAM, if there are any there."""
        if not self.sizes.num_host_blocks or self._load_mode == "never":
            return None
        mem = self.memories[0]
        weights = sum(spec.nbytes for spec in mem.specs.values())
        return BlockLoadCost(self.spec, mem.block_nbytes, weights, is_always=self._load_mode == "always")


class PodPlan:
    """A pod that has been sized and checked, and holds no memory yet. Raises DeploymentError if it cannot be.

    `describe` tells what it will be; `materialise` allocates and loads it. `spec` is that of other hardware.
    `trace_dies` is how many dies of each role a trace shows (0: all).
    """

    needs_weights = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        deployment: Deployment,
        recipe: Recipe,
        clock_seed: int | None = None,
        trace: bool = False,
        spec: Spec | None = None,
        trace_dies: int = DEFAULT_DIES,
    ) -> None:
        if self.needs_weights and not checkpoint.has_weights:
            raise CheckpointError(
                f"model {checkpoint.name}: a configuration without weights; only timing-only runs "
                "(xdeepserve bench superpod, bench engine) can use it"
            )
        self.checkpoint, self.deployment, self.recipe = checkpoint, deployment, recipe
        self.config = checkpoint.config
        sizes = fit(deployment, self.config, has_redundant_slots=not self.needs_weights)
        self.max_model_len = sizes[0].max_model_len
        topology = Topology()
        needed = max(te.dies.stop + te.num_expert_dies for te in sizes)
        servers = max(topology.servers, -(-needed // topology.dies_per_server))
        topology = msgspec.structs.replace(topology, servers=servers)
        self.pod = Pod(topology, self._sized(spec or Spec()), Clock(clock_seed), Trace(is_on=trace))
        for te in sizes:
            if te.hardware == "910b":
                self.pod.equip(te.dies, self._sized(atlas_a2(te.num_dies)))
        self.tes = [self._plan_te(te) for te in sizes]
        name_lanes(self.pod, sizes, trace_dies)
        try:
            self.pod.memories.check(limit=physical_memory())
        except DeploymentError as error:
            raise DeploymentError(f"deployment {deployment.name}: {error}") from None

    def _sized(self, spec: Spec) -> Spec:
        """With the memory that the deployment says."""
        if self.deployment.hardware.hbm_mb is None:
            return spec
        hbm = Param(self.deployment.hardware.hbm_mb * 2**20, "B", "the deployment's hardware.hbm_mb")
        return msgspec.structs.replace(spec, hbm_bytes=hbm)

    @property
    def kv_weight(self) -> float:
        """Bytes of KV that each byte stands for which goes from TE to TE."""
        return 1.0

    def _plan_te(self, sizes: Sizes) -> TEPlan:
        return TEPlan(self.pod, self.checkpoint, self.recipe, sizes, self.deployment.cache.load)

    def materialise(self, progress: Progress | None = None) -> None:
        """Allocate every memory and load the weights into it."""
        self.pod.materialise()
        stores = []
        for te in self.tes:
            for die, mem in te.all_memories:
                mem.materialise(self.pod.memory(die))
                shard = mem.shard if isinstance(mem, DieMemory) else WHOLE
                stores.append(Store(mem.weights(), mem.experts, shard))
        num_mtp = self.tes[0].sizes.num_mtp_layers
        specs = weight_specs(self.config, self.recipe, self.max_model_len, num_mtp=num_mtp)
        total, done = sum(spec.prepared_nbytes for spec in specs.values()), 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        weights = iter_weights(self.checkpoint, self.recipe, self.max_model_len, num_mtp)
        if len(stores) == 1:
            prefer_huge_pages(list(stores[0].arrays.values()))
        # What several dies hold is in this computer's memory once (hw/pages.py).
        place = SharedPages().place
        fill(stores, weights, lambda name, array: specs[name].pack(array), advance, place)


class BlockLoadCost:
    """Load cached blocks, or compute their tokens again? (DeepServe 4.3: whichever is sooner.)"""

    def __init__(self, spec: Spec, block_nbytes: int, weight_nbytes: int, is_always: bool) -> None:
        self._spec, self._block_nbytes, self._is_always = spec, block_nbytes, is_always
        self._flops_per_token = 2.0 * weight_nbytes  # every weight byte at most once

    def should_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether `num_blocks` arrive sooner than `num_tokens` are computed."""
        if self._is_always:
            return True
        spec = self._spec
        load_ns = spec.startup_ns("dma") + spec.link_ns(0, num_blocks * self._block_nbytes, 0)
        return load_ns < spec.kernel_ns(num_tokens * self._flops_per_token, 0)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """The canonical quantisation, in the form that dispatch asks for."""
    q, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    k.quantize_rows(q, scale, x)
    return q, scale


def physical_memory() -> int | None:
    """Bytes of this computer's memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
