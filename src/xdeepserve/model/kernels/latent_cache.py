"""Kernels before attention, per token: heads are rotated; a latent, or keys and values, are stored."""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model.cache_layout import TILE, TILE_SIZE
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.exact_tiles import factor
from xdeepserve.model.kernels.rows import inverse_rms, quantize_row
from xdeepserve.model.kernels.simd import load, splat, store
from xdeepserve.model.kernels.vector_math import take


@kernel
def rope_heads(x, heads, positions, cos, sin):
    """In place: rotate the last 2 * cos.shape[1] entries of each head of x [T, heads * D]."""
    half = cos.shape[1]
    width = x.shape[1] // heads
    for t in range(x.shape[0]):
        c, s = cos[positions[t]], sin[positions[t]]
        for h in range(heads):
            row = x[t, h * width + width - 2 * half : (h + 1) * width]
            for i in range(half):
                even, odd = row[2 * i], row[2 * i + 1]
                row[2 * i] = even * c[i] - odd * s[i]
                row[2 * i + 1] = even * s[i] + odd * c[i]


@part
def _slot_start(slot, size, columns):
    """Return the flat index of column 0 of a cache slot; the next 16 columns are TILE_SIZE further."""
    block, i = slot // size, slot % size
    return (block * (size // TILE) + i // TILE) * (columns // TILE) * TILE_SIZE + i % TILE * TILE


@kernel
def append_kv(c_cache, s_cache, pe_cache, slots, kv, norm, eps, positions, cos, sin):
    """Normalise, rotate and store kv [T, C + R] in cache slots [T] (block * size + offset).

    c_cache, pe_cache: see cache_shape; c_cache float32, or uint8 (INT8 plus 128) with its scales in s_cache
    [blocks, size], and RoPE parts as they enter exact products.
    """
    rank, half = norm.size, cos.shape[1]
    size, width, pe_width = pe_cache.shape[1] * TILE, c_cache.shape[2] * TILE, pe_cache.shape[2] * TILE
    row, quantized = np.zeros(width, np.float32), np.zeros(width, np.uint8)
    pe = np.zeros(pe_width, np.float32)
    for t in range(slots.size):
        start = t * kv.shape[1]
        inverse = splat(inverse_rms(kv, start, rank, eps))
        for i in range(0, rank, LANES):
            store(row, i, take(kv, start + i, rank - i) * inverse * take(norm, i, rank - i))
        to = _slot_start(slots[t], size, width)
        if s_cache.size > 0:
            s_cache[slots[t] // size, slots[t] % size] = quantize_row(quantized, 0, row, 0, rank)
            for i in range(0, width, LANES):
                store(c_cache, to + i * TILE, load(quantized, i))
        else:
            for i in range(0, width, LANES):
                store(c_cache, to + i * TILE, load(row, i))
        c, s, source = cos[positions[t]], sin[positions[t]], kv[t, rank:]
        for i in range(half):
            even, odd = source[2 * i], source[2 * i + 1]
            pe[2 * i] = even * c[i] - odd * s[i]
            pe[2 * i + 1] = even * s[i] + odd * c[i]
        to = _slot_start(slots[t], size, pe_width)
        for i in range(0, pe_width, LANES):
            rotated = load(pe, i)
            store(pe_cache, to + i * TILE, factor(rotated) if s_cache.size > 0 else rotated)


@kernel
def append_heads(v_cache, s_cache, k_cache, slots, keys, kv, heads):
    """Store keys [T, heads * D], and the values behind as many columns of kv [T, heads * (D + V)].

    Caches are those of append_kv, of `heads` blocks for each block of slots: block * heads + head.
    """
    size, width, k_width = k_cache.shape[1] * TILE, v_cache.shape[2] * TILE, k_cache.shape[2] * TILE
    depth, columns = keys.shape[1] // heads, (kv.shape[1] - keys.shape[1]) // heads
    quantized = np.zeros(width, np.uint8)
    for t in range(slots.size):
        for head in range(heads):
            block, offset = slots[t] // size * heads + head, slots[t] % size
            start = t * kv.shape[1] + keys.shape[1] + head * columns
            to = _slot_start(block * size + offset, size, width)
            if s_cache.size > 0:
                s_cache[block, offset] = quantize_row(quantized, 0, kv, start, columns)
                for i in range(0, width, LANES):
                    store(v_cache, to + i * TILE, load(quantized, i))
            else:
                for i in range(0, width, LANES):
                    store(v_cache, to + i * TILE, take(kv, start + i, columns - i))
            start, to = (t * heads + head) * depth, _slot_start(block * size + offset, size, k_width)
            for i in range(0, k_width, LANES):
                key = take(keys, start + i, depth - i)
                store(k_cache, to + i * TILE, factor(key) if s_cache.size > 0 else key)
