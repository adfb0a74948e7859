"""Linear layers on packed weights at an address: `step/linear.py` for kernels."""

from __future__ import annotations

from numba import types
from numba.extending import overload

from xdeepserve.jit.compiling import PART_OPTIONS, part
from xdeepserve.jit.pointers import f32_flat, u8_flat
from xdeepserve.model.kernels.gemm import ALL_ROWS, gemm_f32
from xdeepserve.model.kernels.gemm_exact import gemm_exact
from xdeepserve.model.kernels.gemm_int8 import gemm_int8
from xdeepserve.model.packing import COLUMNS, DEPTH


@part
def groups_of(n):
    """Return the number of column groups of n columns."""
    return (n + COLUMNS - 1) // COLUMNS


def stacked_product(out, x, w, k_size, n, count, step, first, last):
    """Compute `count` products of all rows, side by side in out, for the column groups [first, last) of each.

    The columns of x for each product begin `step` apart. The arithmetic is FP32, or exact for weights in
    BF16.
    """
    raise NotImplementedError


@overload(stacked_product, jit_options=PART_OPTIONS)
def _stacked_product_of(out, x, w, k_size, n, count, step, first, last):
    def in_f32(out, x, w, k_size, n, count, step, first, last):
        gemm_f32(out, x, w, k_size, n, 1, count, step, n, ALL_ROWS, first, last)

    def exact(out, x, w, k_size, n, count, step, first, last):
        gemm_exact(out, x, w, k_size, n, 1, count, step, n, first, last)

    return in_f32 if w.dtype == types.float32 else exact


@part
def linear(out, x, q8, q8_scale, weight, scale, k_size, n, bounds, count, num_blocks, is_int8):
    """Compute out [T, n]: each of `count` stacked layers on its rows between bounds, or one layer on all
    rows.

    `weight` and `scale` are addresses; `scale` is 0 if there is none. With a scale the product takes the INT8
    rows q8 [T, K] and their scales [T], else x [T, K], in `num_blocks` blocks of K. In the INT8 recipe the
    latter are exact products, of one layer.
    """
    last = groups_of(n)
    linear_part(out, x, q8, q8_scale, weight, scale, k_size, n, bounds, count, num_blocks, is_int8, 0, last)


@part
def linear_part(
    out, x, q8, q8_scale, weight, scale, k_size, n, bounds, count, num_blocks, is_int8, first, last
):
    """Compute the column groups [first, last) of the result of `linear`."""
    if scale:
        packed = u8_flat(weight, count * groups_of(n) * COLUMNS * ((k_size + DEPTH - 1) // DEPTH * DEPTH))
        gemm_int8(out, q8, q8_scale, packed, f32_flat(scale, count * n), n, bounds, first, last)
    else:
        packed_f32 = f32_flat(weight, count * groups_of(n) * COLUMNS * k_size)
        if is_int8:
            gemm_exact(out, x, packed_f32, k_size, n, num_blocks, 1, 0, 0, first, last)
        else:
            gemm_f32(out, x, packed_f32, k_size, n, num_blocks, count, 0, 0, bounds, first, last)
