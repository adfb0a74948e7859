"""Published values found in no other benchmark, which follow from the parameter table in a line or two."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from xdeepserve.bench.papers.pipelines import CM_CONTEXT, CM_SPLIT, CM_TIMING
from xdeepserve.bench.papers.sizes import (
    COMBINE_NBYTES,
    DIES_PER_CHIP,
    DISPATCH_NBYTES,
    EP_SIZES,
    FITTED_EP_SIZES,
    MODEL,
    TOP_K,
)
from xdeepserve.bench.papers.superpod import BATCH_288, CONTEXT, XDS_ACCEPTANCE, gap_ms
from xdeepserve.bench.report import Kind, Row
from xdeepserve.comm.cost import OPS, CommCost
from xdeepserve.comm.p2p.layout import RING_FIELD, RingLayout
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Topology, num_switches, utilisation
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.weights import weight_specs
from xdeepserve.prices.formula import EP320, ExpertDies, LayerCost, Load, PrefillCost

# A grouped INT8 GEMM on the cube cores of a die, tile by tile (CM Table 9).

TILE = (128, 152)  # rows and columns of the output that a core computes at once


class GroupedGemm(msgspec.Struct, frozen=True):
    """Grouped GEMM in a single kernel: `groups` products of [m, k] by [k, n], INT8 in, BF16 out."""

    groups: int
    m: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes of both inputs and of the output, each moved once."""
        return self.groups * (self.m * self.k + self.k * self.n + 2 * self.m * self.n)

    def seconds(self, spec: Spec) -> float:
        """Compute the kernel's time: every core takes a tile, wave after wave; the last wave takes as long as
        a full one."""
        rows, columns = TILE
        cores = spec.num_cores("aic")
        tiles = self.groups * math.ceil(self.m / rows) * math.ceil(self.n / columns)
        core_peak = spec.int8_peak.value / cores * spec.tile_efficiency.value
        tile = 2 * rows * columns * self.k / core_peak + spec.tile_overhead.value
        return math.ceil(tiles / cores) * tile + spec.kernel_overhead.value

    def utilisation(self, spec: Spec) -> float:
        """Compute the share of the die's INT8 peak, 0 to 1."""
        operations = 2 * self.groups * self.m * self.n * self.k
        return operations / self.seconds(spec) / spec.int8_peak.value


TABLE_9 = (
    GroupedGemm(4, 7168, 4096, 4096),
    GroupedGemm(4, 2048, 7168, 4096),
    GroupedGemm(4, 7168, 4096, 8192),
    GroupedGemm(4, 2048, 7168, 8192),
    GroupedGemm(8, 7168, 4096, 4096),
    GroupedGemm(8, 2048, 7168, 4096),
)
FITTED_GEMMS = (TABLE_9[0], TABLE_9[2], TABLE_9[4])
TABLE_10 = (48, 44, 36, 32, 24)  # servers
TABLE_6_BATCH = 128
FIGURE_6_EP = 128
EP288 = ExpertDies(288, 256, 32, redundant=1)  # XDS 7.1
WEIGHTS_GB = 671
SMALLEST_BATCH = 4  # of a die, CM Table 4
PROMPTS = (1024, 2048, 4096, 8192)


def gemms(spec: Spec | None = None) -> Iterator[Row]:
    """Compute the utilisations and bandwidths of CM Table 9. Bandwidths are utilisations in another unit; no
    parameter is fitted to them."""
    spec = spec or Spec()
    for gemm in TABLE_9:
        name = f"groups={gemm.groups}/M={gemm.m}/K={gemm.k}"
        kind: Kind = "calibrated" if gemm in FITTED_GEMMS else "predicted"
        yield Row(f"cm.t9/utilisation/{name}", 100 * gemm.utilisation(spec), "%", kind)
        yield Row(f"cm.t9/bandwidth/{name}", gemm.nbytes / gemm.seconds(spec) / 1e9, "GB/s", kind)


def bandwidths(cost: CommCost | None = None) -> Iterator[Row]:
    """Compute the bandwidths of CM Table 6: bytes of a rank's messages over the latency. Published bandwidths
    times latencies are some 5 % more bytes than 1,024 messages of the sizes in CM 4.2.1; the paper does not
    explain the rest."""
    cost = cost or CommCost(way="push")
    for op, nbytes in zip(OPS, (DISPATCH_NBYTES, COMBINE_NBYTES), strict=True):
        for ep in EP_SIZES:
            seconds = cost.exchange_ns(op, ep, TABLE_6_BATCH, TOP_K) / 1e9
            kind: Kind = "calibrated" if ep in FITTED_EP_SIZES else "predicted"
            rate = TABLE_6_BATCH * TOP_K * nbytes / seconds / 1e9
            yield Row(f"cm.t6/bandwidth/{op}/ep={ep}", rate, "GB/s", kind)


def crossover(cost: CommCost | None = None) -> Iterator[Row]:
    """Compute the largest batch with which dispatch takes longer than combine at EP 128 (XDS 3.2, Figure
    6)."""
    cost = cost or CommCost()

    def is_slower(batch: int) -> bool:
        dispatch, combine = (cost.exchange_ns(op, FIGURE_6_EP, batch, TOP_K) for op in OPS)
        return dispatch > combine

    most = max(filter(is_slower, range(1, 256)), default=0)
    yield Row("xds.ep.crossover", most, "tokens", "predicted")


def gains_by_drafts(cost: LayerCost | None = None) -> Iterator[Row]:
    """Compute throughput with a drafted token over that without, by batch of an NPU (CM 5.4.2)."""
    cost = cost or LayerCost(resolve_model(MODEL).config)
    for batch in (8, 128):
        without, drafted = (
            cost.iteration_ns(Load(requests=batch / DIES_PER_CHIP, rows=rows, context=CM_CONTEXT), EP320)
            for rows in (1, 2)
        )
        gain = (1 + CM_TIMING.acceptance) * without / drafted
        yield Row(f"cm.mtp.gain/batch={batch}", gain, "x", "predicted")


def latency_by_drafts(cost: LayerCost | None = None) -> Iterator[Row]:
    """Compute how much less the time per token is with a drafted token (XDS 4.6), in the deployment of XDS
    7.1: with the smallest published batch, where the effect is largest, and with 7.1's own."""
    cost = cost or LayerCost(resolve_model(MODEL).config, comm=CommCost())
    for batch, name in ((SMALLEST_BATCH, "xds.mtp.latency"), (BATCH_288, f"mtp/latency/batch={BATCH_288}")):
        without, drafted = (
            cost.iteration_ns(Load(requests=batch, rows=rows, context=CONTEXT), EP288, microbatches=False)
            + gap_ms(cost.spec) * 1e6
            for rows in (1, 2)
        )
        yield Row(name, 100 * (1 - drafted / (1 + XDS_ACCEPTANCE) / without), "%", "predicted")


def microbatches(cost: LayerCost | None = None) -> Iterator[Row]:
    """Compute how much less time a layer takes with two microbatches than without (CM 5.4.1, Figure 20b)."""
    cost = cost or LayerCost(resolve_model(MODEL).config)
    load = Load(requests=96 / DIES_PER_CHIP, rows=2, context=CM_CONTEXT)
    share = cost.microbatched_ns(load, EP320, (CM_SPLIT,)) / cost.serial_ns(load, EP320)
    yield Row("cm.mb.decode.layer", 100 * (1 - share), "%", "predicted")


def prefill(cost: PrefillCost | None = None) -> list[Row]:
    """Compute CM Table 2 with EPLB as it serves, and the gain of microbatches (5.4.1, Figure 21) by the
    length of prompts."""
    cost = cost or PrefillCost(resolve_model(MODEL).config)
    rows = [Row("cm.t2/default EPLB", cost.throughput(), "tok/s", "predicted")]
    for prompt in PROMPTS:
        of_length = msgspec.structs.replace(cost, prompt=prompt)
        gain = of_length.layer_ns(microbatches=False) / of_length.layer_ns()
        rows.append(Row(f"cm.mb.prefill/prompt={prompt}", gain, "x", "predicted"))
        if prompt == cost.prompt:
            rows.append(Row("cm.mb.prefill.layer", 100 * (1 - 1 / gain), "%", "predicted"))
    return rows


def prefill_by_length() -> list[Row]:
    """Compute throughput by the length of prompts, with two microbatches and with one (CM Figure 21a)."""
    costs = [PrefillCost(resolve_model(MODEL).config, prompt=prompt) for prompt in PROMPTS]
    return [
        Row(f"prefill/{way}/prompt={cost.prompt}", cost.throughput(way == "two"), "tok/s", "predicted")
        for way in ("two", "one")
        for cost in costs
    ]


def fields_and_pairs() -> Iterator[Row]:
    """Count the fields reserved by XCCL on each die for all others, and the pairs of dies (XDS 3.1)."""
    num_dies = Topology().num_dies
    sizes = RingLayout(num_ranks=num_dies, num_cores=Spec().num_cores("aiv")).region_nbytes
    yield Row("xds.meta.fields", (sizes["tails"] + sizes["acks"]) / RING_FIELD.size, "", "measured")
    yield Row("xds.hw.pairs", num_dies * (num_dies - 1) / 2, "", "measured")


def parameters() -> Iterator[Row]:
    """Count the share of DeepSeek-R1's parameters that experts have, routed and shared (XDS 4.7)."""
    config = resolve_model(MODEL).config
    specs = weight_specs(config, "bf16", 1, num_experts=config.n_routed_experts, num_mtp=0)
    counts = {name: math.prod(spec.shape) for name, spec in specs.items()}
    experts = sum(count for name, count in counts.items() if ".experts." in name or ".shared." in name)
    yield Row("xds.int8.moe_share", 100 * experts / sum(counts.values()), "%", "measured")


def ports() -> Iterator[Row]:
    """Compute CM Table 10: switches, and their utilisation, by servers."""
    for servers in TABLE_10:
        yield Row(f"cm.t10/switches/nodes={servers}", num_switches(servers), "", "predicted")
        yield Row(f"cm.t10/utilisation/nodes={servers}", 100 * utilisation(servers), "%", "predicted")


def storage(spec: Spec | None = None) -> Iterator[Row]:
    """Compute the time of a model from the object store, at the bandwidth that CM Table 1 implies (CM
    4.4.3)."""
    minutes = WEIGHTS_GB * 1e9 / (spec or Spec()).storage_bandwidth.value / 60
    yield Row("cm.obs", minutes, "min", "calibrated")
