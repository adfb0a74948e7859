"""Clipping: give up the largest weights of a block, so that all other weights are rounded more finely.

CloudMatrix384 4.5, equation 4: a = argmin |Block(X; W) - Block(X; Q(W; a))|. A block is a set of weights with
a common scale: a row, because there is a scale for each output channel.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.quant.rounding import channel_scale, dequantize, round_weight

CANDIDATES = tuple(1.0 - 0.025 * i for i in range(17))  # 1 down to 0.6


def clip_factors(w: Array, energy: Array) -> Array:
    """Find a clip factor a [N] for each row of w [N, K]; `energy` [K] is each input's sum of squares."""
    best = np.ones(len(w), np.float32)
    least = np.full(len(w), np.inf)
    for factor in CANDIDATES:
        scale = channel_scale(w, factor)
        error = np.square(w - dequantize(round_weight(w, scale), scale)) @ energy
        is_better = error < least
        best[is_better], least[is_better] = factor, error[is_better]
    return best
