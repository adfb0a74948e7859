"""Structured output: the tokens allowed next in a choice. Grammars are those of the library llguidance.

A matcher follows one choice, token by token, on the host. What it allows next is a mask of one bit per token
id, and once the grammar is complete and admits no more, the end-of-sequence ids alone. Where the library
refuses a grammar, `reason` says why, in words for the author of the request.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.dp.written_keys import KeyVocabulary, WrittenKeys
from xdeepserve.errors import RequestError
from xdeepserve.model.canonical import Array

MAX_COMPILED = 64  # grammars that are kept, with what they have learnt about the vocabulary
# Where one is reached, the request fails, at once or later. Masks are computed while a step is planned, so
# that the limits bound what one choice may cost all others: the costliest grammar met within them, one letter
# 9,000 times, takes 7 ms to compile, off the event loop, and 1.2 ms for a mask on a core of Zen 5; a JSON
# schema 25 us.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=50_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarMatcher:
    """Position of a choice in its grammar, token by token.

    begins_after  the tokens that end the reasoning which the prompt has begun: the grammar holds for what
                  follows them. Empty: for all of the output
    keys          of the JSON in the text, if there is any; a key that is there comes again only where the
                  grammar leaves nothing else
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        begins_after: Sequence[int] = (),
        keys: WrittenKeys | None = None,
    ) -> None:
        self._matcher, self._vocab_size, self._awaited = matcher, vocab_size, tuple(begins_after)
        self._keys = keys
        self._latest: tuple[int, ...] = ()  # tokens of the reasoning, as many as are awaited

    def copy(self) -> GrammarMatcher:
        """Make an independent copy of the matcher."""
        keys = self._keys.copy() if self._keys else None
        other = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._awaited, keys)
        other._latest = self._latest
        return other

    def take(self, token_id: int) -> bool:
        """Advance by a single token. Returns False, with nothing changed, if the grammar forbids it."""
        if self._awaited:
            self._latest = (*self._latest, token_id)[-len(self._awaited) :]
            if self._latest == self._awaited:
                self._awaited = ()
            return True
        if self._matcher.is_stopped():  # only what ends a choice is behind the grammar's end
            mask = self.allowed()
            return mask is None or bool(mask[token_id])
        keys = self._keys.copy() if self._keys else None
        if keys is not None and not keys.take(token_id):
            mask = self.allowed()
            if mask is not None and not mask[token_id]:
                return False
        if self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._keys = keys
        return True

    def allowed(self) -> Array | None:
        """Return a mask of the tokens that may come next, bool [vocab]; None allows all."""
        if self._awaited:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        if self._keys is None:
            return mask
        new = mask.copy()
        for token_ids in self._keys.forbidden(mask):
            new[token_ids] = False
        return new if new.any() else mask

    @property
    def fault(self) -> str:
        """Reason why the matcher cannot go on; empty if it can."""
        if not self._matcher.is_error():
            return ""
        found = first_line(self._matcher.get_error())
        return f"structured output: the grammar is too complex to go on: {found}"


class Grammars:
    """Compiles and caches the grammars for one vocabulary.

    tokenizer_json  what `tokenizer.json` holds
    vocab_size      of the model, whose ids beyond the tokenizer's no grammar allows
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._compiled: OrderedDict[str, tuple[LLMatcher, WrittenKeys | None]] = OrderedDict()
        self._lock = threading.Lock()  # of that; not held while a grammar is compiled

    def matcher(self, wanted: StructuredOutputsParams, begins_after: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher at the beginning of a grammar. Raises RequestError if the grammar is invalid.

        A new grammar may take a while, without the interpreter's lock: another thread may compile it first.
        """
        key = wanted.key
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        if found is None:
            lark = wanted.lark
            matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # also fails where nothing at all may come first
            if matcher.is_error():
                told = reason(matcher.get_error(), wanted)
                raise RequestError(f"structured output: {told}", param="structured_outputs")
            found = matcher, WrittenKeys(self._key_vocabulary) if "%json" in lark else None
            with self._lock:
                self._compiled[key] = found
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        matcher, keys = found
        begun = keys.copy() if keys else None
        return GrammarMatcher(matcher.deep_copy(), self._tokenizer.vocab_size, begins_after, begun)

    @cached_property
    def _key_vocabulary(self) -> KeyVocabulary:
        """Make the tokens' roles in keys of JSON, when the first schema is compiled."""
        tokenizer = self._tokenizer
        return KeyVocabulary([tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)])


# All that the library knows of JSON Schema's formats; it refuses others, as it could not keep to them.
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")

_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")  # in a grammar, or what becomes one
_EXAMPLE = 'start: "yes" | "no"'
_IN_SCHEMA, _IN_REGEX = "failed to compile JSON schema: ", "regex parse error:"
_KEYWORDS = re.compile(r"^Unimplemented keys: (?P<names>\[.*\])$")
_FORMAT = re.compile(r"^Unknown format: (?P<name>.*)$")


def reason(message: str, wanted: StructuredOutputsParams) -> str:
    """Turn the library's message into one line that says why a grammar cannot be compiled."""
    first = first_line(message)
    if first == "NoExtensionBias":  # what the library says where no token may come first
        return "no text is allowed by it"
    if first.endswith(_IN_REGEX):  # then come lines that point into the expression, and the error
        errors = [line for line in message.splitlines() if line.startswith("error: ")]
        first = first.removesuffix(_IN_REGEX) + "".join(errors).removeprefix("error: ")
    stripped = _PLACE.sub("", first)[:300]
    if stripped.startswith(_IN_SCHEMA):
        return _of_schema(stripped.removeprefix(_IN_SCHEMA))
    if wanted.grammar is None:
        return stripped
    ebnf = ", not in EBNF with ::=" if "::=" in wanted.grammar else ""
    placed = _PLACE.sub(r"line \g<line>, column \g<column>: ", first)[:300]
    return f"{placed}; grammars are written in Lark{ebnf}: {_EXAMPLE}"


def first_line(message: str) -> str:
    """Return the first line of a library message that is not empty."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[0] if lines else "refused without a reason")[:300]


def _of_schema(message: str) -> str:
    if found := _KEYWORDS.match(message):
        return f"{', '.join(json.loads(found['names']))}: not supported in a JSON schema"
    if found := _FORMAT.match(message):
        return f"format {found['name']}: not supported in a JSON schema; known are {', '.join(FORMATS)}"
    if message.startswith("oneOf "):
        return "oneOf: supported only for schemas that types or constant texts tell apart; use anyOf"
    return f"JSON schema: {message.replace('Expected f64', 'Expected number')}"
