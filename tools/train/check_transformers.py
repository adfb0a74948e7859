"""Hold the trained model beside Hugging Face transformers, and keep what it said for the tests.

    .venv-train/bin/python tools/train/check_transformers.py --model build/tiny [--write FILE]

transformers loads the directory as any other. In float32: logits of the last position and greedy tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xdeepserve.corpus import sample
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.reference import Reference

TOLERANCE = 2e-3
NUM_TOKENS = 24
DOMAINS = ("stories", "arithmetic", "recall", "tools")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--write", type=Path, help="keep prompts, logits and tokens here")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    reference = Reference(open_checkpoint(args.model), "fp32")
    kept: dict[str, np.ndarray] = {}
    for domain in DOMAINS:
        text = sample(domain, "held-out", 2, 0).prompt or "Once upon a time"
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            if len(ids) == len(prompt):
                kept[f"{domain}.logits"] = logits.numpy()
            ids.append(int(logits.argmax()))
        kept[f"{domain}.prompt"] = np.array(prompt, np.int32)
        kept[f"{domain}.tokens"] = np.array(ids[len(prompt) :], np.int32)
        difference = float(np.abs(reference.logits(prompt)[-1] - kept[f"{domain}.logits"]).max())
        print(f"{domain:<12} {len(prompt):>4} tokens, largest difference of a logit {difference:.1e}")
        if difference > TOLERANCE:
            raise SystemExit(f"{domain}: more than {TOLERANCE}")
    if args.write is not None:
        np.savez_compressed(args.write, **kept)


if __name__ == "__main__":
    main()
