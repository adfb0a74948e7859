"""GPTQ: round column by column, and let the columns not yet rounded make up for the error (Frantar 2023).

With inputs X and H = X^T X, the output error |W X^T - Q X^T|^2 is a quadratic form in H. After column j is
rounded, the best change of the columns behind it is err * U[j, j+1:] / U[j, j], where U is the upper Cholesky
factor of H^-1. Columns go in the order of their energy, the largest first, while most others are still free.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.quant.rounding import round_weight

DAMPING = 0.01  # of the mean diagonal
BLOCK = 64  # columns whose effect on the rest is applied at once


def hessian(x: Array) -> Array:
    """Compute X^T X in float64, [K, K]."""
    x = x.astype(np.float64)
    return x.T @ x


def gptq(w: Array, h: Array, scale: Array) -> Array:
    """Round w [N, K] to INT8 [N, K], with Hessian h [K, K] and fixed scales [N].

    The column of an input that is always zero is rounded to the nearest.
    """
    is_dead = np.diag(h) == 0
    order = np.argsort(-np.diag(h), kind="stable")
    damped = h[np.ix_(order, order)].copy()
    diagonal = np.diag(damped)
    damped[np.diag_indices_from(damped)] += DAMPING * max(float(diagonal.mean()), 1e-12)
    # The inverse's upper factor from the factor of the matrix itself, turned round: stable and symmetric.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper = np.linalg.inv(lower)[::-1, ::-1]
    rest = w[:, order].astype(np.float64)
    wide = scale.astype(np.float64)
    q = np.empty(w.shape, np.int8)
    for start in range(0, w.shape[1], BLOCK):
        stop = min(start + BLOCK, w.shape[1])
        errors = np.empty((w.shape[0], stop - start))
        for j in range(start, stop):
            q[:, order[j]] = round_weight(rest[:, j : j + 1], wide)[:, 0]
            errors[:, j - start] = (rest[:, j] - q[:, order[j]] * wide) / upper[j, j]
            rest[:, j:stop] -= errors[:, j - start, None] * upper[j, j:stop]
        rest[:, stop:] -= errors @ upper[start:stop, stop:]
    q[:, is_dead] = round_weight(w[:, is_dead], scale)
    return q
