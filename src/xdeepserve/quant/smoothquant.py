"""SmoothQuant: move the range of activation channels into the weights (Xiao et al. 2023; xDeepServe 4.7).

    X W^T = (X / s) (W * s)^T        s_j = max|X_j|^a / max|W_j|^(1 - a)

Activations have a range 10 to 100 times that of weights, in few channels that are the same for all tokens.
The division is folded into whatever comes before (a norm's weight, the rows of the layer that made X), so the
function of the model does not change and nothing is computed at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.quant.rounding import channel_scale, dequantize, quantized_rows, relative_error, round_weight

DEFAULT_ALPHA = 0.5
ALPHAS = tuple(i / 10 for i in range(1, 10))
MAX_ROWS = 512  # of activations that a search looks at
LIMIT = 1e3


def smoothing_scale(x_max: Array, weights: Sequence[Array], alpha: float) -> Array:
    """Compute s [K] for inputs of magnitude x_max [K] and the layers [N, K] that read them; s is 1 for a dead
    input."""
    w_max = np.max([np.max(np.abs(w), axis=0) for w in weights], axis=0)
    is_alive = (x_max > 0) & (w_max > 0)
    scale = np.ones_like(x_max, dtype=np.float32)
    scale[is_alive] = x_max[is_alive] ** alpha / w_max[is_alive] ** (1 - alpha)
    # A common factor changes nothing, but keeps the folded weights near their size.
    if is_alive.any():
        scale[is_alive] /= np.exp(np.log(scale[is_alive]).mean())
    return np.clip(scale, 1 / LIMIT, LIMIT).astype(np.float32)


def w8a8_error(x: Array, weights: Sequence[Array], scale: Array) -> float:
    """Sum the layers' relative output errors if inputs x [T, K] are smoothed by `scale` [K]."""
    x_q = quantized_rows(x / scale)
    total = 0.0
    for w in weights:
        smoothed = w * scale
        w_scale = channel_scale(smoothed)
        total += relative_error(x_q @ dequantize(round_weight(smoothed, w_scale), w_scale).T, x @ w.T)
    return total


def search_scale(
    x: Array,
    weights: Sequence[Array],
    alphas: Sequence[float],
    tie: Callable[[Array], Array] = lambda scale: scale,
) -> tuple[Array, float]:
    """Find the scale [K] with the least error among `alphas` and no smoothing; x [T, K], weights [N, K].
    Returns the scale and its error.

    One alpha gives SmoothQuant, left out where it would hurt. Several alphas give CloudMatrix384's adaptive
    scale search (section 4.5). `tie` makes those elements equal that are folded into a common weight.
    """
    x_max = np.max(np.abs(x), axis=0, initial=0.0).astype(np.float32)
    sample = x[:: max(1, len(x) // MAX_ROWS)][:MAX_ROWS]
    best = np.ones_like(x_max)
    if not len(sample):
        return best, 0.0
    least = w8a8_error(sample, weights, best)
    for alpha in alphas:
        scale = tie(smoothing_scale(x_max, weights, alpha))
        error = w8a8_error(sample, weights, scale)
        if error < least:
            best, least = scale, error
    return best, least
