"""Text of a user's own, to calibrate with or to be examined on."""

from __future__ import annotations

from pathlib import Path

from xdeepserve.errors import InputError


def paragraphs(file: Path, option: str) -> list[str]:
    """The paragraphs of a text. Raises InputError, which names the option that asked for it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{option} {file}: cannot be read: {error}") from None
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
