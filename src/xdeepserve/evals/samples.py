"""Which text a model is examined on: the package's held-out samples, or paragraphs of a user's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xdeepserve.corpus import EXAMINED, Sample, Split, chat, sample
from xdeepserve.corpus.sample import paragraphs
from xdeepserve.errors import InputError

SEED = 11  # of the held-out samples
OPENING = 4  # words that a text begins with, to say what is asked for
PIECE = 120  # words: a longer paragraph is several samples


def held_out(domains: Sequence[str] = EXAMINED, num_samples: int = 40) -> list[Sample]:
    """So many samples of each domain. Raises InputError."""
    unknown = [domain for domain in domains if domain not in EXAMINED]
    if unknown or not domains:
        raise InputError(f"unknown domain {', '.join(unknown) or '(none)'}: known are {', '.join(EXAMINED)}")
    _check_number(num_samples)
    return [examined(domain, i) for domain in domains for i in range(num_samples)]


def examined(domain: str, index: int, split: Split = "held-out") -> Sample:
    """A sample; one that begins with nothing is given its first words, to say what is asked for."""
    one = sample(domain, split, SEED, index)
    if one.prompt not in ("", chat.BEGIN):
        return one
    prompt, answer = _opened(one.answer)
    return Sample(domain, one.prompt + prompt, answer)


def of_file(file: Path, num_samples: int) -> list[Sample]:
    """The first `num_samples` paragraphs of a text, its name as the domain, long ones in pieces; each begins
    with its first words. Raises InputError if the file cannot be read or has nothing to go on with.
    """
    _check_number(num_samples)
    found = []
    for paragraph in paragraphs(file, "--text"):
        words = paragraph.split(" ")
        pieces = [" ".join(words[i : i + PIECE]) for i in range(0, len(words), PIECE)]
        found += [Sample(file.name, *_opened(piece)) for piece in pieces if piece.count(" ") >= OPENING]
    if not found:
        raise InputError(f"--text {file}: no paragraph has more than {OPENING} words")
    return found[:num_samples]


def _opened(text: str) -> tuple[str, str]:
    start = " ".join(text.split(" ")[:OPENING])
    return start, text[len(start) :]


def _check_number(num_samples: int) -> None:
    if num_samples < 1:
        raise InputError(f"samples must be at least 1, found {num_samples}")
