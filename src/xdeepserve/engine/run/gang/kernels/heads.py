"""The logits of many dies, whose weights are equal and often the same pages of this computer's memory."""

from __future__ import annotations

from xdeepserve.engine.run.gang.kernels.linear import groups_of, stacked_product
from xdeepserve.engine.run.gang.kernels.sync import share
from xdeepserve.jit.compiling import kernel
from xdeepserve.jit.pointers import f32, flat_like
from xdeepserve.model.packing import COLUMNS, PAIR

LOGITS, ROWS, WEIGHT, NUM_ROWS = range(4)  # columns of the table: three addresses and a number
NEAR = 1 << 19  # bytes of a weight that all dies use one after the other


@kernel
def head_stage(table, example, k_size, n, worker, num):
    """A thread's columns of the logits of all dies, float32 [rows, n] each.

    table [dies, 4]: where a die's logits, its normed rows [rows, k_size] and its packed weight are, and how
    many rows it has; example: an array of the weight's type.
    """
    depth = k_size if example.itemsize == 4 else (k_size + PAIR - 1) // PAIR * PAIR
    size = COLUMNS * depth
    at_once = max(NEAR // (size * example.itemsize), 1)
    begin, end = share(groups_of(n), worker, num)
    for first in range(begin, end, at_once):
        last = min(first + at_once, end)
        for die in range(table.shape[0]):
            rows = table[die, NUM_ROWS]
            out, x = f32(table[die, LOGITS], rows, n), f32(table[die, ROWS], rows, k_size)
            w = flat_like(table[die, WEIGHT], groups_of(n) * size, example)
            stacked_product(out, x, w, k_size, n, 1, 0, first, last)
