"""Weights and buffers of a die that has experts, with or without attention."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Part, Recipe
from xdeepserve.step.layer import Holds

F32, I32, I8 = np.float32, np.int32, np.int8

PARTS: dict[Holds, tuple[Part, ...]] = {
    "routed": ("routed",),
    "shared": ("shared",),
    "both": ("routed", "shared"),
}


def holds(slots: range, is_shared: bool) -> Holds:
    """Return the kinds of experts on a die that serve all dies' tokens: routed, shared or both."""
    if not is_shared:
        return "routed"
    return "both" if slots else "shared"


def plan_expert_buffers(
    plan: Callable[..., None], config: ModelConfig, recipe: Recipe, rows: int, num_experts: int
) -> None:
    """Reserve the buffers of a grouped MLP over at most `rows` token copies."""
    hidden, inter = config.hidden_size, config.moe_intermediate_size
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
