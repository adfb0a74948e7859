"""Exercise 5: group-limited routing. The story is beside this file."""

from __future__ import annotations

from xdeepserve.model.canonical import Array


def gate(
    scores: Array,
    bias: Array,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    best_of_group: int = 2,
) -> tuple[Array, Array]:
    """Return topk_idx int32 [T, K], best first, and topk_weights float32 [T, K], for scores float32 [T, E].

    bias: float32 [E], or empty: none. n_group groups of E / n_group consecutive experts; topk_group of them
    stay open. The score of a group of one expert is its value, and so is that of its best one where
    best_of_group is 1. Weights are normalised if norm_topk_prob, and always times routed_scaling_factor.
    xdeepserve.model.canonical has F32 and GATE_EPS.
    """
    raise NotImplementedError
