"""Dimensions shared by all dies in lockstep, in the form that kernels take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.run.lockstep.kernels.attention import QUANTIZE
from xdeepserve.model.cache_layout import scratch_size
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import weight_specs

LIGHT = 1 << 18
"""Bytes of a layer's weights, experts aside, that stay in a core's cache beside the rows that use them."""


class Shape(NamedTuple):
    """Dimensions of the model on a die with attention, in elements unless they say bytes."""

    hidden: int
    heads: int
    q_lora: int  # 0: queries are projected in one step
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    dense: int  # intermediate size of layers without experts
    shared: int  # and of the shared expert; 0 if there is none here
    experts: int
    replicas: int  # most that an expert can have, its primary included; 0: no maps to them
    top_k: int
    copies: int  # of a token that are sent: top_k, and one if the shared expert is dispatched, too
    groups: int
    top_groups: int
    is_norm: bool
    best_of_group: int
    is_softmax: bool
    has_bias: bool
    scaling: float
    eps: float
    latent_eps: float
    softmax_scale: float
    block_size: int
    num_blocks: int
    blocks_per_seq: int
    scratch: int
    first_phase: int  # of a layer's kernels
    is_light: bool  # its weights stay in the cache of each core
    is_int8: bool
    bf16_answers: bool  # what experts make is rounded to BF16 before it is summed,
    int8_answers: bool  # or to INT8
    matrix: Array  # empty, of the dtype of heads' matrices: float32, or BF16 as uint16 if is_int8

    @classmethod
    def of(cls, mem: DieMemory, latent_eps: float, layer_nbytes: int) -> Shape:
        """Return the dimensions of a die with attention, which hold for all others like it.

        layer_nbytes: weights of its largest layer, experts aside.
        """
        c, recipe, placed = mem.config, mem.recipe, mem.placed
        is_elsewhere = placed.where == "away" or placed.num_shared_dies > 0
        is_dispatched = placed.where != "away" and placed.num_shared_dies > 0
        return cls(
            hidden=c.hidden_size,
            heads=c.num_attention_heads,
            q_lora=c.q_lora_rank or 0,
            kv_lora=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            rope=c.qk_rope_head_dim,
            v_dim=c.v_head_dim,
            dense=c.intermediate_size,
            shared=0 if is_elsewhere else c.n_shared_experts * c.moe_intermediate_size,
            experts=c.n_routed_experts,
            replicas=0 if mem.replicas is None else mem.replicas.most,
            top_k=c.num_experts_per_tok,
            copies=c.num_experts_per_tok + is_dispatched,
            groups=c.n_group,
            top_groups=c.topk_group,
            is_norm=c.norm_topk_prob,
            best_of_group=c.best_of_group,
            is_softmax=c.scoring == "softmax",
            has_bias=c.scoring == "sigmoid",
            scaling=c.routed_scaling_factor,
            eps=c.rms_norm_eps,
            latent_eps=latent_eps,
            softmax_scale=c.softmax_scale,
            block_size=mem.kv.sizes.block_size,
            num_blocks=mem.kv.sizes.num_blocks,
            blocks_per_seq=mem.kv.sizes.max_blocks_per_seq,
            scratch=scratch_size(mem.steps.max_model_len, c.kv_lora_rank, c.qk_rope_head_dim),
            first_phase=0 if c.attention == "mla" else QUANTIZE,
            is_light=layer_nbytes <= LIGHT,
            is_int8=recipe == "int8",
            bf16_answers=recipe == "int8" and not c.int8_answers,
            int8_answers=c.int8_answers,
            matrix=np.empty(0, weight_specs(c, recipe, 1)["head"].packed_dtype),
        )


class ExchangeShape(NamedTuple):
    """Dimensions of an exchange between dies with experts, and of its rows."""

    hidden: int
    inter: int  # of a routed expert
    wide: int  # of the shared expert; 0 if no die has it for others
    top_k: int
    copies: int  # of a token: top_k, and one for a shared expert on a die of its own
    is_int8: bool
    int8_answers: bool  # and what experts make of them, on its way back
    num_slots: int  # physical routed experts; those from there on are copies of the shared one
    num_ranks: int
    max_tokens: int  # that a die sends on
    max_rows: int  # that a die can receive
    dispatch_nbytes: int  # a row of dispatch, or of A2E'
    dispatch_block: int  # bytes of the block for one reader
    combine_nbytes: int  # a row of combine, or of E2A
    combine_block: int
    token_nbytes: int = 0  # a row of A2E
    answer_nbytes: int = 0  # a row of E2A'
    answer_block: int = 0  # bytes of the block for one attention die

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout, placed: ExpertSizes) -> ExchangeShape:
        """Return the dimensions of dispatch and combine."""
        wide = config.n_shared_experts * config.moe_intermediate_size
        return cls(
            hidden=config.hidden_size,
            inter=config.moe_intermediate_size,
            wide=wide if placed.num_shared_dies else 0,
            top_k=config.num_experts_per_tok,
            copies=layout.top_k,
            is_int8=layout.quantize,
            int8_answers=layout.int8_answers,
            num_slots=placed.num_slots,
            num_ranks=layout.num_ranks,
            max_tokens=layout.max_tokens,
            max_rows=layout.dispatch.max_rows,
            dispatch_nbytes=layout.dispatch_row,
            dispatch_block=layout.dispatch_block,
            combine_nbytes=layout.combine_row,
            combine_block=layout.combine_block,
        )

    @classmethod
    def of_a2e(cls, config: ModelConfig, layout: A2ELayout, placed: ExpertSizes) -> ExchangeShape:
        """Return the dimensions of A2E and E2A."""
        return cls.of(config, layout.experts, placed)._replace(
            token_nbytes=layout.tokens.row_nbytes,
            answer_nbytes=layout.answers.row_nbytes,
            answer_block=layout.answers.block_nbytes,
        )


class PushShape(NamedTuple):
    """Dimensions of an exchange by push between dies with experts, and of its messages.

    Fields that `ExchangeShape` has, too, mean the same.
    """

    hidden: int
    inter: int
    wide: int
    top_k: int
    copies: int
    is_int8: bool
    int8_answers: bool
    num_slots: int
    num_ranks: int
    max_tokens: int
    max_messages: int  # that a die can have for one peer
    max_rows: int
    held: int  # experts that a flag counts messages for
    dispatch_nbytes: int  # a message
    slot_offset: int  # in it
    payload_nbytes: int
    combine_nbytes: int  # an answer's message
    flag_nbytes: int
    token_nbytes: int = 0
    answer_nbytes: int = 0
    answer_block: int = 0

    @classmethod
    def of(cls, config: ModelConfig, layout: FusedLayout, placed: ExpertSizes) -> PushShape:
        """Return the dimensions of FusedDispatch and FusedCombine."""
        wide = config.n_shared_experts * config.moe_intermediate_size
        return cls(
            hidden=config.hidden_size,
            inter=config.moe_intermediate_size,
            wide=wide if placed.num_shared_dies else 0,
            top_k=config.num_experts_per_tok,
            copies=layout.top_k,
            is_int8=layout.quantize,
            int8_answers=layout.int8_answers,
            num_slots=placed.num_slots,
            num_ranks=layout.num_ranks,
            max_tokens=layout.local_batch,
            max_messages=layout.max_tokens,
            max_rows=layout.capacity,
            held=layout.experts_per_rank,
            dispatch_nbytes=layout.dispatch_message,
            slot_offset=layout.slot_offset,
            payload_nbytes=layout.hidden * layout.dispatch_payload.itemsize,
            combine_nbytes=layout.combine_message,
            flag_nbytes=layout.flag_dtype.itemsize,
        )

    @classmethod
    def of_a2e(cls, config: ModelConfig, layout: A2ELayout, placed: ExpertSizes) -> PushShape:
        """Return the dimensions of A2E and E2A."""
        return cls.of(config, layout.fused, placed)._replace(
            token_nbytes=layout.tokens.row_nbytes,
            answer_nbytes=layout.answers.row_nbytes,
            answer_block=layout.answers.block_nbytes,
        )
