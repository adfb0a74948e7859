"""Operations for GQA in place of MLA's: what each computes on a die, and its cost.

up_proj        the cache's keys and values of each row; queries of the die's heads, with biases, norm and RoPE
attend         attention to the keys and values of all earlier positions, head by head of the cache
head_outputs   each head's output in its place

The cache has 16 positions of each of its heads, one head after the other, then the next 16 positions: so
kernels see blocks of 16, `tile * heads + head`, and two blocks side by side are the bytes of one of twice the
size, as the memory pool wants them. A die of a group that shares a layer's heads caches all of them, as it
does with latents.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from xdeepserve.hw.spec import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE, entry_nbytes
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Layer
from xdeepserve.step.attention import latent, linear_work, outputs, query_input
from xdeepserve.step.frame import Frame, KVCache, Model
from xdeepserve.step.stage import Counts, Op, free


def _finish(f: Frame, x: Array, bias: Array | None, heads: int, norm: Array | None) -> None:
    """Finish x [T, heads * D] in place: add its bias, norm each head (or all together, if the norm is as
    wide), and rotate the last columns."""
    if bias is not None:
        np.add(x, bias, out=x)
    if norm is not None:
        normed = x.reshape(-1, norm.size)
        k.rms_norm(normed, normed, norm, f.config.rms_norm_eps)
    k.rope_heads(x, heads, f.batch.positions, f.cos, f.sin)


def _up_proj(f: Frame) -> None:
    c, rows, layer = f.config, f.batch.num_tokens, f.layer
    kv, keys = latent(f, rows), f.take("q_lat", rows, c.num_key_value_heads * c.key_columns)
    np.copyto(keys, kv[:, : keys.shape[1]])
    if layer.bv is not None:
        kv[:, keys.shape[1] :] += layer.bv
    _finish(f, keys, layer.bk, c.num_key_value_heads, layer.kv_norm)
    k.append_heads(*_by_head(f).pages, f.batch.slots, keys, kv, c.num_key_value_heads)
    width = f.num_heads * c.qk_head_dim
    q = f.take("q", rows, width)
    if layer.wq_b is None:  # all heads' queries have been normed together
        np.copyto(q, query_input(f, rows)[:, f.group_rank * width :][:, :width])
        _finish(f, q, None, f.num_heads, None)
    else:
        f.linears.apply(q, f.source, layer.wq_b)
        _finish(f, q, layer.bq, f.num_heads, layer.q_norm)


def _by_head(f: Frame) -> KVCache:
    """View the layer's cache in blocks of a tile of positions and a head."""
    values, scale, keys = f.cache.pages
    tiles = values.reshape(-1, 1, *values.shape[2:]), keys.reshape(-1, 1, *keys.shape[2:])
    return KVCache(tiles[0], scale.reshape(-1, TILE), tiles[1])


def _tables(f: Frame, head: int) -> Array:
    """Return the block tables of such blocks for a head, int32 [seqs, max tiles]."""
    tables, tiles = f.batch.block_tables, np.arange(f.cache.latent.shape[1], dtype=np.int32)
    by_tile = (tables[:, :, None] * np.int32(len(tiles)) + tiles).reshape(len(tables), -1)
    return by_tile * np.int32(f.config.num_key_value_heads) + np.int32(head)


def _shares(f: Frame) -> Iterator[tuple[int, slice]]:
    """Yield the cache's heads used by this die's queries, each with the slice of queries that use it."""
    c, num = f.config, f.num_heads
    first, shared = f.group_rank * num, c.num_attention_heads // c.num_key_value_heads
    for head in range(first // shared, (first + num - 1) // shared + 1):
        start, stop = max(head * shared, first), min((head + 1) * shared, first + num)
        yield head, slice(start - first, stop - first)


def _attended(f: Frame, queries: slice) -> Array:
    """Buffer of attended values for the heads `queries`, [T, heads * V], beside the others'."""
    rows, width = f.batch.num_tokens, f.config.value_columns
    flat = f.take("o_lat", rows * f.num_heads * width)
    return flat[rows * queries.start * width : rows * queries.stop * width].reshape(rows, -1)


def _attend(f: Frame) -> None:
    c, b, rows = f.config, f.batch, f.batch.num_tokens
    q, none = f.take("q", rows, f.num_heads, c.qk_head_dim), np.empty((rows, 0), np.float32)
    for head, queries in _shares(f):
        num = queries.stop - queries.start
        mine = f.take("q_lat", rows, num * c.qk_head_dim)
        np.copyto(mine.reshape(rows, num, -1), q[:, queries])
        f.linears.threads.over_pieces(
            k.attention, b.context * num * float(c.key_columns + c.value_columns), f.scratch_size,
            _attended(f, queries), none, mine, num, c.key_columns, b.seq_of, b.positions,
            *_by_head(f).pages, _tables(f, head), c.softmax_scale, False,
        )  # fmt: skip


def _head_outputs(f: Frame) -> None:
    rows = f.batch.num_tokens
    o = outputs(f, rows).reshape(rows, f.num_heads, -1)
    for _, queries in _shares(f):
        np.copyto(o[:, queries], _attended(f, queries).reshape(rows, -1, o.shape[-1]))


def _up_work(model: Model, layer: Layer, n: Counts) -> Work:
    return Work() if layer.wq_b is None else linear_work(n.rows, layer.wq_b)


def _attend_work(model: Model, layer: Layer, n: Counts) -> Work:
    c = model.config
    products = model.heads * (c.key_columns + c.value_columns)
    return Work(
        attention=2.0 * n.context * products, cache=float(n.kv_tokens * entry_nbytes(c, model.recipe))
    )


up_proj = Op(_up_proj, _up_work, "heads", operators=6)
attend = Op(_attend, _attend_work, "heads")
head_outputs = Op(_head_outputs, free, "heads")
