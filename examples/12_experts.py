"""Walkthrough 12: which expert fires on what.

The trained model reads held-out text of each domain, and every token's routing is counted. The selection bias
(DeepSeek-V3, section 2.1.2) balances experts over *all* text; a single domain still has its favourites, which
is why expert-parallel serving needs replicas of hot experts (xDeepServe 4.5).

    python examples/12_experts.py
"""

from __future__ import annotations

import textwrap

import numpy as np

from xdeepserve.corpus import EXAMINED, sample
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.tokenizer import Tokenizer, load_tokenizer
from xdeepserve.progress import working
from xdeepserve.quant.forward import Walk, expert_load

NUM_SAMPLES = 16
STEPS = " ▁▂▃▄▅▆▇█"
TEXT = "Tom has 23 coins. What is 23 + 45? Once upon a time a small fox lived near the river."


def title(text: str) -> None:
    print(f"\n--- {text}")


def loads(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, dict[int, Array]]:
    """Tokens per expert, by domain and layer."""
    found = {}
    with working("Counting tokens per expert") as status:
        for domain in EXAMINED:
            status.detail = domain
            texts = [sample(domain, "held-out", 1, i) for i in range(NUM_SAMPLES)]
            ids = [tokenizer.encode(one.prompt + one.answer) for one in texts]
            found[domain] = expert_load(checkpoint, ids)
    return found


def bars(load: Array) -> str:
    """An expert a block; the scale ends at three times the mean."""
    share = np.minimum(load / load.mean() / 3, 1)
    return "".join(STEPS[round(float(value) * (len(STEPS) - 1))] for value in share)


def distance(a: Array, b: Array) -> float:
    """Share of the load that would have to move to turn one into the other."""
    return float(np.abs(a / a.sum() - b / b.sum()).sum() / 2)


def show_routing(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """The first choice of every token of a text, in the last layer of the main model."""
    ids = tokenizer.encode(TEXT)
    walk = Walk(checkpoint, [ids])
    for layer_idx in range(checkpoint.config.num_hidden_layers):
        topk_idx = walk.run(layer_idx)
    assert topk_idx is not None
    words = [f"{tokenizer.token_text(i)}[{e}]" for i, e in zip(ids, topk_idx[:, 0], strict=True)]
    print(textwrap.fill(" ".join(words), 100, initial_indent="  ", subsequent_indent="  "))


def main() -> None:
    checkpoint = resolve_model("tiny")
    tokenizer = load_tokenizer(checkpoint.directory)
    assert tokenizer is not None
    found = loads(checkpoint, tokenizer)
    layers = [i for i in found[EXAMINED[0]] if i < checkpoint.config.num_hidden_layers]

    title("Step 1: load per expert, groups of four side by side")
    for layer_idx in layers:
        print(f"  layer {layer_idx}")
        for domain in EXAMINED:
            load = found[domain][layer_idx]
            print(f"    {domain:<11} |{bars(load)}| hottest: expert {load.argmax():2d}")

    title("Step 2: hottest over mean")
    print(f"  {'':<11}" + "".join(f"  layer {layer_idx}" for layer_idx in layers))
    for domain in EXAMINED:
        ratios = [found[domain][i].max() / found[domain][i].mean() for i in layers]
        print(f"  {domain:<11}" + "".join(f"{ratio:>9.2f}" for ratio in ratios))
    everything = [sum(found[domain][i] for domain in EXAMINED) for i in layers]
    print(f"  {'all':<11}" + "".join(f"{load.max() / load.mean():>9.2f}" for load in everything))
    skewed = [found[d][i].max() / found[d][i].mean() for d in EXAMINED for i in layers]
    print(
        f"  every domain is skewed, the hottest expert has at least 1.5 times the mean: {min(skewed) >= 1.5}"
    )
    is_evened = np.mean(skewed) > np.mean([load.max() / load.mean() for load in everything])
    print(f"  domains are more skewed than their sum: {is_evened}")

    title("Step 3: share of the load that differs between domains, last layer")
    print(f"  {'':<11}" + "".join(f"{domain:>12}" for domain in EXAMINED))
    for a in EXAMINED:
        row = [distance(found[a][layers[-1]], found[b][layers[-1]]) for b in EXAMINED]
        print(f"  {a:<11}" + "".join(f"{100 * value:>10.0f} %" for value in row))

    title("Step 4: every token's first choice in the last layer")
    show_routing(checkpoint, tokenizer)


if __name__ == "__main__":
    main()
