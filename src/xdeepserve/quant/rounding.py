"""Weights to INT8 with one scale per output channel, and how far that is from the original."""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import QUANT_FLOOR, QUANT_MAX, Array, quantize_rows

F32 = np.float32


def channel_scale(w: Array, clip: Array | float = 1.0) -> Array:
    """Scale [N] of w [N, K]: the largest magnitude of each row, times `clip` [N] or a number, over 127."""
    amax = np.max(np.abs(w), axis=1, initial=0.0)
    return (np.maximum(amax * clip, QUANT_FLOOR) / QUANT_MAX).astype(F32)


def round_weight(w: Array, scale: Array) -> Array:
    """The nearest integers in [-127, 127] for w [N, K] with scale [N]."""
    return np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8)


def dequantize(q: Array, scale: Array) -> Array:
    """float32 [N, K]."""
    return q.astype(F32) * scale[:, None]


def quantized_rows(x: Array) -> Array:
    """What INT8 leaves of activations x [T, K]: quantised per token and back."""
    return dequantize(*quantize_rows(x.astype(F32, copy=False)))


def relative_error(found: Array, wanted: Array) -> float:
    """|found - wanted|^2 / |wanted|^2."""
    norm = float(np.square(wanted, dtype=np.float64).sum())
    return float(np.square(found - wanted, dtype=np.float64).sum()) / max(norm, 1e-30)
