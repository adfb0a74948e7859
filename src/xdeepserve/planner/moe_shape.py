"""Shape of a decoder layer: its multiplications and bytes, with attention and experts apart (MegaScale-Infer
Table 2).

Everything is in BF16, as in the paper. `b_a` and `b_e` are rows of a microbatch on an attention and on an
expert node, `tp` the devices of a node. Grouped-query attention (GQA) is the paper's. Multi-head latent
attention (MLA) stands beside it, and sparse attention, whose indexer chooses the positions.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec

from xdeepserve.hw.spec import Work
from xdeepserve.model.config import ModelConfig

BF16 = 2  # bytes


class Gemm(NamedTuple):
    """A matrix product: rows [b, k] times parameters [k, n] on one device."""

    name: str
    k: float
    n: float

    def work(self, rows: float) -> Work:
        size = self.k * self.n
        return Work(bf16=2 * rows * size, weights=BF16 * size)


class MLA(msgspec.Struct, frozen=True):
    """Widths of latent attention; queries are absorbed into the latent space.

    An indexer chooses `top_k` positions by `index_heads` heads of width `index` (DeepSeek-V3.2, 2.1).
    `indexers` is the fraction of layers with an indexer.
    """

    heads: int
    q_lora: int  # 0: queries are projected directly
    kv_lora: int
    rope: int
    nope: int
    value: int
    top_k: int = 0  # 0: all positions are attended to
    index_heads: int = 0
    index: int = 0
    indexers: float = 0.0

    def index_gemms(self, hidden: int) -> list[Gemm]:
        """List the indexer's products for keys, weights and queries, whole on every device, averaged over all
        layers."""
        if not self.indexers:
            return []
        keys, queries = self.index + self.index_heads, self.index_heads * self.index
        return [
            Gemm("Index keys", hidden, self.indexers * keys),
            Gemm("Index queries", self.q_lora, self.indexers * queries),
        ]

    def index_work(self, positions: float) -> Work:
        """Return the work of scoring `positions` earlier positions, by one indexer."""
        return Work(
            attention=self.indexers * positions * 2 * self.index_heads * self.index,
            cache=self.indexers * positions * BF16 * self.index,
        )


class MoEShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the planner sees it, under the paper's names (Table 1).

    group     query heads per group of GQA, g
    queries   width of all query heads in GQA, which Table 2 has for h
    mla       latent attention in place of GQA
    matrices  of an expert: 3 where its input is gated; Table 2 counts 2
    positions  of a request at most
    """

    name: str
    layers: int  # L, those with experts
    hidden: int  # h
    experts: int  # E
    top_k: int  # K
    intermediate: int  # h'
    group: int = 1
    mla: MLA | None = None
    matrices: int = 3
    queries: int = 0
    positions: int = sys.maxsize

    def attention_gemms(self, tp: int) -> list[Gemm]:
        """List attention's products: Table 2's two rows, or MLA's projections. Projections into latent spaces
        are on every device."""
        h, mla = self.hidden, self.mla
        if mla is None:
            width = self.query_width
            return [
                Gemm("QKV Project", h, width * (1 + 2 / self.group) / tp),
                Gemm("Attn Output", width / tp, h),
            ]
        heads = mla.heads / tp
        down = [Gemm("Latents", h, mla.q_lora + mla.kv_lora + mla.rope)]
        return [
            *down,
            *mla.index_gemms(h),
            Gemm("Queries", mla.q_lora or h, heads * (mla.nope + mla.rope)),
            Gemm("Absorb", heads * mla.nope, mla.kv_lora),
            Gemm("Values", heads * mla.kv_lora, mla.value),
            Gemm("Attn Output", heads * mla.value, h),
        ]

    @property
    def query_width(self) -> int:
        """Number of columns of all heads' queries in GQA; the hidden size if it is not given."""
        return self.queries or self.hidden

    def expert_gemms(self, tp: int) -> list[Gemm]:
        """List an expert's products: FFN Input, together with the gate's product if there is one, and FFN
        Output."""
        width = self.intermediate / tp
        return [
            Gemm("FFN Input", self.hidden, (self.matrices - 1) * width),
            Gemm("FFN Output", width, self.hidden),
        ]

    def kv_nbytes(self) -> float:
        """Return the bytes of a position in a layer: equation 8's 4 h / g, or MLA's latent and rotated key,
        with the indexer's key."""
        if self.mla is None:
            return 2 * BF16 * self.query_width / self.group
        return BF16 * (self.mla.kv_lora + self.mla.rope + self.mla.indexers * self.mla.index)

    def attended(self, context: float) -> float:
        """Return the number of positions that a row attends to."""
        return min(context, self.mla.top_k) if self.mla and self.mla.top_k else context

    def kv_cut(self, tp: int) -> int:
        """Return the number of parts into which a node's devices cut the KV cache. MLA's latents belong to
        all heads, so they are not cut."""
        return tp if self.mla is None else 1

    def attention_flops(self) -> float:
        """Return the operations of a row's attention for each position that it reads."""
        if self.mla is None:
            return 4 * self.query_width
        return 2 * self.mla.heads * (2 * self.mla.kv_lora + self.mla.rope)

    def attention_works(self, b_a: float, context: float, tp: int) -> list[Work]:
        """List the launches of a layer's attention on a device, its small kernels included."""
        cut, attended = self.kv_cut(tp), b_a * self.attended(context)
        nbytes = self.kv_nbytes() if self.mla is None else BF16 * (self.mla.kv_lora + self.mla.rope)
        core = Work(attention=attended * self.attention_flops() / tp, cache=attended * nbytes / cut, layers=1)
        if self.mla is not None:
            core += self.mla.index_work(b_a * context)
        return [core, *(gemm.work(b_a) for gemm in self.attention_gemms(tp))]

    def expert_works(self, b_e: float, tp: int) -> list[Work]:
        """List the launches of a layer's single expert on a device."""
        return [gemm.work(b_e) for gemm in self.expert_gemms(tp)]

    def attention_nbytes(self) -> float:
        """Return the bytes of attention's parameters in all layers, 2 P_a."""
        return BF16 * self.layers * sum(gemm.k * gemm.n for gemm in self.attention_gemms(1))

    def expert_nbytes(self) -> float:
        """Return the bytes of an expert's parameters in all layers, 2 P_e. The gate's matrix is included even
        where times do not count it."""
        return BF16 * self.layers * 3 * self.hidden * self.intermediate


def _published(
    name: str, layers: int, hidden: int, experts: int, top_k: int, inner: int, g: int, n: int
) -> MoEShape:
    return MoEShape(
        name=name,
        layers=layers,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        intermediate=inner,
        group=g,
        positions=n,
    )


# MS Table 4; g and positions are public for the first two (48 heads, 8 of keys) and assumed for the third (64
# and 8, as DBRX).
PUBLISHED = {
    "mixtral-8x22b": _published("Mixtral-8x22B", 56, 6144, 8, 2, 16384, 6, 65536),
    "dbrx": _published("DBRX", 40, 6144, 16, 4, 10752, 6, 32768),
    "scaled-moe": _published("Scaled-MoE", 48, 8192, 32, 4, 8192, 8, 32768),
}


def shape_of(name: str, c: ModelConfig) -> MoEShape:
    """Make the shape of a model from its configuration: its layers with experts, without the shared
    expert."""
    heads = c.num_attention_heads
    latents = MLA(
        heads=heads,
        q_lora=c.q_lora_rank or 0,
        kv_lora=c.kv_lora_rank,
        rope=c.qk_rope_head_dim,
        nope=c.qk_nope_head_dim,
        value=c.v_head_dim,
        top_k=c.index_topk,
        index_heads=c.index_n_heads,
        index=c.index_head_dim,
        indexers=1 - len(c.shared_choices) / c.num_hidden_layers if c.index_topk else 0.0,
    )
    return MoEShape(
        name=name,
        layers=c.num_moe_layers,
        hidden=c.hidden_size,
        experts=c.n_routed_experts,
        top_k=c.num_experts_per_tok,
        intermediate=c.moe_intermediate_size,
        group=heads // c.num_key_value_heads if c.attention == "gqa" else 1,
        queries=heads * c.qk_head_dim,
        mla=latents if c.has_latents else None,
        positions=c.max_position_embeddings,
    )
