"""LiteLLM, as users of vLLM call it (`hosted_vllm/`) and as an OpenAI endpoint (`openai/`)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json

import litellm
from features import BASE_URL, LONG, MODEL, PERSON, at_work, check_person, feature, hanging_up, version

HI = [{"role": "user", "content": "Who is glad?"}]
TOOL = {"type": "function", "function": {"name": "greet", "parameters": PERSON, "strict": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

version("litellm")
for provider in ("hosted_vllm", "openai"):
    at = {"model": f"{provider}/{MODEL}", "api_base": f"{BASE_URL}/v1", "api_key": "none"}

    @feature("text", f"{provider}: text_completion")
    def _(at: dict = at) -> None:
        assert litellm.text_completion(prompt="Once", max_tokens=8, **at).choices[0].text

    @feature("chat", f"{provider}: completion")
    def _(at: dict = at) -> None:
        done = litellm.completion(messages=HI, max_tokens=16, **at)
        assert done.choices[0].message.content
        assert done.usage.completion_tokens > 0

    @feature("stream", f"{provider}: stream")
    def _(at: dict = at) -> None:
        chunks = list(
            litellm.completion(
                messages=HI, max_tokens=16, stream=True, stream_options={"include_usage": True}, **at
            )
        )
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0

    @feature("cancel", f"{provider}: acompletion, cancelled")
    def _(at: dict = at) -> None:
        async def cancelled() -> None:
            answer = asyncio.create_task(litellm.acompletion(messages=HI, **LONG, **at))
            await at_work()
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                raise AssertionError(f"the answer came before it was cancelled: {await answer}")

        with hanging_up():
            asyncio.run(cancelled())

    @feature("structured", f"{provider}: json_schema")
    def _(at: dict = at) -> None:
        done = litellm.completion(messages=HI, max_tokens=300, response_format=FORM, **at)
        check_person(done.choices[0].message.content)

    @feature("tools", f"{provider}: required")
    def _(at: dict = at, provider: str = provider) -> object:
        tools = [copy.deepcopy(TOOL)]  # which it may change
        done = litellm.completion(
            messages=HI, tools=tools, tool_choice="required", parallel_tool_calls=False, **at
        )
        [call] = done.choices[0].message.tool_calls
        if provider == "hosted_vllm":
            arguments = json.loads(call.function.arguments)
            check_person({name: arguments[name] for name in PERSON["required"]})
            return "works, but LiteLLM sends schemas without `strict` and `additionalProperties`"
        check_person(call.function.arguments)
        return None

    @feature("tools", f"{provider}: required, streamed")
    def _(at: dict = at) -> None:
        tools = [copy.deepcopy(TOOL)]
        parts = litellm.completion(
            messages=HI, tools=tools, tool_choice="required", stream=True, parallel_tool_calls=False, **at
        )
        [call] = litellm.stream_chunk_builder(list(parts)).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["mood"] in PERSON["properties"]["mood"]["enum"]


@feature("chat", "anthropic: completion, at /v1/messages")
def _() -> None:
    at = {"model": f"anthropic/{MODEL}", "api_base": BASE_URL, "api_key": "none"}
    assert litellm.completion(messages=HI, max_tokens=16, **at).choices[0].message.content


@feature("responses", "responses")
def _() -> None:
    done = litellm.responses(
        model=f"openai/{MODEL}",
        input="Who is glad?",
        max_output_tokens=16,
        api_base=f"{BASE_URL}/v1",
        api_key="none",
    )
    assert done.output
