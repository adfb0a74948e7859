"""/v1/messages: Anthropic's form of a chat, whole or in events, and the counting of its tokens."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from aiohttp import web

from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.answers.sse import stream_events
from xdeepserve.api.anthropic.message_items import CLIENTS_NAMES, MessagesRequest, chat_of
from xdeepserve.api.openai.chat import PreparedChat, prepare_chat
from xdeepserve.api.openai.response_items import in_clients_words
from xdeepserve.api.openai.response_stream import Event
from xdeepserve.api.routes.body import read_body
from xdeepserve.api.server.endpoint import ENGINE_REQUEST_ID, ApiEndpoint
from xdeepserve.api.server.http_errors import ErrorDetail, anthropic_error
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.engine.serving.request import OutputDelta
from xdeepserve.errors import RequestError
from xdeepserve.model.chat_template import JsonText

# Types of blocks: the field with their text, and the type of the events that extend it.
_TEXT_OF = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}
_JSON_TOKEN = re.compile(
    r'(?P<whole>"(?:[^"\\]|\\.)*"|true\b|false\b|null\b)|".*|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL
)


async def create_message(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/messages: a single answer, or a stream of events.

    An answer for which the context has less room than `max_tokens` ends where the context is full.
    """
    body = await read_body(request, MessagesRequest)
    endpoint = request.app[MODELS].find(body.model)
    if body.max_tokens is None:
        raise RequestError("max_tokens is required", param="max_tokens")
    prepared = await _prepared(endpoint, body)
    params, limit = prepared.params, endpoint.engine.max_model_len
    is_cut = len(prepared.prompt) < limit < len(prepared.prompt) + body.max_tokens
    if is_cut:
        params = msgspec.structs.replace(params, max_tokens=limit - len(prepared.prompt))
    hides = getattr(body.thinking, "display", None) == "omitted"
    answer = MessageAnswer(
        endpoint, request[ENGINE_REQUEST_ID].removeprefix("req-"), is_cut=is_cut, hides_thinking=hides
    )
    async with endpoint.generate(
        request, [prepared.prompt], params, "messages", prepared.parse
    ) as generation:
        if body.stream:
            return await stream_events(request, answer.events(generation), answer.failed)
        async for _ in answer.events(generation):
            pass
        return json_response(answer.whole())


async def count_message_tokens(request: web.Request) -> web.Response:
    """Handle POST /v1/messages/count_tokens: the length of the prompt that a request would have."""
    body = await read_body(request, MessagesRequest)
    prepared = await _prepared(request.app[MODELS].find(body.model), body)
    return json_response({"input_tokens": len(prepared.prompt)})


async def _prepared(endpoint: ApiEndpoint, body: MessagesRequest) -> PreparedChat:
    """Prepare the chat that a request becomes. Errors have the request's names of fields."""
    chat = chat_of(body)
    try:
        return await prepare_chat(endpoint, chat)
    except RequestError as error:
        raise in_clients_words(error, CLIENTS_NAMES) from None


class MessageAnswer:
    """Turns a generation's deltas into events, and into the message that they add up to."""

    def __init__(self, endpoint: ApiEndpoint, answer_id: str, *, is_cut: bool, hides_thinking: bool) -> None:
        self._answer_id, self._is_cut, self._hides_thinking = answer_id, is_cut, hides_thinking
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._message: dict[str, Any] = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": endpoint.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }

    def whole(self) -> dict[str, Any]:
        """Return the message, with the arguments of calls as objects."""
        content = []
        for block in self._blocks:
            is_call = block["type"] == "tool_use"
            content.append({**block, "input": dict(JsonText(block["input"] or "{}"))} if is_call else block)
        return {**self._message, "content": content}

    def failed(self, detail: ErrorDetail) -> Event:
        """Make the last event of a stream that breaks off."""
        return anthropic_error(500, detail)

    async def events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield all events of the answer."""
        self._message["usage"] = _usage(generation)
        yield {"type": "message_start", "message": self._message}
        yield {"type": "ping"}
        reason, ended_by = "end_turn", None
        async for _, delta in generation:
            for event in self._add(delta):
                yield event
            if delta.finish_reason is not None:
                reason, ended_by = self._reason(delta)
        for event in self._close():
            yield event
        self._message |= {"stop_reason": reason, "stop_sequence": ended_by, "usage": _usage(generation)}
        told = {"stop_reason": reason, "stop_sequence": ended_by}
        yield {"type": "message_delta", "delta": told, "usage": self._message["usage"]}
        yield {"type": "message_stop"}

    def _reason(self, delta: OutputDelta) -> tuple[str, str | None]:
        """Return why the answer has ended, in Anthropic's words, and the stop sequence that ended it."""
        if delta.finish_reason == "length":
            return ("model_context_window_exceeded" if self._is_cut else "max_tokens"), None
        if isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        is_call = any(block["type"] == "tool_use" for block in self._blocks)
        return ("tool_use" if is_call else "end_turn"), None

    def _add(self, delta: OutputDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._extend("thinking", delta.reasoning)
        if delta.text:
            yield from self._extend("text", delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                call_id = call.id or f"toolu_{self._answer_id}-{call.index}"
                yield from self._open({"type": "tool_use", "id": call_id, "name": call.name, "input": ""})
            if arguments := completed(call.arguments):
                self._blocks[-1]["input"] += arguments
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        """Append text to a block of a type; open a new block if necessary."""
        field, named = _TEXT_OF[kind]
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            block = {"type": kind, field: ""}
            yield from self._open({**block, "signature": ""} if kind == "thinking" else block)
        if kind == "thinking" and self._hides_thinking:
            return
        self._blocks[-1][field] += text
        yield self._delta({"type": named, field: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        shown = {**block, "input": {}} if block["type"] == "tool_use" else block
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": shown}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            if self._blocks[-1]["type"] == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _usage(generation: Generation) -> dict[str, Any]:
    """Count the tokens so far: the prompt's, without those that were found in the cache, and new ones."""
    usage = generation.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def completed(text: str) -> str:
    """Return the arguments of a call as a JSON object. Of a call that `max_tokens` cut off, these are the
    members whose values are whole, objects and arrays included; a number at the end may lack digits. Empty if
    nothing is whole.

    Other forms of an answer have arguments as text, where the beginning of an object has its place.
    """
    whole, depth, before = "", 0, ""
    for found in _JSON_TOKEN.finditer(text):
        token = found[0]
        depth += (token in ("{", "[")) - (token in ("}", "]"))
        if depth == 0:
            whole = text[: found.end()]
        elif depth == 1 and token == ",":
            whole = text[: found.start()] + "}"
        elif depth == 1 and (token in ("{", "}", "]") or (before == ":" and found["whole"] is not None)):
            whole = text[: found.end()] + "}"
        before = token
    try:
        return whole and JsonText(whole).text
    except ValueError:  # the model's text is no JSON so far, or the object is written as a text
        return ""
