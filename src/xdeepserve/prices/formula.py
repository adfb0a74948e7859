"""Decode iterations and prefill in closed form: the stages of a decoder layer, added up.

Stages and their prices are those of the Program that every run walks (`step/layer.py`, `Spec.stage_ns`).
Added here are the numbers of rows, the formula of an exchange, and the overlap of two microbatches. All times
are ns, not rounded. `cores` is a stage's share of the AICs; two streams share HBM's bandwidth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.cost import OPS, CommCost
from xdeepserve.comm.port_cost import ACTIVATION, expected_maximum
from xdeepserve.engine.walk.overlap import Halves, PricedItem, walk_ns
from xdeepserve.hw.hbm import side_by_side
from xdeepserve.hw.spec import Spec, Work
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import packed_shapes
from xdeepserve.model.sharding import Shard
from xdeepserve.model.tensors import Layer
from xdeepserve.model.weights import assemble, weight_specs
from xdeepserve.step.frame import Model
from xdeepserve.step.layer import Where, decoder_layer
from xdeepserve.step.passes import EMBED, HEAD, MTP_HEAD, MTP_INPUT, MTP_STATES
from xdeepserve.step.shard import sp_tp_sp
from xdeepserve.step.stage import Counts, Meet, Program, Stage, stages

ACCEPTANCE = 0.7  # of drafts (CM 5.1)
Tiles: TypeAlias = Literal["BSND", "BNSD"]
SPLITS = (10, 12, 14, 16, 18)  # AIC cores that the attention stream may get of the two microbatch streams
CHIP_TOKENS, PROMPT = 16384, 4096  # of prefill: on a chip, and of each prompt (CM Table 2)
EP = 32  # dies of a prefill instance (CM 4.1)
TP = 8  # of these, in a DP group (CM 4.3.1: not published)
WITH_REPLICAS = Where("among", has_shared=False, has_routes=True, collects=True)


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
    """Dies with experts: dies in all, dies with routed experts, dies with a shared expert; and how many
    redundant experts each die has besides."""

    total: int
    routed: int
    shared: int
    redundant: int = 0

    @property
    def holders(self) -> int:
        """Number of dies with routed experts or redundant ones."""
        return self.total if self.redundant else self.routed


EP320 = ExpertDies(320, 288, 32)  # CM 4.1: 256 routed and 32 redundant experts, 32 copies of the shared one


@functools.lru_cache(maxsize=8)
def expert_layer(config: ModelConfig, tp: int = 1) -> Layer:
    """Make a layer with experts, one on each die, as shapes, in INT8: a die's share in a DP group of `tp`
    dies by SP-TP-SP."""
    shallow = msgspec.structs.replace(config, num_hidden_layers=config.first_k_dense_replace + 1)
    specs = Shard(0, tp, "sp-tp-sp").specs(weight_specs(shallow, "int8", 1, num_experts=1, num_mtp=0))
    return assemble(shallow, specs, packed_shapes(specs), is_packed=True).layers[-1]


def works_of(config: ModelConfig, program: Program, counts: Counts) -> list[Work]:
    """Compute the work of each stage of a layer's Program, on a die with all heads."""
    model = Model(config, "int8", config.num_attention_heads)
    return [stage.work(model, expert_layer(config), counts) for stage in stages(program)]


def around_ns(config: ModelConfig, spec: Spec, program: Program, rows: float, logits: float) -> float:
    """Compute the time of stages around a pass's layers [ns], with `rows` rows, of which `logits` want
    logits."""
    return sum(
        spec.stage_ns(work)
        for stage in stages(program)
        for work in works_of(config, (stage,), Counts(logits if stage.rows == "logits" else rows))
    )


class LayerCost(msgspec.Struct, frozen=True):
    """Cost of a decoder layer, stage by stage, for a model on dies of a kind."""

    config: ModelConfig
    spec: Spec = Spec()
    comm: CommCost = CommCost(way="push")  # CloudMatrix's fused operators
    shares_hbm: bool = True  # by two streams
    tiles: Tiles = "BSND"  # of attention: rows are dealt to cores, or whole requests (CM 4.2.2)

    def stage_work(self, name: str, counts: Counts) -> Work:
        """Compute the work of a stage of a layer with experts."""
        layer = decoder_layer(expert_layer(self.config), WITH_REPLICAS)
        program = tuple(stage for stage in stages((*layer.attention, *layer.feed)) if stage.name == name)
        (work,) = works_of(self.config, program, counts)
        return work

    def stage_ns(self, name: str, counts: Counts) -> float:
        """Compute the time of a single stage of a layer with experts [ns]."""
        return self.spec.stage_ns(self.stage_work(name, counts))

    def ends_ns(self, load: Load) -> float:
        """Compute the time of an iteration outside of its layers [ns]: both ends of the main pass, and of
        each pass of MTP."""
        drafts, rows = load.rows - 1, load.requests * load.rows
        main = around_ns(self.config, self.spec, EMBED + HEAD, rows, rows)
        of_draft = around_ns(self.config, self.spec, MTP_INPUT + MTP_HEAD, rows, load.requests)
        between = around_ns(self.config, self.spec, MTP_STATES, rows, 0)
        return main + drafts * of_draft + max(0, drafts - 1) * between

    def exchanges_ns(self, num_ranks: int, batch: float, copies: int) -> list[float]:
        """Compute dispatch and combine in a layer [ns], stretched as in serving."""
        stretch = self.spec.barrier_stretch.value
        return [self.comm.exchange_ns(op, num_ranks, batch, copies, stretch) for op in OPS]

    # ---- a colocated layer with shared experts on dies of their own ------------------------------------

    def stream0_works(self, load: Load) -> list[Work]:
        """Compute the work of MLAProlog, attention and output projection, with the layer's small kernels."""
        rows = load.requests * load.rows
        counts = Counts(rows, rows * load.context, load.requests * load.context)
        return works_of(self.config, decoder_layer(expert_layer(self.config), Where()).attention, counts)

    def stream0_parts_ns(self, load: Load, cores: int | None = None) -> list[float]:
        """Compute the times of the attention stream's stages [ns]."""
        uneven = self.unevenness(load, cores or self.spec.num_cores("aic"))
        works = [
            work._replace(attention=uneven * work.attention, int8_attention=uneven * work.int8_attention)
            for work in self.stream0_works(load)
        ]
        return [self.spec.stage_ns(work, cores) for work in works]

    def stream0_ns(self, load: Load, cores: int | None = None) -> float:
        """Compute the time of the attention stream [ns]."""
        return sum(self.stream0_parts_ns(load, cores))

    def unevenness(self, load: Load, cores: int) -> float:
        """Compute the busiest core's share of attention over the mean. With drafts, requests have different
        numbers of accepted rows, and each core has only some requests."""
        drafts = load.rows - 1
        if self.tiles == "BSND" or not drafts:
            return 1.0
        mean, variance = 1 + drafts * ACCEPTANCE, drafts * ACCEPTANCE * (1 - ACCEPTANCE)
        of_core = max(1.0, load.requests / cores)
        return 1 + expected_maximum(cores) * math.sqrt(variance / of_core) / mean

    def experts_work(self, load: Load, dies: ExpertDies) -> Work:
        """Compute the work of the busiest die, with routed experts or a shared expert."""
        total, held = load.requests * load.rows * dies.total, 1 + dies.redundant
        mean = self.config.num_experts_per_tok * total / dies.holders
        beside = self.spec.billed_copies(mean * dies.redundant / held, mean)  # of a shared expert
        busiest = max(total / dies.shared + beside, self.spec.billed_copies(mean, mean))
        return self.stage_work("Experts", Counts(0, copies=busiest, touched=held))

    def stream1_parts_ns(self, load: Load, dies: ExpertDies, cores: int | None = None) -> list[float]:
        """Compute the times of the expert stream [ns]: routing and dispatch, experts, combine."""
        rows, c = load.requests * load.rows, self.config
        copies = c.num_experts_per_tok + min(1, c.n_shared_experts)
        dispatch, combine = self.exchanges_ns(dies.total, rows, copies)
        experts = self.spec.stage_ns(self.experts_work(load, dies), cores)
        return [self.routing_ns(rows, dies) + dispatch, experts, combine]

    def routing_ns(self, rows: float, dies: ExpertDies) -> float:
        """Compute the time from gate to dispatch [ns]: with redundant experts load is counted, and replicas
        are found."""
        has_replicas = dies.redundant or dies.routed > self.config.n_routed_experts
        names = ("Gate", "Collect", "Route") if has_replicas else ("Gate",)
        return sum(self.stage_ns(name, Counts(rows)) for name in names)

    def streams_ns(self, load: Load, dies: ExpertDies, cores: int) -> list[float]:
        """Compute the times of both streams [ns], the first with `cores` AIC cores. The streams swap
        microbatches, so they begin together and share HBM."""
        first = self.stream0_works(load)
        second = (Work(), self.experts_work(load, dies), Work())
        times = (
            self.stream0_parts_ns(load, cores),
            self.stream1_parts_ns(load, dies, self.spec.num_cores("aic") - cores),
        )
        reads = [
            [self.spec.hbm_ns(work.nbytes * self.shares_hbm) for work in each] for each in (first, second)
        ]
        ends = side_by_side([[*zip(*each, strict=True)] for each in zip(times, reads, strict=True)])
        return [round(ns, 3) for ns in ends]  # in steps up to the ends of both streams' kernels

    def serial_ns(self, load: Load, dies: ExpertDies) -> float:
        """Compute a layer without microbatches [ns]."""
        return self.stream0_ns(load) + sum(self.stream1_parts_ns(load, dies))

    def microbatched_ns(self, load: Load, dies: ExpertDies, splits: Sequence[int] = SPLITS) -> float:
        """Compute a layer of two microbatches in two streams that swap them [ns], with the best of some
        splits of cores."""
        half = msgspec.structs.replace(load, requests=load.requests / 2)
        return min(2 * max(self.streams_ns(half, dies, cores)) for cores in splits)

    def iteration_ns(
        self, load: Load, dies: ExpertDies, microbatches: bool = True, splits: Sequence[int] = SPLITS
    ) -> float:
        """Compute a decode iteration of CloudMatrix [ns]: all layers as MoE layers, and MTP's layer if there
        are drafts."""
        layer = self.serial_ns(load, dies)
        if microbatches:
            layer = min(layer, self.microbatched_ns(load, dies, splits))
        num_layers = self.config.num_hidden_layers + (load.rows > 1)
        return num_layers * layer + self.ends_ns(load)


class PrefillCost(msgspec.Struct, frozen=True):
    """Cost of prefill in CloudMatrix (CM 4.3), on dies with half of CHIP_TOKENS each, of prompts of `prompt`
    tokens, in DP groups of TP dies that share them by SP-TP-SP.

    Nothing is fitted to prefill. Attention is not absorbed, as in runs with `prefill_attention=unabsorbed`: a
    prompt's keys and values are made once, for all heads, so that each position costs a head N + R + V
    products and not 2 C + R. Loads of experts are as uneven as in decode; `evened` divides that, as perfect
    EPLB would. Without `hides` two microbatches go one after the other.
    """

    config: ModelConfig
    unabsorbed: bool = True
    comm: CommCost = CommCost(way="push")
    spec: Spec = Spec()
    prompt: int = PROMPT
    hides: bool = True
    evened: float = 1.0

    @property
    def tokens(self) -> int:
        """Number of tokens on a die."""
        return CHIP_TOKENS // self.comm.topology.dies_per_chip

    def halves(self, tokens: int) -> Halves:
        """Compute the parts of a layer with experts for `tokens` tokens on each die."""
        c, shared, stretch = self.config, TP * tokens, self.spec.barrier_stretch.value / self.evened
        layer, model = expert_layer(c, TP), Model(c, "int8", c.num_attention_heads // TP, self.unabsorbed)
        copies = tokens * c.num_experts_per_tok
        counts = {
            "mine": Counts(tokens),
            "all": Counts(shared, shared * self.prompt / 2, shared),
            "received": Counts(copies, copies=max(1.0, stretch) * copies, touched=c.n_routed_experts / EP),
        }
        group = CollectiveCost(tuple(range(TP)), self.spec, self.comm.topology)
        heads = ACTIVATION * tokens * model.heads * c.v_head_dim
        meets: dict[str, float] = {
            "all_gather": group.all_gather_ns(ACTIVATION * tokens * c.down_columns),
            "all_to_all": group.all_to_all_ns([[heads] * TP] * TP),
            **{op: self.comm.exchange_ns(op, EP, tokens, c.num_experts_per_tok, stretch) for op in OPS},
        }

        def part(item: Stage | Meet) -> PricedItem:
            if isinstance(item, Meet):
                return PricedItem(None, meets[item.op], 0.0, 1)
            work = item.work(model, layer, counts[item.rows])
            return PricedItem(item.core, self.spec.stage_ns(work), 0.0, item.operators)

        program = sp_tp_sp(decoder_layer(layer, Where("among")))
        return Halves([*map(part, program.attention)], [*map(part, program.feed)])

    def layer_ns(self, microbatches: bool = True) -> float:
        """Compute a layer [ns]; two microbatches take turns at the cores of a kind (CM 4.3.2)."""
        if microbatches and self.hides:
            layers = self.config.num_hidden_layers
            part = [self.halves(self.tokens // 2)] * layers
            return walk_ns([part, part], by_cores=False, op_ns=0)[-1] / layers
        whole = self.halves(self.tokens)
        return sum(item.ns for item in (*whole.attention, *whole.feed))

    def batch_ns(self, microbatches: bool = True) -> float:
        """Compute the time [ns] from a chip's prompt tokens to the first new ones."""
        rows = TP * self.tokens
        ends = around_ns(self.config, self.spec, EMBED + HEAD, rows, rows / self.prompt)
        return self.config.num_hidden_layers * self.layer_ns(microbatches) + ends

    def throughput(self, microbatches: bool = True) -> float:
        """Compute tokens per second of a chip."""
        return CHIP_TOKENS / self.batch_ns(microbatches) * 1e9
