"""Write a checkpoint as GGUF, llama.cpp's format, so that `xdeepserve bench` can run llama.cpp beside.

    pip install gguf
    python tools/make_gguf.py CHECKPOINT CHECKPOINT/q8_0.gguf           # what `bench --peers` looks for
    python tools/make_gguf.py CHECKPOINT out.gguf --type f32            # the same mathematics as our fp32

Only what speed and logits need: llama.cpp's `deepseek2` architecture with made-up words, since the benchmark
feeds token ids. kv_b_proj is split in its key and value parts, as llama.cpp's absorbed MLA has it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model

ARCHITECTURE = "deepseek2"
SIGMOID = 2  # llama.cpp's number of DeepSeek-V3's gate
ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
PROJECTIONS = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Array]]:
    """Every tensor of the main model under llama.cpp's name, float32."""
    config, get = checkpoint.config, checkpoint.tensor
    yield "token_embd.weight", get("model.embed_tokens.weight")
    yield "output_norm.weight", get("model.norm.weight")
    yield "output.weight", get("lm_head.weight")
    known = set(checkpoint.names())
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for name, other in ATTENTION.items():
            if f"{ours}.{name}.weight" in known:
                yield f"{theirs}.{other}.weight", get(f"{ours}.{name}.weight")
        kv_b = get(f"{ours}.self_attn.kv_b_proj.weight")
        kv_b = kv_b.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        w_uk, w_uv = np.split(kv_b, [config.qk_nope_head_dim], axis=1)
        yield f"{theirs}.attn_k_b.weight", np.ascontiguousarray(w_uk.transpose(0, 2, 1))
        yield f"{theirs}.attn_v_b.weight", np.ascontiguousarray(w_uv)
        if not config.is_moe(layer):
            for name, other in PROJECTIONS.items():
                yield f"{theirs}.{other}.weight", get(f"{ours}.mlp.{name}.weight")
            continue
        yield f"{theirs}.ffn_gate_inp.weight", get(f"{ours}.mlp.gate.weight")
        yield f"{theirs}.exp_probs_b.bias", get(f"{ours}.mlp.gate.e_score_correction_bias")
        for name, other in PROJECTIONS.items():
            stack = [
                get(f"{ours}.mlp.experts.{expert}.{name}.weight") for expert in range(config.n_routed_experts)
            ]
            yield f"{theirs}.{other}_exps.weight", np.stack(stack)
            yield f"{theirs}.{other}_shexp.weight", get(f"{ours}.mlp.shared_experts.{name}.weight")


def parameters(config: ModelConfig) -> dict[str, int | float | bool]:
    """llama.cpp's keys, without the architecture's name before them."""
    sizes: dict[str, int | float | bool] = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,  # MLA as attention over one latent head
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": config.rope.theta,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": SIGMOID,
    }
    if config.q_lora_rank is not None:
        sizes["attention.q_lora_rank"] = config.q_lora_rank
    return sizes


def refuse(config: ModelConfig) -> str | None:
    """What this script does not carry over."""
    if config.rope.yarn is not None:
        return "YaRN"
    if not config.rope_interleave:
        return "rope_interleave=false"
    if not config.n_shared_experts:
        return "no shared expert"
    return None


def add_vocabulary(writer: Any, gguf: Any, size: int) -> None:
    """A word for each token id, of no meaning: llama.cpp's server does not load a model without words."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>" for token in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)


def write(checkpoint: Checkpoint, path: Path, kind: str) -> None:
    gguf: Any = importlib.import_module("gguf")
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_name(checkpoint.name)
    add_vocabulary(writer, gguf, checkpoint.config.vocab_size)
    for key, value in parameters(checkpoint.config).items():
        if isinstance(value, bool):
            writer.add_bool(f"{ARCHITECTURE}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
        else:
            writer.add_float32(f"{ARCHITECTURE}.{key}", value)
    quantised = gguf.GGMLQuantizationType.Q8_0
    for name, array in tensors(checkpoint):
        # As llama.cpp's own quantiser does: matrices, but not the gate.
        if kind == "q8_0" and array.ndim > 1 and ".ffn_gate_inp." not in name:
            writer.add_tensor(name, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint as GGUF.")
    parser.add_argument("model", help="a checkpoint's directory, or the name of a preset")
    parser.add_argument("path", type=Path)
    parser.add_argument("--type", choices=("q8_0", "f32"), default="q8_0", help="of matrices")
    args = parser.parse_args()
    checkpoint = resolve_model(args.model)
    if reason := refuse(checkpoint.config):
        parser.error(f"{args.model}: {reason} is not supported")
    write(checkpoint, args.path, args.type)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
