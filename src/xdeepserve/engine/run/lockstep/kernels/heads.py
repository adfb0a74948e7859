"""Logits and tokens of many dies with equal weights: their rows go through the product together."""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.twin import copy_payload
from xdeepserve.engine.run.lockstep.kernels.attention import AT_ONCE
from xdeepserve.engine.run.lockstep.kernels.linear import groups_of, stacked_product
from xdeepserve.engine.run.lockstep.kernels.sync import share
from xdeepserve.jit.compiling import kernel
from xdeepserve.jit.pointers import f32, flat_like
from xdeepserve.model.kernels.sampling import sample_one
from xdeepserve.model.packing import COLUMNS, PAIR

NEAR = 1 << 19  # bytes of a weight that all rows use one after the other


@kernel
def head_stage(logits, x, weight, example, n, worker, num):
    """Compute a thread's columns of the logits of all rows x [T, K].

    logits int64 [T]: addresses for each row's logits, float32 [n]; weight: address of the packed head, an
    array of the type of `example`.
    """
    num_rows, k_size = x.shape
    depth = k_size if example.itemsize == 4 else (k_size + PAIR - 1) // PAIR * PAIR
    nbytes = COLUMNS * depth * example.itemsize  # of a column group
    begin, end = share(groups_of(n), worker, num)
    at_once = min(max(NEAR // nbytes, 1), max(end - begin, 1))
    space = np.empty(min(num_rows, AT_ONCE) * at_once * COLUMNS, np.float32)
    for first in range(begin, end, at_once):
        last = min(first + at_once, end)
        column, width = first * COLUMNS, min(last * COLUMNS, n) - first * COLUMNS
        w = flat_like(weight + first * nbytes, (last - first) * COLUMNS * depth, example)
        for row in range(0, num_rows, AT_ONCE):
            rows = min(AT_ONCE, num_rows - row)
            out = space[: rows * width].reshape(rows, width)
            stacked_product(out, x[row : row + rows], w, k_size, width, 1, 0, 0, last - first)
            for i in range(rows):
                copy_payload(logits[row + i] + 4 * column, out[i].ctypes.data, 4 * width)


@kernel
def draw_stage(
    tokens, logits, n, temperature, top_k, top_p, min_p, seed, choice, position, worker, num
):  # fmt: skip
    """Draw a thread's part of the tokens int32 [T] of all rows.

    logits int64 [T]: addresses of each row's logits, float32 [n]. All else [T] as in `sample`.
    """
    first, last = share(tokens.size, worker, num)
    for r in range(first, last):
        tokens[r] = sample_one(
            f32(logits[r], 1, n), 0,
            temperature[r], top_k[r], top_p[r], min_p[r], seed[r], choice[r], position[r],
        )  # fmt: skip
