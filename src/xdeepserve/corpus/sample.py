"""What a generator makes: a prompt, its answer, and on which side of the split the pair lies."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Split = Literal["train", "held-out"]
HELD_OUT_SHARE = 26  # of 256 keys


class Sample(msgspec.Struct, frozen=True):
    """A text in two parts. `prompt + answer` is a training document, special tokens spelled out."""

    domain: str
    prompt: str
    answer: str


class Draft(msgspec.Struct, frozen=True):
    """A sample and the facts that decide its split; two samples with the same key are on the same side."""

    key: tuple[object, ...]
    prompt: str
    answer: str


def is_held_out(key: tuple[object, ...]) -> bool:
    """Whether samples with this key are kept from training: a tenth of all keys, by their hash."""
    text = "|".join(str(part) for part in key)
    return hashlib.sha256(text.encode()).digest()[0] < HELD_OUT_SHARE
