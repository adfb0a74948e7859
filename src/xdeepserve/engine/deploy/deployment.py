"""Settings of a deployment: the dies, the roles that they have, and how they share the work.

A TOML file or a preset gives them. Beside the type of each field stand its bounds and its meaning, which
`settings` lists and `--help` prints.
"""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import field

from xdeepserve.comm import exchange_choices
from xdeepserve.engine.deploy.policies import (
    ADMISSION,
    DECODE,
    DISPATCH,
    EVICTION,
    ORDER,
    PLACEMENT,
    ROUTE,
    VICTIM,
    Admission,
    Decode,
    Dispatch,
    Eviction,
    Order,
    Placement,
    Route,
    Victim,
)
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.errors import InputError
from xdeepserve.hw.topology import Topology
from xdeepserve.model.config import TPMode
from xdeepserve.parsing.tool_formats import ToolFormat

Role = Literal["both", "prefill", "decode"]
Hardware = Literal["cm384", "910b"]  # dies of a CloudMatrix384, NPUs of Atlas 800T A2 servers beside it
Device = Literal["cm384", "910b", "l20", "h800", "a800", "h20", "l40s"]  # of attention or of experts alone
Kind = Literal["monolithic", "colocated", "pd", "moe-attention", "transformerless", "eaas", "mixed"]

Mode = Literal["graph", "op"]  # a step is one launch, or one for each operator
Drafting = Literal["pipelined", "naive"]
Statuses = Literal["state", "all-gather"]
Preemption = Literal["recompute", "swap"]
Load = Literal["auto", "always", "never"]
Overlap = Literal["cores", "engines"]
Fabric = Literal["auto", "ub", "roce", "vpc"]
Transfer = Literal["request", "layer"]
Attention = Literal["absorbed", "unabsorbed"]
Transport = Literal["pod", "shm", "tcp"]  # EaaS 4.4
Carrier = Literal[exchange_choices.Carrier, "rdma"]  # rdma: by network cards (MegaScale-Infer 5)
Combine = Literal["bf16", "int8"]
Exchange = exchange_choices.Exchange
PoolFabric = Literal["ub", "vpc"]
Over = Literal["dma", "send-receive", "zero-copy"]
KVLoss = Literal["recompute", "fail"]
Tools = Literal["auto", "off"] | ToolFormat
Reasoning = Literal["auto", "off", "deepseek"]  # <think>


class Limits(NamedTuple):
    """Least and most value that the number of a setting may have; it is finite in any case.

    Limits are not given as `msgspec.Meta`: msgspec refuses the first wrong value alone, and one error has to
    name them all.
    """

    least: float
    most: float = math.inf
    is_open: bool = False  # the least value itself is not allowed

    def allow(self, value: float) -> bool:
        """Return whether a value lies within the bounds; NaN and infinity never do."""
        above = value > self.least if self.is_open else value >= self.least
        return above and value <= self.most and value < math.inf

    def __str__(self) -> str:
        if self.is_open:
            return f"more than {self.least:g}"
        if self.most == math.inf:
            return f"at least {self.least:g}" if self.least else "0 or more"
        if self.most - self.least > 2:
            return f"between {self.least:g} and {self.most:g}"
        *others, last = range(int(self.least), int(self.most) + 1)
        return f"{', '.join(map(str, others))} or {last}"


Count = Annotated[int, Limits(1)]
Natural = Annotated[int, Limits(0)]
Positive = Annotated[float, Limits(0, is_open=True)]
NonNegative = Annotated[float, Limits(0)]


def default_invariants() -> bool:
    """Return whether XDEEPSERVE_INVARIANTS is set to something else than 0."""
    return os.environ.get("XDEEPSERVE_INVARIANTS", "0") not in ("", "0")


def default_threads() -> int:
    """Return XDEEPSERVE_THREADS or NUMBA_NUM_THREADS if set, else 1.

    Raises InputError unless the value is a whole number from 1 on.
    """
    for name in ("XDEEPSERVE_THREADS", "NUMBA_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value:
            if not re.fullmatch("[0-9]+", value) or int(value) == 0:
                raise InputError(f"{name}={value}: a whole number from 1 on")
            return int(value)
    return 1


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and policies of the scheduler of each DP group."""

    max_num_seqs: Annotated[Count, "sequences in a step, per DP group"] = 16
    max_num_batched_tokens: Annotated[Count, "token rows in a step, per DP group; more go in chunks"] = 128
    max_waiting: Annotated[Natural, "sequences that may wait for a step, in all; else refused (429)"] = 1024
    dispatch: Annotated[Dispatch, DISPATCH.meaning] = "collaborative"
    statuses: Annotated[
        Statuses,
        "how the leader of DP groups knows them when it deals requests out for prefill; state: as they are, "
        "at no cost; all-gather: by bytes that their dies exchange",
    ] = "state"
    decode: Annotated[Decode, DECODE.meaning] = "kv"
    status_period: Annotated[
        NonNegative,
        "virtual seconds between the KV statuses that DP groups send for `decode`; 0: as they are",
    ] = 0.0
    route: Annotated[Route, ROUTE.meaning] = "sequences"
    heat: Annotated[
        str | None,
        "file of a heat map (bench heatmap --map), from which routes pd-aware and deepserve read whether TEs "
        "with prefill and decode apart or TEs that do both are better for a request",
    ] = None
    hint_age_ms: Annotated[
        NonNegative,
        "virtual ms until job executors know of blocks that come into a TE's prefix cache, or leave it",
    ] = 0.05
    job_executors: Annotated[Count, "of which a request reaches any; each knows what it has given to TEs"] = 1
    admission: Annotated[Admission, ADMISSION.meaning] = "prefill"
    order: Annotated[Order, ORDER.meaning] = "arrival"
    victim: Annotated[Victim, VICTIM.meaning] = "last"


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paged latent KV cache of each DP group."""

    block_size: Annotated[int, "positions in a KV block, a multiple of 16"] = 16
    num_blocks: Annotated[
        int | None, "KV blocks per DP group; by default for one context, and 4096 tokens"
    ] = None
    num_host_blocks: Annotated[Natural, "KV blocks per die in host DRAM, for swapped and cached ones"] = 0
    max_keys: Annotated[Count, "prompt_cache_keys per DP group; the least recently used go first"] = 1024
    prefix: Annotated[bool, "keep blocks of finished sequences for prompts with the same beginning"] = True
    preemption: Annotated[Preemption, "of sequences that give way; swap: blocks go to the host"] = "recompute"
    eviction: Annotated[Eviction, EVICTION.meaning] = "lru"
    load: Annotated[Load, "cached blocks from the host or other TEs, or recompute; auto: what is sooner"] = (
        "auto"
    )
    peers: Annotated[
        bool, "TEs read prefixes that they lack from the HBM caches of other TEs, by DistFlow"
    ] = False


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parsing of a chat's answer. "auto" takes the format from the checkpoint's tokenizer and template."""

    reasoning: Annotated[Reasoning, "reasoning in chats; auto: by their template; deepseek: <think>"] = "auto"
    tools: Annotated[Tools, "tool calls in chats; auto: by their template"] = "auto"


class RoleExecution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Overrides of `ExecutionConfig` for TEs of a given role; None keeps the common value."""

    mode: Annotated[Mode | None, "as execution.mode, on TEs of this role alone"] = None
    overlap: Annotated[bool | None, "as execution.overlap, on these alone"] = None
    mtp: Annotated[Drafting | None, "as execution.mtp, on these alone"] = None
    pin_cores: Annotated[bool | None, "as execution.pin_cores, on these alone"] = None
    cache_graphs: Annotated[bool | None, "as execution.cache_graphs, on these alone"] = None
    control_gc: Annotated[bool | None, "as execution.control_gc, on these alone"] = None


class ExecutionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the host launches steps, and the cost in virtual time; tokens never change by it."""

    # Prefill TEs, whose steps differ in length, launch eagerly (XDS 5.1: a static graph for decode alone).
    mode: Annotated[
        Mode | None,
        "graph: a step is one launch, captured once; op: operator by operator; by default op on prefill "
        "TEs, else graph. This and the next ones change virtual time, and no token. Presets with prefill "
        "apart launch so; elsewhere the host costs nothing until one of them is set",
    ] = None
    overlap: Annotated[bool, "plan and launch the next step while the current one runs"] = False
    mtp: Annotated[Drafting, "naive: back to the host between main model and draft"] = "pipelined"
    pin_cores: Annotated[
        bool, "each launch thread on a core of its own; without it launches jitter, by an assumed time"
    ] = True
    cache_graphs: Annotated[bool, "no guard checks of compiled graphs, whose time is assumed"] = True
    control_gc: Annotated[
        bool, "garbage collection by hand, in the same step everywhere; its pause is assumed"
    ] = True
    prefill: RoleExecution | None = None
    decode: RoleExecution | None = None

    def for_role(self, role: Role) -> ExecutionConfig:
        """Merge the settings for TEs of a role; `mode` gets a value if it is not set."""
        own = {"prefill": self.prefill, "decode": self.decode}.get(role) or RoleExecution()
        found = {name: getattr(own, name) for name in own.__struct_fields__}
        found["mode"] = own.mode or self.mode or ("op" if role == "prefill" else "graph")
        set_here = {name: value for name, value in found.items() if value is not None}
        return msgspec.structs.replace(self, prefill=None, decode=None, **set_here)


class HealthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two tiers of heartbeats, in seconds of virtual time.

    They say when a DP group that does not answer its TE-shell is suspect, and when it is lost. The same holds
    for a TE-shell that does not answer the control plane.
    """

    probe_s: Annotated[
        float,
        Limits(1e-4),
        "virtual seconds between probes of DP groups that have no work while others have, and before a "
        "failed link between prefill and decode is tried again",
    ] = 1.0
    link_probe_s: Annotated[
        float | None,
        Limits(1e-4),
        "virtual seconds between dummy payloads over each link of prefill and decode, beside its traffic: a "
        "link on which two in a row come late, or one never, is avoided until one comes in time; by default "
        "only links that have failed are probed",
    ] = None
    suspect_s: Annotated[Positive, "virtual seconds of silence until a DP group gets no new work"] = 5.0
    lost_s: Annotated[Positive, "virtual seconds of silence until a DP group is lost, and with it its TE"] = (
        60.0
    )
    beat_s: Annotated[
        float,
        Limits(0.001),
        "virtual seconds between two questions of the control plane to TE-shells",
    ] = 1.0
    shell_lost_s: Annotated[
        Positive,
        "virtual seconds of silence until a TE-shell is lost: later than lost_s, which can name a group",
    ] = 90.0


class RecoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reactions to a failure within a TE (xDeepServe 6.2)."""

    stage: Annotated[
        int,
        Limits(2, 3),
        "the gentlest stage that may be tried: 3, steps of a TE whose dies have kept their memory are run "
        "again; 2, it is given up, and others go on with what it had",
    ] = 3
    max_rollbacks: Annotated[
        Natural,
        "so often in a row a TE runs its steps again; then it is given up. A step that ends begins anew",
    ] = 4
    kv_loss: Annotated[
        KVLoss,
        "of sequences whose KV lay in a page of HBM that is lost; recompute: from their tokens; fail: their "
        "requests end with an error, and others go on",
    ] = "recompute"
    failover: Annotated[
        bool,
        "another TE takes the place of one that is given up, on fewer dies if need be; requests that nobody "
        "else could serve wait for it",
    ] = False
    spare_dies: Annotated[Natural, "dies beyond those of the deployment that such a TE may have"] = 0
    max_restarts: Annotated[
        Natural, "so often all TEs are started anew, where no TE can be replaced alone"
    ] = 2


class HardwareConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Differences from the dies of `hw/spec.py` and `hw/accelerators.py`."""

    hbm_mb: Annotated[Count | None, "memory of every die in MiB; by default that of its hardware"] = None


class EmsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The disaggregated memory pool (EMS): host DRAM over volumes.

    KV of prompts outlives requests, TEs and this process there.
    """

    path: Annotated[str | None, "directory of the memory pool's volumes; without one there is no pool"] = None
    servers: Annotated[
        int, Limits(1, Topology().superpod_servers), "hosts that give DRAM to the pool, with a volume each"
    ] = 4
    dram_mb: Annotated[Count, "MiB of DRAM on each of them"] = 64
    volume_mb: Annotated[Count, "MiB that each volume may hold; what was not used for longest goes"] = 1024
    block_size: Annotated[Count, "tokens in a block of the pool, a multiple of cache.block_size"] = 128
    fabric: Annotated[PoolFabric, "between dies and the pool's DRAM; vpc: by the servers' cards"] = "ub"
    namespace: Annotated[str, "part of the pool that this deployment sees"] = "default"
    quota_mb: Annotated[Count | None, "MiB that the namespace may have on each volume; by default all"] = None
    decode_blocks: Annotated[bool, "keep blocks with generated tokens, too, not only those of prompts"] = (
        False
    )


class TEConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings for task executors of a role."""

    count: Annotated[Count, "TEs of this role (pd; transformerless has one decode TE)"] = 1
    hardware: Annotated[Hardware, "910b: Atlas 800T A2 servers, one for each TE; prefill alone"] = "cm384"
    dies: Annotated[Count | None, "dies of each TE; by default up to 4"] = None
    tp: Annotated[int | None, "dies that share heads: 1, 2, 4 or 8; prefill by default up to 4"] = None
    tp_mode: Annotated[TPMode, "how dies share a DP group; sp-tp-sp: tokens are cut around attention"] = "tp"
    o_proj_tp: Annotated[
        int, "DP groups of one die (tp=1) that share the output projection of attention: 1, 2, 4 or 8"
    ] = 1
    max_num_seqs: Annotated[Count | None, "the scheduler's, on TEs of this role alone"] = None
    max_num_batched_tokens: Annotated[Count | None, "the scheduler's, on TEs of this role alone"] = None
    shared_dies: Annotated[
        Natural | None, "as experts.shared_dies, in TEs of this role, whose attention dies have experts"
    ] = None
    redundant_slots: Annotated[Natural | None, "as experts.redundant_slots, in TEs of this role alone"] = None
    experts_per_die: Annotated[Count | None, "as experts.experts_per_die, in TEs of this role alone"] = None


class ListedTE(TEConfig, frozen=True, forbid_unknown_fields=True):
    """Entry of a deployment's list [[te]]: TEs with settings and a role of their own."""

    role: Role = "both"


class AttentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention dies of `moe-attention`, `transformerless` and `eaas`.

    In `eaas` they are the clients of expert servers.
    """

    count: Annotated[
        Count, "TEs with that many attention dies each, all clients of the same expert servers (eaas)"
    ] = 1
    domains: Annotated[Count, "DP domains, which experts serve in turn (moe-attention, transformerless)"] = 2
    dies: Annotated[Count, "attention dies in each DP domain, each a DP group"] = 2
    microbatches: Annotated[
        Count, "parts of a step: experts work on one while attention works on another"
    ] = 2
    carrier: Annotated[
        Carrier | None,
        "of tokens and answers: mte, A2E and E2A through AIV cores; urma, by the DMA engine, which starts "
        "later and leaves cores and MTE2 to others; rdma, M2N by network cards, without trampolines. By "
        "default mte, and rdma where hardware is of other kinds",
    ] = None
    hardware: Annotated[
        Device,
        "of attention dies (moe-attention, transformerless); another one than cm384, here or in "
        "experts.hardware, has no UB, and is reached by network cards",
    ] = "cm384"


class ExpertConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expert dies, replicas of experts, and copies of the shared expert.

    Dies for experts alone exist in `moe-attention`, `transformerless` and `eaas`. Replicas of hot experts are
    possible anywhere. In `colocated`, some dies may hold copies of the shared expert for the tokens of other
    dies.
    """

    routed_dies: Annotated[Count | None, "dies of routed experts; by default up to 4"] = None
    shared_dies: Annotated[
        Natural | None,
        "dies of the shared expert; by default 1 for 8 of routed ones, and in colocated every die",
    ] = None
    hardware: Annotated[Device, "of dies for experts alone (moe-attention, transformerless)"] = "cm384"
    counts: Annotated[
        tuple[int, ...] | None,
        "routed experts of each expert server, in order (eaas); by default even shares",
    ] = None
    copies: Annotated[
        int, "other servers that have each routed expert, too, from the start (eaas): one may then be lost"
    ] = 0
    vacancies: Annotated[
        Natural, "more expert servers that there may be (eaas): their dies are held, and they may join"
    ] = 0
    transport: Annotated[
        Transport,
        "to expert servers (eaas): pod, dies in virtual time; shm, processes on this computer, whose memory "
        "clients share; tcp, processes on any",
    ] = "pod"
    monitor: Annotated[
        str | None,
        "HOST:PORT where server processes register (shm, tcp); by default a monitor and all servers are "
        "started, and end with this process",
    ] = None
    redundant_slots: Annotated[
        Natural, "slots per die and layer for replicas of hot routed experts (EPLB)"
    ] = 0
    experts_per_die: Annotated[
        Count | None,
        "in place of redundant_slots, what a die with experts has of each layer in all: routed experts, the "
        "shared one if it is there, and in slots for the rest replicas, from the start",
    ] = None
    balance_interval: Annotated[NonNegative, "virtual seconds of load that decide on replicas; 0: none"] = (
        60.0
    )
    balance_slices: Annotated[Count, "time slices in which the load that decides on replicas is counted"] = 4
    placement: Annotated[Placement, PLACEMENT.meaning] = "xdeepserve"
    cold_tokens: Annotated[
        Natural,
        "tokens of a time slice that an expert costs at least when replicas are decided on: its weights are "
        "read all the same (MegaScale-Infer 6); 0: replicas follow tokens alone",
    ] = 0


class ServiceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Experts as services (`eaas`): when servers begin a batch, and when they count as lost.

    Times are virtual; for server processes they are this computer's.
    """

    batch_clients: Annotated[
        Count, "clients whose requests a server waits for; 1: it begins with what has come"
    ] = 1
    batch_timeout_us: Annotated[NonNegative, "virtual microseconds after which it waits no longer"] = 50.0
    answer_timeout_ms: Annotated[
        Positive, "virtual milliseconds until a client asks a replica, if there is one (see experts.copies)"
    ] = 20.0
    process_timeout_ms: Annotated[
        Positive, "the same of server processes: milliseconds of this computer's time (experts.transport)"
    ] = 5000.0
    heartbeat_ms: Annotated[Positive, "virtual milliseconds between two looks of the monitor at servers"] = (
        2.0
    )
    server_sums: Annotated[
        bool, "timing-only: servers answer with a sum over their experts for each token, as the paper's do"
    ] = False
    lost_heartbeats: Annotated[Count, "so many without an answer, and clients hear that a server is lost"] = 3


class PipelineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Overlap of two microbatches on dies with attention and experts (CloudMatrix 4.2.3, 4.3.2)."""

    microbatches: Annotated[
        int, Limits(1, 2), "of a step: 1, or 2 that overlap on dies with attention and experts"
    ] = 1
    overlap: Annotated[Overlap | None, "of microbatches; by default by engines in prefill, else by cores"] = (
        None
    )
    attention_cores: Annotated[
        int,
        "AIC cores of the attention stream where microbatches overlap by cores, of 24 (of 20 if prefill on "
        "910b does so), and AIV cores alike",
    ] = 16
    dynamic: Annotated[
        bool,
        "a step is cut into its two microbatches only if it is predicted to end sooner so (xDeepServe 4)",
    ] = False
    adaptive: Annotated[
        bool, "AIC cores move between the streams, one a layer, until both take as long; from attention_cores"
    ] = False


class RoleScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of TEs of a role, where they differ from those of `[scale]`."""

    least: Annotated[Natural | None, "as scale.least, of TEs of this role alone"] = None
    most: Annotated[Count | None, "as scale.most, of TEs of this role alone"] = None
    warm: Annotated[Natural | None, "as scale.warm, of TEs of this role alone"] = None


class ScaleConfig(ScaleBounds, frozen=True, forbid_unknown_fields=True):
    """TEs that come and go as load does (DeepServe 6), in `pd` those of each role by their own load."""

    FEWEST: ClassVar[int] = 0

    # None is for replays of a cluster: a pre-warmed TE for each that comes, which has held no dies.
    warm: Annotated[Natural | None, "TEs that are pre-warmed: dies and processes, without weights"] = 0
    ttft_s: Annotated[Positive | None, "bound of TTFT, the time to the first token; by default none"] = None
    tpot_s: Annotated[Positive | None, "bound of TPOT, the time per further token; by default none"] = None
    prefill: RoleScale | None = None
    decode: RoleScale | None = None

    def of(self, role: Role) -> ScaleConfig:
        """Return the settings for TEs of a role. TTFT is a matter of prefill, TPOT of decode."""
        if role == "both":
            return self
        own = {} if (given := getattr(self, role)) is None else msgspec.structs.asdict(given)
        other = "tpot_s" if role == "prefill" else "ttft_s"
        return msgspec.structs.replace(
            self, **{name: value for name, value in own.items() if value is not None}, **{other: None}
        )


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of a pod. `resolve` makes one from a preset or a file, and `fit` checks it against a model."""

    name: str
    kind: Annotated[Kind, "which dies there are: a preset says it, and a .toml file has to"]
    dies: Annotated[Count | None, "dies of the pod (colocated: up to the number of routed experts)"] = None
    tp: Annotated[int | None, "dies that share a DP group's heads: 1, 2, 4 or 8 (colocated)"] = None
    tp_mode: Annotated[TPMode | None, "how dies share a DP group; sp-tp-sp: tokens, too; by default tp"] = (
        None
    )
    o_proj_tp: Annotated[
        int | None,
        "DP groups of one die (tp=1) that share the output projection of attention: 1, 2, 4 or 8 (colocated)",
    ] = None
    prefill: TEConfig | None = None  # of `pd` and `transformerless`
    decode: TEConfig | None = None  # of `pd`
    te: tuple[ListedTE, ...] | None = None  # of `mixed`, in a file: sections [[te]]
    pipeline: PipelineConfig | None = None  # of `colocated`, `pd`, and prefill of `transformerless`
    attention: AttentionConfig | None = None  # of `moe-attention` and `transformerless`
    experts: ExpertConfig | None = None  # routed_dies are of these and `eaas` alone
    services: ServiceConfig | None = None  # of `eaas`
    fabric: Annotated[Fabric, "between prefill and decode; auto: the first that both are on"] = "auto"
    transfer: Annotated[Transfer, "of KV to decode: when prefill is done, or layer by layer"] = "request"
    exchange: Annotated[
        Exchange,
        "of tokens between dies with experts: "
        + "; ".join(f"{name}, by {each.how}" for name, each in exchange_choices.EXCHANGES.items())
        + ". Digests are equal, bytes and times are not",
    ] = "pull"
    combine: Annotated[
        Combine,
        "of experts' outputs on their way back, with --precision int8: bf16; or int8, each row with a scale "
        "(xDeepServe 4.7), which has digests of its own",
    ] = "bf16"
    transfer_over: Annotated[
        Over,
        "on UB: dma, decode's DMA engine pulls KV; send-receive, kernels of both sides send and receive it "
        "through rings; zero-copy, they do so without rings: prefill's tells where KV lies and ends",
    ] = "dma"
    prefill_attention: Annotated[
        Attention,
        "how MLA of prompts is billed: absorbed, as it is computed here; unabsorbed, with keys and values of "
        "all heads made first (CloudMatrix 4.3.1). Changes virtual time, and no token",
    ] = "absorbed"
    checksums: Annotated[
        bool,
        "over payloads between nodes: bits that flip on their way are found; takes time, but not in "
        "exchanges of lockstep and of timing-only runs",
    ] = False
    max_model_len: Annotated[
        int | None, "prompt and new tokens together; by default the model's, at most 4096"
    ] = None
    threads: Annotated[Count, "threads of this computer; by default XDEEPSERVE_THREADS"] = field(
        default_factory=default_threads
    )
    seed: Annotated[int, "seed of requests that bring none"] = 0
    invariants: Annotated[
        bool,
        "check after every turn what must always hold, at no virtual time; by default XDEEPSERVE_INVARIANTS",
    ] = field(default_factory=default_invariants)
    mtp: Annotated[
        int,
        Limits(0, 2),
        "drafts per step from the MTP layers: 0, 1 or 2; generate and serve: --mtp",
    ] = 0
    mtp_reuse: Annotated[bool, "the second draft comes from the first MTP layer, used again"] = False
    dataflow: Annotated[bool, "no barriers to experts (moe-attention, transformerless)"] = False
    # These kernels are much faster, but take longer to compile, once.
    lockstep: Annotated[
        bool | None,
        "kernels go over all dies at once, also over hundreds (of pd and mixed, all but those that "
        "prefill alone); by default in superpod, and in monolithic and colocated with large models",
    ] = None
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    output: OutputConfig = OutputConfig()
    hardware: HardwareConfig = HardwareConfig()
    health: HealthConfig = HealthConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    scale: ScaleConfig | None = None
    ems: EmsConfig = EmsConfig()
    execution: ExecutionConfig | None = None  # None: a host that costs nothing
