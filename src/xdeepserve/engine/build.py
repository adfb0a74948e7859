"""From a model and a deployment to a pod: sizes first, then memory, then weights."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import numpy as np

from xdeepserve.comm.layout import Group, Layout
from xdeepserve.comm.xccl import XCCL, Kernels
from xdeepserve.engine.deployment import Deployment, Sizes, fit
from xdeepserve.engine.programs.memory_plan import DieMemory
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.hw.trace import Trace
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.kernels import quantize_rows
from xdeepserve.model.weights import Recipe, fill, iter_weights, weight_specs

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class TEPlan:
    """The dies of one TE: their memories, and how they exchange tokens."""

    def __init__(self, pod: Pod, config: ModelConfig, recipe: Recipe, sizes: Sizes, load_mode: str) -> None:
        self.pod, self.config, self.recipe, self.sizes, self._load_mode = (
            pod,
            config,
            recipe,
            sizes,
            load_mode,
        )
        self.dies = tuple(range(sizes.first_die, sizes.first_die + sizes.num_dies))
        self.exchange: tuple[Group, Layout] | None = None
        if sizes.num_dies > 1 and any(sizes.experts_of):
            self.exchange = self._plan_exchange()
        self.memories = [
            DieMemory(pod.plan(die).app, config, recipe, sizes, rank) for rank, die in enumerate(self.dies)
        ]
        if sizes.num_host_blocks:
            for die, mem in zip(self.dies, self.memories, strict=True):
                host = pod.topology.host(pod.topology.server_of(die))
                mem.plan_host(pod.plan(host).app, die)

    def _plan_exchange(self) -> tuple[Group, Layout]:
        """Dispatch and combine between all dies: expert e lives on the rank whose range holds it."""
        sizes = self.sizes
        group = Group(
            dies=self.dies,
            expert_rank=tuple(rank for rank, held in enumerate(sizes.experts_of) for _ in held),
        )
        layout = Layout.for_group(
            group,
            max_tokens=sizes.max_tokens,
            top_k=self.config.num_experts_per_tok,
            hidden=self.config.hidden_size,
            quantize=self.recipe == "int8",
        )
        for die in self.dies:
            layout.plan(self.pod.plan(die))
        return group, layout

    def exchanges(self) -> list[XCCL | None]:
        """Each rank's end of dispatch and combine; None where one die holds all experts."""
        if self.exchange is None:
            return [None] * self.sizes.num_dies
        group, layout = self.exchange
        kernels = Kernels(quantize=_quantize)
        return [XCCL(self.pod.dies[die], rank, group, layout, kernels) for rank, die in enumerate(self.dies)]

    def load_cost(self) -> BlockLoadCost | None:
        """The cost model of loading cached blocks from host DRAM, if there are any there."""
        if not self.sizes.num_host_blocks or self._load_mode == "never":
            return None
        mem = self.memories[0]
        weights = sum(spec.nbytes for spec in mem.specs.values())
        return BlockLoadCost(self.pod.spec, mem.block_nbytes, weights, is_always=self._load_mode == "always")


class PodPlan:
    """A pod that has been sized and checked, and holds no memory yet. Raises DeploymentError if it cannot be.

    `describe` tells what it will be; `materialise` allocates and loads it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        deployment: Deployment,
        recipe: Recipe,
        clock_seed: int | None = None,
        trace: bool = False,
    ) -> None:
        self.checkpoint, self.deployment, self.recipe = checkpoint, deployment, recipe
        self.config = checkpoint.config
        sizes = fit(deployment, self.config)
        self.max_model_len = sizes[0].max_model_len
        spec = Spec()
        if deployment.hardware.hbm_mb is not None:
            hbm = Param(deployment.hardware.hbm_mb * 2**20, "B", "the deployment's hardware.hbm_mb")
            spec = msgspec.structs.replace(spec, hbm_bytes=hbm)
        self.pod = Pod(spec=spec, clock=Clock(clock_seed), trace=Trace(is_on=trace))
        self.tes = [TEPlan(self.pod, self.config, recipe, te, deployment.cache.load) for te in sizes]
        try:
            self.pod.memories.check(limit=physical_memory())
        except DeploymentError as error:
            raise DeploymentError(f"deployment {deployment.name}: {error}") from None

    def materialise(self, progress: Progress | None = None) -> None:
        """Allocate every memory and load the weights into it."""
        self.pod.materialise()
        stores = []
        for te in self.tes:
            for die, mem in zip(te.dies, te.memories, strict=True):
                mem.materialise(self.pod.memory(die))
                stores.append((mem.weights(), mem.experts))
        has_mtp = self.tes[0].sizes.mtp > 0
        specs = weight_specs(self.config, self.recipe, self.max_model_len, with_mtp=has_mtp)
        total, done = sum(spec.nbytes for spec in specs.values()), 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        weights = iter_weights(self.checkpoint, self.recipe, self.max_model_len, has_mtp)
        specs = self.tes[0].memories[0].specs
        fill(stores, weights, lambda name, array: specs[name].pack(array), advance)


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


def _quantize(x: Array) -> tuple[Array, Array]:
    """The canonical quantisation, in the form that dispatch asks for."""
    q, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    quantize_rows(q, scale, x)
    return q, scale


def physical_memory() -> int | None:
    """Bytes of this computer's memory, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
