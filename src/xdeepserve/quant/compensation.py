"""Error compensation: let a layer undo what quantisation upstream did to its inputs, on average.

CloudMatrix384 4.5 inserts small correcting terms into the graph. DeepSeek's linear layers have no bias that
could hold such a term, and files with extra ones could not be read elsewhere, so here the correction goes
into the weights: of all matrices, W' brings the quantised model's inputs X^ nearest to W's outputs for the
original inputs X,

    W' = argmin |W X - W' X^|^2 + lambda |W' - W|^2 = W + W (X - X^) X^^T (X^ X^^T + lambda)^-1
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import Array

DAMPING = 0.1  # of the mean diagonal: with few samples the weights stay as they were


def compensate(w: Array, x: Array, x_quantized: Array) -> Array:
    """Compute W' [N, K] for w [N, K]; x and x_quantized [T, K] are the same tokens' inputs in both models."""
    seen = x_quantized.astype(np.float64)
    gram = seen.T @ seen
    damping = DAMPING * max(float(np.diag(gram).mean()), 1e-12)
    missing = (x.astype(np.float64) - seen).T @ seen
    correction = np.linalg.solve(gram + damping * np.eye(len(gram)), missing.T).T
    return (w + w @ correction).astype(np.float32)
