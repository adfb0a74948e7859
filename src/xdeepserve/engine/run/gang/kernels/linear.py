"""Linear layers on packed weights at an address: `step/linear.py` for kernels."""

from __future__ import annotations

from xdeepserve.jit.compiling import part
from xdeepserve.jit.pointers import f32_flat, u8_flat
from xdeepserve.model.kernels.gemm import gemm_f32, gemm_int8
from xdeepserve.model.packing import COLUMNS, DEPTH


@part
def groups_of(n):
    """Column groups of n columns."""
    return (n + COLUMNS - 1) // COLUMNS


@part
def linear(out, x, q8, q8_scale, weight, scale, k_size, n, bounds, count, num_blocks):
    """out [T, n]: each of `count` stacked layers on its rows between bounds, or one on all rows.

    `weight` and `scale` are addresses. With a scale, 0 if there is none, it takes the INT8 rows q8 [T, K] and
    their scales [T], else x [T, K], in `num_blocks` blocks of K.
    """
    last = groups_of(n)
    linear_part(out, x, q8, q8_scale, weight, scale, k_size, n, bounds, count, num_blocks, 0, last)


@part
def linear_part(out, x, q8, q8_scale, weight, scale, k_size, n, bounds, count, num_blocks, first, last):
    """The column groups [first, last) of what `linear` computes."""
    if scale:
        packed = u8_flat(weight, count * groups_of(n) * COLUMNS * ((k_size + DEPTH - 1) // DEPTH * DEPTH))
        gemm_int8(out, q8, q8_scale, packed, f32_flat(scale, count * n), n, bounds, first, last)
    else:
        packed_f32 = f32_flat(weight, count * groups_of(n) * COLUMNS * k_size)
        gemm_f32(out, x, packed_f32, k_size, n, num_blocks, count, 0, 0, bounds, first, last)
