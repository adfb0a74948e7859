"""Sizes used by several suites: DeepSeek-R1's, the papers' groups, and the replacement for long tokens."""

from __future__ import annotations

import msgspec
import numpy as np

from xdeepserve.hw.spec import Param, Spec

MODEL, HIDDEN, TOP_K = "deepseek-r1", 7168, 8
DIES_PER_CHIP = 2
DISPATCH_NBYTES, COMBINE_NBYTES = HIDDEN + 512, 2 * HIDDEN
EP_SIZES = (8, 16, 32, 64, 128, 256)
FITTED_EP_SIZES = (8, 256)
A2E_COPIES = TOP_K + 1  # of a token: for its routed experts, and for the shared one
A2E_SHRINK = 16


def slower(factor: int) -> Spec:
    """Make slower hardware, where tokens that are shorter by `factor` take the time of whole ones."""
    spec, slower = Spec(), dict[str, Param]()
    for name in ("vector_peak", "hbm_bandwidth", "ub_bandwidth", "mte_bandwidth", "unified_buffer"):
        param = getattr(spec, name)
        slower[name] = msgspec.structs.replace(param, value=param.value / factor)
    return msgspec.structs.replace(spec, **slower)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise to zeros: time does not depend on values, so the arithmetic is left out."""
    return np.zeros(x.shape, np.int8), np.ones(len(x), np.float32)
