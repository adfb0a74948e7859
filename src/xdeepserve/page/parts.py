"""Data of the page, format 1: a *frame* has the parts that have changed since the last one (docs/page.md).

Times are ns of virtual time. Data of many dies stands in columns or short rows: a pod has 768 dies.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

FORMAT = 1
NAME = "xdeepserve-page"


class PageHello(msgspec.Struct, frozen=True):
    """The first line of a record, and the first event of a stream."""

    software: str
    format: str = NAME
    version: int = FORMAT


class DieRow(msgspec.Struct, frozen=True, array_like=True):
    """A die of a TE: its role, and the experts it holds. `te` is a place in `PodPart.tes`.

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
    """A task executor (TE): the numbers from which the page draws its parts."""

    name: str
    role: str
    num_groups: int
    num_domains: int
    num_microbatches: int
    num_blocks: int
    block_size: int
    max_seqs: int


class PodPart(msgspec.Struct, frozen=True):
    """Data of the pod, changed only when TEs come and go.

    `no_kill` says why the page may not break dies; None if it may. `breaks` are the kinds of faults that it
    offers, each with a button's text and with its meaning.
    """

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
    breaks: list[tuple[str, str, str]]


class NowPart(msgspec.Struct, frozen=True):
    """State of the whole pod at this moment."""

    ns: int
    num_running: int
    num_waiting: int
    num_tokens: int  # generated while somebody watched
    lives: list[str]  # of each TE
    lost: list[int]  # dies, as the engine has found
    lost_servers: list[int]  # dies of expert servers that clients leave out


class GroupsPart(msgspec.Struct, frozen=True):
    """State of the DP groups: each column has a number for each DP group, TE by TE."""

    used: list[int]  # KV blocks
    cached: list[int]  # of the others, those with content that a prompt may match
    running: list[int]
    waiting: list[int]
    queries: list[int]  # tokens of prompts that were looked up
    hits: list[int]


class RequestRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's row. Times are -1 while they are unknown; `group` counts as in GroupsPart."""

    seq_id: int
    group: int
    state: str
    num_tokens: int
    ttft_ns: int
    tpot_ns: int
    num_accepted: int


class EventRow(msgspec.Struct, frozen=True, array_like=True):
    """An event of the pod; `kind` is that of the event's class (`engine/dp/events.py`)."""

    number: int
    ns: int
    kind: str
    text: str
    die: int  # -1: none


class SpanRow(msgspec.Struct, frozen=True, array_like=True):
    """An operation of a die in the step.

    `lane` and `name` are places in StepPart's lists, -1: does not apply. `start_ns` counts from the step's
    start. `is_wait`: 1 for a wait for a peer's field.
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
    """A step of a DP group, and what some dies did in it and beside it.

    Shown are `num_shown` of `num_dies` dies, and the layers `first_layer` to `last_layer`.
    """

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
    """Load of each die of PodPart in the step: parts per mille of the step with busy cores, and with
    waits."""

    busy: list[int]
    waits: list[int]


class HeatPart(msgspec.Struct, frozen=True):
    """Work by layer and column in the step.

    `unit` says what a value counts: rows of an expert, or us of a die.
    """

    unit: str
    layers: list[int]
    columns: list[int]
    values: list[list[int]]


class TrafficPart(msgspec.Struct, frozen=True):
    """Bytes moved by pair of dies and plane, most first, from when the step was wanted until it ended.

    `nbytes` is the sum over all `num_pairs`.
    """

    pairs: list[tuple[int, int, int, str]]
    num_pairs: int
    nbytes: int


class PoolPart(msgspec.Struct, frozen=True):
    """Counters of the memory pool's servers, and how full they are."""

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
