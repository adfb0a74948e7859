"""Rounding of weights to INT8 with a scale per output channel, and measures of the error."""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import QUANT_FLOOR, QUANT_MAX, Array, quantize_rows

F32 = np.float32


def channel_scale(w: Array, clip: Array | float = 1.0) -> Array:
    """Compute scale [N] of w [N, K]: the largest magnitude of each row, times `clip` [N] or a number, over
    127."""
    amax = np.max(np.abs(w), axis=1, initial=0.0)
    return (np.maximum(amax * clip, QUANT_FLOOR) / QUANT_MAX).astype(F32)


def round_weight(w: Array, scale: Array) -> Array:
    """Round w [N, K] with scale [N] to the nearest integers in [-127, 127]."""
    return np.clip(np.rint(w / scale[:, None]), -127, 127).astype(np.int8)


def dequantize(q: Array, scale: Array) -> Array:
    """Multiply INT8 weights q [N, K] by scale [N], in float32 [N, K]."""
    return q.astype(F32) * scale[:, None]


def quantized_rows(x: Array) -> Array:
    """Quantise activations x [T, K] to INT8 per token and convert them back to float32."""
    return dequantize(*quantize_rows(x.astype(F32, copy=False)))


def relative_error(found: Array, wanted: Array) -> float:
    """Compute |found - wanted|^2 / |wanted|^2."""
    norm = float(np.square(wanted, dtype=np.float64).sum())
    return float(np.square(found - wanted, dtype=np.float64).sum()) / max(norm, 1e-30)
