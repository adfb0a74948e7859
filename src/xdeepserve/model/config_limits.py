"""What a config.json and its neighbours may ask for at most.

Several times what any published model has, and little enough that what follows from it (names of tensors,
sizes in bytes) is counted in seconds. Numbers with a fraction stay far within float32, in which dies compute.
"""

from __future__ import annotations

LIMITS: dict[str, float] = {  # by key; negative numbers may be as large
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "partial_rotary_factor": 1.0,
    "rotary_dim": 2**12,
    "decoder_sparse_step": 2**10,
    "q_lora_rank": 2**16,
    "kv_lora_rank": 2**16,
    "qk_nope_head_dim": 2**12,
    "qk_rope_head_dim": 2**12,
    "v_head_dim": 2**12,
    "index_topk": 2**20,
    "index_n_heads": 2**12,
    "index_head_dim": 2**12,
    "index_topk_freq": 2**10,
    "index_skip_topk_offset": 2**10,
    "n_routed_experts": 2**14,
    "n_shared_experts": 2**8,
    "num_experts_per_tok": 2**10,
    "n_group": 2**12,
    "topk_group": 2**12,
    "first_k_dense_replace": 2**31 - 1,  # any number beyond the layers means all of them
    "num_nextn_predict_layers": 2**6,
    "num_mtp_layers": 2**6,
    "max_position_embeddings": 2**26,  # as far as the angles of RoPE are exact
    "original_max_position_embeddings": 2**26,
    "routed_scaling_factor": 1e6,
    "rms_norm_eps": 1.0,
    "rope_theta": 1e15,
    "factor": 1e6,
    "beta_fast": 1e6,
    "beta_slow": 1e6,
    "mscale": 1e3,
    "mscale_all_dim": 1e3,
    "attention_factor": 1e3,
}
MAX_EXPERTS = 2**18  # routed ones in all layers; DeepSeek-V3 has 14,848
MAX_END_TOKENS = 2**10
MAX_JSON_BYTES = 2**24  # of one file
MAX_INDEXED = 2**21  # tensors in an index: those of MAX_EXPERTS experts with their scales, and some more
MAX_INDEX_BYTES = 2**27  # which these come to
MAX_FILE_NAME = 255  # bytes that file systems take
