"""Buffers of the stages of a layer, by what a die does: attention, dense and shared MLP, gate, experts, and
what dies that share heads or projections hand each other.

Each function reserves buffers by `plan(name, dtype, *shape)`. A buffer is as large as a step can need; names
are those under which the stages take them (step/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xdeepserve.model.cache_layout import TILE, cache_shape
from xdeepserve.model.config import ModelConfig, ShardMode, TPMode
from xdeepserve.model.weights import Part, Recipe
from xdeepserve.step.layer import Holds
from xdeepserve.step.sparse import rows_at_once

F32, I32, I8, U8 = np.float32, np.int32, np.int8, np.uint8
Plan = Callable[..., None]

PARTS: dict[Holds, tuple[Part, ...]] = {
    "routed": ("routed",),
    "shared": ("shared",),
    "both": ("routed", "shared"),
}


def holds(slots: range, is_shared: bool) -> Holds:
    """Return whose experts a die serves for the tokens of all dies: routed ones in `slots`, the shared one if
    `is_shared`, or both."""
    if not is_shared:
        return "routed"
    return "both" if slots else "shared"


class Extent(NamedTuple):
    """Most that one step can bring to a die, by kind of buffer."""

    part: int  # rows of the step, or of one of its microbatches where these are side by side
    slice: int  # rows of that, where tokens are cut between dies
    expert: int  # token copies for the die's experts
    copied: int  # of these, rows for its copy of the shared expert; 0 if it has none for others
    context: int  # positions of a sequence
    lanes: int  # microbatches whose chosen positions stay until the next layer, in buffers that they share


def plan_layer(
    plan: Plan, c: ModelConfig, recipe: Recipe, most: Extent, num_heads: int, tp: int, mode: TPMode
) -> None:
    """Reserve buffers for attention with `num_heads` heads, a dense MLP and the shared expert.

    The MLP of a die is one of `tp` parts of it in mode "tp", and otherwise all of it for a slice of the rows.
    """
    t, n, hidden = most.part, most.slice, c.hidden_size
    shared = c.n_shared_experts * c.moe_intermediate_size
    mlp = t * (c.intermediate_size // tp) if mode == "tp" else n * c.intermediate_size
    act = max(mlp, (most.copied or n) * shared)
    q_width, o_width = num_heads * c.qk_head_dim, num_heads * c.v_head_dim
    for name in ("x", "y"):
        plan(name, F32, t, hidden)
    plan("q_a", F32, t, c.q_lora_rank or 1)
    plan("q", F32, t, q_width)
    plan("kv", F32, t, c.kv_columns)
    plan("q_lat", F32, t, max(num_heads * c.value_columns, c.num_key_value_heads * c.key_columns))
    plan("o_lat", F32, t, num_heads * c.value_columns)
    plan("o", F32, t, o_width)
    if c.v4 is not None:
        plan_v4(plan, c, most)
    elif c.index_topk:
        plan_indexer(plan, c, recipe, most)
    plan("gate_up", F32, 2 * act)
    plan("act", F32, act)
    groups = 0 if c.v4 is None else c.v4.o_groups * c.v4.o_lora_rank
    widest = max(2 * hidden, c.q_lora_rank or 1, q_width, o_width, groups)
    plan("q8", I8, max(t * widest, n * c.num_attention_heads * c.v_head_dim, act))
    plan("q8_scale", F32, max(t, most.copied))


def plan_v4(plan: Plan, c: ModelConfig, most: Extent) -> None:
    """Reserve buffers of DeepSeek-V4's stages (step/v4.py)."""
    assert c.v4 is not None
    t, n = most.part, c.v4.hc_mult
    plan("hc_logits", F32, t, (2 + n) * n)
    for lane in range(most.lanes):
        plan(f"hc_post/{lane}", F32, t, n)
        plan(f"hc_mix/{lane}", F32, t, n, n)
    plan("entry_given", F32, t, 4 * c.v_head_dim)
    plan("index_entry_given", F32, t, 4 * c.index_head_dim)
    plan("given_half", F32, t, 2 * max(c.v_head_dim, c.index_head_dim))
    plan("index_w", F32, t, c.index_n_heads)
    plan("index_q", F32, t, c.index_n_heads * c.index_head_dim)
    plan("chosen_entries", I32, t, c.index_topk)
    plan("o_groups", F32, t, c.v4.o_groups * c.v4.o_lora_rank)


def plan_indexer(plan: Plan, c: ModelConfig, recipe: Recipe, most: Extent) -> None:
    """Reserve buffers to choose positions of rows, and to gather those of a row (step/sparse.py)."""
    t, few = most.part, min(c.index_topk, most.context)
    whole = -(-few // TILE) * TILE
    plan("index_k", F32, t, c.index_head_dim)
    plan("index_w", F32, t, c.index_n_heads)
    plan("index_q", F32, t, c.index_n_heads * c.index_head_dim)
    for lane in range(most.lanes):
        plan(f"chosen/{lane}", I32, t, few)
    dtype, rows = U8 if recipe == "int8" else F32, rows_at_once(t, few)
    plan("chosen_latent", dtype, *cache_shape(rows, whole, c.value_columns))
    plan("chosen_scale", F32, rows, whole)
    plan("chosen_k_pe", F32, *cache_shape(rows, whole, c.key_columns))


def plan_gate(plan: Plan, c: ModelConfig, most: Extent, num_physical: int) -> None:
    """Reserve buffers for the gate's choice: logical experts, and `num_physical` physical ones of a token; 0
    if these are the same."""
    plan("gate_logits", F32, most.slice, c.n_routed_experts)
    plan("topk_idx", I32, most.slice, c.num_experts_per_tok)
    plan("topk_weights", F32, most.slice, c.num_experts_per_tok)
    if num_physical:
        plan("topk_physical", I32, most.slice, num_physical)


def plan_own_experts(plan: Plan, c: ModelConfig, recipe: Recipe, most: Extent, num_slots: int) -> None:
    """Reserve buffers for experts beside attention, and for the answers that are summed."""
    plan("shared", F32, most.slice, c.hidden_size)
    plan_experts(plan, c, recipe, most.expert, num_slots)
    plan("expert_sent", F32, most.expert, c.hidden_size)
    plan("slot_out", F32, most.slice * c.num_experts_per_tok, c.hidden_size)


def plan_experts(plan: Plan, c: ModelConfig, recipe: Recipe, rows: int, num_experts: int) -> None:
    """Reserve buffers for a grouped MLP over at most `rows` token copies."""
    hidden, inter = c.hidden_size, c.moe_intermediate_size
    plan("expert_in", I8 if recipe == "int8" else F32, rows, hidden)
    plan("expert_in_scale", F32, rows)
    plan("expert_q8_scale", F32, rows)
    plan("expert_idx", I32, rows)
    plan("expert_order", I32, rows)
    plan("expert_offsets", I32, num_experts + 1)
    plan("expert_gate_up", F32, rows, 2 * inter)
    plan("expert_act", F32, rows, inter)
    plan("expert_q8", I8, rows, inter)
    plan("expert_out", F32, rows, hidden)


def plan_tensor_parallel(plan: Plan, c: ModelConfig, most: Extent, mode: ShardMode) -> None:
    """Reserve buffers for exchanges within a TP group (step/shard.py)."""
    plan("slice", F32, most.slice, c.hidden_size)
    if mode == "tp":
        plan("maxima", F32, most.part)
        plan("sums", I32, most.part, c.hidden_size)
    else:
        plan("latents", F32, most.slice, c.down_columns)
        plan("o_slice", F32, most.slice, c.num_attention_heads * c.v_head_dim)


def plan_shared_out_proj(plan: Plan, c: ModelConfig, recipe: Recipe, most: Extent, size: int) -> None:
    """Reserve buffers for exchanges of `size` DP groups that share an output projection (step/o_proj.py)."""
    t, width = most.part, c.num_attention_heads * c.v_head_dim // size
    plan("o_columns", F32, size, t, width)
    plan("o_shared", F32, size * t, width)
    plan("o_sums", F32, size * t, c.hidden_size)
    if recipe == "int8":
        plan("q8_columns", I8, size, t, width)
        plan("q8_shared", I8, size * t, width)
        plan("q8_sums", I32, size * t, c.hidden_size)
