"""Canonical arithmetic of DeepSeek-V4, in NumPy, as `xdeepserve.model.canonical` has it for all else.

    reduction           order
    ------------------  ---------------------------------------------------------------------------------
    connections         FP32 in both recipes. Streams, and the n x n matrix's rows and columns: ascending,
                        from zero
    an entry            FP32: its positions ascending, from zero; a softmax in each column
    attention           keys: the window's positions ascending, then the entries ascending; the sink's share
                        comes to the total last. Products are those of MLA: INT8 values have a scale a row

All arrays are float32 unless a docstring says otherwise. T tokens, H hidden, n streams, N heads, D columns
of a head, of which RoPE turns the last R; m positions make an entry.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import F32, Array

ONE, TWO = F32(1.0), F32(2.0)
SQRT_HALF = F32(0.707106781186547524)
# log(1 + r) = r - r^2 / 2 + r^3 P(r) for sqrt(1/2) <= 1 + r < sqrt(2), coefficients of Cephes' logf
LOG_POLY = tuple(
    F32(each)
    for each in (
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )
)
LARGE = F32(20.0)  # from here on softplus(x) is x


def log(x: Array) -> Array:
    """Compute the natural logarithm of positive, normal x elementwise; relative error below 2e-7 of
    max(|log x|, 2^-23)."""
    bits = np.asarray(x, F32).view(np.int32)
    exponent = ((bits >> np.int32(23)) - np.int32(126)).astype(F32)
    mantissa = ((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(F32)  # in [1/2, 1)
    is_low = mantissa < SQRT_HALF
    exponent = np.where(is_low, exponent - ONE, exponent)
    r = np.where(is_low, mantissa + mantissa, mantissa) - ONE
    square = r * r
    p = np.full_like(r, LOG_POLY[0])
    for each in LOG_POLY[1:]:
        p = p * r + each
    y = p * r * square
    y = y + exponent * c.LN2_LO
    y = y - F32(0.5) * square
    found: Array = (r + y) + exponent * c.LN2_HI
    return found


def softplus(x: Array) -> Array:
    """Compute log(1 + e^x) elementwise: x itself from 20 on, and where e^x is small to its last bits."""
    power = c.exp(np.minimum(x, LARGE))
    plus_one = ONE + power
    rest = plus_one - ONE
    # What 1 + e^x has lost of e^x counts in the same proportion.
    exact = np.where(rest == 0, power, log(plus_one) * (power / np.where(rest == 0, ONE, rest)))
    return np.where(x > LARGE, x, exact)


def sqrt_softplus(x: Array) -> Array:
    """Compute scores of experts from a router's logits elementwise."""
    root: Array = np.sqrt(softplus(x))
    return root


def experts_by_token(
    by_token: Array, token_ids: Array, scores: Array, norm: bool, factor: float
) -> tuple[Array, Array]:
    """Find experts by token id in by_token [vocab, K], and weigh them by scores [T, E] -> two of [T, K].

    An expert that stands twice in a row of the table counts twice: its first slot has both weights, and the
    other slot has the first expert that the row does not name, with weight 0, so that nobody is sent a token
    twice.
    """
    topk_idx = by_token[token_ids].astype(np.int32)
    weights: Array = np.take_along_axis(scores, topk_idx, axis=-1)
    if norm:
        weights = weights / (total(weights, 1) + c.GATE_EPS)
    weights = weights * F32(factor)
    ordered = np.sort(topk_idx, axis=1)
    for t in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)).tolist():
        row = topk_idx[t].tolist()
        others = iter(sorted(set(range(scores.shape[1])) - set(row)))
        for slot, expert in enumerate(row):
            if (first := row.index(expert)) < slot:
                weights[t, first] += weights[t, slot]
                topk_idx[t, slot], weights[t, slot] = next(others), 0
    return topk_idx, weights


def swiglu(gate_up: Array, limit: float) -> Array:
    """Compute gate_up [T, 2I] = [gate | up] -> silu(min(gate, limit)) * clip(up, -limit, limit), [T, I]."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return c.silu(np.minimum(gate, F32(limit))) * np.clip(up, F32(-limit), F32(limit))


def total(x: Array, axis: int) -> Array:
    """Sum over an axis, ascending from zero; the axis stays, of length 1."""
    parts = np.moveaxis(x, axis, 0)
    found = np.zeros(parts.shape[1:], F32)
    for part in parts:
        found = found + part
    return np.expand_dims(found, axis)


def connection(
    logits: Array, base: Array, scale: Array, streams: int, iterations: int, eps: float
) -> tuple[Array, Array, Array]:
    """Weights of a hyper-connection, from logits [T, (2 + n) n] of the streams.

    Returns pre [T, n], what each stream counts in the input; post [T, n], how much of the output each gets;
    and mix [T, n, n], doubly stochastic by Sinkhorn's iterations (a column counts as often as `iterations`, a
    row once less): stream k becomes the sum over j of mix[j, k] times stream j.
    """
    n = streams
    first, second, third = logits[:, :n], logits[:, n : 2 * n], logits[:, 2 * n :].reshape(-1, n, n)
    pre = c.sigmoid(first * scale[0] + base[:n]) + F32(eps)
    post = TWO * c.sigmoid(second * scale[1] + base[n : 2 * n])
    mix = third * scale[2] + base[2 * n :].reshape(n, n)
    mix = c.exp(mix - mix.max(axis=-1, keepdims=True))
    mix = mix / total(mix, -1) + F32(eps)
    mix = mix / (total(mix, -2) + F32(eps))
    for _ in range(iterations - 1):
        mix = mix / (total(mix, -1) + F32(eps))
        mix = mix / (total(mix, -2) + F32(eps))
    return pre, post, mix


def head_weights(logits: Array, base: Array, scale: Array, eps: float) -> Array:
    """Weights [T, n] of the streams in the row that the head sees, from logits [T, n] of the streams."""
    return c.sigmoid(logits * scale[0] + base) + F32(eps)


def merge(streams: Array, weights: Array) -> Array:
    """Sum streams [T, n, H] by weights [T, n] -> [T, H]."""
    return total(streams * weights[..., None], 1)[:, 0]


def spread(streams: Array, output: Array, post: Array, mix: Array) -> Array:
    """Add an output [T, H] to mixed streams [T, n, H] -> [T, n, H]: post_k output + sum_j mix_jk stream_j."""
    found = post[..., None] * output[:, None]
    for j in range(streams.shape[1]):
        found = found + mix[:, j, :, None] * streams[:, j, None]
    return found


def entry(values: Array, gates: Array) -> Array:
    """Compress positions to one: values and gates [S, D] -> [D], a softmax of gates over S in each column."""
    p = c.exp(gates - gates.max(axis=0))
    found: Array = total(p * values, 0)[0] / total(p, 0)[0]
    return found


def window_entries(values: Array, gates: Array, ape: Array, overlaps: bool) -> Array:
    """Compress all whole windows of m positions: values and gates [T, C], ape [m, C] -> [T // m, D].

    Where windows overlap C is 2 D: the first half of a position goes into the next window's entry, the last
    half into its own; an entry has 2 m positions, but for the first one. Otherwise C is D.
    """
    m, columns = ape.shape
    depth = columns // 2 if overlaps else columns
    count = len(values) // m
    gates = (gates[: count * m].reshape(count, m, columns) + ape).reshape(-1, columns)
    found = np.empty((count, depth), F32)
    for w in range(count):
        own = slice(w * m, (w + 1) * m)
        x, g = values[own, columns - depth :], gates[own, columns - depth :]
        if overlaps and w:
            before = slice((w - 1) * m, w * m)
            x, g = np.concatenate([values[before, :depth], x]), np.concatenate([gates[before, :depth], g])
        found[w] = entry(x, g)
    return found


def sink_attention(
    q: Array, q_pe: Array, latent: Array, scale: Array | None, k_pe: Array, softmax_scale: float, sinks: Array
) -> tuple[Array, Array]:
    """Attend with one head of keys, which are the values, too, and a sink: a single token over what it sees.

    q [N, C], q_pe [N, R]; latent [S, C] float32, or int8 with scale [S]; k_pe [S, R]; sinks [N] -> [N, C] and
    [N, R]. A sink is a logit without a key or a value.
    """
    if scale is None:
        scores = c.matmul(q, latent.T) + c.matmul(q_pe, k_pe.T)
    else:
        scores = c.matmul_int8(latent, scale, *c.quantize_rows(q)).T
        scores = scores + c.matmul_exact(c.factors(q_pe), c.factors(k_pe).T)
    scores = scores * F32(softmax_scale)
    top = np.maximum(scores.max(axis=-1), sinks)
    p = c.exp(scores - top[:, None])
    mass = (c.lane_sum(p) + c.exp(sinks - top))[:, None]
    if scale is None:
        return c.matmul(p, latent) / mass, c.matmul(p, k_pe) / mass
    values = c.matmul_exact(c.factors(p * scale), latent.astype(F32))
    return values / mass, c.matmul_exact(c.factors(p), c.factors(k_pe)) / mass
