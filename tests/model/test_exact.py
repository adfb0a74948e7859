"""Exact products: why a matrix unit, fused multiply-adds and NumPy agree, and that the kernels do."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from tests.model.tools import shares, unpack_f32
from xdeepserve.bf16 import round_bf16
from xdeepserve.jit.compiling import kernel
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.pair_dots import BY_DOTS, add_words
from xdeepserve.model.kernels.tiles import load_tile, store_tile
from xdeepserve.model.packing import pack_bf16, pack_f32, packed_shape_bf16

LEAST_NORMAL = F32(2.0**-126)
KINDS = ["normal", "wild", "smallest", "cancelling", "integers"]
kinds = st.sampled_from(KINDS)


def numbers(kind: str, seed: int, *shape: int) -> np.ndarray:
    """Factors that try the limits of float32: its range, its smallest sums, and what cancels out."""
    rng = np.random.default_rng(seed)
    x = normal(seed, *shape)
    if kind == "wild":
        x = x * np.exp2(rng.integers(-50, 60, shape)).astype(F32)
    elif kind == "smallest":
        x = np.exp2(rng.integers(-46, -44, shape)).astype(F32) * rng.choice(F32([-1, 1, 1.0078125]), shape)
    elif kind == "cancelling":  # neighbours but for the last bit, with the opposite sign
        x = round_bf16(x)
        x[..., 1::2] = -x[..., 0 : x.shape[-1] - 1 : 2]
        x = x * rng.choice(F32([1, 1.0078125]), shape)
    elif kind == "integers":
        x = rng.integers(-128, 128, shape).astype(F32)
    return c.factors(x)


def nearest(exact: Fraction) -> np.float32:
    """Rounded once to float32, to nearest, ties to even; denormals are flushed, as matrix units do."""
    if not exact:
        return F32(0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit  # Python rounds ties to even
    return F32(0) if abs(rounded) < Fraction(2) ** -126 else F32(float(rounded))


def matrix_unit(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """One output, x [K] . w [K], of TDPBF16PS: for each 32 k two chains of fused multiply-adds, whose sum
    is added to the tile; every operation rounds once, and denormals are flushed."""
    total = F32(0)
    for start in range(0, len(x), 32):
        chains = [F32(0), F32(0)]
        for i in range(start, min(start + 32, len(x))):
            product = Fraction(float(x[i])) * Fraction(float(w[i]))
            chains[i % 2] = nearest(product + Fraction(float(chains[i % 2])))
        total = nearest(
            Fraction(float(total)) + Fraction(float(nearest(sum(map(Fraction, map(float, chains))))))
        )
    return total


@kernel
def dots_of_words(out, sums, x, w):
    """out [16] = sums + the two products of the word x[0] and each of the words w [16]."""
    store_tile(out, 0, 16, add_words(load_tile(1, 1, sums, 0, 16, 0), x, 0, 1, w, 0, 16), 16)


def words(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first.view(np.uint32) | second.view(np.uint32) >> np.uint32(16)).view(F32)


@pytest.mark.skipif(not BY_DOTS, reason="this CPU has no dot product of BF16 pairs")
@few
@given(seeds, kinds, kinds)
def test_a_dot_of_words_is_two_fused_multiply_adds_the_upper_one_first(
    seed: int, one: str, other: str
) -> None:
    x, w = numbers(one, seed, 3), numbers(other, seed + 1, 3, 16)
    sums, out = (-x[2] * w[2]).astype(F32), np.empty(16, F32)  # of the size of the products
    dots_of_words(out, sums, words(x[:1], x[1:2]), words(w[0], w[1]))
    for lane in range(16):
        total = sums[lane]
        for i in range(2):
            total = nearest(Fraction(float(total)) + Fraction(float(x[i])) * Fraction(float(w[i, lane])))
        assert out[lane] == total


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_products_are_exact_and_nothing_is_denormal(one: str, other: str) -> None:
    x, w = numbers(one, 1, 3, 97), numbers(other, 2, 97, 4)
    products = x[:, :, None] * w
    assert np.array_equal(
        products.astype(np.float64), x.astype(np.float64)[:, :, None] * w.astype(np.float64)
    )
    sums = np.abs(np.concatenate([products, np.cumsum(products, axis=1, dtype=F32)]))
    assert np.all((sums == 0) | (sums >= F32(2.0**-104)))


@few
@given(seeds, kinds, kinds, st.integers(1, 100))
def test_a_matrix_unit_gives_the_bits_of_numpy(seed: int, one: str, other: str, depth: int) -> None:
    x, w = numbers(one, seed, depth), numbers(other, seed + 1, depth)
    assert_same_bits(c.matmul_exact(x[None], w[:, None])[0], np.array([matrix_unit(x, w)]))


def test_factors_that_are_too_small_would_tell_machines_apart() -> None:
    """What the limit is for: a product that a matrix unit flushes, and NumPy does not."""
    x = np.full(2, 2.0**-65, F32)
    assert c.matmul_exact(x[None], x[:, None])[0, 0] != matrix_unit(x, x)
    assert not c.factors(x).any()


def test_the_order_is_that_of_chunks_and_chains() -> None:
    x, w = c.factors(normal(5, 9, 75)), c.factors(normal(6, 75))
    total = np.zeros(9, F32)
    for start in (0, 32, 64):
        even, odd = np.zeros(9, F32), np.zeros(9, F32)
        for i in range(start, min(start + 32, 75), 2):
            even = even + x[:, i] * w[i]
            if i + 1 < 75:
                odd = odd + x[:, i + 1] * w[i + 1]
        total = total + (even + odd)
    assert_same_bits(c.matmul_exact(x, w[:, None])[:, 0], total)
    assert not np.array_equal(c.matmul(x, w[:, None])[:, 0], total)


def test_factors() -> None:
    least = c.LEAST_FACTOR
    x = F32(
        [0, 1, 1 + 2**-8, 1 + 3 * 2**-8, least, -least, least * (1 - 2**-10), least * (1 - 2**-7), 2.0**63]
    )
    expected = F32([0, 1, 1, 1 + 2**-6, least, -least, least, 0, 2.0**63])
    assert np.array_equal(c.factors(x), expected)
    assert np.isnan(c.factors(F32([np.nan]))[0])
    assert_same_bits(c.factors(c.factors(x)), c.factors(x))


def test_kernels_round_rows_so() -> None:
    """A product with ones on the diagonal shows the factors."""
    least = float(c.LEAST_FACTOR)
    x = np.concatenate([normal(1, 3, 40, scale=s) for s in (1, least, 1e-30, 1e18)], axis=1)
    x[0, :6] = least, -least, np.nextafter(F32(least), F32(0)), -0.0, 1e-45, least * (1 - 2**-8)
    identity, out = np.eye(160, dtype=F32), np.empty((3, 160), F32)
    k.matmul_exact(out, x, pack_bf16(identity).ravel())
    assert np.array_equal(out, c.factors(x))


@few
@given(seeds, kinds, kinds, st.integers(1, 14), st.integers(1, 130), st.integers(1, 70), st.integers(1, 4))
def test_matmul(seed: int, one: str, other: str, m: int, kk: int, n: int, workers: int) -> None:
    x, w = numbers(one, seed, m, kk), numbers(other, seed + 1, kk, n)
    if one == "normal":
        x = normal(seed, m, kk)  # the kernel rounds
    expected = c.matmul_exact(c.factors(x), w)
    for pack in (pack_bf16, pack_f32):
        out = np.full((m, n), np.nan, F32)
        for first, last in shares(n, workers):
            k.matmul_exact(out, x, pack(w).ravel(), first, last)
        assert_same_bits(out, expected)
    k.matmul_exact_blocked(out, x, pack_f32(w).ravel())
    assert_same_bits(out, c.matmul_blocked(c.factors(x), w, product=c.matmul_exact))


def test_many_rows_are_computed_some_at_a_time() -> None:
    x, w = normal(1, 150, 600), c.factors(normal(2, 600, 33))
    whole, single = np.full((150, 33), np.nan, F32), np.empty((1, 33), F32)
    packed = pack_bf16(w).ravel()
    k.matmul_exact(whole, x, packed)
    assert_same_bits(whole, c.matmul_exact(c.factors(x), w))
    for row in range(0, 150, 13):
        k.matmul_exact(single, x[row : row + 1], packed)
        assert_same_bits(single[0], whole[row])


@few
@given(seeds, st.integers(1, 9), st.integers(1, 4), st.integers(1, 20), st.integers(1, 40), st.integers(1, 3))
def test_a_matrix_per_head(seed: int, rows: int, heads: int, nope: int, rank: int, workers: int) -> None:
    q, w_uk = normal(seed, rows, heads, nope + 4), c.factors(normal(seed + 1, heads, nope, rank))
    q_lat = np.full((rows, heads * rank), np.nan, F32)
    for first, last in shares(rank, workers):
        k.matmul_exact_heads(q_lat, q.reshape(rows, -1), pack_bf16(w_uk).ravel(), heads, nope, first, last)
    still = c.factors(np.ascontiguousarray(q[..., :nope].transpose(1, 0, 2)))
    expected = c.matmul_exact(still, w_uk).transpose(1, 0, 2)
    assert_same_bits(q_lat, np.ascontiguousarray(expected).reshape(rows, -1))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", [24, 64, 1096])
def test_row_parallel_sums_do_not_depend_on_tp(tp: int, depth: int) -> None:
    """Layers that an INT8 checkpoint keeps in floating point: chunks begin anew in blocks of any depth."""
    x, w = c.factors(normal(7, 3, depth)), c.factors(normal(8, depth, 5))
    sums = []
    for rank in range(tp):
        mine = slice(rank * depth // tp, (rank + 1) * depth // tp)
        out, part = np.empty((3, 5), F32), np.ascontiguousarray(x[:, mine])
        k.matmul_exact_blocked(out, part, pack_f32(w[mine]).ravel(), num_blocks=c.TP_BLOCKS // tp)
        sums.append(out)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    assert_same_bits(sums[0], c.matmul_blocked(x, w, product=c.matmul_exact))


@few
@given(seeds, st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))
def test_packing(seed: int, stack: int, kk: int, n: int) -> None:
    w = c.factors(normal(seed, stack, kk, n))
    packed = pack_bf16(w)
    assert (packed.dtype, packed.shape) == (np.uint16, (stack, *packed_shape_bf16(kk, n)))
    pairs = np.moveaxis(packed, -1, -2).reshape(stack, packed.shape[1], -1, 16)  # [.., groups, K, 16]
    columns = unpack_f32((pairs.astype(np.uint32) << np.uint32(16)).view(F32), n)
    assert_same_bits(columns[:, :kk].copy(), w)
    assert not columns[:, kk:].any()
    with pytest.raises(ValueError, match="without loss"):
        pack_bf16(np.nextafter(w, F32(9)))


def test_bf16_weights_are_not_cut_into_blocks() -> None:
    x, w, out = normal(1, 2, 16), c.factors(normal(2, 16, 16)), np.empty((2, 16), F32)
    with pytest.raises(TypeError, match="takes float32 weights, not uint16"):
        k.matmul_exact_blocked(out, x, pack_bf16(w).ravel())
