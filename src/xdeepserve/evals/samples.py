"""Text for examining a model: the package's held-out samples, or paragraphs of a user's file."""

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
    """Draw `num_samples` samples of each domain. Raises InputError."""
    unknown = [domain for domain in domains if domain not in EXAMINED]
    if unknown or not domains:
        raise InputError(f"unknown domain {', '.join(unknown) or '(none)'}: known are {', '.join(EXAMINED)}")
    _check_number(num_samples)
    return [examined(domain, i) for domain in domains for i in range(num_samples)]


def examined(domain: str, index: int, split: Split = "held-out") -> Sample:
    """Return a sample with a prompt; a sample without one gets its first words as the prompt."""
    one = sample(domain, split, SEED, index)
    if one.prompt not in ("", chat.BEGIN):
        return one
    prompt, answer = _opened(one.answer)
    return Sample(domain, one.prompt + prompt, answer)


def of_file(file: Path, num_samples: int) -> list[Sample]:
    """Read the first `num_samples` paragraphs of a text as samples, with its name as the domain; long
    paragraphs are cut. Each prompt is the first words. Raises InputError if the file cannot be read or has no
    text behind these words."""
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
