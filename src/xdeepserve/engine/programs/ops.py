"""The kernels of one die, bound to its recipe, its scratch buffers and the laptop's threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from xdeepserve.engine.programs.workspace import Workspace
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.weights import MLP, Linear

PARALLEL_OPS = 1 << 22  # multiply-adds below which a second thread costs more than it brings


class Work(NamedTuple):
    """What a kernel costs in virtual time: operations and bytes of HBM traffic."""

    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)


class Threads:
    """Splits the rows of a GEMM over the laptop's threads. Rows are independent, so the bits are the same."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1) if count > 1 else None

    def over_rows(
        self, kernel: Any, ops_per_row: int, out: Array, *by_row: Array, rest: tuple[Any, ...]
    ) -> None:
        """kernel(out, *by_row, *rest), in row blocks when there is enough to do."""
        rows = out.shape[0]
        if self._pool is None or rows < 2 or rows * ops_per_row < PARALLEL_OPS:
            kernel(out, *by_row, *rest)
            return
        parts = min(self.count, rows)
        cuts = [slice(rows * i // parts, rows * (i + 1) // parts) for i in range(parts)]
        jobs = [self._pool.submit(kernel, out[c], *(a[c] for a in by_row), *rest) for c in cuts[1:]]
        kernel(out[cuts[0]], *(a[cuts[0]] for a in by_row), *rest)
        for job in jobs:
            job.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def linear_work(rows: int, layer: Linear) -> Work:
    """Work of a linear layer on `rows` rows."""
    out_features = layer.w.shape[0] if layer.scale is not None else layer.w.shape[1]
    in_features = layer.w.size // out_features
    moved = layer.w.nbytes + rows * (in_features + out_features) * 4
    return Work(2.0 * rows * layer.w.size, moved)


class Ops:
    """Linear layers and MLPs on the buffers `q8`, `q8_scale`, `gate_up` and `act` of a workspace."""

    def __init__(self, workspace: Workspace, threads: Threads) -> None:
        self.ws, self.threads = workspace, threads

    def linear(self, out: Array, x: Array, layer: Linear, is_row_parallel: bool = False) -> None:
        """out [T, N] = layer(x [T, K])."""
        if layer.scale is None:
            kernel = k.matmul_blocked if is_row_parallel else k.matmul
            self.threads.over_rows(kernel, layer.w.size, out, x, rest=(layer.w,))
        else:
            q, scale = self.quantize(x)
            self.threads.over_rows(k.matmul_int8, layer.w.size, out, q, scale, rest=(layer.w, layer.scale))

    def quantize(self, x: Array) -> tuple[Array, Array]:
        """INT8 rows and scales of x [T, K], valid until the next quantisation."""
        q, scale = self.ws.take("q8", *x.shape), self.ws.take("q8_scale", x.shape[0])
        k.quantize_rows(q, scale, x)
        return q, scale

    def mlp(self, out: Array, x: Array, mlp: MLP) -> None:
        """A dense layer or the shared expert: out, x [T, H]."""
        width = mlp.w13.w.shape[0 if mlp.w13.scale is not None else 1]
        gate_up = self.ws.take("gate_up", x.shape[0], width)
        act = self.ws.take("act", x.shape[0], width // 2)
        self.linear(gate_up, x, mlp.w13)
        k.swiglu(act, gate_up)
        self.linear(out, act, mlp.w2, is_row_parallel=True)

    def experts(self, out: Array, rows: Array, scale: Array, offsets: Array, experts: MLP) -> None:
        """Grouped MLP: rows offsets[e]:offsets[e+1] go through local expert e. out [N, H] float32.

        rows are float32, or INT8 with one scale per row as they were dispatched.
        """
        w13, w2 = experts.w13, experts.w2
        width = w13.w.shape[1 if w13.scale is not None else 2]
        gate_up = self.ws.take("expert_gate_up", rows.shape[0], width)
        act = self.ws.take("expert_act", rows.shape[0], width // 2)
        if w13.scale is None:
            k.grouped_matmul(gate_up, rows, offsets, w13.w)
            k.swiglu(act, gate_up)
            k.grouped_matmul(out, act, offsets, w2.w)
        else:
            assert w2.scale is not None
            k.grouped_matmul_int8(gate_up, rows, scale, offsets, w13.w, w13.scale)
            k.swiglu(act, gate_up)
            q = self.ws.take("expert_q8", *act.shape)
            q_scale = self.ws.take("expert_q8_scale", act.shape[0])
            k.quantize_rows(q, q_scale, act)
            k.grouped_matmul_int8(out, q, q_scale, offsets, w2.w, w2.scale)
