"""Text of a user's own, to calibrate with or to be examined on."""

from __future__ import annotations

from pathlib import Path

from xdeepserve.reading import read_text


def paragraphs(file: Path, option: str) -> list[str]:
    """The paragraphs of a text. Raises InputError, which names the option that asked for it."""
    text = read_text(file, f"{option} {file}")
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
