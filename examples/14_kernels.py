"""Walkthrough 14: a matrix product at the limit of the machine, and the same bits on every machine.

How INT8 weights lie in memory so that one instruction multiplies 64 of them; why a float32 sum has an order,
and what a library that has none does to a row; products that are exact, so that fusing changes nothing, and
the order of a matrix unit; one result from several instruction sets; where a latent lies in the KV cache
(CloudMatrix384 4.2.2); and how near all of this comes to what one core can do. docs/exact-products.md has
the reasons.

    python examples/14_kernels.py
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from xdeepserve.jit.compiling import ENVIRONMENT_VARIABLE, instructions, uses_amx, uses_vnni
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE, cache_shape
from xdeepserve.model.kernels import limits
from xdeepserve.model.packing import pack_bf16, pack_f32, pack_int8
from xdeepserve.progress import working

F32 = np.float32
BAR = 40


def title(text: str) -> None:
    print(f"\n--- {text}")


def dot_product() -> None:
    """64 bytes of a packed weight, and what the instruction makes of them."""
    title("INT8: sixteen columns, four numbers of each side by side")
    n, depth = 20, 8
    w = np.arange(n * depth).reshape(n, depth).astype(np.int8) - np.int8(80)
    packed = pack_int8(w)
    print(
        f"a weight of {n} columns, {depth} deep, is packed as {packed.shape}: groups, depth / 4, columns, 4"
    )
    for column in (0, 1, 15):
        data = packed[0, 0, column]
        print(
            f"  column {column:>2}, k 0 to 3: {data.tobytes().hex()} = {w[column, :4].tolist()}, each + 128"
        )
    q = np.array([[5, -3, 2, 1, 0, 7, -7, 4]], np.int8)
    unsigned = int(packed[0, :, 1].reshape(-1).astype(int) @ q[0].astype(int))
    print(f"a row of activations: {q[0].tolist()}, their sum is {int(q.sum())}")
    print(f"  column 1, unsigned bytes by signed: {unsigned}")
    print(f"  less 128 times the row's sum:       {unsigned - 128 * int(q.sum())}")
    out = np.empty((1, n), F32)
    ones = np.ones(n, F32)
    k.matmul_int8(out, q, ones[:1], packed.ravel(), ones)
    print(f"  the kernel says:                    {out[0, 1]:.0f}")
    kind = "one instruction for 64 products" if uses_vnni() else "widening and 16-bit products"
    print(f"  every column as int64 arithmetic has it: {(out[0] == w.astype(int) @ q[0].astype(int)).all()}")
    print(f"  (on this CPU by {kind})")


def order() -> None:
    """A row alone and in a crowd."""
    title("float32: one order of additions")
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 1000), F32), rng.standard_normal((1000, 96), F32)
    crowd, alone, packed = np.empty((64, 96), F32), np.empty((1, 96), F32), pack_f32(w).ravel()
    k.matmul(crowd, x, packed)
    same = theirs = 0
    for row in range(64):
        k.matmul(alone, x[row : row + 1], packed)
        same += np.array_equal(alone[0], crowd[row])
        theirs += np.array_equal((x[row : row + 1] @ w)[0], (x @ w)[row])
    print(f"rows with the same bits alone and among 64: {same} of 64")
    print(f"  (of NumPy's BLAS {theirs}: it sums in an order that depends on the shape)")
    print(f"the NumPy reference, k after k: {np.array_equal(c.matmul(x, w), crowd)}")


def exact_products() -> None:
    """BF16 factors, and the order of a matrix unit."""
    title("BF16 by BF16: products that are exact, in the order of a matrix unit")
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 1000), F32), rng.standard_normal((1000, 96), F32)
    fusing("float32", x, w)
    rounded, w = c.factors(x), c.factors(w)
    fusing("BF16", rounded, w)
    packed = pack_bf16(w)
    print(f"  column 3, k 0 and 1, side by side: {packed[0, 0, 3].tobytes().hex()} = {w[:2, 3].tolist()}")
    chains(rounded[0], w[:, 3])
    out, plain = np.empty((64, 96), F32), np.empty((64, 96), F32)
    k.matmul_exact(out, x, packed.ravel())
    print(f"  the kernel says               {out[0, 3].item().hex()}")
    same_bits = np.array_equal(c.matmul_exact(rounded, w), out)
    print(f"  the NumPy reference, 32 k at a time, all columns: {same_bits}")
    k.matmul(plain, rounded, pack_f32(w).ravel())
    same = np.mean(out == plain)
    print(f"  of the sums, {same:.0%} are those of k after k: the order is part of the number")


def fusing(name: str, x: c.Array, w: c.Array) -> None:
    """How many products are rounded, and how many sums differ if multiplication and addition are one."""
    products = x[:, :, None] * w
    exact = x.astype(np.float64)[:, :, None] * w  # 48 bits at most
    rounded = np.count_nonzero(products != exact)
    two = fused = np.zeros((x.shape[0], w.shape[1]), F32)
    for i in range(x.shape[1]):
        two = two + products[:, i]
        fused = (fused + exact[:, i]).astype(F32)
    print(f"  {name:<7} {rounded:>7} of {products.size} products are rounded; "
          f"fused, {np.count_nonzero(two != fused):>4} of {two.size} sums differ")  # fmt: skip


def chains(x: c.Array, w: c.Array) -> None:
    """One sum as a matrix unit makes it."""
    total = F32(0.0)
    for start in range(0, x.size, c.EXACT_CHUNK):
        even = odd = F32(0.0)
        for i in range(start, min(start + c.EXACT_CHUNK, x.size)):
            if i % 2:
                odd = odd + x[i] * w[i]
            else:
                even = even + x[i] * w[i]
        total = total + (even + odd)
        if start == 0:
            print(f"  row 0: even k to 30 {even:.6f}, odd k to 31 {odd:.6f}, both {total:.6f}")
    print(f"  and so on, 32 k at a time:    {total.item().hex()}")


def digests() -> tuple[str, str]:
    """Of a product of each kind, over seeded numbers: by the kernels, and by plain NumPy."""
    rng = np.random.default_rng(1)
    q, w8 = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((9, 331), (150, 331)))
    scale, w_scale = rng.random(9, F32), rng.random(150, F32)
    x, w = rng.standard_normal((9, 131), F32), rng.standard_normal((131, 70), F32)
    out, out8, exact = np.empty((9, 70), F32), np.empty((9, 150), F32), np.empty((9, 70), F32)
    k.matmul(out, x, pack_f32(w).ravel())
    k.matmul_int8(out8, q, scale, pack_int8(w8).ravel(), w_scale)
    k.matmul_exact(exact, x, pack_bf16(c.factors(w)).ravel())
    plain = c.matmul(x, w), c.matmul_int8(q, scale, w8, w_scale), c.matmul_exact(c.factors(x), c.factors(w))
    by_kernels, by_numpy = (
        hashlib.sha256(b"".join(each.tobytes() for each in all_three)).hexdigest()[:16]
        for all_three in ((out, out8, exact), plain)
    )
    return by_kernels, by_numpy


def other_cpus() -> None:
    """This file once more, compiled for others."""
    title("One product, several instruction sets, one result")
    found, by_numpy = digests()
    print(f"  {'NumPy':<28} {by_numpy}")
    rows = [(instructions(), found)]
    # Those that this CPU has: all four where there is a matrix unit.
    for name, value in (
        (ENVIRONMENT_VARIABLE, "vnni"), (ENVIRONMENT_VARIABLE, "portable"), ("NUMBA_CPU_NAME", "generic")
    ):  # fmt: skip
        if value == "vnni" and not uses_amx():
            continue
        inherited = {key: text for key, text in os.environ.items() if key != ENVIRONMENT_VARIABLE}
        command, env = [sys.executable, __file__, "--digest"], {**inherited, name: value}
        said = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        kind, _, found = said.strip().partition(": ")
        rows.append((kind, found))
    for kind, found in dict.fromkeys(rows):
        print(f"  {kind:<28} {found} {'the same' if found == by_numpy else 'NOT THE SAME'}")


def cache() -> None:
    """Where one latent is."""
    title("The KV cache: tiles of 16 positions by 16 columns")
    blocks, size, rank, rope = 3, 32, 40, 8
    latents, scales, k_pe = (
        np.zeros(cache_shape(blocks, size, rank), np.uint8),
        np.zeros((blocks, size), F32),
        np.zeros(cache_shape(blocks, size, rope), F32),
    )
    kv = np.random.default_rng(2).standard_normal((1, rank + rope), F32)
    slot = 2 * size + 21
    ones, cos, sin = np.ones(rank, F32), np.ones((1, rope // 2), F32), np.zeros((1, rope // 2), F32)
    position = np.zeros(1, np.int32)
    k.append_kv(latents, scales, k_pe, np.array([slot], np.int32), kv, ones, 1e-6, position, cos, sin)
    print(
        f"latents of {rank} numbers, INT8: {latents.shape} = blocks, tiles of positions, of columns, 16, 16"
    )
    print(f"slot {slot} is position 21 of block 2: row {21 % TILE} of tile {21 // TILE} of that block")
    for column in (0, 1, 2):
        at = latents[2, 1, column, 5]
        print(f"  columns {TILE * column:>2} to {TILE * column + 15}: {at.tobytes().hex()}")
    expected, scale = c.quantize_rows(c.rms_norm(kv[:, :rank], ones, 1e-6))
    found = latents[2, 1, :, 5].reshape(-1)[:rank].astype(int) - 128
    print(f"  scale {scales[2, 21]:.6f}; as quantising the norm of the row gives them: "
          f"{np.array_equal(found, expected[0]) and scales[2, 21] == scale[0]}")  # fmt: skip


def rate(operations: float, call: Callable[[], object]) -> float:
    """Billions of operations a second, the best of some runs."""
    call()
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return operations / best / 1e9


def near_the_limit() -> None:
    """Products of some heights beside the arithmetic that the core can do out of registers."""
    depth, n = 1024, 1024
    rng = np.random.default_rng(3)
    w8 = rng.integers(0, 256, depth * n, np.uint8)
    w, ones = rng.standard_normal((depth, n), F32), np.ones(n, F32)
    w32, w16 = pack_f32(w).ravel(), pack_bf16(c.factors(w)).ravel()
    int8_peak, bf16_peak = rate(limits.DOT_OPS, limits.dot_peak), rate(limits.EXACT_OPS, limits.exact_peak)
    if uses_amx():
        int8_peak = rate(limits.UNIT_OPS, limits.int8_unit_peak)
        bf16_peak = rate(limits.UNIT_OPS / 2, limits.exact_unit_peak)
    for name, peak in (
        ("INT8", int8_peak), ("float32", rate(limits.F32_OPS, limits.f32_peak)), ("BF16", bf16_peak)
    ):  # fmt: skip
        title(f"{name}, {depth} x {n}, one core: {peak:.0f} billion operations a second at best")
        for rows in (1, 2, 4, 8, 16, 64):
            out, x = np.empty((rows, n), F32), rng.standard_normal((rows, depth), F32)
            q, scale = rng.integers(-127, 128, (rows, depth)).astype(np.int8), np.ones(rows, F32)

            if name == "INT8":
                call = partial(k.matmul_int8, out, q, scale, w8, ones)
            elif name == "BF16":
                call = partial(k.matmul_exact, out, x, w16)
            else:
                call = partial(k.matmul, out, x, w32)
            share = rate(2.0 * rows * depth * n, call) / peak
            print(f"  {rows:>2} rows {'#' * round(BAR * min(share, 1.0)):<{BAR}} {100 * share:3.0f} %")
    print(
        "  With few rows a weight is read for little arithmetic: the caches set the pace, then the core does."
    )


def main() -> None:
    if "--digest" in sys.argv[1:]:
        print(f"{instructions()}: {digests()[0]}")
        return
    for step in (dot_product, order, exact_products, other_cpus, cache, near_the_limit):
        with working(f"Walkthrough 14, {step.__name__.replace('_', ' ')}"):
            step()


if __name__ == "__main__":
    main()
