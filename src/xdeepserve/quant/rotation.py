"""Rotations for spreading outliers over all channels, without changing the function (CloudMatrix384 4.5).

An orthogonal R goes in where a linear layer ends and out where the next begins. MLA has three such places
inside a layer, and GQA has the last of them:

    q latent     q_a_proj -> q_a_layernorm -> the query projection
    kv latent    kv_a_proj (latent rows) -> kv_a_layernorm -> kv_b_proj; the cached latent is rotated, too
    values       each head's value rows of kv_b_proj, or of v_proj -> o_proj

RMSNorm commutes with a rotation once its weight has moved into the layer behind it. The residual stream
itself is not rotated: MTP layers read it behind the final norm's weight, which does not commute. A rotation
consists of Hadamard blocks with random signs; the block size is the largest power of two that divides the
size.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import Array


def rotation(size: int, seed: int) -> Array:
    """Make an orthogonal matrix [size, size] in float64; the identity for odd sizes."""
    block = size & -size
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard /= np.sqrt(block)
    out = np.zeros((size, size))
    signs = np.where(np.random.Generator(np.random.PCG64(seed)).random(size) < 0.5, -1.0, 1.0)
    for start in range(0, size, block):
        out[start : start + block, start : start + block] = hadamard
    return out * signs if block > 1 else np.eye(size)


def rotate_latent(first: Array, norm: Array, second: Array, r: Array) -> tuple[Array, Array, Array]:
    """Rotate first [R, K] -> norm [R] -> second [N, R] in between; the norm's weight moves into `second`."""
    return (r.T @ first).astype(np.float32), np.ones_like(norm), ((second * norm) @ r).astype(np.float32)


def rotate_values(values: Array, o_proj: Array, r: Array) -> tuple[Array, Array]:
    """Rotate value rows [heads, V, C] and o_proj [H, N * V], each head by r [V, V]. N query heads may share
    fewer value heads."""
    turned = np.einsum("vw,hvc->hwc", r, values)
    o = o_proj.reshape(len(o_proj), -1, len(r)) @ r
    return turned.astype(np.float32), o.reshape(o_proj.shape).astype(np.float32)
