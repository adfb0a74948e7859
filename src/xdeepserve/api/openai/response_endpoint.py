"""/v1/responses: OpenAI's newer form of a chat, which can continue from a stored answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.answers.logprobs import chat_logprobs
from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.answers.sse import stream_events
from xdeepserve.api.openai.chat import note_unread_effort, prepare_chat
from xdeepserve.api.openai.input_items import input_items
from xdeepserve.api.openai.requests import ChatMessage
from xdeepserve.api.openai.response_items import (
    ResponsesRequest,
    answered_messages,
    chat_messages,
    chat_request,
    in_clients_words,
)
from xdeepserve.api.openai.response_stream import Event, Items
from xdeepserve.api.routes.body import read_body
from xdeepserve.api.server.endpoint import ENDPOINT, ENGINE_REQUEST_ID, ApiEndpoint, check_stream
from xdeepserve.api.server.http_errors import ErrorDetail
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.errors import RequestError

# What OpenAI calls, in a response that failed, errors of these types.
ERROR_CODES = {
    "invalid_request_error": "invalid_prompt",
    "rate_limit_error": "rate_limit_exceeded",
    "server_error": "server_error",
}


async def _asked(request: web.Request) -> tuple[ResponsesRequest, ApiEndpoint, list[ChatMessage]]:
    """Read a request; return the body, its model's endpoint, and the messages of an earlier answer."""
    body = await read_body(request, ResponsesRequest)
    endpoint = request.app[MODELS].find(body.model)
    if body.previous_response_id is None:
        return body, endpoint, []
    return body, endpoint, endpoint.store.find(body.previous_response_id, "previous_response_id").messages


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/responses: a single answer, or a stream of events."""
    body, endpoint, before = await _asked(request)
    chat = chat_request(body, before)
    check_stream(chat)
    note_unread_effort(request, endpoint, chat, "reasoning.effort")
    try:
        prepared = await prepare_chat(endpoint, chat)
        # Not the client's own id, which may come again: answers are found by theirs.
        answer = ResponseAnswer(endpoint, body, before, request[ENGINE_REQUEST_ID].removeprefix("req-"))
        generation = endpoint.generate(request, [prepared.prompt], prepared.params, "input", prepared.parse)
    except RequestError as error:
        raise in_clients_words(error) from None
    async with generation:
        if body.stream:
            return await stream_events(request, answer.events(generation), answer.failed)
        async for _ in answer.events(generation):
            pass
        return json_response(answer.response)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Handle POST /v1/responses/input_tokens: the length of the prompt that a request would have."""
    body, endpoint, before = await _asked(request)
    try:
        prepared = await prepare_chat(endpoint, chat_request(body, before))
    except RequestError as error:
        raise in_clients_words(error) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(prepared.prompt)})


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


class ResponseAnswer:
    """Turns a generation's deltas into events, and into the response that they add up to."""

    def __init__(
        self, endpoint: ApiEndpoint, body: ResponsesRequest, before: list[ChatMessage], answer_id: str
    ) -> None:
        self.endpoint, self.body, self.before = endpoint, body, before
        self._items, self._answer_id = Items(answer_id), answer_id
        self._num_events = 0
        self.response: dict[str, Any] = {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": endpoint.model_name,
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": _given(body.temperature, endpoint.defaults.get("temperature", 1.0)),
            "top_p": _given(body.top_p, endpoint.defaults.get("top_p", 1.0)),
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None,
        }

    async def events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Yield all events, numbered; the last one has the whole response."""
        async with aclosing(self._events(generation)) as events:
            async for event in events:
                yield self._numbered(event)

    def failed(self, detail: ErrorDetail) -> Event:
        """Make the last event of a stream that breaks off: the response so far, which is not stored."""
        for _ in self._items.close("incomplete"):
            pass
        error = {"code": ERROR_CODES.get(detail.type, detail.type), "message": detail.message}
        self.response |= {"status": "failed", "error": error}
        return self._numbered({"type": "response.failed", "response": self.response})

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        yield {"type": "response.created", "response": self.response}
        yield {"type": "response.in_progress", "response": self.response}
        reason: str | None = None
        async for _, delta in generation:
            scores = chat_logprobs(delta.logprobs or (), self.endpoint.namer).content
            for event in self._items.add(delta, scores):
                yield event
            reason = delta.finish_reason
        is_whole = reason == "stop"
        status = "completed" if is_whole else "incomplete"
        for event in self._items.close(status):
            yield event
        usage = generation.usage()
        self.response |= {
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                    "cache_write_tokens": 0,  # prompts are kept without being asked, and at no price
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": usage.completion_tokens_details,
                "total_tokens": usage.total_tokens,
            },
        }
        if self.body.store is not False:
            said = chat_messages(self.body.input) + answered_messages(self._items.items)
            brought = input_items(self.body.input, self._answer_id)
            self.endpoint.store.keep(self.response, [*self.before, *said], brought)
        yield {"type": f"response.{status}", "response": self.response}


async def get_response(request: web.Request) -> web.Response:
    """Handle GET /v1/responses/ID: return a stored answer."""
    kept = request.app[ENDPOINT].store.find(request.match_info["id"], "response_id")
    return json_response(kept.response)


async def delete_response(request: web.Request) -> web.Response:
    """Handle DELETE /v1/responses/ID: forget a stored answer."""
    response_id = request.match_info["id"]
    request.app[ENDPOINT].store.forget(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """Handle POST /v1/responses/ID/cancel: always refused, because no answer is made in the background."""
    kept = request.app[ENDPOINT].store.find(request.match_info["id"], "response_id")
    raise RequestError(
        f"it has ended ({kept.response['status']}): only a response with background: true can be cancelled",
        param="response_id",
    )


async def compact_conversation(request: web.Request) -> web.Response:
    """Handle POST /v1/responses/compact: always refused, because conversations are not compacted here."""
    raise RequestError(
        "/v1/responses/compact is not supported: send a shorter input to /v1/responses",
        code="unsupported_endpoint",
    )
