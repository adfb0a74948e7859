"""A decode iteration in closed form: the stages of a decoder layer, added up, with and without microbatches.

Stages and their prices are those of the Program that every run walks (`step/layer.py`, `Spec.stage_ns`);
what is added here is how many rows there are, the formula of an exchange, and how two streams overlap. All
times are ns, not rounded. `cores` is a stage's share of the AICs; memory bandwidth is the die's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.hw.spec import Spec
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.shapes import packed_shapes
from xdeepserve.model.tensors import Layer
from xdeepserve.model.weights import assemble, weight_specs
from xdeepserve.step.frame import Model
from xdeepserve.step.layer import Where, decoder_layer
from xdeepserve.step.passes import PASS
from xdeepserve.step.stage import Counts, Program, stages

SPLITS = (10, 12, 14, 16, 18)  # AIC cores that the attention stream may get of the two microbatch streams


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A die's share of a decode iteration.

    requests     that it decodes
    rows         token rows of each: 2 with one MTP draft
    context      positions that each attends to
    """

    requests: float
    rows: int
    context: float


class ExpertDies(msgspec.Struct, frozen=True):
    """Where experts live: dies in all, those with slots for routed experts, those with a shared expert."""

    total: int
    routed: int
    shared: int


EP320 = ExpertDies(320, 288, 32)  # CM 4.1: 256 routed and 32 redundant experts, 32 copies of the shared one


@functools.lru_cache(maxsize=8)
def expert_layer(config: ModelConfig) -> Layer:
    """A layer with experts, one on each die, as shapes, in INT8."""
    shallow = msgspec.structs.replace(config, num_hidden_layers=config.first_k_dense_replace + 1)
    specs = weight_specs(shallow, "int8", 1, num_experts=1, num_mtp=0)
    return assemble(shallow, specs, packed_shapes(specs), is_packed=True).layers[-1]


class LayerCost(msgspec.Struct, frozen=True):
    """Stage by stage, of one model on dies of one kind."""

    config: ModelConfig
    spec: Spec = Spec()
    comm: CommCost = CommCost(way="push")  # CloudMatrix's fused operators

    def program_ns(self, program: Program, counts: Counts, cores: int | None = None) -> float:
        """All stages of a Program."""
        model, layer = Model(self.config, "int8", self.config.num_attention_heads), expert_layer(self.config)
        works = [stage.work(model, layer, counts) for stage in stages(program)]
        return sum(self.spec.stage_ns(work, cores) for work in works)

    def stage_ns(self, name: str, counts: Counts, cores: int | None = None) -> float:
        """One stage of a layer with experts."""
        layer = decoder_layer(expert_layer(self.config), Where("among", has_shared=False))
        program = (*layer.attention, *layer.feed)
        return self.program_ns(tuple(stage for stage in stages(program) if stage.name == name), counts, cores)

    def pass_ns(self) -> float:
        """What a pass, the main model's or one of MTP's, takes besides its layers."""
        return self.spec.stage_ns(PASS)

    def exchanges_ns(self, num_ranks: int, batch: float, copies: int) -> float:
        """Dispatch and combine in a layer, stretched as in serving."""
        stretch = self.spec.barrier_stretch.value
        ops: tuple[Op, Op] = "dispatch", "combine"
        return sum(self.comm.exchange_ns(op, num_ranks, batch, copies, stretch) for op in ops)

    # ---- a colocated layer with shared experts on dies of their own ------------------------------------

    def stream0_ns(self, load: Load, cores: int | None = None) -> float:
        """MLAProlog, attention and output projection, with the layer's small kernels."""
        rows = load.requests * load.rows
        counts = Counts(rows, rows * load.context, load.requests * load.context)
        return self.program_ns(decoder_layer(expert_layer(self.config), Where()).attention, counts, cores)

    def stream1_ns(self, load: Load, dies: ExpertDies, cores: int | None = None) -> float:
        """Gate, dispatch, experts, combine."""
        rows, c = load.requests * load.rows, self.config
        copies = c.num_experts_per_tok + min(1, c.n_shared_experts)
        total = rows * dies.total
        mean = c.num_experts_per_tok * total / dies.routed
        busiest = max(total / dies.shared, self.spec.billed_copies(0, mean))
        counts = Counts(rows, copies=busiest, touched=1)
        exchanges = self.exchanges_ns(dies.total, rows, copies)
        return self.stage_ns("Gate", counts) + exchanges + self.stage_ns("Experts", counts, cores)

    def serial_ns(self, load: Load, dies: ExpertDies) -> float:
        """A layer without microbatches."""
        return self.stream0_ns(load) + self.stream1_ns(load, dies)

    def microbatched_ns(self, load: Load, dies: ExpertDies, splits: Sequence[int] = SPLITS) -> float:
        """A layer of two microbatches in two streams that swap them, with the best of some splits."""
        half = msgspec.structs.replace(load, requests=load.requests / 2)
        total = self.spec.num_cores("aic")
        return min(
            2 * max(self.stream0_ns(half, cores), self.stream1_ns(half, dies, total - cores))
            for cores in splits
        )

    def iteration_ns(
        self, load: Load, dies: ExpertDies, microbatches: bool = True, splits: Sequence[int] = SPLITS
    ) -> float:
        """One decode iteration of CloudMatrix: all layers as MoE layers, MTP's too if there are drafts."""
        passes = load.rows
        layer = self.serial_ns(load, dies)
        if microbatches:
            layer = min(layer, self.microbatched_ns(load, dies, splits))
        num_layers = self.config.num_hidden_layers + (passes > 1)
        return num_layers * layer + passes * self.pass_ns()


@functools.cache
def ping_pong_throughput(microbatches: int, comm_ratio: float) -> float:
    """Relative throughput of MegaScale's ping-pong with m microbatches (MS 4.1), if T_a = T_e = T_f.

    A microbatch is back after 2 (T_f + T_c), `comm_ratio` = T_c / T_f; in that time at most m are served.
    """
    return microbatches / max(microbatches, 2 + 2 * comm_ratio)
