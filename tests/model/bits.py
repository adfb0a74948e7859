"""What tests of kernels share."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

F32 = np.float32
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25)


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(F32)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()
