"""Fields of messages, their parts, calls and tools that no chat template shows: one table for all chats.

Templates write the fields that they know, and pass over all others. `SERVED` are those of OpenAI's API. A
field that would change the prompt (`CHANGES`), or is like a served one, is refused, by the endpoint
(api/routes/fields.py) as by `LLM.chat`. `OURS` and `HARMLESS` change nothing, nor does any other field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache, lru_cache
from typing import Any, NamedTuple

from xdeepserve.errors import RequestError, meant

MAX_NAME_CHARS = 100
MAX_KNOWN = 8  # fields of an object that a message lists
LIKE = 0.8  # share of letters in common above which one name is taken for a misspelt other
TEXT_ONLY = ": this model reads text only"


class Unserved(NamedTuple):
    """A field that would change the answer: values, beside null, that ask for nothing, and what to use."""

    neutral: tuple[Any, ...] = ()
    use: str = ""

    def is_neutral(self, value: Any) -> bool:
        """Whether a value asks for nothing. JSON has one type of numbers: 1 and 1.0 are equal, true is
        neither."""
        return any(value == each and (value is each or not isinstance(value, bool)) for each in self.neutral)


def rows(names: str, use: str = "", *neutral: Any) -> dict[str, Unserved]:
    """Make a row for each of some names."""
    return dict.fromkeys(names.split(), Unserved(neutral, use))


# Fields of an assistant's reasoning: those of this server, of DeepSeek, Ollama, LiteLLM, OpenRouter and
# GitHub Copilot.
REASONING = (
    *("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details"),
    "reasoning_text",
)
SERVED: Mapping[str, frozenset[str]] = {  # by the name of a type in api/openai/requests.py
    "ChatMessage": frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "refusal")).union(
        REASONING
    ),
    "ContentPart": frozenset(("type", "text", "refusal", "thinking")),
    "ToolCall": frozenset(("function", "id", "type")),
    "FunctionCall": frozenset(("name", "arguments")),
    "Tool": frozenset(("type", "function")),
    "FunctionDefinition": frozenset(("name", "description", "parameters", "strict")),
}
# Other names of a tool's schema, of a call's arguments, and of a message's content.
SCHEMAS = """args args_schema arguments input_schema inputs json_schema parameters parameters_json_schema
    params properties schema"""
ARGUMENTS, CONTENTS = "args arguments input parameters params", "output parts response result text"
MEDIA = rows("audio audio_url file file_data file_id file_url image image_url inline_data", TEXT_ONLY)
MEDIA |= rows("input_audio source video video_url", TEXT_ONLY)
CHANGES: Mapping[str, Mapping[str, Unserved]] = {
    "ChatMessage": {
        "function_call": Unserved(({},), "; use tool_calls"),
        **rows("attachments audio files images videos", TEXT_ONLY, []),
        **rows(CONTENTS, "; use content", "", []),
        **rows("partial prefix", "; use continue_final_message", False),
    },
    "ContentPart": MEDIA,
    "ToolCall": {"custom": Unserved()} | rows(f"name {ARGUMENTS}", "; use function"),
    "FunctionCall": rows(ARGUMENTS, "; use arguments"),
    "Tool": rows(f"custom description function_declarations name strict {SCHEMAS}", "; use function"),
    "FunctionDefinition": {
        **rows(SCHEMAS, "; use parameters"),
        "returns": Unserved(use=": describe it in description"),
    },
}
HARMLESS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Tool", "FunctionDefinition"), ("cache_control", "defer_loading")),
    "ChatMessage": ("cache_control", "finish_reason", "is_error", "timestamp", "usage", "metadata"),
    "ContentPart": ("cache_control", "prompt_cache_breakpoint"),
}
# What libraries keep beside an answer and send back with it. None is shown to a model.
_KEPT = ("annotations", "id", "parsed", "parsed_arguments", "provider_specific_fields", "status")
_HIDDEN = ("reasoning_opaque", "reasoning_signature", "thought_signature")  # what only its provider can read
OURS: Mapping[str, tuple[str, ...]] = {
    "ChatMessage": (*_KEPT, *_HIDDEN, "index", "type"),
    "ContentPart": (*_KEPT, "logprobs", "uuid", "signature", "data"),
    "ToolCall": (*_KEPT, "index", "cache_control", "extra_content"),
    "FunctionCall": (*_KEPT, "cache_control"),
}


def letters(name: str) -> str:
    """Return the letters that all spellings of a name share, as `stopSequences` and `stop_sequences` do."""
    return re.sub("[-_]", "", name[:MAX_NAME_CHARS]).lower()


class RefusedFields:
    """Fields of one type of objects that would change the answer, found by any spelling."""

    def __init__(self, changes: Mapping[str, Unserved]) -> None:
        self.names = frozenset(changes)
        self._by_letters = {letters(name): each for name, each in changes.items()}

    def asks_for_nothing(self, path: str, name: str, value: Any, served: frozenset[str]) -> bool:
        """Whether a field that is not among `served` is a known one whose value asks for nothing.

        Raises RequestError for a field that would change the answer, or is like a served one."""
        is_misspelt = letters(name) in _all_letters(served)
        unserved = None if is_misspelt else self._by_letters.get(letters(name))
        if unserved is not None and not unserved.is_neutral(value):
            raise RequestError(
                f"{path} is not supported{unserved.use}", param=path, code="unsupported_parameter"
            )
        if is_misspelt or (unserved is None and _is_like(name[:MAX_NAME_CHARS], self.names, served)):
            raise unknown_field(path, name, served)
        return unserved is not None


def unknown_field(path: str, name: str, served: frozenset[str]) -> RequestError:
    """Make the refusal of an unknown field, which names the one that may be meant."""
    near = meant(name, served) or f"; known are {', '.join(sorted(served))}" * (len(served) <= MAX_KNOWN)
    return RequestError(f"unknown field {path}{near}", param=path, code="unknown_parameter")


def check_fields(where: str, given: Mapping[str, Any], kind: str, *more: str) -> None:
    """Refuse fields of an object in a chat that would change the prompt and that no template shows.

    `kind` is the object's type in `SERVED`; it may also have the fields `more`. Raises RequestError.
    """
    served = SERVED[kind].union(more) if more else SERVED[kind]
    known = served.union(OURS.get(kind, ()), HARMLESS.get(kind, ()))
    for name, value in given.items():
        if name not in known and value is not None and isinstance(name, str):
            _refusals(kind).asks_for_nothing(f"{where}.{name[:MAX_NAME_CHARS]}", name, value, served)


@cache
def _refusals(kind: str) -> RefusedFields:
    return RefusedFields(CHANGES[kind])


@lru_cache(maxsize=4096)
def _is_like(name: str, refused: frozenset[str], served: frozenset[str]) -> bool:
    """Whether a name is a known one but for its spelling, as `temprature` is. One that is refused has about
    as many letters: `message_id` is not `message`."""
    name = name.lower()
    near = (each for each in refused if abs(len(each) - len(name)) <= 1)
    found = SequenceMatcher(b=name)
    for each in (*served, *near):
        found.set_seq1(each)
        if found.real_quick_ratio() > LIKE and found.quick_ratio() > LIKE and found.ratio() > LIKE:
            return True
    return False


@cache
def _all_letters(served: frozenset[str]) -> frozenset[str]:
    return frozenset(map(letters, served))
