"""Batches of whole documents, a pure function of (seed, step)."""

from __future__ import annotations

from random import Random

import torch
from tokenizers import Tokenizer

from model import Batch, Buckets
from xdeepserve.corpus import sample

# Share of documents, chosen so that stories, sums and tool calls have about the same share of tokens.
MIX = {
    "stories": 0.21,
    "arithmetic": 0.34,
    "recall": 0.12,
    "tools": 0.16,
    "code": 0.06,
    "echo": 0.09,
    "talk": 0.02,
}
# One token of a prompt in this many is learned; most of them are drawn at random and cannot be foreseen.
PROMPT_EVERY = 10
NUM_BUCKETS = 6


def make_batch(tokenizer: Tokenizer, seed: int, step: int, num_documents: int) -> Batch:
    """`num_documents` samples in the proportions of MIX."""
    rng = Random(f"{seed}/batch/{step}")
    domains = rng.choices(list(MIX), list(MIX.values()), k=num_documents)
    documents = []
    for i, domain in enumerate(domains):
        one = sample(domain, "train", seed, step * num_documents + i)
        prompt = tokenizer.encode(one.prompt, add_special_tokens=False).ids
        answer = tokenizer.encode(one.answer, add_special_tokens=False).ids
        documents.append((prompt + answer, len(prompt)))
    return pack(documents)


def pack(documents: list[tuple[list[int], int]]) -> Batch:
    """Documents (token ids, length of the prompt) back to back, shortest first."""
    documents = sorted(documents, key=lambda document: len(document[0]))
    ids, positions, starts = [], [], []
    targets: list[list[int]] = [[], [], []]
    weights: list[list[float]] = [[], [], []]
    for tokens, prompt in documents:
        starts.append(len(ids))
        ids += tokens
        positions += range(len(tokens))
        for ahead in range(3):
            for i in range(len(tokens)):
                target = i + 1 + ahead
                is_inside = target < len(tokens)
                targets[ahead].append(tokens[target] if is_inside else 0)
                weights[ahead].append(_weight(ahead, i, target >= prompt) if is_inside else 0.0)
    return Batch(
        ids=torch.tensor(ids),
        targets=torch.tensor(targets),
        weights=torch.tensor(weights),
        positions=torch.tensor(positions),
        buckets=_buckets([len(tokens) for tokens, _ in documents], starts, len(ids)),
    )


def _weight(ahead: int, position: int, is_answer: bool) -> float:
    """Drafts are only made of answers, so MTP learns from nothing else."""
    is_learned = is_answer or (ahead == 0 and position % PROMPT_EVERY == 0)
    return 1.0 if is_learned else 0.0


def _buckets(lengths: list[int], starts: list[int], num_rows: int) -> Buckets:
    """Cut the sorted documents into buckets of about the same number of tokens."""
    shapes, rows, places = [], [], [0] * num_rows
    first, used = 0, 0
    for i, length in enumerate(lengths):
        used += length
        if i + 1 < len(lengths) and used < num_rows / NUM_BUCKETS:
            continue
        for start, n in zip(starts[first : i + 1], lengths[first : i + 1], strict=True):
            places[start : start + n] = range(len(rows), len(rows) + n)
            rows += [*range(start, start + n), *[num_rows] * (length - n)]
        shapes.append((i + 1 - first, length))
        first, used = i + 1, 0
    return Buckets(shapes, torch.tensor(rows), torch.tensor(places))
