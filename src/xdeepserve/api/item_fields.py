"""Fields of items of /v1/responses and of their parts.

Some fields are read; some are only accepted because clients send an answer's fields back. All others are
refused by name.
"""

from __future__ import annotations

from typing import Any

from xdeepserve.api.requests import FedBack
from xdeepserve.api.structured import refuse_unknown

_OF_ALL = ("type", *FedBack.__struct_fields__)
_OF_CALLS = ("call_id", "name", "namespace", "caller", "created_by")
ITEM_FIELDS = {
    "message": (*_OF_ALL, "role", "content", "phase", "created_by"),
    "reasoning": (*_OF_ALL, "content", "summary", "encrypted_content", "created_by"),
    "function_call": (*_OF_ALL, *_OF_CALLS, "arguments"),
    "function_call_output": (*_OF_ALL, *_OF_CALLS, "output"),
}
_OF_TEXTS = (*_OF_ALL, "text", "prompt_cache_breakpoint")
PART_FIELDS = {  # of parts with text, by type
    "input_text": _OF_TEXTS,
    "output_text": (*_OF_TEXTS, "logprobs"),
    "text": (*_OF_TEXTS, "logprobs"),
    "refusal": (*_OF_ALL, "refusal"),
    "reasoning_text": _OF_TEXTS,
}


def item_kind(item: dict[str, Any]) -> Any:
    """Return an item's type, known or not; an item without one is a message."""
    kind = item.get("type")
    return "message" if kind is None else kind


def refuse_unknown_in_item(where: str, item: dict[str, Any]) -> None:
    """Raise RequestError for an unknown field of an item, or of a part of its summary."""
    refuse_unknown(where, item, ITEM_FIELDS[item_kind(item)])
    summary = item.get("summary")
    for j, part in enumerate(summary if isinstance(summary, list) else ()):
        refuse_unknown(f"{where}.summary[{j}]", part, _OF_TEXTS)
