"""The data of the page, format 1: a *frame* has those of these parts that have changed (docs/page.md).

Times are ns of virtual time. What there are many of stands in columns or short rows: a pod has 768 dies.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

FORMAT = 1
NAME = "xdeepserve-page"


class Hello(msgspec.Struct, frozen=True):
    """The first line of a record, and the first event of a stream."""

    software: str
    format: str = NAME
    version: int = FORMAT


class DieRow(msgspec.Struct, frozen=True, array_like=True):
    """A die that a TE has: who it is, by its place in `PodPart.tes`, and what of the model it holds.

    role: both, prefill, decode, attention, experts, shared, vacant. `group` is a DP group of its TE, or -1.
    `first_expert` up to `last_expert`: physical experts, -1: none.
    """

    die: int
    te: int
    role: str
    domain: int
    group: int
    first_expert: int
    last_expert: int


class TERow(msgspec.Struct, frozen=True):
    """A task executor: the numbers that its parts of the page are drawn from."""

    name: str
    role: str
    num_groups: int
    num_domains: int
    num_microbatches: int
    num_blocks: int
    block_size: int
    max_seqs: int


class PodPart(msgspec.Struct, frozen=True):
    """What changes only when TEs come and go. `no_kill`: why the page may not break dies; None: it may."""

    model: str
    deployment: str
    precision: str
    num_layers: int
    num_experts: int
    top_k: int
    servers: int
    superpod_servers: int
    chips_per_server: int
    dies_per_chip: int
    runs: str  # dies as tasks, in lockstep, or in time only
    has_text: bool
    tes: list[TERow]
    dies: list[DieRow]
    no_kill: str | None


class NowPart(msgspec.Struct, frozen=True):
    """The moment, and what is true of all."""

    ns: int
    num_running: int
    num_waiting: int
    num_tokens: int  # generated while somebody watched
    lives: list[str]  # of each TE
    lost: list[int]  # dies
    lost_servers: list[int]  # dies of expert servers that clients leave out


class GroupsPart(msgspec.Struct, frozen=True):
    """A row of each column for each DP group, TE by TE."""

    used: list[int]  # KV blocks
    cached: list[int]  # of the others, those with content that a prompt may match
    running: list[int]
    waiting: list[int]
    queries: list[int]  # tokens of prompts that were looked up
    hits: list[int]


class RequestRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence. Times are -1 while they are not known; `group` counts as in GroupsPart."""

    seq_id: int
    group: int
    state: str
    num_tokens: int
    ttft_ns: int
    tpot_ns: int
    num_accepted: int


class EventRow(msgspec.Struct, frozen=True, array_like=True):
    """Something has happened to the pod: kind is te, fault, rollback, server or preemption."""

    number: int
    ns: int
    kind: str
    text: str
    die: int  # -1: none


class SpanRow(msgspec.Struct, frozen=True, array_like=True):
    """Something that a die did. `lane` and `name` are places in StepPart's lists; -1: does not apply.

    `start_ns` counts from the step's. `is_wait`: 1 for a wait for a peer's field.
    """

    die: int
    lane: int
    name: int
    start_ns: int
    num_ns: int
    layer: int
    microbatch: int
    domain: int
    is_wait: int
    nbytes: int


class StepPart(msgspec.Struct, frozen=True):
    """A step of a DP group, with what some dies did in it, `num_shown` of `num_dies`, in some of the layers,
    from `first_layer` to `last_layer`, and beside them."""

    te: str
    group: int
    step: int
    start_ns: int
    end_ns: int
    num_rows: int
    num_shown: int
    num_dies: int
    first_layer: int
    last_layer: int
    lanes: list[str]
    names: list[str]
    spans: list[SpanRow]


class LoadPart(msgspec.Struct, frozen=True):
    """How much of that step each die of PodPart had busy cores, and how much it waited: per mille."""

    busy: list[int]
    waits: list[int]


class HeatPart(msgspec.Struct, frozen=True):
    """What each column had to do in each layer in that step. `unit`: rows of experts, or us of dies."""

    unit: str
    layers: list[int]
    columns: list[int]
    values: list[list[int]]


class TrafficPart(msgspec.Struct, frozen=True):
    """Bytes by pair and plane, most first, from when the step was wanted until it ended; `nbytes` of all
    `num_pairs`."""

    pairs: list[tuple[int, int, int, str]]
    num_pairs: int
    nbytes: int


class PoolPart(msgspec.Struct, frozen=True):
    """The memory pool: what its servers have counted, and what is there."""

    queries: int
    hits: int
    counts: dict[str, int]
    usage: dict[str, int]


class RequestsPart(msgspec.Struct, frozen=True):
    rows: list[RequestRow]


class EventsPart(msgspec.Struct, frozen=True):
    rows: list[EventRow]


Part: TypeAlias = (
    PodPart
    | NowPart
    | GroupsPart
    | RequestsPart
    | EventsPart
    | StepPart
    | LoadPart
    | HeatPart
    | TrafficPart
    | PoolPart
)
PARTS: dict[str, type[msgspec.Struct]] = {
    "pod": PodPart,
    "now": NowPart,
    "groups": GroupsPart,
    "requests": RequestsPart,
    "events": EventsPart,
    "step": StepPart,
    "load": LoadPart,
    "heat": HeatPart,
    "traffic": TrafficPart,
    "pool": PoolPart,
}
