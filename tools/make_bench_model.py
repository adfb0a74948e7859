"""Write the model of the decode benchmark: 286 M parameters, DeepSeek-V3's architecture, seeded weights.

Small enough for a laptop and for its peers (transformers, llama.cpp), large enough that the arithmetic and
not Python is what takes time. It speaks no language: prompts are token ids.

    python tools/make_bench_model.py DIRECTORY
    xdeepserve bench decode --model DIRECTORY
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import load_config
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.seeded import SeededCheckpoint

SEED = 286
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 1408,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write(directory: Path) -> int:
    """Write config and weights; the number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    checkpoint = SeededCheckpoint("bench", directory, load_config(directory), SEED)
    write_checkpoint(checkpoint, directory)
    return num_parameters(checkpoint.config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the model of the decode benchmark.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    print(f"{directory}: {write(directory) / 1e6:.1f} M parameters, seed {SEED}")


if __name__ == "__main__":
    main()
