"""Rotate an attention layer's latents and values where that lowers the error, and only there.

As in smoothing, each place is tried both ways on the calibration text, smoothed as the method would smooth
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.model.config import LATENT_NORM_EPS, ModelConfig
from xdeepserve.quant.forward import attend, rms_norm
from xdeepserve.quant.rotation import rotate_latent, rotate_values, rotation
from xdeepserve.quant.rounding import quantized_rows, relative_error
from xdeepserve.quant.smoothquant import search_scale


class AttentionWeights(msgspec.Struct, frozen=True):
    """An MLA layer's matrices and inner norms.

    Without a query latent, q_a and q_norm are None. `index_q` is the indexer's query projection, which also
    reads the query latent, or None.
    """

    q_a: Array | None
    q_norm: Array | None
    q_b: Array
    kv_a: Array
    kv_norm: Array
    kv_b: Array
    o_proj: Array
    index_q: Array | None = None


def rotate_where_it_helps(
    a: AttentionWeights,
    x: Array,
    config: ModelConfig,
    lengths: Sequence[int],
    alphas: Sequence[float],
    seed: int,
) -> AttentionWeights:
    """Return weights of the same function of x [T, H], the layer's normed inputs, rotated where rounding then
    loses less. With sparse attention, values are judged as if all positions were seen."""
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank

    def error(inputs: Array, *weights: Array) -> float:
        return search_scale(inputs, weights, alphas)[1]

    if a.q_a is not None and a.q_norm is not None:
        plain = (a.q_a, a.q_norm, a.q_b)
        turned = rotate_latent(*plain, rotation(len(a.q_a), seed))

        def latent_error(first: Array, norm: Array, second: Array) -> float:
            return error(x, first) + error(rms_norm(x @ first.T, norm, LATENT_NORM_EPS), second)

        if latent_error(*turned) < latent_error(*plain):
            index_q = a.index_q
            if index_q is not None:
                index_q = rotate_latent(a.q_a, a.q_norm, index_q, rotation(len(a.q_a), seed))[2]
            a = msgspec.structs.replace(a, q_a=turned[0], q_norm=turned[1], q_b=turned[2], index_q=index_q)

    def cache_error(kv_a: Array, norm: Array, kv_b: Array) -> float:
        """Compute the error at the kv latent. kv_b is never quantised, but the cached latent that it reads
        is."""
        latent = rms_norm(x @ kv_a[:rank].T, norm, LATENT_NORM_EPS)
        return error(x, kv_a) + relative_error(quantized_rows(latent) @ kv_b.T, latent @ kv_b.T)

    latent_rows, kv_norm, kv_b = rotate_latent(a.kv_a[:rank], a.kv_norm, a.kv_b, rotation(rank, seed))
    kv_a = np.concatenate([latent_rows, a.kv_a[rank:]])
    if cache_error(kv_a, kv_norm, kv_b) < cache_error(a.kv_a, a.kv_norm, a.kv_b):
        a = msgspec.structs.replace(a, kv_a=kv_a, kv_norm=kv_norm, kv_b=kv_b)

    q_in = x
    if a.q_a is not None and a.q_norm is not None:
        q_in = rms_norm(x @ a.q_a.T, a.q_norm, LATENT_NORM_EPS)
    o = attend(config, q_in @ a.q_b.T, x @ a.kv_a.T, a.kv_norm, a.kv_b, lengths)
    turn = rotation(config.v_head_dim, seed)
    by_head = a.kv_b.reshape(heads, nope + config.v_head_dim, -1)
    values, o_proj = rotate_values(by_head[:, nope:], a.o_proj, turn)
    o_turned = (o.reshape(len(o), heads, -1) @ turn).reshape(o.shape).astype(np.float32)
    if error(o_turned, o_proj) < error(o, a.o_proj):
        kv_b = np.concatenate([by_head[:, :nope], values], axis=1).reshape(a.kv_b.shape)
        a = msgspec.structs.replace(a, kv_b=kv_b, o_proj=o_proj)
    return a
