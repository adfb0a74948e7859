"""Operations of DeepSeek sparse attention (DeepSeek-V3.2, section 2.1) that differ from MLA's.

down_proj   besides, the indexer's key and weights of each row
up_proj     besides, the indexer's key into the cache, and its queries
choose      the positions that each row attends to: of equal scores the lowest
attend      MLA over these: some rows' latents at a time are gathered side by side, in order of position

A row that sees at most index_topk positions attends to all of them, together with other rows of its sequence.
In a group that shares heads each die chooses independently, with equal results. A layer without an indexer
(GLM) uses the positions chosen for the layer before it, which are still in their buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from xdeepserve.hw.spec import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE, cache_shape
from xdeepserve.model.canonical import Array, factors
from xdeepserve.model.config import INDEX_NORM_EPS
from xdeepserve.model.tensors import Layer
from xdeepserve.step import attention as mla
from xdeepserve.step.frame import Batch, Frame, KVCache, Model
from xdeepserve.step.stage import Counts, Op

GATHERED = 4096  # positions that rows attend to, gathered at a time


def _down_proj(f: Frame) -> None:
    mla.down_proj.kernel(f)
    rows, layer = len(f.h), f.layer
    assert layer.index_wk is not None
    assert layer.index_gate is not None
    x = f.take("x", *f.h.shape)
    key, weights = mla.index_parts(f, rows)
    f.linears.matmul(key, x, layer.index_wk)
    f.linears.gate(weights, x, layer.index_gate)


def _up_proj(f: Frame) -> None:
    c, b, layer, rope = f.config, f.batch, f.layer, (f.batch.positions, f.cos, f.sin)
    assert layer.index_wq is not None
    key, _ = mla.index_parts(f, b.num_tokens)
    k.layer_norm(key, key, layer.index_norm, layer.index_bias, INDEX_NORM_EPS)
    k.rope_heads(key, 1, *rope)
    q = _queries(f)
    f.linears.matmul(q, mla.query_input(f, b.num_tokens), layer.index_wq)
    k.rope_heads(q, c.index_n_heads, *rope)
    if f.is_int8:
        key[:], q[:] = factors(key), factors(q)
    blocks, places = np.divmod(b.slots, f.cache.index_k.shape[1] * TILE)
    f.cache.index_k[blocks, places // TILE, :, places % TILE] = key
    mla.up_proj.kernel(f)


def _queries(f: Frame) -> Array:
    """Buffer of the indexer's queries, [T, heads * X]."""
    return f.take("index_q", f.batch.num_tokens, f.config.index_n_heads * f.config.index_head_dim)


def _chosen(f: Frame) -> Array:
    """Buffer of chosen positions, int32 [T, K]: written for rows that see more than K positions; a later
    layer may read it, too."""
    return f.take(f"chosen/{f.lane}", f.batch.num_tokens, f.config.index_topk)


def _choose(f: Frame) -> None:
    c, b = f.config, f.batch
    if not _is_chosen(f).any():
        return
    _, weights = mla.index_parts(f, b.num_tokens)
    f.linears.threads.over_pieces(
        k.choose_positions, float(b.context) * c.index_n_heads * c.index_head_dim, f.scratch_size,
        _chosen(f), _queries(f), weights, b.seq_of, b.positions, f.cache.index_k, b.block_tables, f.is_int8,
    )  # fmt: skip


def _is_chosen(f: Frame) -> Array:
    """Mask of rows with more visible positions than they attend to, bool [T]."""
    return f.batch.positions >= f.config.index_topk


def _attend(f: Frame) -> None:
    b = f.batch
    for rows, is_chosen in _runs(_is_chosen(f)):
        if not is_chosen:
            mla.attend_rows(f, rows, b.part(rows), f.cache)
            continue
        step = rows_at_once(b.num_tokens, f.config.index_topk)
        for first in range(rows.start, rows.stop, step):
            some = slice(first, min(first + step, rows.stop))
            mla.attend_rows(f, some, *_gathered(f, some))


def _runs(flags: Array) -> Iterator[tuple[slice, bool]]:
    """Yield runs of neighbouring equal flags as (slice, flag)."""
    cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    for start, stop in pairwise(cuts):
        yield slice(start, stop), bool(flags[start])


def rows_at_once(rows: int, top_k: int) -> int:
    """Return how many of `rows` rows are attended at a time, with their chosen positions gathered side by
    side."""
    return max(1, min(rows, GATHERED // top_k))


def _gathered(f: Frame, rows: slice) -> tuple[Batch, KVCache]:
    """Gather the chosen positions of each row, as the only block of a sequence with that many positions."""
    c, cache, chosen = f.config, f.cache, _chosen(f)[rows]
    tables, (num, count) = f.batch.block_tables[f.batch.seq_of[rows]], chosen.shape
    whole = -(-count // TILE) * TILE
    latent = f.take("chosen_latent", *cache_shape(num, whole, c.value_columns))
    k_pe = f.take("chosen_k_pe", *cache_shape(num, whole, c.key_columns))
    k.gather_positions(latent, cache.latent, chosen, tables)
    k.gather_positions(k_pe, cache.k_pe, chosen, tables)
    scale = cache.scale
    if f.is_int8:
        scale = f.take("chosen_scale", num, whole)
        blocks, places = np.divmod(chosen, cache.scale.shape[1])
        scale[:, :count] = cache.scale[np.take_along_axis(tables, blocks, axis=1), places]
    own = np.arange(num, dtype=np.int32)
    last = np.full(num, count - 1, np.int32)
    return Batch.of(last, last, own, own[:, None]), KVCache(latent, scale, k_pe)


def _down_work(model: Model, layer: Layer, n: Counts) -> Work:
    c = model.config
    size = c.hidden_size * (c.index_head_dim + c.index_n_heads)
    return mla.down_proj.work(model, layer, n) + mla.float_work(n.rows, size)


def _up_work(model: Model, layer: Layer, n: Counts) -> Work:
    c = model.config
    size = (c.q_lora_rank or 0) * c.index_n_heads * c.index_head_dim
    return mla.up_proj.work(model, layer, n) + mla.float_work(n.rows, size)


def _choose_work(model: Model, layer: Layer, n: Counts) -> Work:
    c = model.config
    products = c.index_n_heads * c.index_head_dim
    return Work(attention=2.0 * n.context * products, cache=2.0 * n.kv_tokens * c.index_head_dim)  # BF16


def _attend_work(model: Model, layer: Layer, n: Counts) -> Work:
    """Work of attention to at most index_topk positions per row, each row reading its own latents."""
    most = n.rows * model.config.index_topk
    few = n._replace(context=min(n.context, most), kv_tokens=min(n.kv_tokens, most))
    return mla.attend.work(model, layer, few)


down_proj = Op(_down_proj, _down_work, "rows", mla.down_proj.operators + 2)
up_proj = Op(_up_proj, _up_work, "heads", mla.up_proj.operators + 5)
choose = Op(_choose, _choose_work, "heads")
attend = Op(_attend, _attend_work, "heads")
