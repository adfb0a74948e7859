"""The numbers that all dies of a lockstep share, in the form that kernels take."""

from __future__ import annotations

from typing import NamedTuple

from xdeepserve.comm.layout.exchange import HEADER_DTYPE
from xdeepserve.comm.layout.trampoline import A2ELayout
from xdeepserve.engine.sizes import Sizes
from xdeepserve.model.cache_layout import scratch_size
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe

HEADER_NBYTES = HEADER_DTYPE.itemsize


class Shape(NamedTuple):
    """Of the model on an attention die, and of a row on its way. Sizes in elements unless they say bytes."""

    hidden: int
    heads: int
    q_lora: int  # 0: queries are projected in one step
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    dense: int  # intermediate size of layers without experts
    experts: int
    top_k: int
    groups: int
    top_groups: int
    is_norm: bool
    scaling: float
    eps: float
    latent_eps: float
    softmax_scale: float
    block_size: int
    num_blocks: int
    blocks_per_seq: int
    scratch: int
    is_int8: bool
    copies: int  # of a token: top_k, and one for the shared expert
    token_nbytes: int  # an A2E row
    answer_nbytes: int  # an E2A' row

    @classmethod
    def of(
        cls, config: ModelConfig, recipe: Recipe, sizes: Sizes, layout: A2ELayout, latent_eps: float
    ) -> Shape:
        """Of a TE whose A2E layouts are all like `layout`."""
        c = config
        return cls(
            hidden=c.hidden_size,
            heads=c.num_attention_heads,
            q_lora=c.q_lora_rank or 0,
            kv_lora=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            rope=c.qk_rope_head_dim,
            v_dim=c.v_head_dim,
            dense=c.intermediate_size,
            experts=c.n_routed_experts,
            top_k=c.num_experts_per_tok,
            groups=c.n_group,
            top_groups=c.topk_group,
            is_norm=c.norm_topk_prob,
            scaling=c.routed_scaling_factor,
            eps=c.rms_norm_eps,
            latent_eps=latent_eps,
            softmax_scale=c.softmax_scale,
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            blocks_per_seq=sizes.max_blocks_per_seq,
            scratch=scratch_size(sizes.max_model_len, c.kv_lora_rank, c.qk_rope_head_dim),
            is_int8=recipe == "int8",
            copies=layout.top_k,
            token_nbytes=layout.tokens.row_nbytes,
            answer_nbytes=layout.answers.row_nbytes,
        )


class ExchangeShape(NamedTuple):
    """Of the expert dies of an exchange, and of the rows between them."""

    hidden: int
    inter: int  # of a routed expert
    wide: int  # of the shared expert
    copies: int
    is_int8: bool
    num_ranks: int
    max_tokens: int  # of a trampoline
    max_rows: int  # that an expert die can receive
    token_nbytes: int
    answer_nbytes: int
    answer_block: int  # bytes of the block for one attention die
    dispatch_nbytes: int  # a row of A2E'
    dispatch_block: int  # bytes of the block for one reader
    combine_nbytes: int  # a row of E2A
    combine_block: int

    @classmethod
    def of(cls, config: ModelConfig, layout: A2ELayout) -> ExchangeShape:
        experts = layout.experts
        return cls(
            hidden=config.hidden_size,
            inter=config.moe_intermediate_size,
            wide=config.n_shared_experts * config.moe_intermediate_size,
            copies=layout.top_k,
            is_int8=layout.quantize,
            num_ranks=experts.num_ranks,
            max_tokens=experts.max_tokens,
            max_rows=experts.dispatch.max_rows,
            token_nbytes=layout.tokens.row_nbytes,
            answer_nbytes=layout.answers.row_nbytes,
            answer_block=layout.answers.block_nbytes,
            dispatch_nbytes=experts.dispatch_row,
            dispatch_block=experts.dispatch_block,
            combine_nbytes=experts.combine_row,
            combine_block=experts.combine_block,
        )
