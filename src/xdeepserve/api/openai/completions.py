"""POST /v1/completions: text or token ids in, a continuation out; with `echo`, the prompt's own scores."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.answers.logprobs import OffsetCounter, completion_logprobs, prompt_scores
from xdeepserve.api.answers.offload import run_for_text
from xdeepserve.api.answers.responses import (
    CompletionChoice,
    CompletionLogprobs,
    TextCompletion,
    json_response,
)
from xdeepserve.api.answers.sse import stream_events
from xdeepserve.api.openai.requests import CompletionRequest
from xdeepserve.api.openai.structured import requested_form
from xdeepserve.api.routes.body import read_body
from xdeepserve.api.server.endpoint import (
    CREATED,
    MAX_CHOICES,
    REQUEST_ID,
    ApiEndpoint,
    check_stream,
    limit_param,
    requested_max_tokens,
    sampling_params,
    truncated,
    wants_running_usage,
    wants_usage,
)
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.request import NOTHING, OutputDelta, PositionLogprobs
from xdeepserve.errors import RequestError, abridged
from xdeepserve.model.tokenizer import check_length

DEFAULT_MAX_TOKENS = 16


class Prompt(msgspec.Struct):
    """A prompt's token ids, and its text where the client sent text."""

    token_ids: list[int]
    text: str | None = None


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/completions: a single answer, or a stream of events."""
    body = await read_body(request, CompletionRequest)
    endpoint = request.app[MODELS].find(body.model)
    check_stream(body)
    form, blamed = requested_form(body)
    if body.truncate_prompt_tokens is None:
        check_lengths(endpoint, body.prompt)
    tokenizer, length = endpoint.engine.tokenizer, num_chars(body.prompt)
    prompts = await run_for_text(tokenizer, length, read_prompts, endpoint, body)
    for prompt in prompts:
        kept = truncated(prompt.token_ids, body.truncate_prompt_tokens, endpoint.engine.max_model_len)
        if len(kept) < len(prompt.token_ids):
            prompt.token_ids, prompt.text = kept, None
    name, created = f"cmpl-{request[REQUEST_ID]}", request[CREATED]
    answer = CompletionAnswer(endpoint, body, prompts, form, name, created)
    await endpoint.prepare(answer.params, NOTHING, blamed)
    token_ids, limit = [p.token_ids for p in prompts], limit_param(body)
    async with endpoint.generate(request, token_ids, answer.params, limit_param=limit) as generation:
        generation.scores_only = answer.scores_only
        if body.stream:
            return await stream_events(request, answer.chunks(generation))
        return json_response(await answer.whole(generation))


def num_chars(prompt: str | list[Any]) -> int:
    """Count the characters to tokenise in a prompt."""
    return len(prompt) if isinstance(prompt, str) else sum(len(p) for p in prompt if isinstance(p, str))


def check_lengths(endpoint: ApiEndpoint, prompt: str | list[Any]) -> None:
    """Refuse a text of surely too many tokens, before it is tokenised."""
    for text in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(text, str):
            fewest = endpoint.tokenizer.fewest_tokens(len(text))
            check_length(fewest, endpoint.engine.max_model_len, "prompt")


def read_prompts(endpoint: ApiEndpoint, body: CompletionRequest) -> list[Prompt]:
    """Read the prompts of a request, each as text or as token ids. Raises RequestError that names the bad
    element."""
    prompt, adds = body.prompt, body.add_special_tokens is True
    if isinstance(prompt, str):
        return [_read_prompt(endpoint, prompt, "prompt", adds)]
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [_read_prompt(endpoint, prompt, "prompt", adds)]
    if len(prompt) > MAX_CHOICES:
        raise RequestError(f"one request may have at most {MAX_CHOICES} prompts", param="prompt")
    return [_read_prompt(endpoint, each, f"prompt[{i}]", adds) for i, each in enumerate(prompt)]


def _read_prompt(endpoint: ApiEndpoint, prompt: Any, where: str, adds_special_tokens: bool) -> Prompt:
    if isinstance(prompt, str):
        parsed = Prompt(endpoint.tokenizer.encode(prompt, adds_special_tokens), prompt)
    elif isinstance(prompt, list):
        for i, token_id in enumerate(prompt):
            if type(token_id) is not int:
                raise RequestError(
                    f"{where}[{i}] must be a token id, found {abridged(token_id)}", param=where
                )
        parsed = Prompt(prompt)
    else:
        raise RequestError(f"{where} must be text or token ids, found {abridged(prompt)}", param=where)
    if not parsed.token_ids:
        raise RequestError(f"{where} is empty: it has no tokens", param=where)
    return parsed


def num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many likely tokens to score beside each token of the prompt; None without scores."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)


class CompletionAnswer:
    """Turns a generation's deltas into the response of one request, whole or in chunks."""

    def __init__(
        self,
        endpoint: ApiEndpoint,
        body: CompletionRequest,
        prompts: list[Prompt],
        form: StructuredOutputsParams | None,
        response_id: str,
        created: int,
    ) -> None:
        self.endpoint = endpoint
        self.body = body
        self._namer = endpoint.namer_for(body)
        self.response_id = response_id
        self.created = created
        self.prompts = prompts
        max_tokens = requested_max_tokens(body, low=0 if body.echo else 1)
        if max_tokens is None:
            longest = max(len(p.token_ids) for p in prompts)
            max_tokens = endpoint.default_max_tokens(longest, DEFAULT_MAX_TOKENS) or 1
        self.scores_only = max_tokens == 0
        self.params = sampling_params(
            body,
            defaults=endpoint.defaults,
            max_tokens=max(1, max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=num_prompt_logprobs(body),
            form=form,
        )
        skip = self.params.skip_special_tokens
        num_choices = len(prompts) * self.params.n
        self._offsets = [OffsetCounter(self._namer, skip) for _ in range(num_choices)]
        self._has_begun = [False] * num_choices
        self._prompt_scores: list[list[PositionLogprobs | None]] = [[] for _ in prompts]

    async def chunks(self, generation: Generation) -> AsyncGenerator[TextCompletion, None]:
        usage_or_null = None if wants_usage(self.body) else UNSET
        async for prompt_idx, delta in generation:
            choice = self._choice(generation, prompt_idx, delta)
            usage = generation.usage() if wants_running_usage(self.body) else usage_or_null
            yield self._completion([choice], usage)
        if wants_usage(self.body):
            yield self._completion([], generation.usage())

    async def whole(self, generation: Generation) -> TextCompletion:
        choices: list[CompletionChoice | None] = [None] * generation.num_choices
        async for prompt_idx, delta in generation:
            new = self._choice(generation, prompt_idx, delta)
            old = choices[new.index]
            choices[new.index] = new if old is None else _joined(old, new)
        return self._completion([c for c in choices if c is not None], generation.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Any) -> TextCompletion:
        model = self.endpoint.model_name
        return TextCompletion(
            id=self.response_id, created=self.created, model=model, choices=choices, usage=usage
        )

    def _choice(self, generation: Generation, prompt_idx: int, delta: OutputDelta) -> CompletionChoice:
        """Convert a delta to a choice; a choice's first delta carries the echoed prompt in front."""
        if delta.prompt_logprobs is not None:
            self._prompt_scores[prompt_idx] = delta.prompt_logprobs
        choice_idx = generation.choice_idx(prompt_idx, delta)
        is_first = not self._has_begun[choice_idx]
        self._has_begun[choice_idx] = True
        prompt = self.prompts[prompt_idx]
        text, ids, positions = delta.text, delta.token_ids, list(delta.logprobs or ())
        scored_ids: list[int] = ids
        scores: list[PositionLogprobs | None] = [*positions]
        if is_first and self.body.echo:
            text = self._prompt_text(prompt) + text
            scored_ids = prompt.token_ids + ids
            scores = [*map(self._as_echoed, self._prompt_scores[prompt_idx]), *scores]
        choice = CompletionChoice(
            index=choice_idx, text=text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        if self.body.logprobs is not None:
            choice.logprobs = completion_logprobs(
                scored_ids,
                scores,
                self._namer,
                self._offsets[choice_idx],
                num_echoed=len(scored_ids) - len(ids),
            )
        if self.body.return_token_ids:
            choice.token_ids = list(ids)  # extended below, and the delta's own list is the engine's
            if is_first:
                choice.prompt_token_ids = prompt.token_ids
        if is_first and self.body.prompt_logprobs is not None:
            known = self._prompt_scores[prompt_idx]
            choice.prompt_logprobs = prompt_scores(known, self.body.prompt_logprobs, self._namer)
        return choice

    def _as_echoed(self, position: PositionLogprobs | None) -> PositionLogprobs | None:
        """Limit a prompt's alternatives to as many as new tokens have; `prompt_logprobs` may ask for more."""
        return position and msgspec.structs.replace(position, top=position.top[: self.body.logprobs or 0])

    def _prompt_text(self, prompt: Prompt) -> str:
        """Return the prompt as text, special tokens included."""
        if prompt.text is None and self.endpoint.engine.tokenizer is not None:
            prompt.text = self.endpoint.engine.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return prompt.text or ""


def _joined(old: CompletionChoice, new: CompletionChoice) -> CompletionChoice:
    """Extend `old` by `new`, in place."""
    old.text += new.text
    old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    if old.logprobs is not None and new.logprobs is not None:
        for name in CompletionLogprobs.__struct_fields__:
            getattr(old.logprobs, name).extend(getattr(new.logprobs, name))
    if old.token_ids is not UNSET and new.token_ids is not UNSET:
        old.token_ids.extend(new.token_ids)
    return old
