"""Operations of DeepSeek-V4's layers (model/v4/equations.py) that differ from MLA's and DeepSeek-V3's.

connect      a hyper-connection's beginning: from the streams of each row, one row of them
down_proj    norm; latents of query and cache, and what positions give to entries of cache and indexer
up_proj      the cache's latent of each row, and its share of entries; queries of all heads, with RoPE
compress     entries whose windows this step has filled
choose       the entries that each row sees: of equal scores the lowest
attend       attention to a window and to these
head_outputs, out_proj  RoPE turned back; each group's projection of its heads; the one of all groups
gate         norm and routing, by scores or by the token's id
spread       a connection's end: the output and the mixed streams are the new streams

Between `connect` and `spread` the row itself (`h`) is what the output is added to, and so begins as zero.
Arithmetic is `model/v4/canonical.py`, which products of the die's own kernels surround.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xdeepserve.hw.spec import Work
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import entry_nbytes
from xdeepserve.model.canonical import Array, factors
from xdeepserve.model.tensors import Layer
from xdeepserve.model.v4 import canonical as v4
from xdeepserve.model.v4.sizes import V4Sizes
from xdeepserve.step import attention as mla
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.stage import Counts, Op, free

STREAM = 4.0  # bytes of a stream's element that a small kernel reads and writes, both in BF16
UNIT = np.ones(1, np.float32)  # the weights of a norm that has none


def sizes_of(f: Frame) -> V4Sizes:
    assert f.config.v4 is not None
    return f.config.v4


# ---- streams ----------------------------------------------------------------------------------------


def _buffers(f: Frame) -> tuple[Array, Array]:
    """Buffers of a connection until its end: post [T, n] and mix [T, n, n]."""
    rows, n = len(f.h), sizes_of(f).hc_mult
    return f.take(f"hc_post/{f.lane}", rows, n), f.take(f"hc_mix/{f.lane}", rows, n, n)


def _logits(f: Frame, name: str, fn: Array | None, count: int) -> Array:
    """Products of all streams of each row, normed together, with `count` columns of weights."""
    assert fn is not None
    flat = c.rms_norm(f.streams.reshape(len(f.streams), -1), UNIT, f.config.rms_norm_eps)
    logits = f.take(name, len(f.streams), count)
    f.linears.gate(logits, flat, fn)
    return logits


def _connect(f: Frame, fn: Array | None, base: Array | None, scale: Array | None) -> None:
    sizes, (post, mix) = sizes_of(f), _buffers(f)
    n = sizes.hc_mult
    assert base is not None
    assert scale is not None
    logits = _logits(f, "hc_logits", fn, (2 + n) * n)
    pre, post[:], mix[:] = v4.connection(logits, base, scale, n, sizes.hc_sinkhorn_iters, sizes.hc_eps)
    f.h[:] = v4.merge(f.streams, pre)


def _connect_attention(f: Frame) -> None:
    layer = f.layer
    _connect(f, layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale)


def _connect_feed(f: Frame) -> None:
    layer = f.layer
    _connect(f, layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale)


def _spread(f: Frame) -> None:
    post, mix = _buffers(f)
    f.streams[:] = v4.spread(f.streams, f.h, post, mix)


def leave_streams(f: Frame) -> None:
    """Make the row before the last norm of each row's streams."""
    sizes, ends = sizes_of(f), f.ends
    assert ends.hc_head_base is not None
    assert ends.hc_head_scale is not None
    logits = _logits(f, "head_logits", ends.hc_head_fn, sizes.hc_mult)
    f.h[:] = v4.merge(f.streams, v4.head_weights(logits, ends.hc_head_base, ends.hc_head_scale, sizes.hc_eps))


# ---- attention --------------------------------------------------------------------------------------


class Compressor(NamedTuple):
    """Weights and cache of one kind of entries: the layer's own, or those of its indexer."""

    kv: Array
    gate: Array
    ape: Array
    norm: Array
    open: Array  # [blocks, positions, 2 C]: what each position gives, and its gates


def _compressors(f: Frame) -> Iterator[tuple[str, Compressor]]:
    """Yield the names of the entries that the layer has, with their weights."""
    for name in ("entry", "index_entry"):
        found = [getattr(f.layer, f"{name}_{part}") for part in ("kv", "gate", "ape", "norm")]
        if found[0] is not None:
            is_own = name == "entry"
            kv, gate, ape, norm = found
            yield name, Compressor(kv, gate, ape, norm, f.cache.open if is_own else f.cache.index_open)


def _given(f: Frame, name: str, columns: int) -> Array:
    """Buffer of contributions to entries, and of their gates, for each row [T, 2 C]."""
    return f.take(f"{name}_given", f.batch.num_tokens, columns)


def _down_proj(f: Frame) -> None:
    mla.down_proj.kernel(f)
    x, rows = f.take("x", *f.h.shape), len(f.h)
    for name, each in _compressors(f):
        width = each.ape.shape[1]
        given = _given(f, name, 2 * width)
        for half, weights in enumerate((each.kv, each.gate)):
            part = f.take("given_half", rows, width)
            f.linears.matmul(part, x, weights)
            given[:, half * width : (half + 1) * width] = part
    if f.layer.index_gate is not None:
        f.linears.gate(f.take("index_w", rows, f.config.index_n_heads), x, f.layer.index_gate)
    f.h[:] = 0


def _places(f: Frame) -> tuple[Array, Array]:
    """Blocks and places in them of the rows' slots."""
    return np.divmod(f.batch.slots, f.cache.latent.shape[1])


def _up_proj(f: Frame) -> None:
    config, b, layer, eps = f.config, f.batch, f.layer, f.config.rms_norm_eps
    rows, heads, rope = b.num_tokens, f.num_heads, (b.positions, f.cos, f.sin)
    blocks, places = _places(f)
    kv = mla.latent(f, rows)
    k.rms_norm(kv, kv, layer.kv_norm, eps)
    k.rope_heads(kv, 1, *rope)
    still = f.config.kv_lora_rank
    f.cache.latent[blocks, places, :still], scale, f.cache.k_pe[blocks, places] = _stored(f, kv)
    if scale is not None:
        f.cache.scale[blocks, places] = scale
    for name, each in _compressors(f):
        each.open[blocks, places] = _given(f, name, each.open.shape[2])
    assert layer.wq_b is not None
    q = f.take("q", rows, heads * config.qk_head_dim)
    f.linears.apply(q, f.source, layer.wq_b)
    q[:] = c.rms_norm(q.reshape(rows, heads, -1), UNIT, eps).reshape(q.shape)
    k.rope_heads(q, heads, *rope)
    if layer.index_wq is not None:
        index_q = f.take("index_q", rows, config.index_n_heads * config.index_head_dim)
        f.linears.matmul(index_q, mla.query_input(f, rows), layer.index_wq)
        k.rope_heads(index_q, config.index_n_heads, *rope)


def _stored(f: Frame, kv: Array) -> tuple[Array, Array | None, Array]:
    """Return latents [T, C], their scales [T] and RoPE parts [T, R] as the cache has them."""
    still, turned = np.split(kv, [f.config.kv_lora_rank], axis=1)
    if not f.is_int8:
        return still, None, turned
    return *c.quantize_rows(still), factors(turned)


def _compress(f: Frame) -> None:
    """Make the entries whose windows end among the rows, and put each into the block of its last position."""
    b, rate = f.batch, sizes_of(f).rate(f.layer.attention)
    last = np.flatnonzero((b.positions + 1) % rate == 0)
    if not rate or not len(last):
        return
    for name, each in _compressors(f):
        overlaps, width = f.layer.attention == "csa", each.ape.shape[1]
        depth = width // 2 if overlaps else width
        found = np.empty((len(last), depth), np.float32)
        for i, row in enumerate(last.tolist()):
            window = int(b.positions[row]) // rate
            first = max(0, window - overlaps) * rate
            blocks, places = _blocks_of(f, row, np.arange(first, (window + 1) * rate))
            given = each.open[blocks, places]
            found[i] = v4.window_entries(given[:, :width], given[:, width:], each.ape, overlaps)[-1]
        k.rms_norm(found, found, each.norm, f.config.rms_norm_eps)
        k.rope_heads(found, 1, (b.positions[last] + 1 - rate).astype(np.int32), f.cos, f.sin)
        blocks, places = _entry_places(f, b.positions[last] // rate, rate, b.seq_of[last])
        if name == "index_entry":
            f.cache.index_entry[blocks, places] = found
            continue
        still = f.config.kv_lora_rank
        f.cache.entry[blocks, places, :still], scale, f.cache.entry_pe[blocks, places] = _stored(f, found)
        if scale is not None:
            f.cache.entry_scale[blocks, places] = scale


def _blocks_of(f: Frame, row: int, positions: Array) -> tuple[Array, Array]:
    """Blocks and places of positions of a row's sequence."""
    table = f.batch.block_tables[f.batch.seq_of[row]]
    blocks, places = np.divmod(positions, f.cache.latent.shape[1])
    return table[blocks], places


def _entry_places(f: Frame, windows: Array, rate: int, seqs: Array | int) -> tuple[Array, Array]:
    """Return blocks and places of entries, which are in the blocks of windows' last positions."""
    size = f.cache.latent.shape[1]
    at = ((windows + 1) * rate - 1) // size
    return f.batch.block_tables[seqs, at], windows - at * size // rate


def _choose(f: Frame) -> None:
    """Choose entries for rows before which there are more than they may see."""
    config, b, rate = f.config, f.batch, sizes_of(f).csa_rate
    chosen = _chosen(f)
    queries = f.take("index_q", b.num_tokens, config.index_n_heads * config.index_head_dim)
    weights = f.take("index_w", b.num_tokens, config.index_n_heads)
    for row in np.flatnonzero((b.positions + 1) // rate > config.index_topk).tolist():
        windows = np.arange((int(b.positions[row]) + 1) // rate)
        blocks, places = _entry_places(f, windows, rate, int(b.seq_of[row]))
        q = queries[row].reshape(config.index_n_heads, -1)
        scores = c.index_scores(q, f.cache.index_entry[blocks, places], weights[row], f.is_int8)
        chosen[row] = c.top_positions(scores, config.index_topk)


def _chosen(f: Frame) -> Array:
    """Buffer of chosen entries, int32 [T, K]: written for rows before which there are more than K."""
    return f.take("chosen_entries", f.batch.num_tokens, f.config.index_topk)


def _seen(f: Frame, row: int, rate: int) -> Array:
    """Entries that a row sees, ascending."""
    count = (int(f.batch.positions[row]) + 1) // rate
    if f.layer.attention == "csa" and count > f.config.index_topk:
        return _chosen(f)[row]
    return np.arange(count)


def _attend(f: Frame) -> None:
    config, b, cache, sizes = f.config, f.batch, f.cache, sizes_of(f)
    rate, heads, still = sizes.rate(f.layer.attention), f.num_heads, config.kv_lora_rank
    assert f.layer.sinks is not None
    q, o = (f.take(name, b.num_tokens, heads * config.qk_head_dim) for name in ("q", "o"))
    for row in range(b.num_tokens):
        position = int(b.positions[row])
        near = _blocks_of(f, row, np.arange(max(0, position + 1 - sizes.sliding_window), position + 1))
        parts = [cache.latent[near], cache.scale[near] if f.is_int8 else None, cache.k_pe[near]]
        if rate:
            far = _entry_places(f, _seen(f, row, rate), rate, int(b.seq_of[row]))
            others = cache.entry[far], cache.entry_scale[far] if f.is_int8 else None, cache.entry_pe[far]
            parts = [
                None if ours is None or theirs is None else np.concatenate([ours, theirs])
                for ours, theirs in zip(parts, others, strict=True)
            ]
        latent, scale, k_pe = parts
        assert latent is not None
        assert k_pe is not None
        latent = latent[:, :still]
        mine = q[row].reshape(heads, -1)
        out = o[row].reshape(heads, -1)
        out[:, :still], out[:, still:] = v4.sink_attention(
            mine[:, :still], mine[:, still:], latent, scale, k_pe, config.softmax_scale, f.layer.sinks
        )


def _head_outputs(f: Frame) -> None:
    rows, sizes = f.batch.num_tokens, sizes_of(f)
    o = mla.outputs(f, rows)
    own = f.batch.positions
    k.rope_heads(o, f.num_heads, np.arange(rows, dtype=np.int32), f.cos[own], -f.sin[own])
    groups = _grouped(f)
    assert f.layer.wo_a is not None
    f.linears.heads(groups, o, f.layer.wo_a, sizes.o_groups, o.shape[1] // sizes.o_groups)


def _grouped(f: Frame) -> Array:
    """Buffer of all groups' projections [T, groups * O]."""
    sizes = sizes_of(f)
    return f.take("o_groups", f.batch.num_tokens, sizes.o_groups * sizes.o_lora_rank)


OUT_PROJ = mla.RowParallel(
    linear=lambda layer: layer.wo,
    buffer="o_groups",
    floats=_grouped,
    rows=lambda f: f.linears.prepare(_grouped(f)),
)


# ---- experts ----------------------------------------------------------------------------------------


def _gate(f: Frame) -> None:
    config, rows, moe = f.config, len(f.h), f.moe
    x = f.take("x", *f.h.shape)
    f.source = f.linears.norm(x, f.h, f.layer.ffn_norm, config.rms_norm_eps)
    logits = f.take("gate_logits", rows, config.n_routed_experts)
    f.linears.gate(logits, x, moe.gate)
    scores, norm, factor = v4.sqrt_softplus(logits), config.norm_topk_prob, config.routed_scaling_factor
    if moe.by_token is None:
        found = c.gate(scores, moe.bias, 1, 1, config.num_experts_per_tok, norm, factor)
    else:
        found = v4.experts_by_token(moe.by_token, np.asarray(f.token_ids), scores, norm, factor)
    f.topk_idx[:], f.topk_weights[:] = found
    f.h[:] = 0


# ---- costs ------------------------------------------------------------------------------------------


def _connect_work(model: Model, layer: Layer, n: Counts) -> Work:
    """Work of the streams' products, in FP32 on vector cores, and of reading them."""
    sizes = model.config.v4
    assert sizes is not None
    moved = STREAM * n.rows * (sizes.hc_mult + 1) * model.config.hidden_size
    return Work(kernels=2, moved=moved)


def _down_work(model: Model, layer: Layer, n: Counts) -> Work:
    config = model.config
    columns = sum(
        2 * each.shape[1] for each in (layer.entry_ape, layer.index_entry_ape) if each is not None
    ) + (config.index_n_heads if layer.index_gate is not None else 0)
    return mla.down_proj.work(model, layer, n) + mla.float_work(n.rows, float(config.hidden_size * columns))


def _up_work(model: Model, layer: Layer, n: Counts) -> Work:
    config = model.config
    assert layer.wq_b is not None
    work = mla.linear_work(n.rows, layer.wq_b)
    if layer.index_wq is None:
        return work
    size = (config.q_lora_rank or 0) * config.index_n_heads * config.index_head_dim
    return work + mla.float_work(n.rows, float(size))


def _seen_by(model: Model, layer: Layer, n: Counts) -> tuple[float, float]:
    """Positions and entries that rows attend to, over all rows, and those that are read for all."""
    config, sizes = model.config, model.config.v4
    assert sizes is not None
    rate, window = sizes.rate(layer.attention), float(sizes.sliding_window)
    seen, read = min(n.context, n.rows * window), min(n.kv_tokens, n.rows * window)
    if not rate:
        return seen, read
    entries, stored = n.context / rate, n.kv_tokens / rate
    if layer.attention == "csa":
        entries, stored = (min(each, n.rows * config.index_topk) for each in (entries, stored))
    return seen + entries, read + stored


def _choose_work(model: Model, layer: Layer, n: Counts) -> Work:
    config = model.config
    assert config.v4 is not None
    products, rate = config.index_n_heads * config.index_head_dim, config.v4.csa_rate
    return Work(
        attention=2.0 * n.context / rate * products, cache=2.0 * n.kv_tokens / rate * config.index_head_dim
    )


def _attend_work(model: Model, layer: Layer, n: Counts) -> Work:
    seen, read = _seen_by(model, layer, n)
    return Work(
        attention=4.0 * seen * model.heads * model.config.qk_head_dim,
        cache=read * entry_nbytes(model.config, model.recipe),
    )


def _head_work(model: Model, layer: Layer, n: Counts) -> Work:
    sizes = model.config.v4
    assert sizes is not None
    return mla.float_work(n.rows, float(model.heads * model.config.v_head_dim * sizes.o_lora_rank))


def _out_work(model: Model, layer: Layer, n: Counts) -> Work:
    return mla.HALF_LAYER + OUT_PROJ.work(model, layer, n)


connect_attention = Op(_connect_attention, _connect_work, operators=2)
connect_feed = Op(_connect_feed, _connect_work, operators=2)
spread = Op(_spread, _connect_work, operators=1)
down_proj = Op(_down_proj, _down_work, operators=mla.down_proj.operators + 2)
up_proj = Op(_up_proj, _up_work, operators=mla.up_proj.operators)
compress = Op(_compress, free)
choose = Op(_choose, _choose_work)
attend = Op(_attend, _attend_work)
head_outputs = Op(_head_outputs, _head_work, operators=2)
out_proj = Op(OUT_PROJ.run, _out_work, operators=3)
gate = Op(_gate, lambda model, layer, n: Work(gates=1), operators=3)
