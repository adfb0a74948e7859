"""A deployment: which dies there are and how they share the work. A TOML file, or a preset of that form."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from xdeepserve.model.tp import TPMode

Role = Literal["both", "prefill", "decode"]
Hardware = Literal["cm384", "910b"]  # dies of a CloudMatrix384, NPUs of Atlas 800T A2 servers beside it
Kind = Literal["monolithic", "colocated", "pd", "moe-attention", "transformerless"]

ToolFormat = Literal["deepseek", "deepseek_v31", "kimi", "hermes"]


def default_threads() -> int:
    """XDEEPSERVE_THREADS or NUMBA_NUM_THREADS if set, else 1."""
    for name in ("XDEEPSERVE_THREADS", "NUMBA_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one DP group's scheduler."""

    max_num_seqs: int = 16  # sequences in a step
    max_num_batched_tokens: int = 128  # token rows in a step; longer prompts are prefilled in chunks
    max_waiting: int = 1024  # sequences beyond those that fit in a step, in the whole engine; then 429
    dispatch: Literal["collaborative", "two-level"] = "collaborative"  # of requests to DP groups
    decode: Literal["kv", "round-robin"] = "kv"  # of prefilled requests to DP groups of decode TEs


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The paged latent KV cache of one DP group."""

    block_size: int = 16  # positions in a block
    num_blocks: int | None = None  # by default room for one context, and for 4096 tokens at least
    num_host_blocks: int = 0  # in host DRAM, for swapped sequences and cached prefixes
    max_keys: int = 1024  # names of cached prefixes (`prompt_cache_key`), the least recently used go first
    prefix: bool = True  # keep blocks of finished sequences for prompts with the same beginning
    preemption: Literal["recompute", "swap"] = "recompute"
    load: Literal["auto", "always", "never"] = "auto"  # cached blocks from host DRAM, or recompute?


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is parsed out of a chat's answer. "auto": what the checkpoint's tokenizer and template know."""

    reasoning: Literal["auto", "off", "deepseek"] = "auto"
    tools: Literal["auto", "off"] | ToolFormat = "auto"


class RoleExecution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where TEs of one role differ from `ExecutionConfig`. None: they do not."""

    mode: Literal["graph", "op"] | None = None
    overlap: bool | None = None
    mtp: Literal["pipelined", "naive"] | None = None
    pin_cores: bool | None = None
    cache_graphs: bool | None = None
    control_gc: bool | None = None


class ExecutionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the host launches steps, and what that costs in virtual time. It never changes a bit."""

    # A step is one launch, or one for each operator. By default "op" on prefill TEs, whose steps differ in
    # length (XDS 5.1: eager for prefill, a static graph for decode), else "graph".
    mode: Literal["graph", "op"] | None = None
    overlap: bool = False  # plan and launch the next step while the current one runs
    mtp: Literal["pipelined", "naive"] = "pipelined"  # naive: back to the host between main model and draft
    pin_cores: bool = True  # each launch thread on a core of its own
    cache_graphs: bool = True  # no guard checks of compiled graphs
    control_gc: bool = True  # garbage collection by hand, in the same step everywhere
    prefill: RoleExecution | None = None
    decode: RoleExecution | None = None

    def for_role(self, role: Role) -> ExecutionConfig:
        """What holds for the TEs of a role; nothing is left open."""
        own = {"prefill": self.prefill, "decode": self.decode}.get(role) or RoleExecution()
        found = {name: getattr(own, name) for name in own.__struct_fields__}
        found["mode"] = own.mode or self.mode or ("op" if role == "prefill" else "graph")
        set_here = {name: value for name, value in found.items() if value is not None}
        return msgspec.structs.replace(self, prefill=None, decode=None, **set_here)


class HealthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a DP group that does not answer is suspect, and when it is lost. In seconds of virtual time."""

    probe_s: float = 1.0  # between probes of a group that has no work while others have; and before a link
    # of a prefill and a decode TE that has failed is tried again
    suspect_s: float = 5.0  # new requests go elsewhere
    lost_s: float = 60.0  # the TE gives up, with an error


class HardwareConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What differs from the dies of `hw/spec.py` and `hw/atlas.py`."""

    hbm_mb: int | None = None  # capacity of a die in MiB; by default the specification's 64 GB


class TEConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Task executors of one kind."""

    count: int = 1
    hardware: Hardware = "cm384"  # 910b: of prefill alone, each TE in a server of its own
    dies: int | None = None  # of each; by default up to 4
    tp: int | None = None  # dies that a DP group spans; by default up to 4 in prefill TEs, else 1
    tp_mode: TPMode = "tp"  # how they share its work
    max_num_seqs: int | None = None  # in a step of one DP group; by default the scheduler's
    max_num_batched_tokens: int | None = None


class AttentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention dies of `moe-attention` and `transformerless`."""

    domains: int = 2  # of DP groups; the experts serve one at a time
    dies: int = 2  # in each domain, each a DP group
    microbatches: int = 2  # of a step: while the experts work on one, attention works on the other


class ExpertConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dies for experts alone in `moe-attention` and `transformerless`; anywhere, replicas of hot experts."""

    routed_dies: int | None = None  # by default up to 4
    shared_dies: int | None = None  # each with a copy of the shared expert; by default 1 for 8 routed ones
    redundant_slots: int = 0  # on each die with routed experts and in each layer, for replicas (EPLB)
    balance_interval: float = 60.0  # virtual seconds of load that decide on replicas; 0: there will be none
    balance_slices: int = 4  # in which the load is counted


class PipelineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two microbatches that overlap on dies with attention and experts (CloudMatrix 4.2.3, 4.3.2)."""

    microbatches: int = 1  # of a step; 1: layers run one stage after the other
    overlap: Literal["cores", "engines"] | None = None  # by default engines in prefill TEs, else cores
    attention_cores: int = 16  # "cores": AIC cores of the attention stream, and two AIV cores for each


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of a pod. `resolve` makes and checks one."""

    name: str
    kind: Kind
    dies: int | None = None  # of `monolithic` and `colocated`
    tp: int | None = None  # dies that a DP group of `colocated` spans, by default 1
    tp_mode: TPMode | None = None  # how they share its work, by default "tp"
    prefill: TEConfig | None = None  # of `pd`
    decode: TEConfig | None = None
    pipeline: PipelineConfig | None = None  # of `colocated`, `pd`, and prefill of `transformerless`
    attention: AttentionConfig | None = None  # of `moe-attention` and `transformerless`
    experts: ExpertConfig | None = None  # routed_dies and shared_dies are of these two alone
    fabric: Literal["auto", "ub", "roce", "vpc"] = "auto"  # between prefill and decode TEs; auto: UB if both
    # sides are on it, else RoCE, else VPC
    transfer: Literal["request", "layer"] = (
        "request"  # of KV between them: at the end of prefill, or during it
    )
    max_model_len: int | None = None  # by default the model's context, 4096 at most
    threads: int = msgspec.field(default_factory=default_threads)  # of the laptop, not of a die
    seed: int = 0  # of requests that bring none
    mtp: int = 0  # drafts per step from the checkpoint's MTP layers
    mtp_reuse: bool = False  # use the first MTP layer again for the second draft even if there is another
    dataflow: bool = False  # where MoE and attention are apart: no barriers, see programs/dataflow.py
    # Not of `pd`: run a step's layers on all dies at once. None: only `monolithic` and `colocated`, with a
    # large model, since these kernels are much faster, but take longer to compile, once.
    lockstep: bool | None = None
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    output: OutputConfig = OutputConfig()
    hardware: HardwareConfig = HardwareConfig()
    health: HealthConfig = HealthConfig()
    execution: ExecutionConfig | None = None  # None: a host that costs nothing
