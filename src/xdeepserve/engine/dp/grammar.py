"""Structured output: the tokens allowed next in a choice. Grammars are those of the library llguidance.

A matcher follows one choice, token by token, on the host. It gives a mask of the tokens allowed next, one bit
per token id. Once the grammar is complete and admits no more, only the end-of-sequence ids are allowed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from xdeepserve.engine.dp.grammar_errors import first_line, reason
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
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
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, begins_after: Sequence[int] = ()) -> None:
        self._matcher, self._vocab_size, self._awaited = matcher, vocab_size, tuple(begins_after)
        self._latest: tuple[int, ...] = ()  # tokens of the reasoning, as many as are awaited

    def copy(self) -> GrammarMatcher:
        """Make an independent copy of the matcher."""
        other = GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._awaited)
        other._latest = self._latest
        return other

    def take(self, token_id: int) -> bool:
        """Advance by a single token. Returns False, with nothing changed, if the grammar forbids it."""
        if self._awaited:
            self._latest = (*self._latest, token_id)[-len(self._awaited) :]
            if self._latest == self._awaited:
                self._awaited = ()
            return True
        if self._matcher.is_stopped():
            return True  # whatever ends a choice is behind the grammar's end
        return self._matcher.try_consume_tokens([token_id]) == 1

    def allowed(self) -> Array | None:
        """Return a mask of the tokens that may come next, bool [vocab]; None allows all."""
        if self._awaited:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

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
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of that; not held while a grammar is compiled

    def matcher(self, wanted: StructuredOutputsParams, begins_after: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher at the beginning of a grammar. Raises RequestError if the grammar is invalid.

        A new grammar may take a while, without the interpreter's lock: another thread may compile it first.
        """
        key = wanted.key
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, wanted.lark, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # also fails where nothing at all may come first
            if matcher.is_error():
                found = reason(matcher.get_error(), wanted)
                raise RequestError(f"structured output: {found}", param="structured_outputs")
            with self._lock:
                self._compiled[key] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return GrammarMatcher(matcher.deep_copy(), self._tokenizer.vocab_size, begins_after)
