"""A model of full size, layer by layer: Moonlight's shapes, 16 B parameters, seeded weights in INT8.

Held at once it takes 16 GB and more. Here each layer is built, loaded into a pod of one die and run by
itself, and what it makes of the rows goes on into the next one, so that a prompt passes the whole model.
Nothing is written to disk. It prints, of each layer and of all, what the weights weigh, what loading takes
(making them from the seed and rounding them included), and tokens per second of prefill and of decoding, by
CPU time; and the peak of resident memory, which is that of one layer.

    python tools/full_size.py [--layers N] [--prompt T]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import load_config
from xdeepserve.model.seeded import SeededCheckpoint, normal_tensor

SEED, DECODED = 16, 8
CONFIG = {  # of moonshotai/Moonlight-16B-A3B
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
}


class OneLayer(SeededCheckpoint):
    """A layer of the model whose embedding are the rows that the one before has made."""

    rows: Array

    def tensor(self, name: str) -> Array:
        """By its name in a model of one layer."""
        return self.rows if name == "model.embed_tokens.weight" else super().tensor(name)


def layer_of(directory: Path, number: int, rows: Array) -> OneLayer:
    """Layer `number`, whose vocabulary are the positions of `rows` [T, H]."""
    is_dense = number < int(str(CONFIG["first_k_dense_replace"]))
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": int(is_dense), "vocab_size": len(rows)}
    (directory / "config.json").write_text(json.dumps(CONFIG | sizes))
    checkpoint = OneLayer(f"layer-{number}", directory, load_config(directory), SEED + number)
    checkpoint.rows = rows
    return checkpoint


def run(checkpoint: OneLayer, count: int) -> tuple[Array, float, float, float, int]:
    """What the layer makes of its rows [T, H]; CPU seconds of loading, of T rows at once and of a decoded
    one; bytes of a die's memory."""
    limits = [f"max_model_len={2 * count}", f"scheduler.max_num_batched_tokens={count}"]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = time.process_time()
    with LLM(checkpoint, "monolithic", "int8", overrides=[*limits, "cache.prefix=false"]) as llm:
        loading = time.process_time() - start
        llm.generate([[0]], params)  # kernels may have to be compiled
        start = time.process_time()
        llm.generate([list(range(count))], params)
        prefill = time.process_time() - start
        executor = llm.engine.je.tes[0].executors[0]
        made = executor.ws.take("h", count, checkpoint.config.hidden_size).copy()
        nbytes = len(executor.die.memory)
        start = time.process_time()
        llm.generate([[3, 1, 2]], SamplingParams(max_tokens=DECODED + 1, temperature=0.0, ignore_eos=True))
        decoded = (time.process_time() - start) / (DECODED + 1)
    return made, loading, prefill, decoded, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="run the first N")
    parser.add_argument("--prompt", type=int, default=128, help="token rows")
    args = parser.parse_args()
    hidden = int(str(CONFIG["hidden_size"]))
    rows = normal_tensor(SEED, "embedding", (args.prompt, hidden), deviation=1.0)
    totals = np.zeros(4)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(args.layers):
            checkpoint = layer_of(Path(directory), number, rows)
            size = num_parameters(checkpoint.config)
            rows, *figures = run(checkpoint, args.prompt)
            assert np.isfinite(rows).all()
            totals += [size, *figures[:3]]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            loading, prefill, decoded, nbytes = figures
            print(
                f"layer {number}: {size / 1e6:.0f} M parameters, die {nbytes / 1e9:.2f} GB, loaded in "
                f"{loading:.1f} s, {args.prompt} rows in {prefill:.2f} s, a decoded one in "
                f"{1e3 * decoded:.1f} ms; rows deviate {rows.std():.2f}, peak {peak:.2f} GiB",
                flush=True,
            )
    print(
        f"{args.layers} layers: {totals[0] / 1e9:.2f} G parameters, loaded in {totals[1]:.0f} s of CPU; "
        f"prefill {args.prompt / totals[2]:.1f}, decoding {1 / totals[3]:.1f} tokens per second of CPU"
    )


if __name__ == "__main__":
    main()
