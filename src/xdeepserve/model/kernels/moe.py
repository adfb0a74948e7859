"""Mixture of experts: routing of tokens to experts, and the combination of their outputs."""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model import canonical as c
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.simd import (
    first_equal,
    max_of,
    maximum,
    only_first,
    prefetch,
    round_bf16,
    splat,
    tree_sum,
)
from xdeepserve.model.kernels.vector_math import exp, put, sigmoid, take

GATE_EPS = c.GATE_EPS
ZERO, INFINITY = np.float32(0.0), np.float32(np.inf)
IN_ORDER = np.empty(0, np.int32)  # no places: see combine


@part
def _largest(choice, start, size):
    """Return the largest number of choice[start : start + size]."""
    top = splat(-INFINITY)
    for i in range(0, size, LANES):
        top = maximum(only_first(take(choice, start + i, size - i), size - i, -INFINITY), top)
    return max_of(top)


@part
def _place_of(choice, start, size, number):
    """Return the first place of a number in choice[start : start + size]; `start` if there is none."""
    for i in range(0, size, LANES):
        lane = first_equal(take(choice, start + i, size - i), number)
        if lane < min(size - i, LANES):
            return start + i + lane
    return start


@part
def _softmax(scores, logits, start, size):
    """Compute scores [size] = canonical.softmax of logits[start : start + size]."""
    top = logits[start // size, 0]
    for e in range(1, size):
        top = max(top, logits[start // size, e])
    lanes = splat(ZERO)
    for e in range(0, size, LANES):
        put(scores, e, exp(take(logits, start + e, size - e) - splat(top)), size - e)
        lanes = lanes + take(scores, e, size - e)
    total = splat(tree_sum(lanes))
    for e in range(0, size, LANES):
        put(scores, e, take(scores, e, size - e) / total, size - e)


@kernel
def gate(
    topk_idx, topk_weights, logits, bias, n_group, topk_group, norm_topk_prob, routed_scaling_factor,
    best_of_group, is_softmax,
):  # fmt: skip
    """Route tokens: topk_idx int32 [T, K], topk_weights [T, K] from logits [T, E] = x @ Wg. canonical.gate
    takes the sigmoid of these, or the softmax. bias [E], or [0] for none."""
    num_experts, top_k = logits.shape[1], topk_idx.shape[1]
    per_group = num_experts // n_group
    scores = np.empty(num_experts, np.float32)
    choice = np.empty(num_experts, np.float32)
    group_score = np.empty(n_group, np.float32)
    group_place = np.empty(n_group, np.int64)  # of those that are left, which is why a slot looks at few
    for t in range(logits.shape[0]):
        if is_softmax:
            _softmax(scores, logits, t * num_experts, num_experts)
        else:
            for e in range(0, num_experts, LANES):
                left = num_experts - e
                put(scores, e, sigmoid(take(logits, t * num_experts + e, left)), left)
        for e in range(0, num_experts, LANES):
            left = num_experts - e
            score = take(scores, e, left)
            put(choice, e, score + take(bias, e, left) if bias.size > 0 else score, left)
        for g in range(n_group):
            start = g * per_group
            first = _largest(choice, start, per_group)
            best = _place_of(choice, start, per_group, first)
            group_score[g], group_place[g] = first, best
            if min(best_of_group, per_group) > 1:  # the second largest, too
                choice[best] = -INFINITY
                group_score[g] += _largest(choice, start, per_group)
                choice[best] = first
        # A group stays open if fewer than topk_group groups beat it; ties go to the lower index.
        for g in range(n_group):
            better = 0
            for other in range(n_group):
                if group_score[other] > group_score[g] or (
                    group_score[other] == group_score[g] and other < g
                ):
                    better += 1
            if better >= topk_group:
                choice[g * per_group : (g + 1) * per_group] = -INFINITY
        total = ZERO
        for slot in range(top_k):
            best = 0
            for g in range(n_group):
                if choice[group_place[g]] > choice[best]:
                    best = group_place[g]
            topk_idx[t, slot] = best
            topk_weights[t, slot] = scores[best]
            total += scores[best]
            choice[best] = -INFINITY
            g = best // per_group
            start = g * per_group
            group_place[g] = _place_of(choice, start, per_group, _largest(choice, start, per_group))
        for slot in range(top_k):
            w = topk_weights[t, slot]
            if norm_topk_prob:
                w = w / (total + GATE_EPS)
            topk_weights[t, slot] = w * np.float32(routed_scaling_factor)


@kernel
def group_rows(order, offsets, expert_idx):
    """Sort rows by expert, stably: order int32 [N] lists the rows, offsets int32 [E + 1] bounds each
    expert's."""
    offsets[:] = 0
    for e in expert_idx:
        offsets[e + 1] += 1
    for e in range(offsets.size - 1):
        offsets[e + 1] += offsets[e]
    place = offsets[:-1].copy()
    for row in range(expert_idx.size):
        e = expert_idx[row]
        order[place[e]] = row
        place[e] += 1


@kernel
def gather_tokens(out, out_scale, x, scale, order, copies):
    """Gather out[i] = x[order[i] // copies], and the same for their scales (none if there are none)."""
    size = x.shape[1]
    for i in range(order.size):
        source = order[i] // copies
        for column in range(size):
            out[i, column] = x[source, column]
        if scale.size > 0:
            out_scale[i] = scale[source]


@kernel
def combine(h, expert_out, place, topk_weights, shared, is_bf16):
    """Add to h [T, H], in place, canonical.combine of the experts' outputs and shared [T, H] (no rows: none).

    expert_out [T * K, H]; place int32 [T * K] says which row each is in, or none says that they are in order.
    With is_bf16 the experts' outputs are rounded first.
    """
    size, top_k = h.shape[1], topk_weights.shape[1]
    starts = np.empty(top_k, np.int64)
    for t in range(topk_weights.shape[0]):
        for slot in range(top_k):
            n = t * top_k + slot
            starts[slot] = (place[n] if place.size > 0 else n) * size
            if t + 1 < topk_weights.shape[0] and place.size > 0:
                for i in range(0, size, LANES):
                    prefetch(expert_out, place[n + top_k] * size + i)
        for i in range(0, size, LANES):
            total = splat(ZERO)
            for slot in range(top_k):
                source = take(expert_out, starts[slot] + i, size - i)
                if is_bf16:
                    source = round_bf16(source)
                total = total + source * splat(topk_weights[t, slot])
            if shared.shape[0] > 0:
                source = take(shared, t * size + i, size - i)
                if is_bf16:
                    source = round_bf16(source)
                total = total + source
            put(h, t * size + i, take(h, t * size + i, size - i) + total, size - i)


@kernel
def add_sums(h, sums, shared, is_bf16):
    """Add to h [T, H], in place, sums [T, H] + shared [T, H] (no rows: none): the rest of `combine`.

    sums: the routed experts' outputs by weight. With is_bf16 the shared expert's is rounded first.
    """
    for i in range(0, sums.size, LANES):
        total = take(sums, i, sums.size - i)
        if shared.shape[0] > 0:
            source = take(shared, i, sums.size - i)
            if is_bf16:
                source = round_bf16(source)
            total = total + source
        put(h, i, take(h, i, sums.size - i) + total, sums.size - i)
