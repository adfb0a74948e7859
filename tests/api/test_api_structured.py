"""Structured output, penalties and biases over HTTP: they reach the engine, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, FORM(json_object=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, FORM(json=SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": None, "x": None}}, FORM(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            FORM(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, FORM(json=SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, FORM(regex="a+")),
        ({"structured_outputs": {"choice": ["x", "y"]}}, FORM(choice=("x", "y"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, FORM(grammar='start: "a"')),
        ({"structured_outputs": {}}, None),
        ({"guided_json": SCHEMA}, FORM(json=SCHEMA)),
        ({"guided_json": '{"type": "string"}'}, FORM(json={"type": "string"})),
        ({"guided_regex": "[ab]"}, FORM(regex="[ab]")),
        ({"guided_choice": ["x"]}, FORM(choice=("x",))),
        ({"guided_grammar": 'start: "b"'}, FORM(grammar='start: "b"')),
        ({"guided_json": None, "response_format": None}, None),
        # Guidance names its form twice, for older and for newer servers of vLLM's kind, and the backend.
        (
            {
                "guided_decoding_backend": "guidance",
                "guided_grammar": 'start: "b"',
                "structured_outputs": {"grammar": 'start: "b"'},
            },
            FORM(grammar='start: "b"'),
        ),
    ],
)
async def test_spellings_of_a_form(
    post: Post, engine: FakeEngine, fields: dict[str, Any], form: StructuredOutputsParams | None
) -> None:
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        status, _ = await post(path, max_tokens=1, **body, **fields)
        assert status == 200
    assert [handle.params.structured_outputs for handle in engine.submitted] == [form, form]
    assert [params.structured_outputs for params, _ in engine.prepared] == ([form, form] if form else [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strct": True}}},
            "response_format.json_schema.strct",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"nonsense": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": [1]}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [260]}, "allowed_token_ids"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens"),
    ],
)
async def test_refuses(post: Post, engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "hi"})):
        status, answer = await post(path, **body, **fields)
        assert (status, answer["error"]["param"]) == (400, param)
    assert not engine.submitted


async def test_what_changes_draws_reaches_the_engine(post: Post, engine: FakeEngine) -> None:
    given = {
        "min_p": 0.1,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "bad_words": ["x"],
        "allowed_token_ids": [97, 98],
    }
    status, _ = await post(TEXT, prompt="hi", logit_bias={"97": -3}, n=2, best_of=2, **given)
    assert status == 200
    params = engine.submitted[0].params
    assert params.logit_bias == {97: -3}
    assert params.n == 2
    for name, value in given.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


async def test_prompts_are_truncated_from_the_left(post: Post, engine: FakeEngine) -> None:
    await post(TEXT, prompt=["abcdef", "xy"], truncate_prompt_tokens=3, max_tokens=1)
    assert [bytes(handle.prompt) for handle in engine.submitted] == [b"def", b"xy"]
    _, body = await post(TEXT, prompt="abcdef", truncate_prompt_tokens=2, max_tokens=1, echo=True)
    assert body["choices"][0]["text"].startswith("ef")
    status, _ = await post(TEXT, prompt="a" * 999, truncate_prompt_tokens=-1, max_tokens=1)
    assert status == 200
    assert len(engine.submitted[-1].prompt) == 255
    await post(CHAT, messages=HI, truncate_prompt_tokens=1, max_tokens=1)
    assert len(engine.submitted[-1].prompt) == 1


async def test_words_of_a_schema_without_effect_are_named(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "nullable": True, "title": "A"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for body in ({}, {"stream": True}):
        async with client.post(
            CHAT, json={"messages": HI, "max_tokens": 1, "response_format": form, **body}
        ) as answer:
            assert (answer.status, answer.headers["X-Ignored-Fields"]) == (200, "schema.nullable")
    async with client.post(CHAT, json={"messages": HI, "max_tokens": 1}) as answer:
        assert "X-Ignored-Fields" not in answer.headers
