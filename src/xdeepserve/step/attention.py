"""Operations of absorbed MLA (CloudMatrix 4.2.2): what each computes on a die, and its cost. The first and
the last belong to any attention.

down_proj      norm; the query's and the cache's latents of each row
up_proj        the cache's entry of each row; queries of the die's heads, with RoPE and absorbed
attend         attention to the latents of all earlier positions
head_outputs   from the attended latents to each head's output
out_proj       output projection, added to the row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xdeepserve.hw.spec import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import entry_nbytes
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import LATENT_NORM_EPS
from xdeepserve.model.tensors import Layer, Linear
from xdeepserve.step.frame import Batch, Frame, KVCache, Model
from xdeepserve.step.linear import Rows
from xdeepserve.step.stage import Counts, Op

# Bytes of an element that vector kernels read and write in memory: before a GEMM BF16 to INT8, by the token's
# scale; after it, by this scale, because GEMMs scale by channel and give BF16 (CM 4.5, Table 9); and in
# SwiGLU two BF16 to one.
QUANTISED, SCALED, ACTIVATED = 3, 4, 6
HALF_LAYER = Work(layers=0.5)  # the small kernels of a layer are billed with its first and last projection


def float_work(rows: float, size: float) -> Work:
    """Work of `rows` through a matrix of `size` BF16 weights, read once."""
    return Work(bf16=2.0 * rows * size, weights=2.0 * size)


def linear_work(rows: float, layer: Linear) -> Work:
    """Work of `rows` through a linear layer, with weights read once: INT8, or BF16 if not quantised."""
    size = layer.k * layer.n
    if layer.scale is None:
        return float_work(rows, size)
    between = rows * (QUANTISED * layer.k + SCALED * layer.n)
    return Work(int8=2.0 * rows * size, weights=float(size), between=between)


class RowParallel(NamedTuple):
    """Linear layer with shared inputs: each die has a part of the inputs, and so of every sum.

    `buffer` has its input float32 [T, K] once `floats` has run; `rows` makes it in one go, as the recipe's
    layer takes it.
    """

    linear: Callable[[Layer], Linear]
    buffer: str
    floats: Callable[[Frame], Array]
    rows: Callable[[Frame], Rows]

    def run(self, f: Frame) -> None:
        """Run the whole layer and add its output to h [T, H]."""
        y = f.take("y", *f.h.shape)
        f.linears.apply(y, self.rows(f), self.linear(f.layer), is_row_parallel=True)
        k.add(f.h, f.h, y)

    def work(self, model: Model, layer: Layer, n: Counts) -> Work:
        return linear_work(n.rows, self.linear(layer))


# ---- kernels ----------------------------------------------------------------------------------------


def query_input(f: Frame, rows: int) -> Array:
    """The input of wq_b [T, Q]: the query's latent, or the normed row where the query has none."""
    c = f.config
    if c.q_lora_rank is None:
        return f.take("x", rows, c.hidden_size)
    return f.take("q_a", rows, c.q_lora_rank)


def latent(f: Frame, rows: int) -> Array:
    """Buffer of the cache's new entries, kv [T, C + R]: the rows' latents and RoPE keys; or keys and
    values."""
    return f.take("kv", rows, f.config.kv_columns)


def index_parts(f: Frame, rows: int) -> tuple[Array, Array]:
    """Buffers of the indexer for each row: its key [T, X], and the weights of its heads' scores [T,
    heads]."""
    return f.take("index_k", rows, f.config.index_head_dim), f.take("index_w", rows, f.config.index_n_heads)


def down_parts(f: Frame, rows: int) -> list[Array]:
    """Buffers with all inputs of heads for each row, whichever die made it: config.down_columns in all."""
    parts = [query_input(f, rows), latent(f, rows)]
    return [*parts, *index_parts(f, rows)] if f.config.index_topk else parts


def _down_proj(f: Frame) -> None:
    c, rows, layer, linears = f.config, len(f.h), f.layer, f.linears
    f.source = linears.norm(f.take("x", *f.h.shape), f.h, layer.attn_norm, c.rms_norm_eps)
    linears.apply(latent(f, rows), f.source, layer.wkv_a)
    if layer.wq_a is not None and layer.q_norm is not None:
        q_a = query_input(f, rows)
        linears.apply(q_a, f.source, layer.wq_a)
        f.source = linears.norm(q_a, q_a, layer.q_norm, c.query_norm_eps)


def _up_proj(f: Frame) -> None:
    c, b, heads = f.config, f.batch, f.num_heads
    rows, layer, rope = b.num_tokens, f.layer, (b.positions, f.cos, f.sin)
    assert layer.kv_norm is not None
    assert layer.wq_b is not None
    k.append_kv(*f.cache.pages, b.slots, latent(f, rows), layer.kv_norm, LATENT_NORM_EPS, *rope)
    q = f.take("q", rows, heads * c.qk_head_dim)
    f.linears.apply(q, f.source, layer.wq_b)
    k.rope_heads(q, heads, *rope)
    q_lat = f.take("q_lat", rows, heads * c.kv_lora_rank)
    f.linears.heads(q_lat, q, layer.w_uk, heads, c.qk_nope_head_dim)


def _attend(f: Frame) -> None:
    attend_rows(f, slice(0, f.batch.num_tokens), f.batch, f.cache)


def attend_rows(f: Frame, rows: slice, b: Batch, cache: KVCache) -> None:
    """Attend for some rows of the step: the rows of `b`, with their blocks in `cache`."""
    c, heads, total = f.config, f.num_heads, f.batch.num_tokens
    width = heads * c.kv_lora_rank
    num_ops = b.context * heads * (2.0 * c.kv_lora_rank + c.qk_rope_head_dim)
    q_lat, q = f.take("q_lat", total, width)[rows], f.take("q", total, heads * c.qk_head_dim)[rows]
    f.linears.threads.over_pieces(
        k.attention, num_ops, f.scratch_size,
        f.take("o_lat", total, width)[rows], q_lat, q, heads, c.qk_rope_head_dim, b.seq_of, b.positions,
        *cache.pages, b.block_tables, c.softmax_scale, f.layer.int8_attention,
    )  # fmt: skip


def outputs(f: Frame, rows: int) -> Array:
    """Buffer of heads' outputs on the die, o [T, heads * V]."""
    return f.take("o", rows, f.num_heads * f.config.v_head_dim)


def _head_outputs(f: Frame) -> None:
    c, rows, heads = f.config, f.batch.num_tokens, f.num_heads
    o_lat = f.take("o_lat", rows, heads * c.kv_lora_rank)
    f.linears.heads(outputs(f, rows), o_lat, f.layer.w_uv, heads, c.kv_lora_rank)


OUT_PROJ = RowParallel(
    linear=lambda layer: layer.wo,
    buffer="o",
    floats=lambda f: outputs(f, f.batch.num_tokens),
    rows=lambda f: f.linears.prepare(outputs(f, f.batch.num_tokens)),
)


# ---- costs ------------------------------------------------------------------------------------------


def _per_head(model: Model, rows: float, width: int) -> Work:
    """Work of a product with a [width, C] or [C, width] matrix for each head, in BF16."""
    return float_work(rows, model.heads * model.config.kv_lora_rank * width)


def _down_work(model: Model, layer: Layer, n: Counts) -> Work:
    work = HALF_LAYER + linear_work(n.rows, layer.wkv_a)
    return work if layer.wq_a is None else work + linear_work(n.rows, layer.wq_a)


def _up_work(model: Model, layer: Layer, n: Counts) -> Work:
    assert layer.wq_b is not None
    return linear_work(n.rows, layer.wq_b) + _per_head(model, n.rows, model.config.qk_nope_head_dim)


def _attend_work(model: Model, layer: Layer, n: Counts) -> Work:
    absorbed = _absorbed_work(model, layer, n)
    if not model.unabsorbed:
        return absorbed
    plain = _unabsorbed_work(model, n)._replace(cache=absorbed.cache)
    return min(absorbed, plain, key=lambda work: work.bf16 + work.attention + work.int8_attention)


def _unabsorbed_work(model: Model, n: Counts) -> Work:
    """Work of attention to keys and values of all heads (CM 4.3.1). For the rows themselves these cost as
    many products as absorption does. Those of earlier positions, in chunks and after cached prefixes, are
    added, and read the weights once more."""
    c = model.config
    products = 2.0 * n.context * model.heads * (c.qk_head_dim + c.v_head_dim)
    num_earlier = max(0.0, n.kv_tokens - n.rows)
    earlier = _per_head(model, num_earlier, c.qk_nope_head_dim + c.v_head_dim) if num_earlier else Work()
    return earlier + Work(attention=products)


def _absorbed_work(model: Model, layer: Layer, n: Counts) -> Work:
    c, cache = model.config, float(n.kv_tokens * entry_nbytes(model.config, model.recipe))
    latent, rope = (2.0 * n.context * model.heads * each for each in (2 * c.kv_lora_rank, c.qk_rope_head_dim))
    if model.recipe == "int8" and layer.int8_attention:
        return Work(attention=rope, int8_attention=latent, cache=cache)
    return Work(attention=latent + rope, cache=cache)


def _head_work(model: Model, layer: Layer, n: Counts) -> Work:
    return _per_head(model, n.rows, model.config.v_head_dim)


def out_work(model: Model, layer: Layer, n: Counts) -> Work:
    return HALF_LAYER + OUT_PROJ.work(model, layer, n)


down_proj = Op(_down_proj, _down_work, "rows", operators=4)
up_proj = Op(_up_proj, _up_work, "heads", operators=4)
attend = Op(_attend, _attend_work, "heads")
head_outputs = Op(_head_outputs, _head_work, "heads")
out_proj = Op(OUT_PROJ.run, out_work, "sum", operators=3)
