"""Digests of what kernels compute, one line for each case: INT8 and exact GEMM, grouped GEMM, and attention.

    python tools/amx_emulator/cases.py [--reference]

Cases are chosen for a matrix unit: rows that fill no tile, K that is no multiple of 64 bytes, column groups
that fill no block, more rows than are computed together, numbers at both ends of BF16's range and sums that
cancel, pages that split a chunk, prefill and decode. With --reference NumPy computes them, from canonical.py.
Two threads share each GEMM once more, so that both have tiles at once.
"""

import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np

from xdeepserve.jit import compiling
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import cache_shape, scratch_size
from xdeepserve.model.packing import pack_bf16, pack_int8

F32 = np.float32
Case = tuple[str, np.ndarray]
IS_REFERENCE = "--reference" in sys.argv[1:]
POOL = ThreadPoolExecutor(2)
# Rows, K, N.
GEMMS = (
    (3, 131, 1030), (8, 64, 770), (9, 65, 680), (15, 127, 210), (16, 128, 200), (17, 100, 250), (31, 96, 150),
    (33, 130, 100), (48, 256, 33), (64, 512, 96), (70, 1090, 36), (100, 4100, 20),
)  # fmt: skip
# Magnitudes of latents and of queries' RoPE parts: weights and queries of which some count as zero.
EDGES = (("", F32(1), F32(1)), (", tiny numbers", F32(2.0**-42), F32(2.0**-46)))
KINDS = ("normal", "wild", "smallest", "cancelling")
# Heads, context, page, rank, RoPE part, rows of each sequence.
ATTENTIONS = (
    (8, 1, 16, 24, 8, 1), (8, 1231, 16, 80, 16, 1), (16, 733, 32, 64, 32, 1), (16, 150, 16, 512, 64, 1),
    (20, 530, 16, 40, 10, 3), (40, 197, 32, 80, 16, 5), (70, 164, 16, 100, 34, 1),
    (128, 300, 128, 512, 64, 2),
)  # fmt: skip
# Heads, rows, context, page, rank, nope, RoPE part, columns of a head's values.
PREFILLS = (
    (3, 9, 9, 16, 64, 32, 32, 16), (5, 70, 197, 32, 128, 64, 32, 40), (2, 33, 530, 16, 512, 64, 64, 64),
    (4, 16, 300, 128, 192, 96, 64, 7),
)  # fmt: skip


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def numbers(kind: str, seed: int, *shape: int) -> np.ndarray:
    """Factors that try the limits: the range, the smallest sums, and what cancels out."""
    rng, x = np.random.default_rng(seed), normal(seed, *shape)
    if kind == "wild":
        x = x * np.exp2(rng.integers(-50, 60, shape)).astype(F32)
    elif kind == "smallest":
        x = np.exp2(rng.integers(-46, -44, shape)).astype(F32) * rng.choice(F32([-1, 1, 1.0078125]), shape)
    elif kind == "cancelling":
        x = c.factors(x)
        x[..., 1::2] = -x[..., 0 : x.shape[-1] - 1 : 2]
        x = x * rng.choice(F32([1, 1.0078125]), shape)
    return c.factors(x)


def by_two_threads(kernel: object, out: np.ndarray, *args: object, groups: int) -> None:
    """A GEMM by column groups."""
    jobs = [POOL.submit(kernel, out, *args, groups * i // 2, groups * (i + 1) // 2) for i in range(2)]
    for job in jobs:
        job.result()


def int8_cases() -> Iterator[Case]:
    for m, kk, n in GEMMS:
        (q, s), (w, ws) = c.quantize_rows(normal(m, m, kk)), c.quantize_rows(normal(n, n, kk))
        q[0], w[0] = -128, -128  # the largest products
        out, shared, sums = np.empty((m, n), F32), np.empty((m, n), F32), np.empty((m, n), np.int32)
        if IS_REFERENCE:
            out = shared = c.matmul_int8(q, s, w, ws)
            sums = q.astype(np.int32) @ w.astype(np.int32).T
        else:
            packed = pack_int8(w).ravel()
            k.matmul_int8(out, q, s, packed, ws)
            by_two_threads(k.matmul_int8, shared, q, s, packed, ws, groups=k.num_groups(n))
            k.matmul_int8_sums(sums, q, packed)
        yield f"int8 {m} x {kk} x {n}", out
        yield f"int8 {m} x {kk} x {n} by two threads", shared
        yield f"int8 {m} x {kk} x {n} sums", sums
    bounds, kk, n = np.array([0, 8, 8, 11, 43, 60], np.int32), 200, 50
    (q, s), w = c.quantize_rows(normal(1, 60, kk)), c.quantize_rows(normal(2, 5 * n, kk))
    weights, scales = w[0].reshape(5, n, kk), w[1].reshape(5, n)
    out = np.empty((60, n), F32)
    if IS_REFERENCE:
        for e in range(5):
            rows = slice(bounds[e], bounds[e + 1])
            out[rows] = c.matmul_int8(q[rows], s[rows], weights[e], scales[e])
    else:
        k.grouped_matmul_int8(out, q, s, bounds, pack_int8(weights).ravel(), w[1])
    yield "int8 grouped", out


def exact_cases() -> Iterator[Case]:
    for i, (m, kk, n) in enumerate(GEMMS):
        for one in KINDS:
            other = KINDS[(i + KINDS.index(one)) % len(KINDS)]
            x, w = numbers(one, i, m, kk), numbers(other, i + 100, kk, n)
            out, shared = np.empty((m, n), F32), np.empty((m, n), F32)
            if IS_REFERENCE:
                out = shared = c.matmul_exact(x, w)
            else:
                packed = pack_bf16(w).ravel()
                k.matmul_exact(out, x, packed)
                by_two_threads(k.matmul_exact, shared, x, packed, groups=k.num_groups(n))
            yield f"exact {m} x {kk} x {n}, {one} x {other}", out
            yield f"exact {m} x {kk} x {n}, {one} x {other} by two threads", shared
    rows, heads, nope, rank = 19, 3, 45, 70
    q, w = normal(7, rows, heads, nope + 4), c.factors(normal(8, heads, nope, rank))
    out = np.empty((rows, heads * rank), F32)
    if IS_REFERENCE:
        product = c.matmul_exact(c.factors(q[..., :nope].transpose(1, 0, 2)), w)
        out = np.ascontiguousarray(product.transpose(1, 0, 2)).reshape(rows, -1)
    else:
        k.matmul_exact_heads(out, q.reshape(rows, -1), pack_bf16(w).ravel(), heads, nope)
    yield "exact, a matrix per head", out


def attention_cases() -> Iterator[Case]:
    for (heads, context, page, rank, rope, rows), (kind, of_latents, of_rope) in product(ATTENTIONS, EDGES):
        kv, norm = normal(context, context, rank + rope), normal(rank, rank) * of_latents
        cos, sin = (normal(seed, context, rope // 2) / of_rope for seed in (heads, rope))
        q_lat, q = normal(3, 2 * rows, heads * rank), normal(4, 2 * rows, heads * (12 + rope)) * of_rope
        first = max(0, context - rows)
        positions = np.arange(first, context, dtype=np.int32)
        rows = len(positions)
        q_lat, q = q_lat[: 2 * rows].copy(), q[: 2 * rows].copy()
        for int8_weights in (False, True):
            name = f"attention of {heads} heads, {context} positions, {rank} + {rope}, {rows} rows{kind}"
            if IS_REFERENCE:
                out = _attention_reference(
                    q_lat, q, kv, norm, cos, sin, positions, heads, rank, 12, int8_weights
                )
            else:
                out = _attention(
                    q_lat, q, kv, norm, cos, sin, positions, heads, rank, rope, page, int8_weights
                )
            yield name + (", whole weights" if int8_weights else ""), out


def _cache(kv, norm, cos, sin, page, rank, rope):  # type: ignore[no-untyped-def]
    context = len(kv)
    num_blocks = -(-context // page) + 2
    table = np.random.default_rng(context).permutation(num_blocks).astype(np.int32)[: -(-context // page)]
    every = np.arange(context, dtype=np.int32)
    slots = table[every // page] * np.int32(page) + every % np.int32(page)
    cache = (
        np.full(cache_shape(num_blocks, page, rank), np.uint8(77)),
        np.full((num_blocks, page), np.nan, F32),
        np.full(cache_shape(num_blocks, page, rope), np.nan, F32),
    )
    k.append_kv(*cache, slots, kv, norm, 1e-6, every, cos, sin)
    return cache, table


def _attention(q_lat, q, kv, norm, cos, sin, positions, heads, rank, rope, page, int8_weights):  # type: ignore[no-untyped-def]
    context = len(kv)
    cache, table = _cache(kv, norm, cos, sin, page, rank, rope)
    rows, out = len(positions), np.empty_like(q_lat)
    seq_of, tables = np.repeat(np.array([0, 1], np.int32), rows), np.stack([table, table])
    scratch = np.full(scratch_size(context, rank, rope), np.nan, F32)
    k.attention(
        out,
        q_lat,
        q,
        heads,
        rope,
        seq_of,
        np.tile(positions, 2),
        *cache,
        tables,
        0.11,
        int8_weights,
        scratch,
        0,
        1,
    )
    return out


def _attention_reference(q_lat, q, kv, norm, cos, sin, positions, heads, rank, nope, int8_weights):  # type: ignore[no-untyped-def]
    latent, scale = c.quantize_rows(c.rms_norm(kv[:, :rank], norm, 1e-6))
    k_pe, out = c.rope(kv[:, rank:], cos, sin), np.empty_like(q_lat)
    for row in range(len(out)):
        seen = slice(0, int(positions[row % len(positions)]) + 1)
        q_pe = q[row].reshape(heads, -1)[:, nope:]
        mine = q_lat[row].reshape(heads, rank)
        out[row] = c.attention(mine, q_pe, latent[seen], scale[seen], k_pe[seen], 0.11, int8_weights).ravel()
    return out


def prefill_cases() -> Iterator[Case]:
    """Many rows of a sequence at once; step by step where the kernel leaves them to others."""
    for heads, rows, context, page, rank, nope, rope, v_dim in PREFILLS:
        kv, norm = normal(context, context, rank + rope), normal(rank, rank)
        cos, sin = normal(heads, context, rope // 2), normal(rope, context, rope // 2)
        q = normal(4, rows, heads * (nope + rope))
        w_uk, w_uv = c.factors(normal(5, heads, nope, rank)), c.factors(normal(6, heads, rank, v_dim))
        positions = np.arange(context - rows, context, dtype=np.int32)
        for int8_weights in (False, True):
            name = f"prefill of {rows} rows, {heads} heads, {context} positions, {rank} + {rope}"
            if IS_REFERENCE:
                q_nope = c.factors(q.reshape(rows, heads, -1)[..., :nope].transpose(1, 0, 2))
                q_lat = c.matmul_exact(q_nope, w_uk).transpose(1, 0, 2).reshape(rows, -1)
                o_lat = _attention_reference(
                    q_lat, q, kv, norm, cos, sin, positions, heads, rank, nope, int8_weights
                )
                values = c.factors(o_lat.reshape(rows, heads, rank).transpose(1, 0, 2))
                out = c.matmul_exact(values, w_uv).transpose(1, 0, 2)
            else:
                cache, table = _cache(kv, norm, cos, sin, page, rank, rope)
                out = np.empty((rows, heads * v_dim), F32)
                weights = (pack_bf16(w_uk).ravel(), pack_bf16(w_uv).ravel())
                scratch = np.full(scratch_size(context, rank, rope), np.nan, F32)
                rest = (positions, table, *cache, 0.11, int8_weights, scratch)
                if not k.prefill(out, q, heads, rope, *weights, *rest):
                    q_lat, seq_of = np.empty((rows, heads * rank), F32), np.zeros(rows, np.int32)
                    o_lat = np.empty_like(q_lat)
                    k.matmul_exact_heads(q_lat, q, weights[0], heads, nope)
                    k.attention(
                        o_lat, q_lat, q, heads, rope, seq_of, positions, *cache, table[None], 0.11,
                        int8_weights, scratch, 0, 1,
                    )  # fmt: skip
                    k.matmul_exact_heads(out, o_lat, weights[1], heads, rank)
            yield name + (", whole weights" if int8_weights else ""), out


def main() -> None:
    print(f"# AMX: {compiling.uses_amx() and not IS_REFERENCE}", file=sys.stderr)
    for cases in (int8_cases, exact_cases, attention_cases, prefill_cases):
        for name, out in cases():
            print(f"{hashlib.sha256(np.ascontiguousarray(out)).hexdigest()[:24]} {name}", flush=True)


if __name__ == "__main__":
    main()
