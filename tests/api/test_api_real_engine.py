"""The endpoint on the real engine, through the official client and raw sockets, as `serve` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

import aiohttp
import openai
import pydantic
import pytest
import pytest_asyncio
from aiohttp import web

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.tokenizer import Tokenizer


@contextlib.asynccontextmanager
async def serving(tiny: TinyCheckpoint) -> AsyncIterator[tuple[Engine, str, int]]:
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2"], warm_up=True)
    runner = web.AppRunner(build_app(engine), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield engine, host, port
    await runner.cleanup()
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0


@pytest.fixture
async def real(tiny: TinyCheckpoint) -> AsyncIterator[tuple[Engine, str, int]]:
    """A server of its own, for a test that counts or that finds prefixes in the cache."""
    async with serving(tiny) as real:
        yield real


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny: TinyCheckpoint) -> AsyncIterator[tuple[Engine, str, int]]:
    async with serving(tiny) as shared:
        yield shared


async def test_a_cache_key_is_served_counted_and_told(real: tuple[Engine, str, int]) -> None:
    _, host, port = real
    async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
        answers = []
        for key in ("talk", "talk", None):
            more = {} if key is None else {"prompt_cache_key": key}
            answer = await client.completions.create(
                model="tiny-random", prompt=list(range(40)), max_tokens=5, temperature=0, extra_body=more
            )
            answers.append((answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens))
        assert {text for text, _ in answers} == {answers[0][0]}
        assert [cached for _, cached in answers] == [0, 32, 32]
        chat = await client.chat.completions.create(
            model="tiny-random",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=5,
            prompt_cache_key="chat",
            n=2,
        )
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        with pytest.raises(openai.BadRequestError, match="prompt_cache_key must have 1 to 256 characters"):
            await client.completions.create(
                model="tiny-random", prompt="a", extra_body={"prompt_cache_key": ""}
            )
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/metrics") as response:
        text = await response.text()
    for line in (
        'xdeepserve:cache_keys{model_name="tiny-random"} 1.0',  # the chat is shorter than a block,
        'xdeepserve:cache_key_queries_total{model_name="tiny-random"} 3.0',
        'xdeepserve:cache_key_hits_total{model_name="tiny-random"} 1.0',
        'xdeepserve:prefetched_blocks_total{model_name="tiny-random"} 0.0',
    ):
        assert line in text


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client(shared: tuple[Engine, str, int]) -> None:
    _, host, port = shared
    async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["tiny-random"]
        prompts = ["Hello", "Once upon a time"]
        answer = await client.completions.create(
            model="tiny-random", prompt=prompts, max_tokens=7, temperature=0
        )
        expected = one_die(prompts, SamplingParams(max_tokens=7, temperature=0.0))
        assert [c.text for c in answer.choices] == [o.outputs[0].text for o in expected]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 14

        messages = [{"role": "user", "content": "Hi"}]
        chat = await client.chat.completions.create(
            model="tiny-random",
            messages=messages,
            max_completion_tokens=6,
            seed=3,
            n=2,
            logprobs=True,
            top_logprobs=2,
        )
        assert len(chat.choices) == 2
        assert chat.choices[0].logprobs is not None
        assert len(chat.choices[0].logprobs.content or []) == 6
        stream = await client.chat.completions.create(
            model="tiny-random",
            messages=messages,
            max_completion_tokens=6,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == chat.choices[0].message.content
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6

        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny-random", prompt=[99999], max_tokens=1)
        assert bad.value.body is not None
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-5", prompt="x")


HOSTILE = [
    *[("top_k", value) for value in (2**31, 2**63, -2, 10**400)],
    *[("temperature", value) for value in (2.001, 1e308, -1e-300, 10**300)],
    *[("top_p", value) for value in (0, -5e-324, 1.0000001, 10**300)],
    *[("seed", value) for value in (2**63, 2**64, 10**400)],
    *[("max_tokens", value) for value in (0, -1, 2**31, 2**63, 10**400)],
    *[("logprobs", value) for value in (21, 2**31, -1)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("logit_bias", value) for value in ({"1": 100.5}, {"1": -101}, {"-1": 1}, {"x": 1}, {str(2**31): 1})],
    *[("stop", value) for value in (["x"] * 129, [""], "", ["x" * 1025])],
    *[("priority", value) for value in (2**63, -(2**63) - 1)],
    *[("n", value) for value in (0, 2**31)],
    *[("stop_token_ids", value) for value in ([2**31], [-1], [10**400])],
    *[("prompt", value) for value in ([2**31], [-1], [True], [1.0], [10**400], [2**63])],
]
HARMLESS = [
    ("top_k", 2**31 - 1),
    ("temperature", 2),
    ("temperature", 5e-324),
    ("temperature", 1e-40),
    ("top_p", 5e-324),
    ("seed", -(2**63)),
    ("priority", -(2**63)),
    ("logprobs", 20),
    ("n", 128),
    ("top_k", 0),
    ("top_k", -1),
    ("min_p", 1),
    ("logit_bias", {"1": 100, "2": -100}),
    ("stop", [f"stop {i}" for i in range(128)]),
    ("stop", []),
]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_number_of_a_request_reaches_a_die_that_cannot_take_it(
    shared: tuple[Engine, str, int],
) -> None:
    """Those beyond what dies compute with are refused, those at the edge served, and others go on."""
    engine, host, port = shared
    url = f"http://{host}:{port}/v1/completions"
    async with aiohttp.ClientSession() as session:
        for wanted, fields in ((400, HOSTILE), (200, HARMLESS)):
            for name, value in fields:
                body = {"prompt": [1], "max_tokens": 1, "temperature": 1, name: value}
                async with session.post(url, json=body) as answer:
                    assert (answer.status, name, value) == (wanted, name, value)
    assert engine.is_healthy()


@pytest.mark.asyncio(loop_scope="module")
async def test_scoring_with_echo(shared: tuple[Engine, str, int], tiny: TinyCheckpoint) -> None:
    _, host, port = shared
    async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
        ids = [5, 200, 31, 7]
        answer = await client.completions.create(
            model="tiny-random", prompt=ids, max_tokens=0, echo=True, logprobs=1
        )
        scores = answer.choices[0].logprobs
    with LLM(tiny) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        expected = llm.generate(ids, params)[0].prompt_logprobs
    assert scores is not None
    assert expected is not None
    assert expected[0] is None
    wanted = [p[token].logprob for p, token in zip(expected[1:], ids[1:], strict=True) if p is not None]
    assert scores.token_logprobs == [None, *wanted]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("length", [10, 200])
async def test_scores_of_several_choices(real: tuple[Engine, str, int], stream: bool, length: int) -> None:
    """The prompt is scored once, however many choices there are; 200 tokens take several steps."""
    _, host, port = real
    prompt = [3 + i % 300 for i in range(length)]
    async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
        answer = await client.completions.create(
            model="tiny-random", prompt=prompt, max_tokens=4, echo=True, logprobs=1, n=3, stream=stream
        )
        if not stream:
            scores = [choice.logprobs.token_logprobs for choice in answer.choices]
        else:
            scores = [[], [], []]
            async for chunk in answer:
                for choice in chunk.choices:
                    if choice.logprobs is not None:
                        scores[choice.index] += choice.logprobs.token_logprobs
    assert [len(one) for one in scores] == [length + 4] * 3
    assert scores[0][:length] == scores[1][:length] == scores[2][:length]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_blocks(shared: tuple[Engine, str, int], stream: bool) -> None:
    engine, host, port = shared
    body = json.dumps(
        {
            "model": "tiny-random",
            "prompt": "x",
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": stream,
            "n": 3,
        }
    )
    reader, writer = await asyncio.open_connection(host, port)
    kind = "Content-Type: application/json"
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    while engine.stats().kv_cache_usage == 0:
        await asyncio.sleep(0.005)
    if stream:
        await reader.readline()
    writer.close()
    deadline = asyncio.get_running_loop().time() + 5
    while engine.stats().kv_cache_usage > 0:
        assert asyncio.get_running_loop().time() < deadline, "the blocks of a gone client are still in use"
        await asyncio.sleep(0.005)
    assert engine.stats().num_running == 0


@pytest.fixture
def served() -> Iterator[str]:
    """`xdeepserve serve` in a process of its own."""
    command = [sys.executable, "-m", "xdeepserve", "serve", "--port", "0", "--deployment", "colocated"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        yield line.removeprefix("listening on ").strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 0


def test_serve_command(served: str) -> None:
    with urllib.request.urlopen(f"{served}/health", timeout=10) as answer:
        assert answer.status == 200
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none")
    first = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
    again = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
    assert first.choices[0].text == again.choices[0].text
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="x" * 2_000_000)
    assert large.value.status_code == 413
    client.close()


CITY = {"type": "string", "maxLength": 12}
NO_PARAMETERS: list[dict[str, object] | None] = [
    None,
    {},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spoken() -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a model whose template knows tools."""
    engine = build_engine("tiny", "colocated", "int8", overrides=["dies=2", "mtp=1"], warm_up=True)
    runner = web.AppRunner(build_app(engine), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
        yield client
    await runner.cleanup()
    engine.check_integrity()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_forced_calls_have_valid_arguments(spoken: openai.AsyncOpenAI, temperature: float) -> None:
    """Of a function whose parameters are all texts, and of one that has none, which gets an empty object."""
    texts = {"type": "object", "properties": {"city": CITY, "day": CITY}, "required": ["city", "day"]}
    texts["additionalProperties"] = False
    for parameters in (texts, *NO_PARAMETERS):
        function = {"name": "find", "parameters": parameters}
        for choice in ("required", {"type": "function", "function": {"name": "find"}}):
            answer = await spoken.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "What is the weather?"}],
                tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
                tool_choice=choice,  # type: ignore[arg-type]
                parallel_tool_calls=False,
                temperature=temperature,
                n=4,
                seed=1,
                max_completion_tokens=120,
            )
            for each in answer.choices:
                assert each.finish_reason == "tool_calls"
                [call] = each.message.tool_calls or []
                assert call.type == "function"
                arguments = json.loads(call.function.arguments)
                wanted = {"city", "day"} if parameters is texts else set()
                assert set(arguments) == wanted
                assert all(isinstance(text, str) for text in arguments.values())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_forced_call_that_is_cut_off_leaks_no_tag(spoken: openai.AsyncOpenAI) -> None:
    texts = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": texts}}
    for length in range(1, 24, 2):
        answer = await spoken.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "What is the weather?"}],
            tools=[tool],  # type: ignore[list-item]
            tool_choice="required",
            temperature=0,
            max_completion_tokens=length,
        )
        [choice] = answer.choices
        assert "<" not in (choice.message.content or "").removesuffix("<")
        assert "tool" not in (choice.message.content or "")
        if choice.finish_reason != "tool_calls":
            assert choice.finish_reason == "length"


ROME: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED = {"role": "user", "content": "How warm is Rome?"}
ROUNDS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], list[dict[str, Any]]]]] = {
    "/v1/chat/completions": (
        {
            "messages": [ASKED], "max_tokens": 200, "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "warmth", "parameters": ROME}}],
        },
        lambda body: [
            message := body["choices"][0]["message"],
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 C"},
        ],
    ),
    "/v1/responses": (
        {
            "input": [ASKED], "max_output_tokens": 200, "tool_choice": "required",
            "tools": [{"type": "function", "name": "warmth", "parameters": ROME}],
        },
        lambda body: [
            *body["output"],
            {"type": "function_call_output", "call_id": body["output"][-1]["call_id"], "output": "21 C"},
        ],
    ),
    "/v1/messages": (
        {
            "messages": [ASKED], "max_tokens": 200, "tool_choice": {"type": "any"},
            "tools": [{"name": "warmth", "input_schema": ROME}],
        },
        lambda body: [
            {"role": "assistant", "content": body["content"]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": body["content"][-1]["id"], "content": "21 C"}
            ]},
        ],
    ),
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ROUNDS)
async def test_an_agents_round_on_seeded_weights(
    shared: tuple[Engine, str, int], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A call is made, goes back with its result, and both are in the next prompt."""
    engine, host, port = shared
    tokenizer, prompts = engine.tokenizer, list[str]()
    assert tokenizer is not None

    def written(*args: Any, **how: Any) -> list[int]:
        ids = Tokenizer.apply_chat_template(tokenizer, *args, **how)
        prompts.append(tokenizer.decode(ids, skip_special_tokens=False))
        return ids

    monkeypatch.setattr(tokenizer, "apply_chat_template", written)
    ask, reply = ROUNDS[path]
    history = "input" if "input" in ask else "messages"
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:

        async def post(**body: Any) -> dict[str, Any]:
            async with session.post(path, json={"model": "tiny-random", "temperature": 0, **body}) as answer:
                found: dict[str, Any] = await answer.json()
                assert answer.status == 200, found
                return found

        first = await post(**ask)
        assert json.dumps(first).count("Rome") >= 1
        behind = reply(first)
        choice = {"type": "none"} if path == "/v1/messages" else "none"
        await post(**(ask | {history: [ASKED, *behind], "tool_choice": choice}))
    assert prompts[0].endswith("<｜User｜>How warm is Rome?<｜Assistant｜>")
    call, told = '<tool_call>{"name": "warmth", "arguments": {"city":"Rome"}}</tool_call>', "21 C"
    assert (
        prompts[1]
        .replace('": "Rome', '":"Rome')
        .endswith(
            f"{call}<｜end▁of▁sentence｜><｜User｜><tool_response>{told}</tool_response><｜Assistant｜>"
        )
    )


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    names: list[Literal["Tom", "Ada"]] = pydantic.Field(max_length=2)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client_parses_structured_output(shared: tuple[Engine, str, int]) -> None:
    _, host, port = shared
    async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
        hi = [{"role": "user", "content": "hi"}]
        for temperature in (0.0, 1.0):
            chat = await client.chat.completions.parse(
                model="tiny-random",
                messages=hi,
                response_format=Pet,
                temperature=temperature,
                seed=3,
            )
            assert chat.choices[0].message.parsed is not None
            answer = await client.responses.parse(
                model="tiny-random", input="hi", text_format=Pet, temperature=temperature
            )
            assert isinstance(answer.output_parsed, Pet)
        for bad in ({"type": "string", "not": {}}, {"type": "nonsense"}):
            form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": bad}}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny-random", messages=hi, response_format=form)
            assert caught.value.param == "response_format"
