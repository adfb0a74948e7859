"""The official client, over a real port, gets what it expects from OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from aiohttp.test_utils import TestClient

from tests.api.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def api(client: TestClient) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


async def test_models(api: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in api.models.list()] == ["fake"]
    assert (await api.models.retrieve("fake")).owned_by == "xdeepserve"
    with pytest.raises(openai.NotFoundError) as caught:
        await api.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_completion(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(
        model="fake", prompt="hi", max_tokens=3, logprobs=1, extra_body={"top_k": 5, "ignore_eos": True}
    )
    assert answer.choices[0].text == "beh"
    assert answer.choices[0].logprobs.tokens == ["b", "e", "h"]
    assert answer.usage.total_tokens == 5
    assert answer._request_id


async def test_completion_stream(api: openai.AsyncOpenAI) -> None:
    stream = await api.completions.create(model="fake", prompt="hi", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "beh"


async def test_chat(api: openai.AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(
        model="fake", messages=HI, max_completion_tokens=2, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["ux", "be"]
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, bytes(entry.bytes), len(entry.top_logprobs)) == ("u", b"u", 2)


async def test_chat_stream_with_usage(api: openai.AsyncOpenAI) -> None:
    stream = await api.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "uxa"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3


async def test_errors_are_typed(api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await api.completions.create(model="fake", prompt="hi", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        await api.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 300}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as absent:
        await api.completions.create(model="gpt-4", prompt="hi")
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="Invalid URL"):
        await api.embeddings.create(model="fake", input="hi")
    engine.failure = RuntimeError("boom")
    with pytest.raises(openai.InternalServerError, match="boom"):
        await api.completions.create(model="fake", prompt="hi")


async def test_error_in_a_stream(api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.failure, engine.fail_at_step = RuntimeError("boom"), 2
    stream = await api.completions.create(model="fake", prompt="hi", stream=True)
    chunks = aiter(stream)
    assert [(await anext(chunks)).choices[0].text for _ in range(2)] == ["b", "e"]
    with pytest.raises(openai.APIError, match="boom"):
        await anext(chunks)


async def test_leaving_a_stream_aborts(api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.hold(2)
    stream = await api.completions.create(model="fake", prompt="hi", stream=True)
    await anext(aiter(stream))
    await stream.close()
    assert await asyncio.wait_for(engine.submitted[0].is_aborted.wait(), 5)
