"""What is trained, and for how long."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenizer import VOCAB_SIZE

MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 2,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Recipe(msgspec.Struct, frozen=True):
    """Two phases: everything but the second MTP layer, then that layer alone."""

    seed: int = 384
    documents: int = 40  # in a step
    steps: int = 2400
    mtp2_steps: int = 250
    warm_up: int = 50
    decay_from: float = 0.35  # share of the steps after which the rate falls linearly
    muon_lr: float = 0.008
    adam_lr: float = 0.004
    weight_decay: float = 0.02
    mtp_weight: float = 0.3  # DeepSeek-V3's lambda
    bias_rate: float = 0.002  # step of the selection bias, falling with the learning rate
    grad_clip: float = 1.0
