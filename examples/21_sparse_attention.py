"""Walkthrough 21: sparse attention, which looks at few positions, and chooses them first.

DeepSeek-V3.2 has an indexer in each layer. It scores all earlier positions with small heads of its own, and
attention sees the best of them alone. This prints one token's scores and the choice; what a tie does, and why
everybody must break it alike; why short prompts prove nothing; and what becomes of the answer if a page of
the indexer's keys is stale while the latents beside it are right. Other systems have had each of these bugs.
The model is seeded: its tokens mean nothing, but each of them is checked.

    python examples/21_sparse_attention.py
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import LATENT_NORM_EPS, load_config
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.reference import Canonical, Reference, indexer
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.progress import working

TOP_K, SEED = 8, 5
INDEXER = {"model_type": "deepseek_v32", "index_topk": TOP_K, "index_n_heads": 4, "index_head_dim": 24}
STEPS = " ▁▂▃▄▅▆▇█"
PROMPT = [(7 * i * i + 3 * i) % 320 for i in range(40)]


def title(text: str) -> None:
    print(f"\n--- {text}")


def seeded_model(directory: Path) -> SeededCheckpoint:
    """tiny-random with an indexer."""
    config = json.loads((PRESET_DIRECTORY / "tiny-random" / "config.json").read_text()) | INDEXER
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    return SeededCheckpoint("sparse", directory, load_config(directory), SEED)


class Watched(Canonical):
    """Arithmetic that remembers what the indexer was asked."""

    def choose(self, q: Array, k: Array, weights: Array) -> list[Array]:
        self.q, self.k, self.index_weights = q, k, weights
        return super().choose(q, k, weights)


def first_layer(model: Reference) -> tuple[Watched, list[Array]]:
    """The first layer's indexer on the prompt."""
    weights, eps = model.weights, model.config.rms_norm_eps
    rows = weights.cos[: len(PROMPT)], weights.sin[: len(PROMPT)]
    layer = Watched(model.config, "fp32", weights.layers[0], *rows)
    x = layer.norm(weights.embed[np.array(PROMPT)], "attn_norm", eps)
    return layer, indexer(layer, x, layer.norm(layer.linear(x, "wq_a"), "q_norm", LATENT_NORM_EPS))


def show_choice(layer: Watched, chosen: list[Array]) -> Array:
    """Scores of the last token, and what it attends to."""
    title(f"The last of {len(PROMPT)} tokens scores all positions, and attends to {TOP_K}")
    scores = c.index_scores(layer.q[-1], layer.k, layer.index_weights[-1], is_exact=False)
    low, high = scores.min(), scores.max()
    print("  scores ", "".join(STEPS[int((s - low) / (high - low) * 8)] for s in scores))
    print("  chosen ", "".join("^" if p in chosen[-1] else " " for p in range(len(PROMPT))).rstrip())
    print(f"  scores from {low:.4f} to {high:.4f}; positions {chosen[-1].tolist()}")
    print(f"  a token that sees {TOP_K} or fewer attends to all: {chosen[TOP_K - 1].tolist()}")
    return scores


def show_tie(scores: Array) -> None:
    """Two positions of one score, with room for one of them."""
    title("A tie at the boundary")
    ranked = np.argsort(-scores, kind="stable")
    last, next_one = int(ranked[TOP_K - 1]), int(ranked[TOP_K])
    tied = scores.copy()
    tied[last] = tied[next_one] = scores[last]
    found = c.top_positions(tied, TOP_K)
    print(f"  positions {last} and {next_one} are given one score, {tied[last]:.6f}, and one place is left")
    print(f"  here {min(last, next_one)} is chosen, the lower one: {min(last, next_one) in found}")
    lowest = c.top_positions(np.zeros_like(scores), TOP_K)
    print(f"  of {len(scores)} scores that are all the same: {lowest.tolist()}")
    print("  Two servers that break a tie differently attend to different tokens from there on")
    print("  (vLLM, pull request 56749: the same prompt got different answers).")


def show_short_prompts(checkpoint: SeededCheckpoint) -> None:
    """Whoever chooses wrongly, here by attending to all, is right as long as nothing is left out."""
    title("Up to the top-k nothing shows")
    dense = copy.copy(checkpoint)
    dense.config = msgspec.structs.replace(checkpoint.config, index_topk=len(PROMPT))
    with working("Computing all logits, sparse and dense"):
        sparse_logits, dense_logits = (Reference(m, "fp32", 64).logits(PROMPT) for m in (checkpoint, dense))
    is_same = (sparse_logits == dense_logits).all(axis=1)
    print(f"  attending to all gives the same bits for tokens 0 to {int(is_same.argmin()) - 1}")
    print(f"  and other bits for {int((~is_same).sum())} of the other {len(PROMPT) - TOP_K}")
    print("  So a test needs prompts longer than the top-k")
    print("  (mlx-lm, issue 1443: right up to 2,048 tokens, garbage beyond).")


def show_stale_page(checkpoint: SeededCheckpoint) -> None:
    """A cached prefix whose latents are right, but whose indexer's keys are of another text."""
    title("A stale page of the indexer's keys")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(checkpoint, "monolithic", "fp32", overrides=["cache.block_size=16"]) as llm:
        right = llm.generate([PROMPT], params, keep_logits=True)[0].outputs[0]
        again = llm.generate([PROMPT], params, keep_logits=True)[0].outputs[0]
        memory = llm.engine.je.tes[0].executors[0].mem
        pages = [cache.index_k for cache in memory.kv.caches()]
        nbytes = dict(memory.kv.block_parts)
        print(f"  a block of a layer: {nbytes['kv/0/latent'] + nbytes['kv/0/k_pe']} bytes for attention, "
              f"{nbytes['kv/0/index_k']} for the indexer")  # fmt: skip
        for page in pages:
            page[:] = np.roll(page, 5, axis=3)  # keys of other positions
        stale = llm.generate([PROMPT], params, keep_logits=True)[0].outputs[0]
    with working("Computing the reference's logits"):
        logits = Reference(checkpoint, "fp32", 64).logits([*PROMPT, *right.token_ids[:-1]])
    expected = logits[len(PROMPT) - 1 :]
    assert right.logits is not None
    print(f"  right                 {right.token_ids}")
    print(f"  from the prefix cache {again.token_ids}")
    print(f"  with stale pages      {stale.token_ids}")
    print(f"  the cached prefix gives the bits of the reference: {np.array_equal(again.logits, expected)}")
    print(f"  stale pages give the same tokens: {stale.token_ids == right.token_ids}")
    print("  No error was raised: the latents were right, and attention was right, of the wrong positions")
    print("  (SGLang, 30321: a cache of the indexer's keys that was evicted apart from the latents).")
    print("  So both pools of a block lie in the block's own bytes: they move and are evicted together.")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = seeded_model(Path(directory))
        with working("Computing the first layer"):
            layer, chosen = first_layer(Reference(checkpoint, "fp32", 64))
        show_tie(show_choice(layer, chosen))
        show_short_prompts(checkpoint)
        show_stale_page(checkpoint)


if __name__ == "__main__":
    main()
