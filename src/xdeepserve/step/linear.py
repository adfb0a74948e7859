"""Linear layers on a die's buffers, in its recipe, on the computer's threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from xdeepserve.jit.compiling import uses_amx
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.gemm_int8 import WIDE
from xdeepserve.model.tensors import MLP, Linear

NO_SCALE = np.empty(0, np.float32)
UNEVEN = 1.1  # of the mean share of columns: what a thread may have to do at most
PARALLEL_OPS = 1 << 22  # multiply-adds below which a second thread costs more than it brings


class Buffers(Protocol):
    """Named buffers of a die; `take` views the beginning of a buffer as an array of the given shape."""

    def take(self, name: str, *shape: int) -> Array: ...


def column_shares(groups: int, count: int) -> list[tuple[int, int]]:
    """Return the groups of columns (first, last) of each of `count` threads. Cuts lie between wide tiles,
    which take several groups at once."""
    cuts = [WIDE * round(groups * i / count / WIDE) for i in range(count)] + [groups]
    return [*pairwise(cuts)]


POOL = "columns"  # how threads beside the caller's are named


class Threads:
    """Pool of worker threads for kernels, shared by independent parts.

    The bits do not depend on the number of threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix=POOL) if count > 1 else None
        self._scratch = [np.empty(0, np.float32) for _ in range(count)]
        self._has_matrix_unit = uses_amx()  # which takes as long to find out as a product of one row

    def over_columns(
        self, kernel: Callable[..., None], num_ops: float, *args: Any, num_outputs: int = 1
    ) -> None:
        """Run kernel(*args, first, last) of a GEMM by column groups on all threads. The first argument is its
        output, or `num_outputs` of them side by side."""
        if self._pool is None or num_ops < PARALLEL_OPS:
            kernel(*args)
            return
        first, *shares = column_shares(k.num_groups(args[0].shape[1] // num_outputs), self.count)
        jobs = [self._pool.submit(kernel, *args, *share) for share in shares]
        kernel(*args, *first)
        for job in jobs:
            job.result()

    def can_share_columns(self, n: int) -> bool:
        """Whether n columns of a GEMM can be shared evenly by all threads. A matrix unit needs more columns
        at once than a grid hands out."""
        tiles = -(-k.num_groups(n) // WIDE)
        return self._has_matrix_unit or -(-tiles // self.count) * self.count <= UNEVEN * tiles

    def over_pieces(self, kernel: Callable[..., None], num_ops: float, scratch_size: int, *args: Any) -> None:
        """Run kernel(*args, scratch, worker, num_workers) on all threads, each with float32 scratch memory of
        its own."""
        if self._scratch[0].size < scratch_size:
            self._scratch = [np.empty(scratch_size, np.float32) for _ in range(self.count)]
        if self._pool is None or num_ops < PARALLEL_OPS:
            kernel(*args, self._scratch[0], 0, 1)
            return
        jobs = [
            self._pool.submit(kernel, *args, self._scratch[i], i, self.count) for i in range(1, self.count)
        ]
        kernel(*args, self._scratch[0], 0, self.count)
        for job in jobs:
            job.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class Rows(NamedTuple):
    """Input of linear layers: float32 rows [T, K], or INT8 rows and their scales [T].

    `floats` is what INT8 rows were made of, for layers that the checkpoint keeps in floating point; None
    where that is not known, as on a die that was sent INT8 rows.
    """

    x: Array
    scale: Array | None
    floats: Array | None = None

    def in_float(self) -> Array:
        """Rows in floating point, float32 [T, K]."""
        rows = self.x if self.scale is None else self.floats
        assert rows is not None, "no layer in floating point where only INT8 rows are"
        return np.ascontiguousarray(rows)


class Linears:
    """Linear layers and MLPs on the buffers `q8`, `q8_scale`, `gate_up` and `act` of a workspace."""

    def __init__(self, buffers: Buffers, threads: Threads, is_int8: bool, limit: float = 0.0) -> None:
        """`limit` bounds gates from above, and what they let through on both sides; 0: neither."""
        self.take, self.threads, self.is_int8, self.limit = buffers.take, threads, is_int8, limit

    def prepare(self, x: Array) -> Rows:
        """Prepare x [T, K] for the recipe's layers; INT8 rows are valid until the next are made."""
        if not self.is_int8:
            return Rows(x, None)
        rows = Rows(self.take("q8", *x.shape), self.take("q8_scale", x.shape[0]), x)
        k.quantize_rows(rows.x, rows.scale, x)
        return rows

    def norm(self, out: Array, x: Array, w: Array, eps: float) -> Rows:
        """Compute out [T, K] = RMS norm of x [T, K], prepared for the recipe's layers."""
        if not self.is_int8:
            k.rms_norm(out, x, w, eps)
            return Rows(out, None)
        rows = Rows(self.take("q8", *x.shape), self.take("q8_scale", x.shape[0]), out)
        k.rms_norm_quantize(out, rows.x, rows.scale, x, w, eps)
        return rows

    def apply(self, out: Array, rows: Rows, layer: Linear, is_row_parallel: bool = False) -> None:
        """Apply a linear layer to rows: out [T, N]."""
        num_ops, over_columns = len(out) * layer.k * layer.n, self.threads.over_columns
        if layer.scale is not None:
            over_columns(k.matmul_int8, num_ops, out, rows.x, rows.scale, layer.w, layer.scale)
        elif is_row_parallel:
            over_columns(self._blocked, num_ops, out, rows.in_float(), layer.w)
        else:
            self.matmul(out, rows.in_float(), layer.w)

    @property
    def _blocked(self) -> Callable[..., None]:
        return k.matmul_exact_blocked if self.is_int8 else k.matmul_blocked

    def partial_sums(self, out: Array, x: Array, layer: Linear, num_blocks: int) -> None:
        """Compute a rank's part of a row-parallel layer: out float32 [T, N], x [T, K / R] in `num_blocks`
        blocks."""
        kernel = partial(self._blocked, num_blocks=num_blocks)
        self.threads.over_columns(kernel, len(out) * layer.k * layer.n, out, x, layer.w)

    def int8_sums(self, out: Array, q: Array, layer: Linear) -> None:
        """Compute a rank's part of a quantised row-parallel layer: out int32 [T, N] from q int8 [T, K /
        R]."""
        self.threads.over_columns(k.matmul_int8_sums, len(out) * layer.k * layer.n, out, q, layer.w)

    def matmul(self, out: Array, x: Array, w: Array) -> None:
        """Compute out [T, N] = x [T, K] @ w, packed and not quantised: exact products in the INT8 recipe."""
        kernel = k.matmul_exact if self.is_int8 else k.matmul
        self.threads.over_columns(kernel, float(x.size) * out.shape[1], out, x, w)

    def gate(self, out: Array, x: Array, w: Array) -> None:
        """Compute out [T, E] = x [T, H] @ w, packed float32, in FP32 arithmetic whatever the recipe."""
        self.threads.over_columns(k.matmul, float(x.size) * out.shape[1], out, x, w)

    def heads(self, out: Array, x: Array, w: Array, heads: int, depth: int) -> None:
        """Compute out [T, heads * N] = each head's first `depth` columns of x @ w, packed [heads, depth,
        N]."""
        num_ops, kernel = float(out.size) * depth, k.matmul_exact_heads if self.is_int8 else k.matmul_heads
        self.threads.over_columns(kernel, num_ops, out, x, w, heads, depth, num_outputs=heads)

    def activate(self, gate_up: Array, layer: Linear, name: str = "act", q: str = "q8") -> Rows:
        """Compute SwiGLU of gate_up [T, 2I], prepared for `layer`, in the buffer `name`, or in `q` and
        `q`_scale."""
        shape = (len(gate_up), gate_up.shape[1] // 2)
        if self.limit:
            np.minimum(gate_up, self.limit, out=gate_up)
            np.maximum(gate_up[:, shape[1] :], -self.limit, out=gate_up[:, shape[1] :])
        if layer.scale is None:
            rows = Rows(self.take(name, *shape), None)
            k.swiglu(rows.x, gate_up)
        else:
            rows = Rows(self.take(q, *shape), self.take(f"{q}_scale", shape[0]))
            k.swiglu_quantize(rows.x, rows.scale, gate_up)
        return rows

    def run_experts(self, out: Array, rows: Rows, local_idx: Array, experts: MLP, num_experts: int) -> None:
        """Run each row's expert, local_idx[i] for out[i]: group by expert, grouped GEMMs, back in order.

        Each row of `rows` stands for as many neighbouring entries of local_idx as there are more of these.
        """
        take, num_rows = self.take, len(local_idx)
        order = take("expert_order", num_rows)
        offsets = take("expert_offsets", num_experts + 1)
        k.group_rows(order, offsets, local_idx)
        x, scale = take("expert_in", num_rows, rows.x.shape[1]), take("expert_in_scale", num_rows)
        given = NO_SCALE if rows.scale is None else rows.scale
        k.gather_tokens(x, scale, rows.x, given, order, num_rows // max(len(rows.x), 1))
        grouped = Rows(x, None if rows.scale is None else scale)
        result = take("expert_out", num_rows, out.shape[1])
        self.experts(result, grouped, offsets, experts)
        k.scatter_rows(out, result, order)

    def experts(self, out: Array, rows: Rows, offsets: Array, experts: MLP) -> None:
        """Run a grouped MLP: rows offsets[e]:offsets[e+1] go through local expert e. out [R, H] float32."""
        gate_up = self.take("expert_gate_up", len(out), experts.w13.n)
        self._grouped(gate_up, rows, offsets, experts.w13)
        act = self.activate(gate_up, experts.w2, "expert_act", "expert_q8")
        self._grouped(out, act, offsets, experts.w2)

    def _grouped(self, out: Array, rows: Rows, offsets: Array, layer: Linear) -> None:
        threads, num_ops = self.threads, len(out) * layer.k * layer.n
        by_columns: Callable[..., None] = k.grouped_matmul
        on_grid: Callable[..., None] = k.grid_matmul
        args: list[Any] = [out, rows.x, offsets, layer.w]
        if layer.scale is not None:
            by_columns, on_grid = k.grouped_matmul_int8, k.grid_matmul_int8
            args = [out, rows.x, rows.scale, offsets, layer.w, layer.scale]
        if threads.can_share_columns(layer.n):
            threads.over_columns(by_columns, num_ops, *args)
        else:
            threads.over_pieces(on_grid, num_ops, k.grid_scratch(len(offsets) - 1, len(out)), *args)
