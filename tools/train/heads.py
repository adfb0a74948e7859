"""What a second MTP layer brings: tokens per decode step with one draft, and with two.

    .venv-train/bin/python tools/train/heads.py --model build/tiny

The second draft comes either from the first layer used once more, as one must with the one that DeepSeek
published, or from the layer trained for it (xDeepServe 4.6: 2.26 and 2.35 tokens per step). Answers are
the model's own greedy ones, made by the engine from held-out prompts; the drafts that speculation would have
made along them are computed in one pass, and the loop of draft and verification is replayed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from data import pack
from model import Model
from xdeepserve import LLM, SamplingParams
from xdeepserve.corpus import EXAMINED
from xdeepserve.evals.samples import examined

MAX_TOKENS = 224


def load(directory: Path) -> Model:
    """The exported checkpoint back into torch, experts stacked."""
    model = Model(json.loads((directory / "config.json").read_text()))
    stored = load_file(directory / "model.safetensors")
    state = {}
    for name, value in model.state_dict().items():
        if ".experts." in name:
            before, after = name.split(".experts.")
            state[name] = torch.stack([stored[f"{before}.experts.{e}.{after}"] for e in range(len(value))])
        else:
            state[name] = stored[name]
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.eval()


@torch.no_grad()
def drafts(model: Model, tokens: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """For each position: what layer 1 says of the token 2 ahead, and layers 1 and 2 of the token 3 ahead."""
    batch = pack([(list(tokens), 0)])
    hidden = model.hidden(batch)
    first = model.draft(0, hidden, batch.targets[0], batch)
    again = model.draft(0, first, batch.targets[1], batch)
    second = model.draft(1, first, batch.targets[1], batch)

    def best(h: Tensor) -> list[int]:
        return model.lm_head(h).argmax(dim=-1).tolist()

    return best(first), best(again), best(second)


def replay(tokens: Sequence[int], start: int, first: Sequence[int], second: Sequence[int] | None) -> int:
    """Decode steps for tokens[start:], whose first one came from the prefill."""
    position, steps = start, 0
    while position < len(tokens) - 1:
        steps += 1
        ahead = 1
        if tokens[position + 1] == first[position - 1]:
            ahead = 2
            if (
                second is not None
                and position + 2 < len(tokens)
                and tokens[position + 2] == second[position - 1]
            ):
                ahead = 3
        position += ahead
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=40, help="per domain")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(args.model), Tokenizer.from_file(str(args.model / "tokenizer.json"))
    totals = {domain: [0, 0, 0, 0] for domain in EXAMINED}
    with LLM(args.model, "monolithic", "fp32", overrides=["max_model_len=768"]) as llm:
        for domain in EXAMINED:
            prompts = [
                tokenizer.encode(examined(domain, i).prompt, add_special_tokens=False).ids
                for i in range(args.samples)
            ]
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                tokens = [*prompt, *output.outputs[0].token_ids]
                first, again, second = drafts(model, tokens)
                counts = totals[domain]
                counts[0] += len(tokens) - len(prompt) - 1
                for i, extra in enumerate((None, again, second)):
                    counts[i + 1] += replay(tokens, len(prompt), first, extra)
    print(f"{'tokens per step':<16}{'one layer':>12}{'used twice':>12}{'two layers':>12}")
    totals["all"] = [sum(column) for column in zip(*totals.values(), strict=True)]
    for domain, (tokens_made, *steps) in totals.items():
        print(f"{domain:<16}" + "".join(f"{tokens_made / count:>12.3f}" for count in steps))


if __name__ == "__main__":
    main()
