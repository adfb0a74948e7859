"""Echo: words and numbers to repeat, the plainest use of the context, from which the others are learned."""

from __future__ import annotations

from random import Random

from .chat import BEGIN, END, render
from .sample import CITIES, COLOURS, NAMES, WORDS, Draft

REQUESTS = ("Repeat: {text}", "Say this again: {text}", "Echo: {text}")


def draw(rng: Random) -> Draft:
    """Draw 4 to 24 words, names and numbers in any order."""
    parts = [_part(rng) for _ in range(rng.randint(4, 24))]
    text = " ".join(parts)
    if rng.random() < 0.3:
        return Draft(
            key=("echo", text), prompt=f"{BEGIN if rng.random() < 0.5 else ''}{text}\n", answer=text + END
        )
    return Draft(key=("echo", text), prompt=render(rng.choice(REQUESTS).format(text=text)), answer=text + END)


def _part(rng: Random) -> str:
    if rng.random() < 0.35:
        return str(rng.randint(0, 9) if rng.random() < 0.4 else rng.randint(10, 999))
    return rng.choice(rng.choice((WORDS, NAMES, COLOURS, CITIES)))
