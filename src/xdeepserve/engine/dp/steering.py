"""Edits of logits by a choice's parameters and the tokens before: penalties, biases, forbidden tokens.

The host sends the edits of each logit row to the die with the step's plan, and the die applies them
(`sampling.edit`). Edits of a row behind a draft assume that the draft is accepted. If a grammar forbids a
draft, the row before it cannot draw it. So the draft is rejected, and the rows behind it are void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.plans import LogitEdits
from xdeepserve.model.canonical import Array

if TYPE_CHECKING:
    from xdeepserve.engine.dp.grammar import GrammarMatcher

Mask = Array  # bool [vocab]: may be drawn
NOTHING_LEFT = (
    "structured output: allowed_token_ids, bad_words and min_tokens leave none of the tokens with which the "
    "text could go on"
)


class Steering:
    """Edits the logits of a choice by its parameters and its position in a grammar.

    ends       ids that end the choice; not drawn before `min_tokens`
    eos        drawn where all else is forbidden
    bad_words  as token ids, each in every way that it may be spelt
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        ends: frozenset[int] = frozenset(),
        eos: frozenset[int] = frozenset(),
        bad_words: Sequence[Sequence[int]] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.params, self.vocab_size, self.num_prompt = params, vocab_size, len(prompt)
        self._ends, self._eos = sorted(ends), sorted(eos)
        self._bad_words = [tuple(word) for word in bad_words]
        self._matcher, self._num_taken = matcher, 0
        self._fault = ""
        self._in_prompt = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self._allowed: Mask | None = None
        if params.allowed_token_ids is not None:
            self._allowed = np.zeros(vocab_size, np.bool_)
            self._allowed[list(params.allowed_token_ids)] = True

    @staticmethod
    def is_wanted(params: SamplingParams) -> bool:
        """Whether the parameters of a choice, apart from a grammar, change logits at all."""
        is_narrowed = params.allowed_token_ids is not None or params.bad_words or params.min_tokens
        return bool(is_narrowed or params.logit_bias or _has_penalties(params))

    @property
    def looks_back(self) -> bool:
        """Whether the edits of a row depend on the tokens before it, which must then be known."""
        has_grammar = self._matcher is not None
        return bool(has_grammar or self._bad_words or self.params.min_tokens or _has_penalties(self.params))

    def edits(self, token_ids: Sequence[int], drafts: Sequence[int], num_rows: int) -> list[LogitEdits]:
        """Return the edits for the row after `token_ids` and those after its drafts: `num_rows` in all.

        Where nothing looks back, token ids and drafts do not matter.
        """
        if not self.looks_back:
            return [self._row(Counter(), self._packed(self._allowed))] * num_rows
        output = list(token_ids[self.num_prompt :])
        masks = self._grammar_masks(output, drafts)
        rows = []
        for number in range(num_rows):
            before = [*output, *drafts[:number]]
            rows.append(self._behind(before, masks[number]))
        return rows

    def _behind(self, before: Sequence[int], by_grammar: Mask | None) -> LogitEdits:
        """Return the edits for the row after the output `before`. If nothing may follow, the sequence ends;
        with an incomplete grammar that is a fault, which counts only if the row does."""
        if self._fault:
            return LogitEdits(fault=self._fault)
        mask = self._mask(before, by_grammar)
        if mask is not None and not mask.any():
            if by_grammar is not None and not by_grammar[self._eos].any():
                return LogitEdits(fault=NOTHING_LEFT)
            mask = mask.copy()
            mask[self._eos] = True
        return self._row(Counter(before), self._packed(mask))

    def _row(self, counts: Counter[int], allowed: bytes | None) -> LogitEdits:
        params = self.params
        repeats, counted = params.repetition_penalty != 1.0, _has_count_penalties(params)
        return LogitEdits(
            bias=params.logit_bias,
            repetition_penalty=params.repetition_penalty,
            seen=sorted(self._in_prompt | counts.keys()) if repeats else [],
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            counts=dict(counts) if counted else {},
            allowed=allowed,
        )

    def _mask(self, before: Sequence[int], by_grammar: Mask | None) -> Mask | None:
        """Return the mask of tokens that may follow the output `before`; None allows all."""
        params, mask = self.params, self._allowed
        too_short = self._ends if len(before) < params.min_tokens else []
        banned = [*too_short, *(word[-1] for word in self._bad_words if _would_complete(word, before))]
        if by_grammar is not None:
            mask = by_grammar if mask is None else by_grammar & mask
        if banned:
            mask = np.ones(self.vocab_size, np.bool_) if mask is None else mask.copy()
            mask[banned] = False
        return mask

    @staticmethod
    def _packed(mask: Mask | None) -> bytes | None:
        return None if mask is None else np.packbits(mask, bitorder="little").tobytes()

    def _grammar_masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[Mask | None]:
        """Return the grammar's masks for the row after the output and those after accepted drafts. Rows after
        a draft that the grammar forbids get None."""
        masks: list[Mask | None] = [None] * (1 + len(drafts))
        matcher = self._matcher
        if matcher is None:
            return masks
        for token_id in output[self._num_taken :]:
            if not matcher.take(token_id):
                unfit = f"structured output: token {token_id} does not fit the grammar"
                self._fault = self._fault or matcher.fault or unfit
        self._num_taken = len(output)
        masks[0] = matcher.allowed()
        ahead = matcher.copy() if drafts else matcher
        for number, draft in enumerate(drafts):
            if not ahead.take(draft):
                break
            masks[number + 1] = ahead.allowed()
        self._fault = self._fault or matcher.fault
        return masks


def _has_count_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or _has_count_penalties(params)


def _would_complete(word: Sequence[int], before: Sequence[int]) -> bool:
    """Whether the last token of `word` would complete it."""
    return len(word) <= len(before) + 1 and tuple(before[len(before) - len(word) + 1 :]) == tuple(word[:-1])
