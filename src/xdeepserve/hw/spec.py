"""Table of all physical parameters, and the costs derived from them.

Every value names its source: CM (Serving LLMs on CloudMatrix384), XDS (xDeepServe), DS (DeepServe), each
with its section; `public` (vendor or press, outside the papers); `fitted` (to published rows); `assumed` (no
source: an order of magnitude that no published number contradicts). Costs are ns: whole ones are rounded up,
and those that add up to others are not rounded.
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import add
from typing import Literal, NamedTuple

import msgspec

from ..errors import DeploymentError

# What a stage of the model does, by kinds that cost differently: the input of `Spec.stage_ns`.


class Work(NamedTuple):
    """Operations and bytes of a launch, as on real hardware.

    What norms, residuals and other small kernels of a layer take is fitted as a whole, so their operations
    are not counted. `kernels` are those that are in no layer, or not in every one.
    """

    int8: float = 0.0  # operations of INT8 GEMMs
    bf16: float = 0.0  # of GEMMs in BF16
    attention: float = 0.0  # of attention's products, in BF16
    int8_attention: float = 0.0  # and in INT8
    weights: float = 0.0  # bytes of weights that are read
    cache: float = 0.0  # bytes of KV that are read
    layers: float = 0.0  # how many layers' small kernels are launched with it
    gates: float = 0.0  # routings of tokens
    kernels: float = 0.0  # small kernels besides, which are launched for themselves
    moved: float = 0.0  # bytes that small kernels read and write
    between: float = 0.0  # bytes that vector kernels read and write before and after GEMMs, not beside them

    @property
    def nbytes(self) -> float:
        """Number of bytes read from HBM, or written."""
        return self.weights + self.cache + self.moved + self.between

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work._make(map(add, self, other))


Core = Literal["aic", "aiv"]
Arithmetic = Literal["int8", "bf16"]


class Param(msgspec.Struct, frozen=True):
    """Physical quantity with value, unit and source."""

    value: float
    unit: str
    source: str


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware parameters of a CloudMatrix384 die and its links. `msgspec.structs.replace` makes other
    hardware."""

    # The die
    aic_cores: Param = Param(24, "cores", "CM 3.3, XDS 2.2: cube cores of a die")
    aiv_cores: Param = Param(48, "cores", "CM 3.3, XDS 2.2: vector cores of a die")
    int8_peak: Param = Param(752e12, "op/s", "CM Tables 2-4: 1504 TOPS per NPU of two dies")
    bf16_peak: Param = Param(376e12, "op/s", "half of INT8; public CANN notes: 353.9 cube + 22.1 vector")
    vector_peak: Param = Param(22.1e12, "op/s", "public CANN notes: BF16 on all 48 vector cores")
    compute_efficiency: Param = Param(0.654, "ratio", "CM Table 7: MLA in the compute-bound case")
    int8_gemm_efficiency: Param = Param(0.79, "ratio", "CM Table 9: large INT8 GEMMs reach 77 to 83 %")
    tile_efficiency: Param = Param(0.8645, "ratio", "fitted: CM Table 9, three rows: a tile in a cube core")
    tile_overhead: Param = Param(0.478e-6, "s", "fitted: CM Table 9, three rows: before and after each tile")
    bf16_gemm_efficiency: Param = Param(
        0.75, "ratio", "assumed: a little below INT8, as for MLA in CM Table 7"
    )
    hbm_bytes: Param = Param(64 * 2**30, "B", "DS 2: 64 GB per die")
    hbm_bandwidth: Param = Param(1.6e12, "B/s", "public: CANN migration guide, 910B2")
    hbm_efficiency: Param = Param(0.841, "ratio", "CM Table 8: MLA in the memory-bound case")
    unified_buffer: Param = Param(
        192 * 1024, "B", "public CANN platform configuration; XDS 2.2: hundreds of KB"
    )

    # Launching work
    kernel_overhead: Param = Param(8.1e-6, "s", "fitted: CM Table 9, time of a kernel without its work")
    graph_dispatch: Param = Param(0.7e-3, "s", "CM 4.2.4: 0.6 to 0.8 ms, hidden when pipelined")
    op_dispatch: Param = Param(20e-6, "s", "assumed: host launch of one operator in single-op mode")
    command_latency: Param = Param(2e-6, "s", "assumed: a host's message reaches the die")

    scheduler_gap: Param = Param(2e-3, "s", "XDS 7.1: bubble between two iterations")
    host_sampling: Param = Param(
        1e-3, "s", "assumed: metadata and sampling on the CPU between two graphs of naive MTP (CM 4.2.4)"
    )
    preemption: Param = Param(20e-3, "s", "assumed: a launch thread that is not pinned loses its core")
    guard_checks: Param = Param(5e-3, "s", "assumed: guards of a compiled graph that is not cached, mean")
    gc_pause: Param = Param(
        100e-3, "s", "assumed: the collector's pause; XDS 4.4 says that jitter can exceed 100 ms"
    )

    # A decoder layer at full size: fitted to its four times in CM 4.2.3 and Figure 20b
    small_kernels: Param = Param(106e-6, "s", "fitted: decode; norms, small kernels and sync of a layer")
    barrier_stretch: Param = Param(
        1.78, "ratio", "fitted: decode; imbalance of experts and waiting, on expert load and token copies"
    )
    gate: Param = Param(10e-6, "s", "assumed: routing of a microbatch's tokens")

    # Links
    ub_bandwidth: Param = Param(
        196e9, "B/s", "public (CM384 launch): per die, one way; XDS 2.2: 400 GB/s per chip"
    )
    inter_server_loss: Param = Param(0.03, "ratio", "CM 3.2: bandwidth between servers, upper bound")
    inter_server_latency: Param = Param(1e-6, "s", "CM 3.2: more than within a server, upper bound")
    roce_bandwidth: Param = Param(25e9, "B/s", "assumed: 200 Gb/s; CM 3.3.1: one interface per die")
    roce_startup: Param = Param(5e-6, "s", "assumed: an RDMA write, card to card")
    rdma_segment: Param = Param(16384, "B", "assumed: a queue pair sends so much in a turn")
    rdma_post: Param = Param(0.15e-6, "s", "assumed: a CPU posts one write and rings the card's doorbell")
    rdma_retry: Param = Param(0.5e-3, "s", "assumed: without an answer for so long a card sends again")
    pcie_flush: Param = Param(1e-6, "s", "assumed: a CPU reads device memory over PCIe, as GDRCopy does")
    stream_flag: Param = Param(1e-6, "s", "assumed: a stream is blocked, or sees that a CPU lets it go on")
    vpc_bandwidth: Param = Param(50e9, "B/s", "CM 4.4: at most 400 Gb/s through a server's Qingtian card")
    vpc_startup: Param = Param(50e-6, "s", "assumed: a message through two hosts' network stacks")
    storage_bandwidth: Param = Param(2.1e9, "B/s", "fitted: CM Table 1: 671 GB of weights from OBS in 320 s")

    pool_load: Param = Param(
        134e9, "B/s", "fitted: CM Table 1: 671 GB of weights from DRAM to an instance in 5 s"
    )

    # Engines
    mte_startup: Param = Param(
        0.5e-6,
        "s",
        "assumed: before a kernel's first access moves, of a copy or a send; XDS Figure 5 allows 0.75 us",
    )
    mte_bandwidth: Param = Param(34e9, "B/s", "fitted: XDS Figure 5, per AIV core, which allows 33.5 to 36")
    ring_slot: Param = Param(8192, "B", "assumed: XDS 3.1: of fixed size; Figure 5 allows 4 to 8 KB")
    ring_slots: Param = Param(192, "slots", "assumed: XDS 3.1: a fixed number; Figure 5 allows 160 and more")
    dma_startup: Param = Param(10e-6, "s", "assumed: XDS 3.1 says higher than MTE")
    urma_startup: Param = Param(6e-6, "s", "assumed: XDS 3.3 says higher than MTE, no CPU in the way")
    piece_overhead: Param = Param(
        1e-6,
        "s",
        "assumed: the scalar unit of one AIV core issues one access of a batch, so also posts one field; "
        "XDS 3.3 calls it limited, and it is why in CM Table 6 dispatch grows more with EP than combine",
    )
    field_poll: Param = Param(
        1e-6,
        "s",
        "assumed: the scalar unit of one AIV core takes note of one field that has arrived (XDS 3.3)",
    )
    attention_cores: Param = Param(
        4,
        "cores",
        "assumed: AIV cores that an attention die spares for A2E and E2A beside its own kernels; XDS 3.1 and "
        "3.3: few, an expert die has all for its persistent kernels",
    )
    core_meeting: Param = Param(
        9.84e-6,
        "s",
        "fitted: CM Table 6, EP 8 and 256: all AIV cores of an operator wait for the last of them",
    )
    exchange_copy: Param = Param(
        91.19e-9, "s", "fitted: CM Table 6, EP 8 and 256: one token's copy at the busiest die's UB port"
    )
    poll_latency: Param = Param(0.5e-6, "s", "assumed: one AIV core reads a flag in its own HBM")

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            param = getattr(self, name)
            if not param.value >= 0 or not math.isfinite(param.value):
                raise DeploymentError(f"hardware parameter {name} must be a number >= 0, not {param.value}")

    # ---- costs --------------------------------------------------------------------------------------

    def num_cores(self, core: Core) -> int:
        return int(self.aic_cores.value if core == "aic" else self.aiv_cores.value)

    def kernel_ns(
        self,
        flops: float,
        nbytes: float,
        core: Core = "aic",
        cores: int | None = None,
        arithmetic: Arithmetic = "int8",
        is_fused: bool = False,
    ) -> int:
        """Time (ns) of a kernel with `flops` operations and `nbytes` of HBM traffic: overhead + roofline.

        `cores` is the kernel's share of the die's cores; HBM bandwidth is the die's whoever uses it. A part
        that is fused into a running kernel has no overhead.
        """
        if core == "aiv":
            peak = self.vector_peak.value
        else:
            peak = self.int8_peak.value if arithmetic == "int8" else self.bf16_peak.value
        share = 1.0 if cores is None else cores / self.num_cores(core)
        compute = flops / (peak * self.compute_efficiency.value * share)
        overhead = 0.0 if is_fused else self.kernel_overhead.value
        return _ns(overhead + max(compute, self.hbm_ns(nbytes) / 1e9))

    def stage_ns(self, work: Work, cores: int | None = None) -> float:
        """Time (ns, not rounded) of a stage of the model, calibrated: every run is billed by it.

        A roofline of its GEMMs, its attention and the bytes that it reads, with what is fitted to small
        kernels and routing on top. `cores` is its share of the AIC cores (all by default); all of
        HBM's bandwidth is its own (`hw/hbm.py` has what several share).
        """
        share = 1.0 if cores is None else min(1.0, cores / self.num_cores("aic"))
        int8 = work.int8 / (self.int8_peak.value * self.int8_gemm_efficiency.value)
        bf16 = work.bf16 / (self.bf16_peak.value * self.bf16_gemm_efficiency.value)
        products = work.attention / self.bf16_peak.value + work.int8_attention / self.int8_peak.value
        attention = products / self.compute_efficiency.value
        fixed = (
            work.layers * self.small_kernels.value
            + work.gates * self.gate.value
            + work.kernels * self.kernel_overhead.value
        )
        compute = 1e9 * (int8 + bf16 + attention) / share
        between = self.hbm_ns(work.between)
        return 1e9 * fixed + between + max(compute, self.hbm_ns(work.nbytes - work.between))

    def billed_copies(self, received: float, mean: float) -> float:
        """Number of token copies billed to a die's routed experts, given the `mean` of copies on each such
        die.

        The fitted stretch already holds the imbalance of ordinary routing; only a die that is hotter than
        that takes longer, and one that is colder than the mean is billed in proportion.
        """
        stretch = self.barrier_stretch.value
        return max(received, stretch * min(received, mean))

    def hbm_ns(self, nbytes: float) -> float:
        """Time (ns, not rounded) to stream bytes from or to the die's own HBM."""
        return 1e9 * nbytes / (self.hbm_bandwidth.value * self.hbm_efficiency.value)

    def dispatch_ns(self, mode: Literal["graph", "op"]) -> int:
        """Host time (ns) to launch a whole graph, or one operator (XDS 2.3)."""
        return _ns((self.graph_dispatch if mode == "graph" else self.op_dispatch).value)

    def link_ns(
        self, local_bytes: float, near_bytes: float, far_bytes: float, cores: float | None = None
    ) -> float:
        """Time (ns, not rounded) for bytes through a side of an engine.

        `near` and `far` bytes cross the UB port, within and between servers. The bound of `cores` AIVs
        applies to MTE only; None means that no AIV carries the data (DMA, URMA).
        """
        crossing = near_bytes + far_bytes / (1 - self.inter_server_loss.value)
        port = 1e9 * crossing / self.ub_bandwidth.value
        time = port + self.hbm_ns(local_bytes)
        if cores is not None:
            time = max(
                time, 1e9 * (local_bytes + near_bytes + far_bytes) / (self.mte_bandwidth.value * cores)
            )
        return time

    def pieces_ns(self, num_pieces: int, cores: int) -> int:
        """Issue time (ns) of a batch: its pieces are dealt evenly to `cores` AIVs."""
        return math.ceil(num_pieces / cores) * _ns(self.piece_overhead.value)

    def ping_pong_ns(self, load_ns: float, store_ns: float, nbytes: int, cores: int) -> tuple[int, int, int]:
        """Times (ns) of a copy through the ping-pong unified buffers of `cores` AIVs.

        `load_ns` and `store_ns` are what MTE2 and MTE3 would need for all `nbytes`. A chunk is half a buffer
        on each core. MTE2 may load chunk i + 1 while MTE3 stores chunk i, but not chunk i + 2, whose half is
        still being read. Returns (end of MTE2, start of MTE3, end of MTE3) from the start of MTE2.
        """
        if nbytes == 0:
            return 0, 0, 0
        chunk = int(self.unified_buffer.value) // 2 * cores
        full, rest = divmod(nbytes, chunk)
        load, store = load_ns * chunk / nbytes, store_ns * chunk / nbytes
        load_end = store_end = stored_before = 0.0
        if full:
            # In the steady state the slower engine never pauses.
            step = max(load, store)
            load_end = load + max(full - 2, 0) * step + (load if full > 1 else 0.0)
            store_end = load + (full - 1) * step + store
            stored_before = store_end - step if full > 1 else 0.0
        if rest:
            last = rest / chunk
            load_end = max(load_end, stored_before) + load * last
            store_end = max(load_end, store_end) + store * last
        first = load if full else load_ns
        return math.ceil(load_end), math.ceil(first), math.ceil(store_end)

    def pipeline_ns(self, stages_ns: list[float], num_steps: int, cores: int) -> tuple[int, int, int, int]:
        """Times (ns) of a three-stage pipeline whose `num_steps` equal steps are dealt to `cores`.

        `stages_ns` is what each stage would need for all the steps. A stage takes up a step as soon as it is
        free and the stage before has done it. Returns (end of stage 1, end of stage 2, start of stage 3, end
        of stage 3) from the start of stage 1.
        """
        if num_steps == 0:
            return 0, 0, 0, 0
        rounds = math.ceil(num_steps / cores)
        first, second, third = (stage / rounds for stage in stages_ns)
        after_second = first + second + (rounds - 1) * max(first, second)
        after_third = first + second + third + (rounds - 1) * max(first, second, third)
        return (
            math.ceil(first * rounds),
            math.ceil(after_second),
            math.ceil(first + second),
            math.ceil(after_third),
        )

    def startup_ns(self, engine: Literal["mte", "dma", "urma"]) -> int:
        params = {"mte": self.mte_startup, "dma": self.dma_startup, "urma": self.urma_startup}
        return _ns(params[engine].value)

    def meeting_ns(self) -> int:
        return _ns(self.core_meeting.value)

    def field_poll_ns(self) -> int:
        return _ns(self.field_poll.value)

    def far_latency_ns(self) -> int:
        return _ns(self.inter_server_latency.value)

    def poll_ns(self) -> int:
        return _ns(self.poll_latency.value)

    def command_ns(self) -> int:
        return _ns(self.command_latency.value)


@lru_cache(4096)  # constants of a spec, most of the time
def _ns(seconds: float) -> int:
    """Convert seconds to whole nanoseconds, rounded up, with a little slack for binary fractions of decimal
    constants."""
    return math.ceil(seconds * 1e9 - 1e-6)
