"""Results of a generator: a prompt, its answer, and the side of the split of the pair."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from xdeepserve.reading import read_text

Split = Literal["train", "held-out"]
HELD_OUT_SHARE = 26  # of 256 keys


class Sample(msgspec.Struct, frozen=True):
    """A text in two parts. `prompt + answer` is a training document, with special tokens spelled out."""

    domain: str
    prompt: str
    answer: str


class Draft(msgspec.Struct, frozen=True):
    """A sample and the facts that decide its split; two samples with the same key are on the same side."""

    key: tuple[object, ...]
    prompt: str
    answer: str


def is_held_out(key: tuple[object, ...]) -> bool:
    """Whether samples with a key are kept from training: a tenth of all keys, by hash."""
    text = "|".join(str(part) for part in key)
    return hashlib.sha256(text.encode()).digest()[0] < HELD_OUT_SHARE


# Text of a user's own, to calibrate with or to be examined on.


def paragraphs(file: Path, option: str) -> list[str]:
    """Split a text file into paragraphs. Raises InputError, which names the option that asked for the file."""
    text = read_text(file, f"{option} {file}")
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]


# The words that the generators choose from. Few, and mostly single tokens of the trained tokenizer.

SHE = (
    "Anna Bella Clara Daisy Emma Fiona Grace Hanna Ida Julia Kate Lily Mia Nora Olive Rosa Sara Tina Vera Zoe"
).split()
HE = (
    "Adam Ben Carl Dan Eric Finn George Henry Ivan Jack Karl Leo Max Nick Oscar Paul Robin Sam Tom Victor"
).split()
NAMES = sorted(SHE + HE)

ANIMALS = "fox bear rabbit mouse hen cat dog frog duck goat horse pig sheep tiger turtle wolf".split()
COLOURS = "red blue green yellow white black brown golden silver purple".split()
PLACES = "forest river hill garden lake village meadow farm harbour mountain".split()
THINGS = "ball lamp book cup drum kite key map ring box bell hat boat coin clock basket".split()
FOODS = "bread soup honey cheese cake jam rice corn fruit fish".split()
FRUITS = "apple pear plum nut lemon".split()  # these can be counted
NATURES = "small brave kind clever shy happy curious gentle lazy proud".split()
CITIES = (
    "Berlin Cairo Dublin Lima London Madrid Oslo Paris Prague Rome Tokyo Vienna Boston Delhi Geneva Lisbon"
).split()
SONGS = "Moonlight Summer Rain Morning Ocean Winter Sunrise Thunder".split()
WORDS = sorted(ANIMALS + THINGS + FRUITS + "stone tree star cloud snow fire wind sand leaf gold".split())
