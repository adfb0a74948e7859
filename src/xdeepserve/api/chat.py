"""POST /v1/chat/completions: messages through the model's chat template, an assistant's message out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web
from msgspec import UNSET

from xdeepserve.api.body import read_body
from xdeepserve.api.conversation import encode_chat
from xdeepserve.api.endpoint import (
    ENDPOINT,
    REQUEST_ID,
    Endpoint,
    check_stream_options,
    requested_max_tokens,
    sampling_params,
    wants_running_usage,
    wants_usage,
)
from xdeepserve.api.generation import Generation
from xdeepserve.api.logprobs import chat_logprobs
from xdeepserve.api.requests import ChatRequest, refuse_unserved
from xdeepserve.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    json_response,
)
from xdeepserve.api.sse import stream_events
from xdeepserve.engine.serving.request import OutputDelta
from xdeepserve.errors import RequestError


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    endpoint = request.app[ENDPOINT]
    body = await read_body(request, ChatRequest)
    endpoint.check_model(body.model)
    refuse_unserved(body)
    check_stream_options(body)
    prompt = await encode_chat(
        endpoint.tokenizer, body.messages, body.add_generation_prompt, body.chat_template_kwargs
    )
    params = sampling_params(body, max_tokens=requested_max_tokens(body), logprobs=num_top_logprobs(body))
    answer = Answer(endpoint, body, f"chatcmpl-{request[REQUEST_ID]}")
    async with endpoint.generate(request, [prompt], params, "messages") as generation:
        if body.stream:
            return await stream_events(request, answer.chunks(generation))
        return json_response(await answer.whole(generation))


def num_top_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    return None


class Answer:
    """Turns a generation's deltas into the response of one request, whole or in chunks."""

    def __init__(self, endpoint: Endpoint, body: ChatRequest, response_id: str) -> None:
        self.endpoint = endpoint
        self.body = body
        self.response_id = response_id
        self.created = int(time.time())

    async def chunks(self, generation: Generation) -> AsyncGenerator[ChatChunk, None]:
        """Per choice: a chunk with the role, chunks with content, an empty one with the finish reason."""
        begun = [False] * generation.num_choices
        async for _, delta in generation:
            if not begun[delta.index]:
                begun[delta.index] = True
                first = ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=""))
                chunk = self._chunk(generation, [first])
                if self.body.return_token_ids:
                    chunk.prompt_token_ids = list(generation.prompts[0])
                yield chunk
            if delta.text or delta.token_ids:
                content = ChatChunkChoice(
                    index=delta.index, delta=ChatDelta(content=delta.text), logprobs=self._logprobs(delta)
                )
                if self.body.return_token_ids:
                    content.token_ids = delta.token_ids
                yield self._chunk(generation, [content])
            if delta.finish_reason is not None:
                last = ChatChunkChoice(
                    index=delta.index, delta=ChatDelta(), finish_reason=delta.finish_reason
                )
                yield self._chunk(generation, [last])
        if wants_usage(self.body):
            chunk = self._chunk(generation, [])
            chunk.usage = generation.usage()
            yield chunk

    async def whole(self, generation: Generation) -> ChatCompletion:
        choices = [self._empty_choice(i) for i in range(generation.num_choices)]
        async for _, delta in generation:
            choice = choices[delta.index]
            choice.message.content += delta.text
            choice.finish_reason = delta.finish_reason
            new_logprobs = self._logprobs(delta)
            if choice.logprobs is not None and new_logprobs is not None:
                choice.logprobs.content.extend(new_logprobs.content)
            if choice.token_ids is not UNSET:
                choice.token_ids.extend(delta.token_ids)
        return ChatCompletion(
            id=self.response_id,
            created=self.created,
            model=self.endpoint.engine.model_name,
            choices=choices,
            usage=generation.usage(),
            prompt_token_ids=list(generation.prompts[0]) if self.body.return_token_ids else UNSET,
        )

    def _empty_choice(self, index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=""),
            logprobs=ChatLogprobs(content=[]) if self.body.logprobs else None,
            finish_reason=None,
            token_ids=[] if self.body.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs or (), self.endpoint.namer) if self.body.logprobs else None

    def _chunk(self, generation: Generation, choices: list[ChatChunkChoice]) -> ChatChunk:
        usage: Any = None if wants_usage(self.body) else UNSET
        if wants_running_usage(self.body):
            usage = generation.usage()
        return ChatChunk(
            id=self.response_id,
            created=self.created,
            model=self.endpoint.engine.model_name,
            choices=choices,
            usage=usage,
        )
