"""Turns a request's parameters into edits of logits: words become token ids, schemas become grammars."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.steering import Steering
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.formats import is_reasoning
from xdeepserve.engine.serving.request import OutputFormats, Parse
from xdeepserve.engine.serving.tool_grammar import tool_grammar
from xdeepserve.errors import RequestError
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tokenizer import Tokenizer
from xdeepserve.parsing.tool_formats import THINK_END

if TYPE_CHECKING:
    from xdeepserve.engine.dp.grammar import GrammarMatcher, Grammars


class Steersman:
    """Makes the `Steering` of choices, with the model's vocabulary.

    `draws` is False where tokens are dummies, which nothing steers.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer | None, formats: OutputFormats, draws: bool = True
    ) -> None:
        self._config, self._tokenizer, self._formats = config, tokenizer, formats
        self._draws = draws

    @cached_property
    def _grammars(self) -> Grammars:
        return grammars_of(self._config, self._tokenizer)

    def prepare(self, params: SamplingParams, parse: Parse) -> None:
        """Compile the grammar of a request, if there is any. Raises RequestError."""
        form = self._form(params, parse)
        if form is not None:
            self._grammars.matcher(form)

    def _form(self, params: SamplingParams, parse: Parse) -> StructuredOutputsParams | None:
        """Return the form required of a choice's text, including its tool calls."""
        tokenizer, form = self._tokenizer, self._formats.tools
        if parse.tool_rules is None or tokenizer is None or form is None:
            return params.structured_outputs
        return tool_grammar(form, parse.tool_rules, params.structured_outputs, tokenizer.token_to_id)

    def steer(self, params: SamplingParams, prompt: Sequence[int], parse: Parse) -> Steering | None:
        """Return the logit edits of a choice; None if its logits stay unchanged. Raises RequestError."""
        if not self._draws:
            return None
        matcher = self._matcher(params, prompt, parse)
        if matcher is None and not Steering.is_wanted(params):
            return None
        eos = frozenset(self._config.eos_token_ids)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        return Steering(
            params,
            prompt,
            self._config.vocab_size,
            ends=ends,
            eos=eos,
            bad_words=self._spellings(params.bad_words),
            matcher=matcher,
        )

    def _matcher(self, params: SamplingParams, prompt: Sequence[int], parse: Parse) -> GrammarMatcher | None:
        """Return a matcher for the required form, if any. If the prompt has begun reasoning, the grammar
        holds for the text after it."""
        form = self._form(params, parse)
        if form is None:
            return None
        tokenizer, reasons = self._tokenizer, parse.reasoning and self._formats.reasoning
        if tokenizer is not None and reasons and is_reasoning(parse, tokenizer, prompt):
            return self._grammars.matcher(form, tokenizer.encode(THINK_END))
        return self._grammars.matcher(form)

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Spell words as token ids, at the beginning of a text and behind a space, as vLLM does."""
        if not words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this model has none", param="bad_words")
        spelt = [self._tokenizer.encode(text) for word in words for text in (word, f" {word.lstrip()}")]
        return [ids for number, ids in enumerate(spelt) if ids and ids not in spelt[:number]]


def grammars_of(config: ModelConfig, tokenizer: Tokenizer | None) -> Grammars:
    """Return the grammars of a model's vocabulary. Raises RequestError without tokenizer or end token."""
    eos = config.eos_token_ids
    if tokenizer is None or not eos:
        lack = "no tokenizer" if tokenizer is None else "no end-of-sequence token"
        raise RequestError(
            f"structured output is impossible: this model has {lack}", param="structured_outputs"
        )
    from xdeepserve.engine.dp.grammar import Grammars  # a library that only such requests need

    return Grammars(tokenizer.to_json(), config.vocab_size, sorted(eos))
