"""Quantisation for exchanges with real bytes, as `comm` needs it."""

from __future__ import annotations

import numpy as np

from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Quantise rows [T, H] to int8 with float32 scales [T], by the canonical arithmetic, for dispatch."""
    q, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    k.quantize_rows(q, scale, x)
    return q, scale
