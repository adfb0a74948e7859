"""Parameters of a request's sampling and of its end: vLLM's `SamplingParams`."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np

from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.errors import RequestError, abridged

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 128
MAX_STOP_STRING_CHARS = 1024
MAX_CACHE_KEY_CHARS = 256
MAX_BAD_WORDS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
MAX_TEMPERATURE = 1e30  # dies divide logits by it in float32, where more would be infinite
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1  # what a die's memory and a message hold


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, and when to stop. Checked on construction; raises RequestError naming the parameter.

    Names and defaults are vLLM's. The endpoint has OpenAI's defaults, and `xdeepserve generate` is greedy, so
    that its text repeats. For the same text everywhere, give temperature and max_tokens:

    not given     SamplingParams   xdeepserve generate   /v1/completions   /v1/chat/completions
    max_tokens    16               16                    16                None
    temperature   1.0              0.0                   1.0               1.0
    top_p         1.0              1.0                   1.0               1.0
    top_k         0                0                     0                 0
    seed          None             0                     None              None

    Every number is within what a die computes with, so that no step of others can fail on it.

    max_tokens            new tokens at most per choice; None: as many as the context has room for
    temperature           0 is greedy; at most MAX_TEMPERATURE
    top_p, top_k          nucleus and top-k truncation; 1.0 and 0 (or -1) are off; top_k is an int32
    seed                  of the counter-based random numbers, int64; None lets the engine choose
    n                     independent choices for the prompt
    stop                  texts that end a choice; a plain string or a list is accepted and made a tuple
    stop_token_ids        token ids that end a choice, beside the model's end-of-sequence ids
    ignore_eos            go on past end-of-sequence ids
    min_tokens            before so many new tokens nothing ends a choice: no end-of-sequence or stop id is
                          drawn, and stop strings are not looked for
    min_p                 in [0, 1]: drop tokens that are less likely than so many times the likeliest; 0: off
    presence_penalty      -2 to 2: subtracted from the logits of tokens that the output has already
    frequency_penalty     -2 to 2: the same, times how often it has them
    repetition_penalty    of tokens in prompt or output: divides positive logits, multiplies others; 1: off
    logit_bias            token id -> -100 to 100, added to its logit
    bad_words             texts that shall not be written; what would complete one is not drawn
    allowed_token_ids     draw from these alone; None: from all
    structured_outputs    what the output has to look like
    logprobs              how many top alternatives to report per new token; 0: the chosen one only
    prompt_logprobs       the same for every prompt token but the first
    priority              lower goes first; of equals, who came first
    prompt_cache_key      of a conversation or a common beginning of prompts: the engine keeps what it has
                          computed of it under this key, sends requests with the same key where that is, and
                          fetches it from the host's memory while they wait. It changes no token
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    priority: int = 0
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        # The Struct is frozen for everyone else; construction may still bring its values into one form.
        for name in self.__struct_fields__:
            msgspec.structs.force_setattr(self, name, _plain(getattr(self, name)))
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        msgspec.structs.force_setattr(self, "stop", stop)
        stop_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        msgspec.structs.force_setattr(self, "stop_token_ids", stop_ids)
        msgspec.structs.force_setattr(self, "bad_words", _as_tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids)
            msgspec.structs.force_setattr(self, "allowed_token_ids", allowed)
        if isinstance(self.logit_bias, dict):
            bias = {_plain(token_id): _plain(value) for token_id, value in self.logit_bias.items()}
            msgspec.structs.force_setattr(self, "logit_bias", bias)
        self._check_numbers()
        self._check_stops()
        self._check_choice_of_tokens()
        self._check_cache_key()

    def _check_numbers(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1, optional=True)  # cut to the context
        _check_float("temperature", self.temperature)
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            span = f"0 or more, {MAX_TEMPERATURE:g} at most, found {abridged(self.temperature)}"
            raise RequestError(f"temperature must be {span}", param="temperature")
        for name, low, high in (
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ):
            _check_within(name, getattr(self, name), low, high)
        _check_float("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must lie in (0, 1], found {abridged(self.top_p)}", param="top_p")
        _check_int("top_k", self.top_k, low=-1, high=INT32_MAX)
        _check_int("min_tokens", self.min_tokens, low=0, high=INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            asked = f"found min_tokens={self.min_tokens} and max_tokens={abridged(self.max_tokens)}"
            raise RequestError(f"min_tokens must not be above max_tokens, {asked}", param="min_tokens")
        _check_int("seed", self.seed, low=-INT64_MAX - 1, high=INT64_MAX, optional=True)
        _check_int("n", self.n, low=1, high=MAX_N)
        _check_int("priority", self.priority, low=-INT64_MAX - 1, high=INT64_MAX)
        _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, found {abridged(value)}", param=name)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop may hold at most {MAX_STOP_STRINGS} strings, found {len(self.stop)}", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, "
                    f"found {abridged(text)}",
                    param="stop",
                )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, low=0, high=INT32_MAX)

    def _check_choice_of_tokens(self) -> None:
        """Check the parameters for restricting or biasing the tokens to be drawn."""
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words may hold at most {MAX_BAD_WORDS} texts, found {len(self.bad_words)}",
                param="bad_words",
            )
        for text in self.bad_words:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each of bad_words must have 1 to {MAX_STOP_STRING_CHARS} characters, "
                    f"found {abridged(text)}",
                    param="bad_words",
                )
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        for token_id in self.allowed_token_ids or ():
            _check_int("allowed_token_ids", token_id, low=0, high=INT32_MAX)
        if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias must be an object of at most {MAX_BIASES} token ids", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, low=0, high=INT32_MAX)
            _check_within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, found {abridged(wanted)}",
                param="structured_outputs",
            )

    def _check_cache_key(self) -> None:
        key = self.prompt_cache_key
        if key is not None and not (isinstance(key, str) and 1 <= len(key) <= MAX_CACHE_KEY_CHARS):
            raise RequestError(
                f"prompt_cache_key must have 1 to {MAX_CACHE_KEY_CHARS} characters, found {abridged(key)}",
                param="prompt_cache_key",
            )


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(_plain(each) for each in (() if value is None else value))
    except TypeError:
        raise RequestError(f"{name} must be a list, found {abridged(value)}", param=name) from None


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as the Python number or text that it holds; other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _check_float(name: str, value: object) -> None:
    # An integer may be too large to be compared with the largest float, or even to be printed.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        raise RequestError(f"{name} must be a finite number, found {abridged(value)}", param=name)


def _check_within(name: str, value: float, low: float, high: float) -> None:
    _check_float(name, value)
    if not low <= value <= high:
        span = f"between {low:g} and {high:g}"
        raise RequestError(f"{name} must be {span}, found {abridged(value)}", param=name)


def _check_int(
    name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> None:
    if value is None and optional:
        return
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        span = f"{low} or more"
        if high is not None:
            span = f"between {low} and {high}" if high < INT32_MAX else f"{span}, {high} at most"
        raise RequestError(f"{name} must be an integer, {span}, found {abridged(value)}", param=name)
