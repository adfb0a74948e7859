"""Limits of a core: loops that only calculate, or only read and write. For the benchmark."""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, register_floats
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.exact_tiles import add_even
from xdeepserve.model.kernels.matrix_unit import (
    BLOCK_TILES,
    TILE_SIZE,
    add_exact_only,
    add_int8_only,
    begin_tiles,
    end_tiles,
    exact_flat,
    int8_flat,
)
from xdeepserve.model.kernels.pair_dots import BY_DOTS, add_words
from xdeepserve.model.kernels.simd import load, splat, store, tree_sum
from xdeepserve.model.kernels.tiles import add_dot, add_outer, dot_start, store_scaled, store_tile, zeros

STEPS = 1 << 16
# Rows and vectors of tiles whose sums stay in registers, and are enough to hide how long an addition takes.
ROWS, WIDE = {512: (4, 5), 128: (6, 1), 64: (2, 1)}[register_floats()]
DOT_ROWS, DOT_WIDE = {512: (5, 4), 128: (4, 1), 64: (2, 1)}[register_floats()]
DOT_OPS = 2.0 * STEPS * DOT_ROWS * DOT_WIDE * 64  # a multiplication and an addition for each byte
F32_OPS = 2.0 * STEPS * ROWS * WIDE * 16
EXACT_OPS = F32_OPS * (2 if BY_DOTS else 1)  # a multiplication and an addition for each BF16
UNIT_OPS = 2.0 * STEPS * BLOCK_TILES * 16 * TILE_SIZE  # of bytes; half as many of BF16

_bytes, _weights = np.ones(4096, np.int8), np.ones(1024, np.uint8)
_tile, _sums = np.ones(TILE_SIZE, np.uint8), np.empty(BLOCK_TILES * TILE_SIZE, np.uint8)
_floats, _start, OUT = np.ones(1024, np.float32), np.zeros(8, np.int32), np.empty(1024, np.float32)


@kernel
def _dot_peak(out, q, w, start, ones, steps):
    acc = dot_start(DOT_ROWS, DOT_WIDE, start, 0)
    for step in range(steps):
        acc = add_dot(acc, q, step % 512 * 4, 4, w, 0, 64)
    store_scaled(out, 0, 64, acc, ones, 0, ones, 0, 64)


@kernel
def _f32_peak(out, x, w, steps):
    acc = zeros(ROWS, WIDE)
    for step in range(steps):
        # Another x each time, or the compiler would multiply only once.
        acc = add_outer(acc, x, step % 512, 1, w, 0, 16)
    store_tile(out, 0, 16 * WIDE, acc, 16 * WIDE)


@kernel
def _exact_peak(out, x, w, steps):
    acc = zeros(ROWS, WIDE)
    for step in range(steps):
        if BY_DOTS:
            acc = add_words(acc, x, step % 512, 1, w, 0, 16)
        else:
            acc = add_even(acc, x, step % 512, 1, w, 0, 16)
    store_tile(out, 0, 16 * WIDE, acc, 16 * WIDE)


@kernel
def _int8_unit_peak(sums, x, steps):
    begin_tiles()
    int8_flat(sums, 0, TILE_SIZE, False, x, 0, 64, x, 0, 0, 0, 1, 1, 1)
    for _ in range(steps):
        add_int8_only()
    end_tiles()


@kernel
def _exact_unit_peak(sums, x, steps):
    begin_tiles()
    exact_flat(sums, 0, TILE_SIZE, False, x, 0, 64, x, 0, 0, 0, 1, 1, 1)
    for _ in range(steps):
        add_exact_only()
    end_tiles()


@kernel
def triad(a, b, c):
    """Compute a = b + 3 c, float32 of one size, a multiple of 16."""
    three = splat(np.float32(3.0))
    for i in range(0, a.size, LANES):
        store(a, i, load(b, i) + load(c, i) * three)


@kernel
def read(x):
    """Sum x, float32, a multiple of 64 elements."""
    first = second = third = fourth = splat(np.float32(0.0))
    for i in range(0, x.size, 4 * LANES):
        first, second = first + load(x, i), second + load(x, i + LANES)
        third, fourth = third + load(x, i + 2 * LANES), fourth + load(x, i + 3 * LANES)
    return tree_sum((first + second) + (third + fourth))


def dot_peak() -> None:
    """Run DOT_OPS operations of the INT8 dot product on registers."""
    _dot_peak(OUT, _bytes, _weights, _start, _floats, STEPS)


def f32_peak() -> None:
    """Run F32_OPS float32 operations, half multiplications, half additions, near registers."""
    _f32_peak(OUT, _floats, _floats, STEPS)


def exact_peak() -> None:
    """Run EXACT_OPS operations of exact products near registers: in pairs or fused where the CPU can."""
    _exact_peak(OUT, _floats, _floats, STEPS)


def int8_unit_peak() -> None:
    """Run UNIT_OPS operations of a matrix unit on bytes in its registers, if there is one."""
    _int8_unit_peak(_sums, _tile, STEPS)


def exact_unit_peak() -> None:
    """Run UNIT_OPS / 2 operations of a matrix unit on BF16 in its registers, if there is one."""
    _exact_unit_peak(_sums, _tile, STEPS)
