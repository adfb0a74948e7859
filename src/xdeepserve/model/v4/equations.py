"""DeepSeek-V4's layer as its equations, one sequence at a time: what `xdeepserve.model.reference` runs.

    streams      X [T, n, H]: n residuals of each token. Before each half of a layer its connection makes one
                 row of them, and afterwards gives each stream its share of the output (`connected`)
    attention    a latent of each position is the key and the value of all heads. A token sees the last W
                 positions, and the entries that older and recent ones are compressed to (`attend`)
    experts      gates and up projections are bounded; in some layers a token's id decides who its experts are

Sources: DeepSeek-V4's published inference program and transformers' class, which differ in what they quantise
only. Weights have their names from tables.py; shapes are those of canonical.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import F32, Array
from xdeepserve.model.tensors import find
from xdeepserve.model.v4 import canonical as v4

UNIT: Array = np.ones(1, F32)  # the weights of a norm that has none


def connected(m: Any, streams: Array, name: str, part: Callable[[Array], Array]) -> Array:
    """Run a half of a layer, `attn` or `ffn`, between the ends of its connection: X [T, n, H] -> the same."""
    pre, post, mix = connection(m, streams, f"hc_{name}")
    output = part(m.norm(v4.merge(streams, pre), f"{name}_norm", m.config.rms_norm_eps))
    return v4.spread(streams, output, post, mix)


def connection(m: Any, streams: Array, name: str) -> tuple[Array, Array, Array]:
    sizes, base, scale = m.config.v4, find(m.weights, f"{name}_base"), find(m.weights, f"{name}_scale")
    logits = m.scores(flattened(streams, m.config.rms_norm_eps), f"{name}_fn")
    return v4.connection(logits, base, scale, sizes.hc_mult, sizes.hc_sinkhorn_iters, sizes.hc_eps)


def flattened(streams: Array, eps: float) -> Array:
    """Norm all streams of a token together: X [T, n, H] -> [T, n H]."""
    return c.rms_norm(streams.reshape(len(streams), -1), UNIT, eps)


def merged(m: Any, streams: Array) -> Array:
    """Make the row that the last norm and the head see: X [T, n, H] -> [T, H]."""
    logits = m.scores(flattened(streams, m.config.rms_norm_eps), "hc_head_fn")
    base, scale = find(m.weights, "hc_head_base"), find(m.weights, "hc_head_scale")
    return v4.merge(streams, v4.head_weights(logits, base, scale, m.config.v4.hc_eps))


def attend(m: Any, x: Array) -> Array:
    """Attend to a window, and to entries where the layer has any: x [T, H] -> [T, H].

    q [T, N, D] and the latent kv [T, D] are [still | turned]; so is what comes out, whose last columns RoPE
    turns back by the token's own position.
    """
    config, sizes, eps = m.config, m.config.v4, m.config.rms_norm_eps
    still, m_rate = config.kv_lora_rank, sizes.rate(m.attention)
    query = m.norm(m.linear(x, "wq_a"), "q_norm", eps)
    q = m.linear(query, "wq_b").reshape(len(x), config.num_attention_heads, -1)
    q = m.rope(c.rms_norm(q, UNIT, eps))
    kv = m.rope(m.norm(m.linear(x, "wkv_a"), "kv_norm", eps))
    seen = [np.arange(max(0, t + 1 - sizes.sliding_window), t + 1) for t in range(len(x))]
    if m_rate:
        kv = np.concatenate([kv, entries(m, x, "entry", m_rate)])
        chosen = (
            choose(m, x, query)
            if m.attention == "csa"
            else [np.arange((t + 1) // m_rate) for t in range(len(x))]
        )
        seen = [np.concatenate([near, len(x) + far]) for near, far in zip(seen, chosen, strict=True)]
    o = m.attend_latents(q, kv[:, :still], kv[:, still:], seen)
    return out(m, m.rope(o, back=True))


def entries(m: Any, x: Array, name: str, rate: int) -> Array:
    """Compress rows x [T, H] of the layer's input to entries [T // m, D], each turned by the position of its
    window's first token."""
    values, gates = m.matrix(x, f"{name}_kv"), m.matrix(x, f"{name}_gate")
    found = v4.window_entries(values, gates, find(m.weights, f"{name}_ape"), m.attention == "csa")
    if not len(found):
        return found
    return m.rope(m.norm(found, f"{name}_norm", m.config.rms_norm_eps), step=rate)


def choose(m: Any, x: Array, query: Array) -> list[Array]:
    """Choose the entries that each token sees, ascending: of those whose windows are whole at its position
    the index_topk best (DeepSeek-V3.2, section 2.1)."""
    rate, heads = m.config.v4.csa_rate, m.config.index_n_heads
    q = m.rope(m.matrix(query, "index_wq").reshape(len(x), heads, -1))
    k, weights = entries(m, x, "index_entry", rate), m.scores(x, "index_gate")
    counts = [(t + 1) // rate for t in range(len(x))]
    scores = (c.index_scores(q[t], k[:count], weights[t], m.is_int8) for t, count in enumerate(counts))
    return [c.top_positions(each, m.config.index_topk) for each in scores]


def out(m: Any, o: Array) -> Array:
    """Project heads' outputs o [T, N, D], group by group, and together -> [T, H]."""
    sizes = m.config.v4
    by_group = o.reshape(len(o), sizes.o_groups, -1).transpose(1, 0, 2)  # [G, T, N / G * D]
    parts = m.product(by_group, "wo_a").transpose(1, 0, 2)
    return m.row_parallel(np.ascontiguousarray(parts).reshape(len(o), -1), "wo")


def mtp_input(m: Any, embedding: Array, streams: Array) -> Array:
    """Make the streams of an MTP layer from the next token's embedding [T, H] and the main model's X."""
    eps = m.config.rms_norm_eps
    first = m.linear(m.norm(embedding, "enorm", eps), "e_proj")
    n = streams.shape[1]
    second = m.linear(m.norm(streams, "hnorm", eps).reshape(-1, streams.shape[-1]), "h_proj")
    return first[:, None] + second.reshape(len(first), n, -1)
