"""What a request asks for, what comes back, and the engine in between: the contract of the serving layer.

The endpoint, the `LLM` facade and the command line speak only these types. Names follow vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from xdeepserve.engine.deployment import ToolFormat
from xdeepserve.engine.health.heartbeat import TEHealth
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_CACHE_KEY_CHARS = 256
MAX_TEMPERATURE = 1e30  # dies divide logits by it in float32, where more would be infinite
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1  # what a die's memory and a message hold


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, and when to stop. Checked on construction; raises RequestError naming the parameter.

    Every number is within what a die computes with, so that no step of others can fail on it.

    max_tokens            new tokens at most per choice; None: as many as the context has room for
    temperature           0 is greedy; at most MAX_TEMPERATURE
    top_p, top_k          nucleus and top-k truncation; 1.0 and 0 (or -1) are off; top_k is an int32
    seed                  of the counter-based random numbers, int64; None lets the engine choose
    n                     independent choices for the prompt
    stop                  texts that end a choice; a plain string or a list is accepted and made a tuple
    stop_token_ids        token ids that end a choice, beside the model's end-of-sequence ids
    ignore_eos            go on past end-of-sequence ids
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
    priority: int = 0
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        # The Struct is frozen for everyone else; construction may still bring its sequences into one form.
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        msgspec.structs.force_setattr(self, "stop", stop)
        stop_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        msgspec.structs.force_setattr(self, "stop_token_ids", stop_ids)
        self._check_numbers()
        self._check_stops()
        self._check_cache_key()

    def _check_numbers(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1, high=INT64_MAX, optional=True)
        _check_float("temperature", self.temperature)
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            span = f"between 0 and {MAX_TEMPERATURE:g}, found {_abridged(self.temperature)}"
            raise RequestError(f"temperature must lie {span}", param="temperature")
        _check_float("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must lie in (0, 1], found {_abridged(self.top_p)}", param="top_p")
        _check_int("top_k", self.top_k, low=-1, high=INT32_MAX)
        _check_int("seed", self.seed, low=-INT64_MAX - 1, high=INT64_MAX, optional=True)
        _check_int("n", self.n, low=1, high=MAX_N)
        _check_int("priority", self.priority, low=-INT64_MAX - 1, high=INT64_MAX)
        _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, found {_abridged(value)}", param=name)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop may hold at most {MAX_STOP_STRINGS} strings, found {len(self.stop)}", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, "
                    f"found {_abridged(text)}",
                    param="stop",
                )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, low=0, high=INT32_MAX)

    def _check_cache_key(self) -> None:
        key = self.prompt_cache_key
        if key is not None and not (isinstance(key, str) and 1 <= len(key) <= MAX_CACHE_KEY_CHARS):
            raise RequestError(
                f"prompt_cache_key must have 1 to {MAX_CACHE_KEY_CHARS} characters, found {_abridged(key)}",
                param="prompt_cache_key",
            )


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError:
        raise RequestError(f"{name} must be a list, found {_abridged(value)}", param=name) from None


def _check_float(name: str, value: object) -> None:
    # An integer may be too large to be compared with the largest float, or even to be printed.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        raise RequestError(f"{name} must be a finite number, found {_abridged(value)}", param=name)


def _check_int(name: str, value: object, *, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(
            f"{name} must be an integer, between {low} and {high}, found {_abridged(value)}", param=name
        )


def _abridged(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than some thousand digits
        return f"{type(value).__name__} with too many digits"
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} characters)"


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and the natural logarithm of its probability. `rank` counts from 1, the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class PositionLogprobs(msgspec.Struct, frozen=True):
    """The token that stands at one position, and the likeliest tokens there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Parse(msgspec.Struct, frozen=True, kw_only=True):
    """What to parse out of a choice's text, as far as the model's format is known (`AsyncEngine.formats`)."""

    reasoning: bool = False
    tools: bool = False


NOTHING = Parse()


class OutputFormats(msgspec.Struct, frozen=True, kw_only=True):
    """What can be parsed out of a model's text.

    reasoning     the model puts its reasoning between `<think>` and `</think>`
    tools         the format of its tool calls; None: unknown, or not to be parsed
    shows_tools   the chat template tells the model which tools there are
    """

    reasoning: bool = False
    tools: ToolFormat | None = None
    shows_tools: bool = False


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """Part of one call of a tool. The first delta of a call has its name; later ones add to its arguments.

    index       which call of the choice, from 0
    id          the model's own id for the call, on its first delta, where its format has one
    arguments   new text of the arguments: JSON if the model keeps to its format
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class OutputDelta(msgspec.Struct, kw_only=True):
    """One increment of one choice.

    index             the choice, 0..n-1
    text              new text; may be empty while a character or a possible stop string is incomplete;
                      where reasoning or tool calls are parsed, what is neither
    reasoning         new text of the reasoning, where it is parsed
    tool_calls        new parts of tool calls, where they are parsed; at most one per call
    token_ids         new token ids
    logprobs          one entry per token of `token_ids`, when asked for
    finish_reason     "stop" | "length" | "abort" on a choice's last delta, None before
    prompt_logprobs   one entry per prompt token, the first None; on the request's first delta, when asked for
    at_ns             virtual time at which the DP group handed it out
    metrics           on a choice's last delta, where the engine keeps them
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)
    at_ns: int = 0
    metrics: RequestMetrics | None = None


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How uneven the load of a layer's experts was in the latest time slice: hottest over mean, 1 if even."""

    te: str
    layer: int
    hottest_expert: float
    hottest_die: float  # with the replicas that there are


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for metrics. Counters only grow; `kv_cache_usage` is a fraction, 0 to 1."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # in tokens, as is the next
    prefix_cache_hits: int = 0
    num_cache_keys: int = 0  # kept now, over all DP groups
    cache_key_queries: int = 0  # requests with a key
    cache_key_hits: int = 0  # of these, those whose prompt began with what was kept under it
    num_prefetched_blocks: int = 0  # brought from the host's memory while their request waited
    rows_per_step: dict[int, int] = msgspec.field(default_factory=dict)  # token rows -> steps of DP groups
    num_drafted: tuple[int, ...] = ()  # MTP's drafts, by position in the step
    num_accepted: tuple[int, ...] = ()
    expert_load: tuple[ExpertLoad, ...] = ()  # of each TE and layer whose load is collected (EPLB)
    num_reconfigurations: int = 0  # times that replicas of experts have changed
    virtual_ns: int = 0  # virtual time since the pod started
    health: tuple[TEHealth, ...] = ()


class Tokenizer(Protocol):
    """Text to token ids and back; what serving needs of a model's tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS: the chat template adds it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, e.g. byte-level "Ġthe"; None where there is none."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation. Raises RequestError when the template refuses it."""


class Handle(Protocol):
    """A submitted request: an async iterator of OutputDelta that ends after every choice has finished.

    Leaving or cancelling the iteration early aborts the request and frees its KV blocks at once, and so
    does `abort`, which may be called any number of times, also after the end. A failure of the engine is
    raised by the iteration.
    """

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...

    def abort(self) -> None: ...


class AsyncEngine(Protocol):
    """What an endpoint needs of an engine."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the checkpoint has no tokenizer: such a model speaks token ids only."""

    @property
    def max_model_len(self) -> int:
        """Prompt and new tokens together, at most."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def formats(self) -> OutputFormats:
        """What `submit` can parse out of the model's text."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        parse: Parse = NOTHING,
        on_scheduled: Callable[[int], None] | None = None,
    ) -> Handle:
        """Check and enqueue a request. Raises RequestError; `check_request` is the part all engines share.

        `on_scheduled` is called, after `submit` has returned, with each choice that begins to be computed.
        OverloadedError: too many wait already.
        """

    def stats(self) -> EngineStats: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Abort what is left and end. Harmless when repeated."""

    def is_healthy(self) -> bool: ...

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine cannot serve any more; None if it can."""

    async def check_health(self) -> list[TEHealth]:
        """The state of every DP group. Those that have nothing to do are asked."""


def check_request(
    prompt_token_ids: Sequence[int], params: SamplingParams, *, max_model_len: int, vocab_size: int
) -> int:
    """How many tokens each choice may generate: `max_tokens`, or what the context has left if that is less.

    Raises RequestError for an empty prompt, a token id that is no integer or outside the vocabulary, a prompt
    that leaves no room for one new token, or more alternatives than the vocabulary has.
    """
    if len(prompt_token_ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    remaining = max_model_len - len(prompt_token_ids)
    if remaining < 1:
        raise RequestError(
            f"the model's context holds {max_model_len} tokens and the prompt has {len(prompt_token_ids)}, "
            "which leaves no room for a new token",
            param="prompt",
            code="context_length_exceeded",
        )
    for name, ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if type(token_id) is not int:
                raise RequestError(f"a token id must be an integer, found {_abridged(token_id)}", param=name)
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token id {_abridged(token_id)} is out of range: "
                    f"the vocabulary has ids 0 to {vocab_size - 1}",
                    param=name,
                )
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > vocab_size:
            raise RequestError(f"{name} is {wanted}, and the vocabulary has {vocab_size} tokens", param=name)
    return remaining if params.max_tokens is None else min(params.max_tokens, remaining)
