"""Exercise 4: latent attention (MLA) in its weight-absorbed form. The story is beside this file."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.model.canonical import Array
from xdeepserve.model.reference import Canonical


def attend_to(
    self: Canonical, seen: Sequence[Array | slice], q: Array, q_pe: Array, latent: Array, k_pe: Array
) -> Array:
    """Compute the attention of T tokens, each over the positions of seen[t]: float32 [T, N * V], contiguous.

    q [T, N, nope], q_pe [T, N, R], latent [T, C], k_pe [T, R]. self.recipe, self.is_int8, self.config
    (softmax_scale) and self.weights (w_uk [N, nope, C], w_uv [N, C, V], int8_attention) have the rest.
    To be used: xdeepserve.model.reference.product(recipe, x [N, T, in], w [N, in, out]) -> [N, T, out]; of
    xdeepserve.model.canonical quantize_rows(x) -> (q, scale) and attention(q_lat [N, C], q_pe [N, R], c,
    c_scale or None, k_pe, softmax_scale, int8_attention) -> [N, C]: one token, and of the cache what it sees,
    seen[t].
    """
    raise NotImplementedError
