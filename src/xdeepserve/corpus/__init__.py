"""Text for training and examining the model, written by a deterministic generator.

    sample("arithmetic", "held-out", seed=1, index=0)   one Sample, the same on every machine for ever
    domains: stories, arithmetic, recall, tools, code, echo, talk

Training and held-out text are disjoint by construction. Each sample has a key (the two numbers and the sign,
the pair asked for, the arguments of the call, ...), and the hash of the key decides its side.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from . import arithmetic, code, echo, recall, stories, talk, tools
from .chat import ASSISTANT, BEGIN, END, END_THINK, USER
from .sample import Draft, Sample, Split, is_held_out

__all__ = ["DOMAINS", "EXAMINED", "Sample", "Split", "sample"]

DOMAINS: dict[str, Callable[[Random], Draft]] = {
    "stories": stories.draw,
    "arithmetic": arithmetic.draw,
    "recall": recall.draw,
    "tools": tools.draw,
    "code": code.draw,
    "echo": echo.draw,
    "talk": talk.draw,
}
HELPFUL = "You are a helpful assistant."
EXAMINED = ("stories", "arithmetic", "recall", "tools", "code")  # have held-out samples


def sample(domain: str, split: Split, seed: int, index: int) -> Sample:
    """Generate sample number `index` of a domain and a side of the split; independent of all other samples."""
    if split == "held-out" and domain not in EXAMINED:
        raise ValueError(f"domain {domain} has no held-out samples")
    rng = Random(f"{seed}/{domain}/{split}/{index}")
    while True:
        draft = DOMAINS[domain](rng)
        if is_held_out(draft.key) == (split == "held-out"):
            return Sample(domain=domain, prompt=_in_context(rng, draft.prompt), answer=draft.answer)


def _in_context(rng: Random, prompt: str) -> str:
    """Give a chat a system message, or an earlier exchange, now and then."""
    if USER not in prompt:
        return prompt
    system, user = prompt.removeprefix(BEGIN).split(USER, 1)
    if rng.random() < 0.1:
        system = HELPFUL + ("\n\n" + system if system else "")
    if rng.random() < 0.1:
        before = DOMAINS[rng.choice(("talk", "talk", "arithmetic"))](rng)
        if before.prompt.startswith(BEGIN + USER) and not is_held_out(before.key):
            question = before.prompt.removeprefix(BEGIN + USER).removesuffix(ASSISTANT)
            reply = before.answer.removesuffix(END).split(END_THINK)[-1]
            user = f"{question}{ASSISTANT}{reply}{END}{USER}{user}"
    return f"{BEGIN}{system}{USER}{user}"
