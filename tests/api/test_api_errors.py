"""Whatever goes wrong, the answer is OpenAI's error object with the right status, and nothing leaks."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from tests.api.conftest import Post, events
from tests.api.fake_engine import FakeEngine
from xdeepserve.api.anthropic.message_items import MessagesRequest
from xdeepserve.api.openai.requests import ChatRequest, CompletionRequest
from xdeepserve.api.openai.response_items import ResponsesRequest
from xdeepserve.api.routes.fields import CHANGES, HARMLESS, place_of, refusals
from xdeepserve.api.routes.fields import GENERATING as ALL_GENERATING
from xdeepserve.api.server.metrics import FINISH_REASONS
from xdeepserve.errors import DeadlockError, TransferError

URL = "/v1/completions"


def check_error(body: Any, partial: list[str] | None = None) -> dict[str, Any]:
    assert list(body) == ["error"]
    assert body["error"].pop("partial", None) == partial
    assert list(body["error"]) == ["message", "type", "param", "code"]
    message = body["error"]["message"]
    assert message
    assert "\n" not in message
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "prompt is required"),
        ({"prompt": None}, "prompt", "expected `string | array`, got `null`"),
        ({"prompt": 5}, "prompt", "got `integer`"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "no tokens"),
        ({"prompt": [[1], []]}, "prompt[1]", "no tokens"),
        ({"prompt": [1, "a"]}, "prompt", 'must be a token id, found "a"'),
        ({"prompt": [1, 2.5]}, "prompt", "found 2.5"),
        ({"prompt": [1, True]}, "prompt", "found true"),
        ({"prompt": [{"a": 1}]}, "prompt[0]", 'found {"a": 1}'),
        ({"prompt": [260]}, "prompt", "token id 260 is out of range: the vocabulary has ids 0 to 259"),
        ({"prompt": [-1]}, "prompt", "out of range"),
        ({"prompt": [10**30]}, "prompt", "out of range"),
        ({"prompt": "x" * 256}, "prompt", "context holds 256 tokens"),
        ({"prompt": "x", "max_tokens": 256}, "max_tokens", "context holds 256 tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "must be 1 or more, found 0 (0 only with echo"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "must be 1 or more, found -1"),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens", "must be 0 or more"),
        (
            {"prompt": "x", "max_tokens": "5"},
            "max_tokens",
            "expected `integer | number | null`, got `string`",
        ),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", "context holds 256 tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature", "between 0 and 2, found -1"),
        ({"prompt": "x", "temperature": 9}, "temperature", "between 0 and 2, found 9"),
        ({"prompt": "x", "top_p": 0}, "top_p", "(0, 1]"),
        ({"prompt": "x", "top_k": -5}, "top_k", "-1 or more"),
        ({"prompt": "x", "n": 0}, "n", "between 1 and 128"),
        ({"prompt": "x", "n": 129}, "n", "between 1 and 128"),
        ({"prompt": ["x"] * 20, "n": 100}, "prompt", "at most 1024 choices"),
        ({"prompt": ["x"] * 1025}, "prompt", "at most 1024 prompts"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "got `boolean`"),
        ({"prompt": "x", "stop": [""]}, "stop", "1 to 1024 characters"),
        ({"prompt": "x", "stop": [5]}, "stop[0]", "expected `string`, got `integer`"),
        ({"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids", "out of range"),
        ({"prompt": "x", "seed": 2**63}, "seed", "integer"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "when stream is true"),
        ({"prompt": "x", "stream": "yes"}, "stream", "expected `boolean | null`"),
    ],
)
async def test_bad_fields(
    post: Post, engine: FakeEngine, fields: dict[str, Any], param: str, says: str
) -> None:
    for stream in ({}, {"stream": True}) if "stream" not in str(fields) else ({},):
        status, body = await post(URL, **fields, **stream)
        assert status == 400
        error = check_error(body)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert says in error["message"]
        assert (error["code"] == "context_length_exceeded") == ("context holds" in says)
    assert not engine.live


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b'{"prompt": "x"} y', "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature: number out of range"),
        (b'["prompt"]', "the request body: expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16"), "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"metadata": ' + b'{"a":' * 100_000, "nested too deeply"),
    ],
)
async def test_bad_bodies(client: TestClient, data: bytes, says: str) -> None:
    for path in (URL, "/v1/chat/completions", "/tokenize", "/detokenize"):
        if path != URL and b"prompt" in data and b"x" in data[:14]:
            continue  # valid elsewhere, or invalid for another reason
        response = await client.post(path, data=data, headers={"Content-Type": "application/json"})
        assert response.status == 400
        if path == URL:
            assert says in check_error(await response.json())["message"]


async def test_a_body_that_is_not_what_its_encoding_says(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        response = await client.post(URL, data=b'{"prompt": "hi"}', headers=headers)
        assert response.status == 400
        check_error(await response.json())
        assert (await client.post(URL, json={"prompt": "hi"})).status == 200
    assert not caplog.records


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_too_large(client: TestClient, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    response = await client.post(
        URL, data=pieces() if chunked else io.BytesIO(body), headers={"Content-Type": "application/json"}
    )
    assert response.status == 413
    error = check_error(await response.json())
    assert error["code"] == "request_too_large"
    assert "1048576 bytes" in error["message"]
    assert (await client.get("/health")).status == 200


async def test_body_of_exactly_the_limit_is_read(client: TestClient) -> None:
    frame = b'{"prompt": "hi", "user": ""}'
    body = frame[:-2] + b"x" * ((1 << 20) - len(frame)) + frame[-2:]
    assert len(body) == 1 << 20
    assert (await client.post(URL, data=body, headers={"Content-Type": "application/json"})).status == 200


async def test_unknown_route_and_method(client: TestClient) -> None:
    response = await client.get("/v1/nothing")
    assert response.status == 404
    assert check_error(await response.json())["message"] == "Invalid URL (GET /v1/nothing)"
    response = await client.post("/v1/completion", json={})
    assert (await response.json())["error"]["message"] == (
        "Invalid URL (POST /v1/completion) (did you mean /v1/completions?)"
    )
    for path in (f"{URL}/", URL.replace("1/", "1//"), f"/v1{URL}", URL.removeprefix("/v1")):
        response = await client.post(path, json={})
        assert response.status == 404
        assert check_error(await response.json())["message"].endswith(f" (did you mean {URL}?)")
    for path, use in (
        ("/v1/conversations", ": conversations are not kept; use previous_response_id of /v1/responses"),
        ("/v1/conversations/conv_1/items", "; use previous_response_id of /v1/responses"),
        ("/v1/embeddings", "(POST /v1/embeddings): the models here generate text only"),
        ("/v1/threads/runs", "; use /v1/responses"),
        ("/api/chat", "; use /v1/chat/completions"),
    ):
        response = await client.post(path, json={})
        assert response.status == 404
        assert check_error(await response.json())["message"].endswith(use)
    response = await client.get(URL)
    assert response.status == 405
    assert response.headers["Allow"] == "POST"
    assert "try POST" in check_error(await response.json())["message"]
    for method, path, instead in (
        ("POST", "/v1/responses/cancel", "/v1/responses/{id}/cancel"),
        ("GET", "/v1/responses/input_items", None),
        ("POST", "/v1/responses/input_items", "DELETE, GET, HEAD"),
        ("PUT", "/v1/responses/cancel", "DELETE, GET, HEAD"),
    ):
        response = await client.request(method, path, json={})
        error = check_error(await response.json())
        assert response.status == (404 if instead is None else 405)
        assert instead is None or error["message"].endswith(f"not allowed on {path}; try {instead}")


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_unknown_model(post: Post, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    body = {"/v1/chat/completions": chat, "/detokenize": {"tokens": [1]}}.get(path, {"prompt": "x"})
    status, answer = await post(path, model="gpt-4", **body)
    assert status == 404
    error = check_error(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-4" in error["message"]


HI: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
MESSAGES = "/v1/messages"
GENERATING: dict[str, tuple[type, dict[str, Any]]] = {
    URL: (CompletionRequest, {"prompt": "x"}),
    "/v1/chat/completions": (ChatRequest, HI),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    MESSAGES: (MessagesRequest, {**HI, "max_tokens": 3}),
}


@pytest.mark.parametrize("path", GENERATING)
async def test_unserved_fields_are_refused_unless_neutral(post: Post, engine: FakeEngine, path: str) -> None:
    kind, asked = GENERATING[path]
    names = refusals(kind.__name__).keys() - place_of(kind).served
    assert names
    for name in sorted(names):
        status, body = await post(path, **{**asked, name: {"asks": "something"}})
        assert status == 400, name
        assert body["error"]["message"].startswith(f"{name} is not supported")
        if path != MESSAGES:  # Anthropic's errors have neither
            error = check_error(body)
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert not engine.submitted
    neutral = {name: (None, *refusals(kind.__name__)[name].neutral) for name in sorted(names)}
    for number in range(max(map(len, neutral.values()))):  # all fields at once; an error would name one
        values = {name: found[number % len(found)] for name, found in neutral.items()}
        status, body = await post(path, **asked, **values)
        assert status == 200, body


def test_what_one_endpoint_serves_the_others_refuse_or_ignore_by_name() -> None:
    kinds = [kind for kind, _ in GENERATING.values()]
    served = set().union(*(place_of(kind).served for kind in kinds))
    for kind in kinds:
        name = kind.__name__
        assert served <= {*place_of(kind).served, *refusals(name), *HARMLESS[name]}
        assert not place_of(kind).served & {*CHANGES[name]}
        assert not refusals(name).keys() & {*HARMLESS[name]}
        for each in CHANGES[name].keys() | ALL_GENERATING.keys() - place_of(kind).served:
            advice = re.match("; use ([a-z_]+)", refusals(name)[each].use)
            known = {*place_of(kind).served, "a"}  # "a message of role system"
            assert advice is None or advice[1] in known, (name, each)


@pytest.mark.parametrize("value", [1, 1.0])
async def test_a_number_is_neutral_with_and_without_a_point(post: Post, value: float) -> None:
    assert (await post(URL, prompt="x", length_penalty=value, dynatemp_range=value - 1))[0] == 200
    for wrong in (True, value + 1, "1"):
        assert (await post(URL, prompt="x", length_penalty=wrong))[0] == 400


@pytest.mark.parametrize("name", HARMLESS["CompletionRequest"])
async def test_harmless_fields_are_not_looked_at(post: Post, name: str) -> None:
    for value in ("me", {"a": 1}, None):
        status, _ = await post(URL, prompt="x", **{name: value})
        assert status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_misspelt_fields_are_refused(
    post: Post, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    _, answer = await post(path, modell="x", **body)
    error = check_error(answer)
    assert (error["param"], error["code"]) == ("modell", "unknown_parameter")
    assert "did you mean model?" in error["message"]
    if "tokenize" not in path:  # known only to be refused
        _, answer = await post(path, prompt_embed="x", **body)
        assert "prompt_embeds?" not in answer["error"]["message"]
        _, answer = await post(path, topK=5, **body)
        assert "did you mean top_k?" in answer["error"]["message"]
    assert not engine.submitted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_null_asks_for_nothing_whatever_it_is_called(
    post: Post, path: str, body: dict[str, Any]
) -> None:
    assert (await post(path, foo_unknown=None, bar=None, model=None, **body))[0] == 200
    status, answer = await post(path, foo_unknown=None, modell="x", **body)
    assert (status, check_error(answer)["param"]) == (400, "modell")
    status, answer = await post(path, foo_unknown=None, model=7, **body)
    assert (status, check_error(answer)["param"]) == (400, "model")


async def test_one_bad_prompt_among_good_ones_leaves_none_running(post: Post, engine: FakeEngine) -> None:
    engine.hold(0)
    status, _ = await post(URL, prompt=[[1], [2], [999]])
    assert status == 400
    assert len(engine.submitted) == 2
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [RuntimeError("boom"), DeadlockError(
    op="combine", rank=1, peer=2, field="flag", expected=3, seen=0, at_ns=9
)])  # fmt: skip
async def test_engine_failure_before_the_first_token(
    post: Post, engine: FakeEngine, failure: Exception, stream: bool
) -> None:
    engine.failure = failure
    status, body = await post(URL, prompt=["a", "b"], n=2, stream=stream)
    assert status == 500
    error = check_error(body)
    assert error["type"] == "server_error"
    assert str(failure) in error["message"]
    assert not engine.live


async def test_a_request_that_cannot_reach_decode_may_be_sent_again(post: Post, engine: FakeEngine) -> None:
    engine.failure, engine.fail_at_step = TransferError("no decode TE can be reached from prefill 0"), 1
    status, body = await post(URL, prompt="a")
    assert status == 503
    error = check_error(body, partial=["t"])
    assert (error["type"], error["code"]) == ("server_error", "transfer_failed")
    assert error["message"] == str(engine.failure)
    assert not engine.live
    engine.failure = None
    assert (await post(URL, prompt="a"))[0] == 200


@pytest.mark.parametrize("step", [1, 2], ids=["before the first token", "later"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_fails_to_finish_is_counted_as_an_error(
    client: TestClient, engine: FakeEngine, stream: bool, step: int
) -> None:
    """Not as aborted, which is what clients do."""
    engine.failure, engine.fail_at_step = TransferError("no decode TE can be reached from prefill 0"), step
    await (await client.post(URL, json={"prompt": ["a", "b"], "n": 2, "stream": stream})).read()
    text = await (await client.get("/metrics")).text()
    for reason in FINISH_REASONS:
        count = 4.0 if reason == "error" else 0.0
        labels = f'engine="0",finished_reason="{reason}",model_name="fake"'
        assert f"vllm:request_success_total{{{labels}}} {count}\n" in text


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
async def test_engine_failure_in_a_stream(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.failure, engine.fail_at_step = RuntimeError("boom"), 2
    body: dict[str, Any] = (
        {"prompt": "a"} if path == URL else {"messages": [{"role": "user", "content": "a"}]}
    )
    response = await client.post(path, json=body | {"stream": True})
    assert response.status == 200
    *chunks, last = events(await response.text())
    assert chunks
    assert all(chunk["choices"] for chunk in chunks)
    assert "boom" in check_error(last)["message"]


async def test_engine_that_stops_short_is_an_error(
    post: Post, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that ends without a finish reason must not look like an answer."""
    from tests.api.fake_engine import FakeHandle

    async def cut_short(self: FakeHandle) -> Any:
        yield self.step_of(0, 0)

    monkeypatch.setattr(FakeHandle, "outputs_of_steps", cut_short)
    status, body = await post(URL, prompt="a")
    assert status == 500
    assert "before it had finished" in check_error(body, partial=["t"])["message"]


async def test_unhealthy_engine(client: TestClient, post: Post, engine: FakeEngine) -> None:
    assert (await client.get("/health")).status == 200
    engine.healthy = False
    response = await client.get("/health")
    assert response.status == 503
    check_error(await response.json())
    status, body = await post(URL, prompt="a")
    assert status == 503
    assert check_error(body)["type"] == "server_error"


async def test_request_ids(client: TestClient) -> None:
    response = await client.post(URL, json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["X-Request-Id"] == "mine-1"
    assert (await response.json())["id"] == "cmpl-mine-1"
    streamed = await client.post(URL, json={"prompt": "a", "stream": True})
    failed = await client.get("/nothing")
    ids = {streamed.headers["X-Request-Id"], failed.headers["X-Request-Id"]}
    assert len(ids) == 2
    response = await client.get("/version", headers={"X-Request-Id": "x" * 129})
    assert response.headers["X-Request-Id"] != "x" * 129


async def test_the_same_request_id_twice_is_no_clash(client: TestClient, engine: FakeEngine) -> None:
    for _ in range(2):
        await client.post(URL, json={"prompt": "a"}, headers={"X-Request-Id": "same"})
    assert len({handle.request_id for handle in engine.submitted}) == 2
