"""Common parts of handlers: the engine, its metrics, and the first checks on a request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from xdeepserve.api.answers.generation import GENERATION, Generation
from xdeepserve.api.answers.logprobs import IdNamer, TokenNamer
from xdeepserve.api.openai.requests import CompletionRequest, GenerationRequest
from xdeepserve.api.openai.response_store import ResponseStore
from xdeepserve.api.openai.structured import note_unread_words
from xdeepserve.api.server.defaults import MAX_TEMPERATURE, checkpoint_defaults
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.api.server.metrics import Metrics
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.request import NOTHING, AsyncEngine, Parse, ServingTokenizer
from xdeepserve.errors import RequestError, abridged

MAX_CHOICES = 1024
MAX_NOTED = 1000  # ignored fields, each with a line of the log
MAX_REQUEST_ID_CHARS = 128
MAX_NAME_CHARS = 64  # of a model's name, as an error shows it

log = logging.getLogger("xdeepserve.api")

# Sampling fields that each endpoint decides for itself; all others stand in a body under the same name.
_DECIDED = ("max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs")


class ApiEndpoint:
    """Endpoint of a model: engine, options, metrics and stored answers."""

    def __init__(self, engine: AsyncEngine, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.model_names = options.served_model_names or (engine.model_name,)
        self.metrics = Metrics(self.model_name, engine.stats)
        self.store = ResponseStore()
        self.namer, self._id_namer = TokenNamer(engine.tokenizer), IdNamer(engine.tokenizer)
        self.created = int(time.time())
        self.defaults = checkpoint_defaults(engine) if options.generation_config == "auto" else {}
        self._ignored: set[str] = set()
        self._request_numbers, self._start = itertools.count(1), secrets.token_hex(4)

    def new_request_id(self) -> str:
        """Make a new request id: a counter behind a random number of this server, so no other server's ids
        are equal."""
        return f"{self._start}-{next(self._request_numbers):08d}"

    def note_ignored(self, names: Sequence[str]) -> None:
        """Log the names of fields that were ignored, each once while the server runs."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < MAX_NOTED:
                self._ignored.add(name)
                log.info("the field %s has no effect: it is ignored, and x-ignored-fields names it", name)

    @property
    def model_name(self) -> str:
        """Name of the model in answers."""
        return self.model_names[0]

    @property
    def tokenizer(self) -> ServingTokenizer:
        if self.engine.tokenizer is None:
            raise RequestError(
                f'the model "{self.model_name}" has no tokenizer: send token ids to /v1/completions',
                param="prompt",
                code="no_tokenizer",
            )
        return self.engine.tokenizer

    def namer_for(self, body: GenerationRequest) -> TokenNamer:
        """Return the namer of tokens for a request's log probabilities."""
        return self._id_namer if body.return_tokens_as_token_ids else self.namer

    def check_healthy(self) -> None:
        """Raise ApiError, with the reason, if the engine cannot serve."""
        if not self.engine.is_healthy():
            reason = self.engine.unhealthy_reason
            because = "" if reason is None else f": {reason}"
            raise ApiError(503, f"the engine is not able to serve{because}", code="engine_unhealthy")

    async def prepare(self, params: SamplingParams, parse: Parse, blamed: str) -> None:
        """Compile the grammar of a request, if it has one, off the event loop. Errors blame the field that
        asks for it."""
        if params.structured_outputs is None and parse.tool_rules is None:
            return
        try:
            await asyncio.to_thread(self.engine.prepare, params, parse)
        except RequestError as error:
            raise RequestError(str(error), param=blamed, code=error.code) from None

    def generate(
        self,
        request: web.Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        prompt_param: str = "prompt",
        parse: Parse = NOTHING,
        limit_param: str = "max_tokens",
    ) -> Generation:
        """Make a generation, ready to enter. Raises errors that can be known before the engine sees the
        request.

        `prompt_param` and `limit_param` are the client's names of its input and its limit of new tokens;
        errors about them use these names.
        """
        self.check_healthy()
        note_unread_words(request, params, parse)
        if params.stop and self.engine.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
        if len(prompts) * params.n > MAX_CHOICES:
            raise RequestError(
                f"one request may have at most {MAX_CHOICES} choices, found "
                f"{len(prompts)} prompts with n={params.n}",
                param=prompt_param,
            )
        for prompt in prompts:
            self._check_context(len(prompt), params.max_tokens, prompt_param, limit_param)
        generation = Generation(self.engine, self.metrics, prompts, params, request[ENGINE_REQUEST_ID], parse)
        if self.options.log_requests:
            generation.began_ns = self.engine.stats().virtual_ns
        request[GENERATION] = generation
        return generation

    def default_max_tokens(self, num_prompt_tokens: int, usual: int | None = None) -> int | None:
        """Return the most new tokens for a request that does not say: the checkpoint's default or the
        endpoint's `usual` one, but no more than the context has room for."""
        limit = self.defaults.get("max_tokens", usual)
        if limit is None:
            return None
        return max(1, min(limit, self.engine.max_model_len - num_prompt_tokens))

    def _check_context(
        self, num_prompt_tokens: int, max_tokens: int | None, prompt_param: str, limit_param: str
    ) -> None:
        """Refuse a request too long for the context, as OpenAI does, rather than stop early."""
        limit = self.engine.max_model_len
        if num_prompt_tokens + (max_tokens or 1) > limit:
            asked = f" and {limit_param}={max_tokens}" if max_tokens else ""
            if max_tokens and num_prompt_tokens < limit:
                asked += f", which may be at most {limit - num_prompt_tokens}"
            raise RequestError(
                f"the model's context holds {limit} tokens; the request has {num_prompt_tokens} prompt tokens"
                f"{asked}",
                param=limit_param if max_tokens and num_prompt_tokens < limit else prompt_param,
                code="context_length_exceeded",
            )


ENDPOINT = web.AppKey("ENDPOINT", ApiEndpoint)

# A request's public name, which a client may choose, and the engine's, which is unique whatever clients send.
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
ENGINE_REQUEST_ID = web.RequestKey("ENGINE_REQUEST_ID", str)
CREATED = web.RequestKey("CREATED", int)  # when it came, in seconds since 1970


def sampling_params(
    body: GenerationRequest,
    *,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Make sampling parameters from the body's fields and the endpoint's own decisions. A null field leaves
    the default: the checkpoint's, if it has one.

    Raises RequestError.
    """
    names = [name for name in SamplingParams.__struct_fields__ if name not in _DECIDED]
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    n = 1 if body.n is None else body.n
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise RequestError(
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, found {abridged(body.temperature)}",
            param="temperature",
        )
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of must equal n={n}: all choices that are made are given, found {body.best_of}",
            param="best_of",
            code="unsupported_parameter",
        )
    try:
        return SamplingParams(
            **{**defaults, **given, "max_tokens": max_tokens},
            logit_bias=_by_token_id(body.logit_bias or {}),
            structured_outputs=form,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except RequestError as error:
        if error.param != "min_tokens":
            raise
        raise RequestError(str(error).replace("max_tokens", limit_param(body)), param=error.param) from None


def _by_token_id(biases: dict[str, float]) -> dict[int, float]:
    """Convert the keys of logit_bias to token ids; JSON's keys are texts."""
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias has {abridged(key)}, which is no token id", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def limit_param(body: GenerationRequest) -> str:
    """Return the client's name of its limit of new tokens."""
    is_newer = body.max_tokens is None and body.max_completion_tokens is not None
    return "max_completion_tokens" if is_newer else "max_tokens"


def requested_max_tokens(body: GenerationRequest, *, low: int = 1) -> int | None:
    """Read `max_tokens` or the field's newer name; None when neither is given. Raises RequestError below
    `low`."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={old} and max_completion_tokens={new} contradict each other", param="max_tokens"
        )
    name, value = limit_param(body), new if old is None else old
    if value is not None and value < low:
        may_score = isinstance(body, CompletionRequest) and value == 0
        hint = " (0 only with echo, to score a prompt)" if may_score else ""
        raise RequestError(f"{name} must be {low} or more, found {value}{hint}", param=name)
    if isinstance(value, float) and not value.is_integer():
        raise RequestError(f"{name} must be an integer, found {value}", param=name)
    return None if value is None else int(value)


def truncated(prompt: list[int], num_kept: int | None, max_model_len: int) -> list[int]:
    """Keep the last `num_kept` tokens of a prompt; with -1, as many as leave room for a new token. Raises
    RequestError."""
    if num_kept is None:
        return prompt
    if num_kept != -1 and not 1 <= num_kept < max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {max_model_len - 1}, found {num_kept}",
            param="truncate_prompt_tokens",
        )
    return prompt[-(max_model_len - 1 if num_kept == -1 else num_kept) :]


def check_stream(body: GenerationRequest) -> None:
    """Raise RequestError for fields at odds with `stream`: those that need a stream, or exclude it."""
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs is not given in streams", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")


def wants_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def wants_running_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)
