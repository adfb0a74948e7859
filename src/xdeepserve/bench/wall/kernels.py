"""`xdeepserve bench kernels`: speed of the kernels beside the limits of one core of this computer.

Limits are measured first: the INT8 dot product, float32 multiplications and additions, separate and fused,
and the matrix unit's products where kernels use one, all out of registers, and the triad a = b + c * d out of
memory. Then follow matrix products and attention, each beside a peer if it is installed: NumPy's BLAS, and
PyTorch. Times are the thread's own CPU time. The best of several runs counts, because other programs share
caches and memory and can only add time. Everything runs on one thread. Arrays begin at a multiple of 64
bytes, as the engine's and PyTorch's do.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.errors import InputError
from xdeepserve.jit.compiling import uses_amx
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import cache_shape, scratch_size
from xdeepserve.model.canonical import factors
from xdeepserve.model.kernels import limits
from xdeepserve.model.packing import pack_bf16, packed_shape_f32, packed_shape_int8
from xdeepserve.step.linear import column_shares

SHAPES = ((512, 1024), (1024, 1024), (2048, 4096))  # K, N
ROWS = (1, 16, 64, 256)
GROUPS, GROUP_K, GROUP_N = 32, 1024, 384  # experts of the decode benchmark's model
MANY_GROUPS, FEW_K, FEW_N = 256, 256, 128  # an expert server with many experts, as narrow as a small model's
ACTIVE, WORKERS = (8, 256), (1, 2, 8, 32)
RANK, NOPE, ROPE = 512, 64, 64
ATTENTION = ((1, 16, 4096), (1, 128, 4096), (8, 16, 1024))  # sequences, heads, context
REPEATS, REPEATS_OF_LIMITS = 9, 50
BLAS_SIZE = 1536  # of a product that several threads would share
TARGET_SECONDS = 0.02  # of one measurement: short calls are repeated


def aligned(array: np.ndarray) -> np.ndarray:
    """Copy an array to memory that begins at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def seconds(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Measure CPU seconds of a call: the best of `repeats` measurements."""
    call()
    start = time.thread_time()
    call()
    count = max(1, int(TARGET_SECONDS / max(time.thread_time() - start, 1e-7)))
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(count):
            call()
        times.append((time.thread_time() - start) / count)
    return min(times)


def all_rows() -> list[Row]:
    """Measure every row; takes minutes. Raises InputError if NumPy's BLAS uses several threads."""
    check_blas()
    torch = _torch()
    rng = np.random.default_rng(0)
    dot_peak, f32_peak, exact_peak, triad = (
        limits.DOT_OPS / seconds(limits.dot_peak, REPEATS_OF_LIMITS) / 1e9,
        limits.F32_OPS / seconds(limits.f32_peak, REPEATS_OF_LIMITS) / 1e9,
        limits.EXACT_OPS / seconds(limits.exact_peak, REPEATS_OF_LIMITS) / 1e9,
        _triad(),
    )
    rows = [
        Row("limit/int8 dot product", dot_peak, "GOPS", "measured"),
        Row("limit/float32 multiply, add", f32_peak, "GFLOPS", "measured"),
        Row("limit/BF16 products", exact_peak, "GFLOPS", "measured"),
        Row("limit/triad", triad, "GB/s", "measured"),
    ]
    if uses_amx():
        dot_peak = limits.UNIT_OPS / seconds(limits.int8_unit_peak, REPEATS_OF_LIMITS) / 1e9
        exact_peak = limits.UNIT_OPS / 2 / seconds(limits.exact_unit_peak, REPEATS_OF_LIMITS) / 1e9
        rows.append(Row("limit/matrix unit, INT8", dot_peak, "GOPS", "measured"))
        rows.append(Row("limit/matrix unit, BF16", exact_peak, "GFLOPS", "measured"))
    rows += _int8(rng, torch, dot_peak)
    rows += _f32(rng, f32_peak)
    rows += _exact(rng, exact_peak)
    rows += _grouped(rng, dot_peak, triad)
    rows += on_a_grid(rng)
    rows += _attention(rng, torch)
    return rows


def check_blas() -> None:
    """Raise InputError if NumPy's products use more cores than the thread whose time is measured."""
    x = np.ones((BLAS_SIZE, BLAS_SIZE), np.float32)
    own, all_threads = -time.thread_time(), -time.process_time()
    np.matmul(x, x)
    own, all_threads = own + time.thread_time(), all_threads + time.process_time()
    if all_threads > 1.2 * own:
        raise InputError("NumPy's products use several threads: start Python with OPENBLAS_NUM_THREADS=1")


def _torch() -> Any:
    """Return PyTorch, set to a single thread; None if it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch


def _triad() -> float:
    b, c, a = (np.ones(1 << 23, np.float32) for _ in range(3))
    return 3 * a.nbytes / seconds(lambda: limits.triad(a, b, c)) / 1e9


def _rates(name: str, unit: str, ops: float, call: Callable[[], Any], peak: float) -> Iterator[Row]:
    rate = ops / seconds(call) / 1e9
    yield Row(name, rate, unit, "measured")
    yield Row(f"{name} of limit", 100 * rate / peak, "%", "measured")


def _int8(rng: np.random.Generator, torch: Any, peak: float) -> Iterator[Row]:
    for depth, n in SHAPES:
        w = aligned(rng.integers(0, 256, packed_shape_int8(depth, n)).astype(np.uint8).ravel())
        w_scale = np.ones(n, np.float32)
        for m in ROWS:
            q, scale = aligned(rng.integers(-127, 128, (m, depth)).astype(np.int8)), np.ones(m, np.float32)
            out, ops = aligned(np.empty((m, n), np.float32)), 2.0 * m * depth * n
            name = f"gemm.int8/m={m},k={depth},n={n}"
            call = partial(k.matmul_int8, out, q, scale, w, w_scale)
            yield from _rates(name, "GOPS", ops, call, peak)
            if torch is not None:
                theirs = min(map(seconds, _torch_int8(torch, m, depth, n)))
                yield Row(f"{name} by torch", ops / theirs / 1e9, "GOPS", "measured")


def _f32(rng: np.random.Generator, peak: float) -> Iterator[Row]:
    for depth, n in SHAPES:
        plain = rng.standard_normal((depth, n), np.float32)
        w = aligned(rng.standard_normal(packed_shape_f32(depth, n), np.float32).ravel())
        for m in ROWS:
            x, out = (
                aligned(rng.standard_normal((m, depth), np.float32)), aligned(np.empty((m, n), np.float32))
            )  # fmt: skip
            name, ops = f"gemm.f32/m={m},k={depth},n={n}", 2.0 * m * depth * n
            yield from _rates(name, "GFLOPS", ops, partial(k.matmul, out, x, w), peak)
            theirs = seconds(partial(np.matmul, x, plain, out=out))
            yield Row(f"{name} by NumPy", ops / theirs / 1e9, "GFLOPS", "measured")


def _exact(rng: np.random.Generator, peak: float) -> Iterator[Row]:
    """Measure exact products of BF16 numbers; the last shapes are those of a head."""
    for depth, n in (*SHAPES, (NOPE, RANK), (RANK, NOPE)):
        w = aligned(pack_bf16(factors(rng.standard_normal((depth, n), np.float32))).ravel())
        for m in ROWS:
            x, out = (
                aligned(rng.standard_normal((m, depth), np.float32)), aligned(np.empty((m, n), np.float32))
            )  # fmt: skip
            name, ops = f"gemm.exact/m={m},k={depth},n={n}", 2.0 * m * depth * n
            yield from _rates(name, "GFLOPS", ops, partial(k.matmul_exact, out, x, w), peak)


def _grouped(rng: np.random.Generator, peak: float, triad: float) -> Iterator[Row]:
    """Measure grouped products with groups of equal size. The limit is arithmetic or the reading of weights,
    whichever takes longer."""
    shape = (GROUPS, *packed_shape_int8(GROUP_K, GROUP_N))
    w = aligned(rng.integers(0, 256, shape).astype(np.uint8).ravel())
    w_scale = np.ones(GROUPS * GROUP_N, np.float32)
    for size in (1, 2, 4, 8):
        m = GROUPS * size
        bounds = np.arange(0, m + 1, size, dtype=np.int32)
        q, scale = rng.integers(-127, 128, (m, GROUP_K)).astype(np.int8), np.ones(m, np.float32)
        out, ops = np.empty((m, GROUP_N), np.float32), 2.0 * m * GROUP_K * GROUP_N
        bound = ops / max(ops / peak, w.nbytes / triad)
        yield from _rates(
            f"gemm.grouped/groups={GROUPS},rows={size},k={GROUP_K},n={GROUP_N}",
            "GOPS",
            ops,
            partial(k.grouped_matmul_int8, out, q, scale, bounds, w, w_scale),
            bound,
        )


def on_a_grid(rng: np.random.Generator) -> Iterator[Row]:
    """Measure many groups where only a few have rows, 4 each (EaaS 4.1). Rows give the busiest of some
    workers, which share columns of every group, or tiles of groups with rows. Workers run one at a time,
    alone on this computer."""
    shape = (MANY_GROUPS, *packed_shape_int8(FEW_K, FEW_N))
    w, w_scale = (
        rng.integers(0, 256, shape).astype(np.uint8).ravel(),
        np.ones(MANY_GROUPS * FEW_N, np.float32),
    )
    for active in ACTIVE:
        sizes = np.zeros(MANY_GROUPS, np.int32)
        sizes[rng.permutation(MANY_GROUPS)[:active]] = 4
        bounds, m = np.append(np.int32(0), np.cumsum(sizes, dtype=np.int32)), 4 * active
        q, scale = rng.integers(-127, 128, (m, FEW_K)).astype(np.int8), np.ones(m, np.float32)
        args = (np.empty((m, FEW_N), np.float32), q, scale, bounds, w, w_scale)
        scratch = np.empty(k.grid_scratch(MANY_GROUPS, m), np.float32)
        for count in WORKERS:
            first, last = max(
                column_shares(k.num_groups(FEW_N), count), key=lambda share: share[1] - share[0]
            )
            columns = seconds(partial(k.grouped_matmul_int8, *args, first, last))
            grid = seconds(partial(k.grid_matmul_int8, *args, scratch, 0, count))
            name = f"gemm.grid/groups={MANY_GROUPS},active={active},k={FEW_K},n={FEW_N},workers={count}"
            yield Row(f"{name}/columns", 1e6 * columns, "us", "measured")
            yield Row(f"{name}/tiles", 1e6 * grid, "us", "measured")


def _attention(rng: np.random.Generator, torch: Any) -> Iterator[Row]:
    for batch, heads, context in ATTENTION:
        blocks, name = batch * context // 16, f"b={batch},heads={heads},context={context}"
        ops = 2.0 * batch * heads * context * (2 * RANK + ROPE)
        q_lat = rng.standard_normal((batch, heads * RANK), np.float32)
        q = rng.standard_normal((batch, heads * (NOPE + ROPE)), np.float32)
        k_pe = rng.standard_normal(cache_shape(blocks, 16, ROPE), np.float32)
        tables = np.arange(blocks, dtype=np.int32).reshape(batch, -1)
        seq_of, positions = np.arange(batch, dtype=np.int32), np.full(batch, context - 1, np.int32)
        out, scratch = np.empty_like(q_lat), np.empty(scratch_size(context, RANK, ROPE), np.float32)
        shape = cache_shape(blocks, 16, RANK)
        caches = {
            "f32": (rng.standard_normal(shape, np.float32), np.empty((0, 0), np.float32)),
            "int8": (rng.integers(1, 256, shape).astype(np.uint8), np.ones((blocks, 16), np.float32)),
        }
        for kind, cache in caches.items():
            rows, rest = (seq_of, positions), (k_pe, tables, 0.1, False, scratch, 0, 1)
            ours = seconds(partial(k.attention, out, q_lat, q, heads, ROPE, *rows, *cache, *rest))
            yield Row(f"mla.{kind}/{name}", ops / ours / 1e9, "GFLOPS", "measured")
        if torch is not None:
            query, keys = torch.randn(batch, heads, RANK + ROPE), torch.randn(batch, context, RANK + ROPE)
            theirs = seconds(partial(_torch_attention, torch, query, keys))
            yield Row(f"mla/{name} by torch bmm f32", ops / theirs / 1e9, "GFLOPS", "measured")


def _torch_int8(torch: Any, m: int, depth: int, n: int) -> list[Callable[[], Any]]:
    """List PyTorch's ways from INT8 weights to a product: its engines' quantised linear layers, with and
    without quantised inputs and outputs, and, for more than 16 rows, the product of two INT8 matrices."""
    calls: list[Callable[[], Any]] = []
    x, w = torch.randn(m, depth), torch.randn(n, depth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer way to quantise a model
        scales, zeros = torch.full((n,), 0.01, dtype=torch.double), torch.zeros(n, dtype=torch.long)
        weight = torch.quantize_per_channel(w, scales, zeros, 0, torch.qint8)
        rows = torch.quantize_per_tensor(x, 0.02, 128, torch.quint8)
    linear = torch.ops.quantized
    for engine in sorted({"onednn", "x86", "fbgemm"} & set(torch.backends.quantized.supported_engines)):
        torch.backends.quantized.engine = engine
        packed = linear.linear_prepack(weight, None)
        calls += [
            partial(linear.linear_dynamic, x, packed, False),
            partial(linear.linear, rows, packed, 0.1, 0),
        ]
    if m > 16:
        q, wt = torch.zeros(m, depth, dtype=torch.int8), torch.zeros(depth, n, dtype=torch.int8)
        calls.append(lambda: torch._int_mm(q, wt).float().mul_(0.5).mul_(0.5))  # two scales
    return calls


def _torch_attention(torch: Any, query: Any, keys: Any) -> Any:
    """Compute the two products of attention by PyTorch, without the softmax between them."""
    return torch.bmm(torch.bmm(query, keys.transpose(1, 2)), keys[:, :, :RANK])
