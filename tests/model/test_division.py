"""Quotients without a division are those of a division, next to ties and at the edges, too."""

import numpy as np
import pytest

from tests.model.bits import F32, assert_same_bits, normal
from xdeepserve.jit.compiling import kernel
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.division import LEAST, MOST, divide
from xdeepserve.model.kernels.simd import load, splat, store

ULP = 2.0**-23
SMALLEST, LARGEST = 1 << 23, 1 << 24  # whole numbers that have all the bits of a float32


@kernel
def quotients(out, a, b):
    """out = a / b, all [N], N a multiple of 16."""
    for i in range(0, a.size, LANES):
        divisor = load(b, i)
        store(out, i, divide(load(a, i), divisor, splat(np.float32(1.0)) / divisor))


def check(a: Array, b: Array) -> None:
    """All pairs, which are filled up to whole vectors."""
    a, b = (np.concatenate([each, np.ones(-each.size % LANES)]).astype(F32) for each in (a, b))
    out = np.empty_like(a)
    quotients(out, a, b)
    with np.errstate(all="ignore"):
        assert_same_bits(out, a / b)


def inverses(odd: Array, bits: int) -> Array:
    """x with odd * x = 1 modulo 2**bits."""
    x = odd.copy()
    for _ in range(5):
        x = x * (np.uint64(2) - odd * x)
    return x & np.uint64((1 << bits) - 1)


def next_to_ties(k: int, bits: int) -> tuple[Array, Array]:
    """All whole a, b of 24 bits and m of 25, odd, with a * 2**bits = b * m + k: so near are a / b and the
    middle of two floats, m / 2**bits."""
    twos = (k & -k).bit_length() - 1  # those that k has, b must have, too
    odd = np.arange((SMALLEST >> twos) | 1, LARGEST >> twos, 2, dtype=np.uint64)
    excess, bits = k >> twos, bits - twos
    m = (inverses(odd, bits) * np.uint64(-excess % (1 << 64))) & np.uint64((1 << bits) - 1)
    pairs = []
    for first in range(0, 2 * LARGEST, 1 << bits):  # m is known modulo 2**bits
        whole = m + np.uint64(first)
        a = (odd * whole + np.uint64(excess % (1 << 64))) >> np.uint64(bits)
        fits = (whole >= LARGEST) & (whole < 2 * LARGEST) & (a < LARGEST)
        pairs.append((a[fits], odd[fits] << np.uint64(twos)))
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


@pytest.mark.parametrize("k", [sign * k for k in range(1, 8) for sign in (1, -1)])
def test_all_quotients_below_one_that_could_be_rounded_wrongly(k: int) -> None:
    a, b = next_to_ties(k, 25)
    assert a.size > 2_000_000
    assert (a < b).all()
    check(a, b)


@pytest.mark.parametrize("k", [-1, 1])
def test_all_quotients_above_one_that_could_be_rounded_wrongly(k: int) -> None:
    a, b = next_to_ties(k, 24)
    assert a.size > 1_000_000
    assert (a >= b).all()
    check(a, b)


def test_quotients_of_all_magnitudes() -> None:
    rng = np.random.default_rng(5)
    low, high = np.log2(LEAST), np.log2(MOST)
    b = np.exp2(rng.uniform(low, high, 1 << 20))
    check(rng.standard_normal(b.size) * np.exp2(rng.uniform(low - 4, high + 4, b.size)), b)


def test_what_is_not_tame_is_divided() -> None:
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, LEAST, -MOST, 1.0, -3.0, 1e-30, 1e30]
    check(np.repeat(edges, 3), np.tile([1.0, 1.7, 3.0], len(edges)))


@pytest.mark.parametrize("scale", [1e-30, 1e-13, 1e-6, 1.0, 1e15, 1e25, 1e37])
def test_rows_of_all_magnitudes_are_quantised(scale: float) -> None:
    x = normal(3, 40, 203, scale=scale)
    x[:, ::7] = 0.0
    q, s = np.empty(x.shape, np.int8), np.empty(len(x), F32)
    k.quantize_rows(q, s, x)
    expected_q, expected_s = c.quantize_rows(x)
    assert_same_bits(q, expected_q)
    assert_same_bits(s, expected_s)
