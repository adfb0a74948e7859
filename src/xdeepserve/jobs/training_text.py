"""Files of examples, a JSON object a line, in OpenAI's two formats; and their token ids.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"prompt": "...", "completion": "..."}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from xdeepserve.errors import InputError, RequestError
from xdeepserve.model.tokenizer import Tokenizer
from xdeepserve.reading import read_line

MAX_TOKENS = 512  # of one example; what is behind is not read
HELD_OUT = 5  # one example in so many, the last ones, is to be examined on


class TrainingMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A turn of a conversation: role and content."""

    role: Literal["system", "user", "assistant"]
    content: str


class TrainingLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the file: a conversation, or a text in two parts."""

    messages: list[TrainingMessage] | None = None
    prompt: str | None = None
    completion: str | None = None

    def __post_init__(self) -> None:
        is_text = self.prompt is not None and self.completion is not None
        is_chat = bool(self.messages) and self.prompt is None and self.completion is None
        if is_chat == (is_text and self.messages is None):
            raise ValueError("give messages, or else prompt and completion")


def read_lines(path: Path) -> Iterator[TrainingLine]:
    """Yield all lines except empty ones. Raises InputError with the number of a bad line, or if there are no
    examples."""
    number = num_found = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            yield read_line(line, TrainingLine, "", number, _refusal)
            num_found += 1
    if not num_found:
        raise _refusal("the file has no examples")


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="file", code="invalid_jsonl")


def token_ids(lines: Iterator[TrainingLine], tokenizer: Tokenizer, limit: int) -> list[list[int]]:
    """Return the first `limit` tokens of each example; conversations use the model's template. Raises
    InputError."""
    found = []
    for line in lines:
        if line.messages is None:
            ids = tokenizer.encode(f"{line.prompt}{line.completion}")
        else:
            messages = [{"role": each.role, "content": each.content} for each in line.messages]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, is_isolated=True)
        found.append(ids[:limit])
    return found


def split(examples: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Split the examples: the last fifth is held out for evaluation. Raises InputError for a single
    example."""
    if len(examples) < 2:
        raise InputError("the training file has one example: two are needed, one to examine on")
    num_held_out = max(1, len(examples) // HELD_OUT)
    return examples[:-num_held_out], examples[-num_held_out:]
