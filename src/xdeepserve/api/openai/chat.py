"""POST /v1/chat/completions: messages through the model's chat template, an assistant's message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.answers.logprobs import chat_logprobs, prompt_scores
from xdeepserve.api.answers.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FunctionCallPart,
    PromptLogprobs,
    ToolCallPart,
    json_response,
)
from xdeepserve.api.answers.sse import stream_events
from xdeepserve.api.openai.conversation import encode_chat, ends_in_reasoning
from xdeepserve.api.openai.requests import ChatRequest, ThinkingChoice
from xdeepserve.api.openai.structured import requested_form
from xdeepserve.api.openai.tools import offered_tools
from xdeepserve.api.routes.body import judge_variables, read_body
from xdeepserve.api.routes.fields import note_ignored
from xdeepserve.api.server.endpoint import (
    CREATED,
    ENGINE_REQUEST_ID,
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
from xdeepserve.engine.dp.sampling_params import MAX_LOGPROBS, SamplingParams
from xdeepserve.engine.serving.request import NOTHING, OutputDelta, Parse
from xdeepserve.errors import RequestError, abridged
from xdeepserve.parsing.call_grammar import ParsedCall

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_KINDS = {None: "adaptive", True: "enabled", False: "disabled"}
THINKING = ("thinking", "enable_thinking")  # what templates call it: DeepSeek's, and most others


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/chat/completions: a single answer, or a stream of events."""
    body = await read_body(request, ChatRequest)
    endpoint = request.app[MODELS].find(body.model)
    check_stream(body)
    judge_variables(request, body.chat_template_kwargs, endpoint.tokenizer.template_variables)
    note_unread_effort(request, endpoint, body, "reasoning_effort")
    prepared = await prepare_chat(endpoint, body)
    name, created = f"chatcmpl-{request[REQUEST_ID]}", request[CREATED]
    answer = ChatAnswer(endpoint, body, name, request[ENGINE_REQUEST_ID], created)
    async with endpoint.generate(
        request, [prepared.prompt], prepared.params, "messages", prepared.parse, limit_param(body)
    ) as generation:
        if body.stream:
            return await stream_events(request, answer.chunks(generation))
        return json_response(await answer.whole(generation))


class PreparedChat(NamedTuple):
    """A chat prepared for the engine: prompt, sampling parameters, and parsing of the output."""

    prompt: list[int]
    params: SamplingParams
    parse: Parse


async def prepare_chat(endpoint: ApiEndpoint, body: ChatRequest) -> PreparedChat:
    """Check a chat request, compile its grammar, and make its prompt. Raises RequestError."""
    form, blamed = requested_form(body)
    tools = offered_tools(body, endpoint.engine.formats, endpoint.model_name, has_form=form is not None)
    if form is not None and blamed != "response_format" and tools and tools.must_call:
        raise RequestError(
            f"{blamed} and tool_choice cannot be combined: one says what the whole text is, and the other "
            "that it is a call",
            param=blamed,
        )
    params = sampling_params(
        body,
        defaults=endpoint.defaults,
        max_tokens=requested_max_tokens(body),
        logprobs=num_top_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        form=form,
    )
    parse = Parse(
        reasoning=True,
        in_reasoning=body.continue_final_message is True and ends_in_reasoning(body.messages),
        tools=tools is not None,
        tool_rules=tools.rules if tools else None,
        functions=tools.functions if tools else (),
    )
    if form is not None:
        await endpoint.prepare(params, NOTHING, blamed)
    if parse.tool_rules is not None:
        await endpoint.prepare(params, parse, "tools")
    prompt = await encode_chat(
        endpoint.tokenizer,
        body.messages,
        body.add_generation_prompt,
        template_kwargs(body),
        tools.shown if tools else None,
        body.continue_final_message is True,
        max_tokens=None if body.truncate_prompt_tokens else endpoint.engine.max_model_len,
    )
    prompt = truncated(prompt, body.truncate_prompt_tokens, endpoint.engine.max_model_len)
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=endpoint.default_max_tokens(len(prompt)))
    return PreparedChat(prompt, params, parse)


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Return the chat template's variables beside the conversation."""
    effort = body.reasoning_effort
    if effort is not None and effort not in REASONING_EFFORTS:
        known = ", ".join(REASONING_EFFORTS)
        raise RequestError(
            f"reasoning_effort must be one of {known}, found {abridged(effort)}", param="reasoning_effort"
        )
    given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        given |= dict.fromkeys(THINKING, False)
    thinking = body.thinking
    kind = thinking.type if isinstance(thinking, ThinkingChoice) else _KINDS[thinking]
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        reason = f"thinking.type must be enabled, disabled or adaptive, found {abridged(kind)}"
        raise RequestError(reason, param="thinking.type")
    if kind in ("enabled", "disabled"):
        given |= dict.fromkeys(THINKING, kind == "enabled")
    return given | (body.chat_template_kwargs or {})


def note_unread_effort(request: web.Request, endpoint: ApiEndpoint, body: ChatRequest, path: str) -> None:
    """Name the effort at `path`, as other ignored fields, if the chat template reads no variable of it."""
    names = {"reasoning_effort", *(THINKING if body.reasoning_effort == "none" else ())}
    if body.reasoning_effort is not None and not names & endpoint.tokenizer.template_variables:
        note_ignored(request, [path])


def num_top_logprobs(body: ChatRequest) -> int | None:
    """Return how many likely tokens a chat wants beside each of its own; None without log probabilities.

    Raises RequestError for a number out of range, or one without `logprobs`.
    """
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be an integer, between 0 and {MAX_LOGPROBS}, found {body.top_logprobs}",
            param="top_logprobs",
        )
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None


class ChatAnswer:
    """Turns a generation's deltas into the response of one request, whole or in chunks."""

    def __init__(
        self, endpoint: ApiEndpoint, body: ChatRequest, response_id: str, call_prefix: str, created: int
    ) -> None:
        self.endpoint = endpoint
        self.body = body
        self.response_id = response_id
        self._namer = endpoint.namer_for(body)
        is_hidden = getattr(body.thinking, "display", None) == "omitted"
        self._shows_reasoning = body.include_reasoning is not False and not is_hidden
        self.call_prefix = call_prefix  # of the ids of tool calls
        self._calls_tools: set[int] = set()  # choices
        self.created = created

    async def chunks(self, generation: Generation) -> AsyncGenerator[ChatChunk, None]:
        """Yield, for each choice, a chunk with the role, chunks with content, and an empty one with the
        finish reason."""
        begun = [False] * generation.num_choices
        async for _, delta in generation:
            if not begun[delta.index]:
                begun[delta.index] = True
                first = ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=""))
                chunk = self._chunk(generation, [first])
                if self.body.return_token_ids:
                    chunk.prompt_token_ids = list(generation.prompts[0])
                yield chunk
            if delta.text or delta.token_ids or delta.reasoning or delta.tool_calls:
                content = ChatChunkChoice(
                    index=delta.index, delta=self._delta(delta), logprobs=self._logprobs(delta)
                )
                if self.body.return_token_ids:
                    content.token_ids = delta.token_ids
                yield self._chunk(generation, [content])
            if delta.finish_reason is not None:
                last = ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(),
                    finish_reason=self._finish_reason(delta),
                    stop_reason=delta.stop_reason,
                )
                yield self._chunk(generation, [last])
        if wants_usage(self.body):
            chunk = self._chunk(generation, [])
            chunk.usage = generation.usage()
            yield chunk

    async def whole(self, generation: Generation) -> ChatCompletion:
        choices = [self._empty_choice(i) for i in range(generation.num_choices)]
        scores: PromptLogprobs | UnsetType = UNSET
        async for _, delta in generation:
            choice = choices[delta.index]
            self._extend(choice.message, delta)
            choice.finish_reason, choice.stop_reason = self._finish_reason(delta), delta.stop_reason
            new_logprobs = self._logprobs(delta)
            if choice.logprobs is not None and new_logprobs is not None:
                choice.logprobs.content.extend(new_logprobs.content)
            if choice.token_ids is not UNSET:
                choice.token_ids.extend(delta.token_ids)
            if delta.prompt_logprobs is not None:
                scores = prompt_scores(delta.prompt_logprobs, self.body.prompt_logprobs or 0, self._namer)
        return ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.endpoint.model_name,
            choices=choices,
            usage=generation.usage(),
            prompt_token_ids=list(generation.prompts[0]) if self.body.return_token_ids else UNSET,
            prompt_logprobs=scores,
        )

    def _delta(self, delta: OutputDelta) -> ChatDelta:
        """Make the part of a message that a chunk adds; the content is "" where a token has no text yet."""
        new = ChatDelta()
        if delta.reasoning and self._shows_reasoning:
            new.reasoning_content = new.reasoning = delta.reasoning
        if delta.tool_calls:
            new.tool_calls = [self._call_part(delta.index, call) for call in delta.tool_calls]
        if delta.text or not (new.reasoning or delta.tool_calls):
            new.content = delta.text
        return new

    def _call_part(self, choice: int, call: ParsedCall) -> ToolCallPart:
        self._calls_tools.add(choice)
        return ToolCallPart(
            index=call.index,
            id=call.id or f"call-{self.call_prefix}-{choice}-{call.index}",
            type="function",
            function=FunctionCallPart(name=call.name, arguments=call.arguments),
        )

    def _extend(self, message: AssistantMessage, delta: OutputDelta) -> None:
        """Add a delta to a whole message. Its content is null if there is nothing but calls."""
        if delta.reasoning and self._shows_reasoning:
            message.reasoning = (message.reasoning or "") + delta.reasoning
            message.reasoning_content = message.reasoning
        calls = message.tool_calls or []
        for call in delta.tool_calls:
            calls.append(msgspec.structs.replace(self._call_part(delta.index, call), index=UNSET))
        message.tool_calls = calls or UNSET
        text = (message.content or "") + delta.text
        message.content = None if calls and not text else text

    def _finish_reason(self, delta: OutputDelta) -> str | None:
        is_call = delta.finish_reason == "stop" and delta.index in self._calls_tools
        return "tool_calls" if is_call else delta.finish_reason

    def _empty_choice(self, index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=""),
            logprobs=ChatLogprobs(content=[]) if self.body.logprobs else None,
            finish_reason=None,
            token_ids=[] if self.body.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs or (), self._namer) if self.body.logprobs else None

    def _chunk(self, generation: Generation, choices: list[ChatChunkChoice]) -> ChatChunk:
        usage: Any = None if wants_usage(self.body) else UNSET
        if wants_running_usage(self.body):
            usage = generation.usage()
        return ChatChunk(
            id=self.response_id,
            created=self.created,
            model=self.endpoint.model_name,
            choices=choices,
            usage=usage,
        )
