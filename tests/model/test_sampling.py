"""Philox against published vectors; the kernel against NumPy; the distribution against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xdeepserve.model import kernels, sampling

F32 = np.float32


def test_philox_known_answers() -> None:
    """From Random123's kat_vectors, philox4x32-10."""
    ones = 0xFFFFFFFF
    assert sampling.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert sampling.philox4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert sampling.philox4x32(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 200),
    st.sampled_from([0.0, 1e-320, 1e-45, 1e-30, 0.3, 1.0, 7.0]),
    st.sampled_from([-1, 0, 1, 3, 1000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    st.sampled_from([0.0, 1e-9, 0.1, 1.0]),
    st.booleans(),
    st.booleans(),
)
def test_kernel_equals_numpy(
    seed: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    has_ties: bool,
    is_masked: bool,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((3, vocab)) * 4).astype(F32)
    if has_ties:
        logits = np.round(logits)
    if is_masked:
        logits[:, rng.permutation(vocab)[1:]] = -np.inf
    seeds = rng.integers(0, 2**64, 3, dtype=np.uint64)
    positions = rng.integers(0, 5000, 3).astype(np.uint64)
    choices = np.arange(3, dtype=np.uint64)
    out = np.empty(3, np.int32)
    kernels.sample(
        out,
        logits,
        np.full(3, temperature, F32),
        np.full(3, top_k, np.int32),
        np.full(3, top_p, np.float64),
        np.full(3, min_p, F32),
        seeds,
        choices,
        positions,
    )
    for r in range(3):
        expected = sampling.sample(
            logits[r], temperature, top_k, top_p, min_p, int(seeds[r]), int(choices[r]), int(positions[r])
        )
        assert out[r] == expected
        assert np.isfinite(logits[r, expected])


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = np.array([1, 3, 3, 2], F32)
    assert sampling.sample(logits, 0.0, 0, 1.0, 0.0, 0, 0, 0) == 1


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 20, 36])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 3)])
def test_no_token_where_logits_are_no_numbers(bad: float, place: int, temperature: float, top_k: int) -> None:
    logits = np.linspace(0, 1, 37, dtype=F32)
    logits[place] = np.copysign(F32(bad), F32(bad))
    out, row = np.empty(1, np.int32), (np.full(1, top_k, np.int32), np.ones(1), np.zeros(1, F32))
    keys = np.zeros(1, np.uint64)
    kernels.sample(out, logits[None], np.full(1, temperature, F32), *row, keys, keys, keys)
    expected = place if bad == np.inf and temperature == 0.0 else -1
    assert out[0] == sampling.sample(logits, temperature, top_k, 1.0, 0.0, 0, 0, 0) == expected
    nothing = np.full((1, 37), -np.inf, F32)
    kernels.sample(out, nothing, np.full(1, temperature, F32), *row, keys, keys, keys)
    assert out[0] == sampling.sample(nothing[0], temperature, top_k, 1.0, 0.0, 0, 0, 0)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(F32)
    draws = {sampling.sample(logits, 1.0, 2, 1.0, 0.0, 7, 0, i) for i in range(300)}
    assert draws == {0, 1}
    draws = {sampling.sample(logits, 1.0, 0, 0.79, 0.0, 7, 0, i) for i in range(300)}
    assert draws == {0, 1}
    draws = {sampling.sample(logits, 1.0, 0, 1e-9, 0.0, 7, 0, i) for i in range(50)}
    assert draws == {0}


def test_min_p_keeps_what_is_likely_enough() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(F32)
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.5, {0, 1}), (1.0, {0})):
        assert {sampling.sample(logits, 1.0, 0, 1.0, min_p, 7, 0, i) for i in range(300)} == kept
    # Before top_p: of the two tokens that min_p leaves, the first holds 0.6.
    assert {sampling.sample(logits, 1.0, 0, 0.6, 0.5, 7, 0, i) for i in range(300)} == {0}


NEUTRAL = {
    "bias": {},
    "repetition_penalty": 1.0,
    "seen": [],
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "counts": {},
    "allowed": None,
}


def test_edits_round_each_step_to_float32() -> None:
    """Against the definition, one token and one operation at a time."""
    rng = np.random.default_rng(5)
    before = (rng.standard_normal(40) * 9).astype(F32)
    bias = {3: 0.1, 7: -100.0, 8: 2.5}
    seen, counts = [1, 3, 8, 9, 20, 39], {3: 2, 20: 7, 39: 1}
    allowed = [i for i in range(40) if i % 3 != 1]
    bits = np.isin(np.arange(40), allowed)
    after = before.copy()
    sampling.edit(
        after,
        bias=bias,
        repetition_penalty=1.3,
        seen=seen,
        frequency_penalty=0.7,
        presence_penalty=-0.3,
        counts=counts,
        allowed=np.packbits(bits, bitorder="little").tobytes(),
    )
    for token in range(40):
        logit = F32(before[token])
        logit = F32(logit + F32(bias[token])) if token in bias else logit
        if token in seen:
            logit = F32(logit / F32(1.3)) if logit > 0 else F32(logit * F32(1.3))
        if token in counts:
            logit = F32(logit - F32(F32(0.7) * F32(counts[token])))
            logit = F32(logit - F32(-0.3))
        logit = logit if token in allowed else F32(-np.inf)
        assert after[token].tobytes() == logit.tobytes()


def test_neutral_edits_change_no_bit() -> None:
    before = np.array([-0.0, 1.5, np.nan, -np.inf], F32)
    after = before.copy()
    sampling.edit(after, **NEUTRAL)
    assert after.tobytes() == before.tobytes()
    sampling.edit(after, **{**NEUTRAL, "counts": {0: 1}})
    assert after.tobytes() == before.tobytes()


def test_frequencies_follow_the_softmax() -> None:
    probabilities = np.array([0.1, 0.6, 0.3])
    logits = np.log(probabilities).astype(F32)
    draws = [sampling.sample(logits, 1.0, 0, 1.0, 0.0, 11, 0, i) for i in range(4000)]
    frequencies = np.bincount(draws, minlength=3) / 4000
    # Three standard deviations of a binomial share; the draws are fixed by the seed.
    assert np.all(np.abs(frequencies - probabilities) < 3 * np.sqrt(0.25 / 4000))


def test_draws_depend_on_seed_choice_and_position_only() -> None:
    values = {sampling.uniform(s, ch, p) for s in range(4) for ch in range(4) for p in range(4)}
    assert len(values) == 64
    assert all(0 <= v < 1 for v in values)
    assert sampling.uniform(2**40 + 1, 0, 0) != sampling.uniform(1, 0, 0)


def test_log_probs_are_a_log_softmax() -> None:
    logits = np.random.default_rng(0).standard_normal(50).astype(F32) * 5
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(sampling.log_probs(logits), exact, atol=2e-6)
