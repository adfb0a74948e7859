"""Grouped GEMM on a static grid, for many groups of which few have rows (EaaS 4.1).

A launch says how many workers there are, and nothing of the groups: how many rows each has the kernel reads.
First the groups that have rows move to the front (group shrink, by a prefix sum), so that the walk ends with
the last of them. Then each worker takes every `num_workers`th tile, as if the tiles of all of them stood in
one row (Algorithm 1): it counts them down group by group, asks nobody and waits for nobody; and a group whose
tiles do not fill the grid leaves no worker idle, since those of the next one follow.

A tile is the rows of a group that are computed together, by WIDE groups of columns. One worker sums each
output, in the order of the GEMM in gemm.py: the bits are the same.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.gemm import f32_columns
from xdeepserve.model.kernels.gemm_int8 import WIDE, int8_columns, int8_start, rows_near
from xdeepserve.model.packing import COLUMNS, DEPTH


def grid_scratch(num_groups: int, num_rows: int) -> int:
    """Return the number of scratch elements needed by a worker."""
    return num_groups + COLUMNS * num_rows


@part
def shrink_groups(active, bounds):
    """Fill the front of active int32 [E] with the groups, between bounds [E + 1], that have rows, in order.
    Returns their number."""
    count = 0
    for e in range(bounds.size - 1):
        active[count] = e
        count += bounds[e + 1] > bounds[e]
    return count


@kernel
def _grid_f32(out, x, bounds, w, n, scratch, worker, num_workers):
    k_size, num_columns = x.shape[1], (n + COLUMNS - 1) // COLUMNS
    tiles, per_group = (num_columns + WIDE - 1) // WIDE, num_columns * k_size * COLUMNS
    active, sums = scratch[: bounds.size - 1].view(np.int32), scratch[bounds.size - 1 :]
    tile = worker
    for i in range(shrink_groups(active, bounds)):
        e = active[i]
        begin, end = bounds[e], bounds[e + 1]
        o, at, w_at = begin * n, begin * k_size, e * per_group
        while tile < tiles:
            first = tile * WIDE
            last = min(first + WIDE, num_columns)
            f32_columns(out, o, x, at, end - begin, w, w_at, k_size, sums, n, first, last)
            tile += num_workers
        tile -= tiles


@kernel
def _grid_int8(out, q, scale, bounds, w, w_scale, n, scratch, worker, num_workers):
    k_size, num_columns = q.shape[1], (n + COLUMNS - 1) // COLUMNS
    group = (k_size + DEPTH - 1) // DEPTH * DEPTH * COLUMNS
    wide, near = (num_columns + WIDE - 1) // WIDE, rows_near(k_size)
    numbers = scratch.view(np.int32)
    active, start = numbers[: bounds.size - 1], numbers[bounds.size - 1 :]
    int8_start(start, q)
    tile = worker
    for i in range(shrink_groups(active, bounds)):
        e = active[i]
        begin, end, weights = bounds[e], bounds[e + 1], e * num_columns * group
        tiles = (end - begin + near - 1) // near * wide
        while tile < tiles:
            m, first = begin + tile // wide * near, tile % wide * WIDE
            stop, last = min(m + near, end), min(first + WIDE, num_columns)
            int8_columns(out, q, m, stop, w, weights, group, start, scale, w_scale, e * n, n, first, last)
            tile += num_workers
        tile -= tiles


def grid_matmul(
    out: Array, x: Array, bounds: Array, w: Array, scratch: Array, worker: int, num_workers: int
) -> None:
    """Compute a worker's share of out [R, N]: rows bounds[e]:bounds[e+1] of x [R, K] by w, packed [E, K, N],
    as gemm.grouped_matmul does. scratch [grid_scratch(E, R)]."""
    _grid_f32(out, x, bounds, w, out.shape[1], scratch, worker, num_workers)


def grid_matmul_int8(
    out: Array,
    q: Array,
    scale: Array,
    bounds: Array,
    w: Array,
    w_scale: Array,
    scratch: Array,
    worker: int,
    num_workers: int,
) -> None:
    """Compute a worker's share of out [R, N]: rows bounds[e]:bounds[e+1] of q [R, K] by w, packed [E, N, K],
    as gemm.grouped_matmul_int8 does. w_scale [E * N], scratch [grid_scratch(E, R)]."""
    _grid_int8(out, q, scale, bounds, w, w_scale, out.shape[1], scratch, worker, num_workers)
