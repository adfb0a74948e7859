"""Frame of a stage's kernel on a die: rows, buffers and a layer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from xdeepserve.model.cache_layout import scratch_size
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import MLP, MTP, Layer, ModelWeights, MoE
from xdeepserve.model.weights import Recipe
from xdeepserve.step.linear import Buffers, Linears, Rows, Threads

NO_ROWS = np.empty((0, 0), np.float32)

Ends: TypeAlias = ModelWeights | MTP
"""Who has the embedding, the last norm and the head of a pass."""


class KVCache(NamedTuple):
    """Paged latents of a layer, tiled (kernels/mla.py). `scale` is empty unless the latents are INT8. In GQA
    `latent` has values and `k_pe` keys, of all the cache's heads (step/grouped.py)."""

    latent: Array
    scale: Array
    k_pe: Array
    index_k: Array = NO_ROWS  # the indexer's keys (kernels/indexer.py)
    # In DeepSeek-V4 (step/v4.py) arrays have a row for each position, [blocks, positions, columns]; besides,
    # entries [blocks, entries, columns], and what positions give to them.
    open: Array = NO_ROWS
    entry: Array = NO_ROWS
    entry_scale: Array = NO_ROWS
    entry_pe: Array = NO_ROWS
    index_open: Array = NO_ROWS
    index_entry: Array = NO_ROWS

    @property
    def pages(self) -> tuple[Array, Array, Array]:
        """Arrays read by attention: latents, scales and RoPE keys."""
        return self.latent, self.scale, self.k_pe


class Batch(NamedTuple):
    """Token rows of a step, on the die."""

    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    seq_of: Array  # int32 [T]
    block_tables: Array  # int32 [seqs, max blocks]
    context: int  # positions seen, over all rows
    kv_tokens: int  # cached positions read, those of a sequence once

    @classmethod
    def of(cls, positions: Array, slots: Array, seq_of: Array, block_tables: Array) -> Batch:
        if not len(positions):
            return cls(positions, slots, seq_of, block_tables, 0, 0)
        context = int(positions.sum()) + len(positions)
        ends = np.flatnonzero(seq_of[1:] != seq_of[:-1])  # the last rows of sequences, but for the last one's
        kv_tokens = int(positions[ends].sum()) + int(positions[-1]) + len(ends) + 1
        return cls(positions, slots, seq_of, block_tables, context, kv_tokens)

    def part(self, rows: slice) -> Batch:
        """Return the batch of some neighbouring rows."""
        return Batch.of(self.positions[rows], self.slots[rows], self.seq_of[rows], self.block_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class Model(NamedTuple):
    """Model as seen by a die: sizes, recipe and number of heads. `unabsorbed` bills MLA without absorption
    where that takes fewer operations, as in prompts."""

    config: ModelConfig
    recipe: Recipe
    heads: int
    unabsorbed: bool = False

    @property
    def is_int8(self) -> bool:
        return self.recipe == "int8"

    @property
    def matrix_nbytes(self) -> int:
        """Size (bytes) of an element of experts' matrices."""
        return 1 if self.is_int8 else 2


class Replicas(Protocol):
    """Map from tokens' logical experts to replicas, if there are any (engine's `ReplicaMap`)."""

    def find(self, out: Array, topk_idx: Array, moe: MoE) -> None: ...

    def collect(self, topk_idx: Array, moe: MoE) -> None: ...


class ArrivedRows(Protocol):
    """Observer of rows received for a die's experts (engine's `RedundantSlots`)."""

    def accept(self, local_idx: Array, layer: MLP) -> None: ...


class Frame:
    """Rows of a step, or of one of its microbatches, on their way through the layers of a die.

    `h` [T, H] are the rows of the die. Where a DP group spans several dies, `whole` has all its rows and `h`
    those that the stage treats. `batch` describes all rows of the group. Values passed from a stage to a
    later one, other than by the name of a buffer, are in the attributes below, as are the inputs of the ends
    of a pass.
    """

    ends: Ends
    token_ids: Sequence[int] | Array  # [T]
    streams: Array  # float32 [T, n, H], residuals of the rows with hyper-connections
    hidden: Array  # float32 [T or more, H]: what the last norm makes of rows; MTP goes on from there
    state_rows: Array  # int32 [T], where each row's state is in `hidden`
    logit_rows: Sequence[int] | Array = ()  # [R], the rows that logits are wanted of
    logits: Array  # float32 [R, V]
    tail: Array  # float32 [blocks, H]: states that MTP keeps from step to step
    mended_blocks: Array  # int32, of it, those that follow the rows' states in `hidden`
    kept_rows: Array  # int32, the rows whose states stay in `kept_blocks` of it
    kept_blocks: Array
    overwritten: dict[int, Array]  # rows of `tail` that this step has overwritten, as they were
    layer: Layer  # where the rows are, or are about to be
    cache: KVCache
    batch: Batch
    h: Array
    whole: Array
    mine: Array
    source: Rows  # the input of linear layers that was made last
    topk_idx: Array  # int32 [T, K], physical experts
    topk_weights: Array  # float32 [T, K]
    experts: MLP  # the routed experts of this die
    copy: MLP  # its copy of the shared one, if it has one for other dies' tokens
    shared_expert: int | None = None  # the physical expert that tokens take for the shared one, if elsewhere
    lane: int = 0  # whose buffers it has, of microbatches that share all others
    first_copy: int = 0  # physical experts from here on are copies of the shared one
    expert_in: Rows  # what the routed experts of this die are given
    expert_idx: Array  # int32 [rows], the physical expert that each received row is for
    local_idx: Array  # int32 [rows], the same, counted from this die's first one
    expert_out: Array  # float32 [rows, H]
    slot_out: Array  # float32 [T * K, H], what the experts made of the own rows
    shared: Array  # float32 [T, H]; no rows where there is no shared expert
    reduced: Array  # what the last collective made, or the answers of experts elsewhere
    parts: list[Array]
    shared_counts: list[int]  # rows of each DP group that shares an output projection

    def __init__(
        self,
        model: Model,
        buffers: Buffers,
        threads: Threads,
        tables: Sequence[Array] = (NO_ROWS, NO_ROWS),
        max_model_len: int = 0,
        slots: range = range(0),
        replicas: Replicas | None = None,
        arrivals: ArrivedRows | None = None,
    ) -> None:
        """Make a frame. `tables` are cos and sin, which only attention reads, and perhaps those of layers
        with compressed positions; `slots` the numbers of the die's physical experts."""
        c = model.config
        self.model, self.config, self.is_int8, self.num_heads = model, c, model.is_int8, model.heads
        self.take = buffers.take
        self.linears = Linears(buffers, threads, model.is_int8, 0.0 if c.v4 is None else c.v4.swiglu_limit)
        self._tables = tables
        self.cos, self.sin = tables[:2]
        self.slots, self.replicas, self.arrivals = slots, replicas, arrivals
        self.scratch_size = scratch_size(max_model_len, c.value_columns, c.key_columns)
        self.event = 0  # of the layer's exchange
        self.group_rank, self.group_size = 0, 1

    def begin_pass(
        self, ends: Ends, first: Layer, h: Array, batch: Batch, token_ids: Sequence[int] | Array
    ) -> None:
        """Begin a pass from tokens: it first makes the rows h [T, H] of the die's DP group, and then runs
        through layers from `first` on."""
        self.ends, self.layer, self.token_ids = ends, first, token_ids
        self.begin(h, batch)
        if (v4 := self.config.v4) is not None:
            self.streams = self.take("streams", len(h), v4.hc_mult, h.shape[1])

    def begin_part(self, whole: Frame, rows: slice) -> None:
        """Begin with some neighbouring rows of a pass that another frame has begun."""
        is_all = rows == slice(0, len(whole.whole))
        self.begin(whole.whole[rows], whole.batch if is_all else whole.batch.part(rows))
        self.token_ids = whole.token_ids[rows]
        if self.config.v4 is not None:
            self.streams = whole.streams[rows]

    def begin(self, h: Array, batch: Batch) -> None:
        """Begin with the rows h [T, H] of the die's DP group, before their first layer."""
        self.whole, self.batch = h, batch
        self.mine = self.h = h[self.slice_of(len(h))]

    def enter(self, layer: Layer, cache: KVCache, event: int) -> None:
        """Enter a layer with the rows; its exchange is event `event` on all ranks."""
        self.layer, self.cache, self.event = layer, cache, event
        if len(self._tables) > 2:
            self.cos, self.sin = self._tables[2:] if layer.attention in ("csa", "hca") else self._tables[:2]
        if layer.moe is not None:
            self.shared = NO_ROWS
            if layer.moe.experts is not None:
                self.experts = layer.moe.experts
            if layer.moe.shared is not None:
                self.copy = layer.moe.shared
            shape = len(self.mine), self.config.num_experts_per_tok
            self.topk_idx, self.topk_weights = (
                self.take("topk_idx", *shape),
                self.take("topk_weights", *shape),
            )
            if not shape[0] and self.shared_expert is not None:  # then no stage does that
                self.topk_idx = self.take("topk_physical", 0, shape[1] + 1)

    def receive(self, payload: Array, scale: Array, expert_idx: Array, out: Array) -> None:
        """Take received rows [N, H], INT8 with scales [N] in that recipe. The experts `expert_idx` [N] write
        their outputs to `out` [N, H]."""
        self.expert_in = Rows(payload, scale if self.is_int8 else None)
        self.expert_idx, self.expert_out = expert_idx, out

    def take_answers(self, answers: Array) -> None:
        """Take the experts' answers [T, K, H] to the die's own rows, or [T, K + 1, H] with the shared
        expert's last."""
        top_k = self.config.num_experts_per_tok
        if answers.shape[1] > top_k:
            self.shared = np.ascontiguousarray(answers[:, top_k])
            answers = np.ascontiguousarray(answers[:, :top_k])
        self.slot_out = answers.reshape(-1, answers.shape[-1])

    @property
    def moe(self) -> MoE:
        """Experts of the layer; fails for a layer without experts."""
        assert self.layer.moe is not None
        return self.layer.moe

    def slice_of(self, num_rows: int, rank: int | None = None) -> slice:
        """Return the slice of a DP group's `num_rows` rows on a die (by default this one). Slices are equal,
        in rank order; the last ones may be short or empty."""
        first = self.slice_size(num_rows) * (self.group_rank if rank is None else rank)
        return slice(min(first, num_rows), min(first + self.slice_size(num_rows), num_rows))

    def slice_size(self, num_rows: int) -> int:
        """Return the number of rows in a whole slice."""
        return -(-num_rows // self.group_size)
