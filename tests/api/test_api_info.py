"""Models, health, version, metrics, tokenize."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve import __version__
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.request import OutputFormats


async def test_models(client: TestClient, engine: FakeEngine) -> None:
    body = await (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    [card] = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", engine.max_model_len)
    assert await (await client.get("/v1/models/fake")).json() == card


async def test_a_model_name_may_have_slashes() -> None:
    engine = FakeEngine()
    engine.model_name = "lab/model-v1"
    async with TestClient(TestServer(build_app(engine))) as client:
        for name in ("lab/model-v1", "lab%2Fmodel-v1"):
            response = await client.get(f"/v1/models/{name}")
            assert (await response.json())["id"] == "lab/model-v1"


async def test_version(client: TestClient) -> None:
    assert await (await client.get("/version")).json() == {"version": __version__}


async def scrape(client: TestClient) -> dict[tuple[str, ...], float]:
    response = await client.get("/metrics")
    assert response.content_type == "text/plain"
    families = text_string_to_metric_families(await response.text())
    return {
        (sample.name, *(sample.labels.get(name, "") for name in ("finished_reason", "le"))): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["model_name"] == "fake"
    }


async def test_metrics_count_requests_and_tokens(client: TestClient, post: Post) -> None:
    before = await scrape(client)
    await post("/v1/completions", prompt=["hi", "abc"], n=2, max_tokens=4)
    await post("/v1/completions", prompt="hi", stop="e")
    await post("/v1/completions", prompt="hi", max_tokens=-1)
    after = await scrape(client)
    grown = {key: value - before[key] for key, value in after.items() if value != before[key]}
    expected = {
        ("vllm:prompt_tokens_total", "", ""): 7,
        ("vllm:generation_tokens_total", "", ""): 18,
        ("vllm:request_success_total", "length", ""): 4,
        ("vllm:request_success_total", "stop", ""): 1,
        ("vllm:time_to_first_token_seconds_count", "", ""): 5,
        ("vllm:inter_token_latency_seconds_count", "", ""): 13,
        ("vllm:time_per_output_token_seconds_count", "", ""): 13,
        ("vllm:request_time_per_output_token_seconds_count", "", ""): 5,
        ("vllm:e2e_request_latency_seconds_count", "", ""): 5,
        ("vllm:e2e_request_latency_seconds_bucket", "", "+Inf"): 5,
        ("vllm:request_prompt_tokens_sum", "", ""): 7,
        ("vllm:request_generation_tokens_sum", "", ""): 18,
    }
    assert {key: grown.get(key) for key in expected} == expected
    assert ("vllm:request_success_total", "abort", "") not in grown


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_alone_generates_no_token(client: TestClient, post: Post, stream: bool) -> None:
    before = await scrape(client)
    fields = {"max_tokens": 0, "echo": True, "logprobs": 0}
    _, body = await post("/v1/completions", prompt=["hi", "abc"], stream=stream, **fields)
    after = await scrape(client)
    grown = {key: value - before[key] for key, value in after.items() if value != before[key]}
    assert grown["vllm:prompt_tokens_total", "", ""] == 5
    assert grown["vllm:request_success_total", "length", ""] == 2
    assert not [
        key
        for key in grown
        if "generation_tokens_total" in key[0] or key[0] == "vllm:request_generation_tokens_sum"
    ]
    if not stream:
        assert body["usage"]["completion_tokens"] == 0
        assert [each["stop_reason"] for each in body["choices"]] == [None, None]


async def test_a_prompt_counts_when_its_first_step_begins(client: TestClient, engine: FakeEngine) -> None:
    before = await scrape(client)
    engine.hold(0)
    gone = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "bc"]}))
    await engine.until_submitted(2)
    gone.cancel()
    await asyncio.gather(*(handle.is_aborted.wait() for handle in engine.submitted))
    engine.release()
    assert (await client.post("/v1/completions", json={"prompt": "hi", "n": 2})).status == 200
    after = await scrape(client)
    name = ("vllm:prompt_tokens_total", "", "")
    assert after[name] - before[name] == 2


async def test_metrics_show_the_engine(client: TestClient, engine: FakeEngine) -> None:
    engine.hold(0)
    running = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"]}))
    await engine.until_submitted(2)
    metrics = await scrape(client)
    assert metrics["vllm:num_requests_running", "", ""] == 2
    assert metrics["vllm:num_requests_waiting", "", ""] == 0
    assert metrics["vllm:kv_cache_usage_perc", "", ""] == 2 / 64
    engine.release()
    await running
    assert (await scrape(client))["vllm:num_requests_running", "", ""] == 0


async def test_two_servers_in_one_process_count_apart(client: TestClient, post: Post) -> None:
    await post("/v1/completions", prompt="hi")
    async with TestClient(TestServer(build_app(FakeEngine()))) as other:
        assert (await scrape(other))["vllm:prompt_tokens_total", "", ""] == 0


async def test_tokenize(post: Post) -> None:
    status, body = await post("/tokenize", prompt="hé", model="fake")
    assert status == 200
    assert body == {"count": 3, "max_model_len": 256, "tokens": [104, 195, 169], "token_strs": None}
    _, body = await post("/tokenize", prompt="hé", return_token_strs=True)
    assert body["token_strs"] == ["h", "Ã", "©"]
    _, body = await post("/tokenize", prompt="")
    assert body["tokens"] == []
    _, body = await post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert body["tokens"] == [256, 258, 104, 105, 259]
    for fields in ({}, {"prompt": "a", "messages": []}):
        assert (await post("/tokenize", **fields))[0] == 400


@pytest.mark.parametrize("text", ["", "hi", "hé €", "<bos>"])
async def test_detokenize_undoes_tokenize(post: Post, text: str) -> None:
    _, body = await post("/tokenize", prompt=text)
    assert await post("/detokenize", tokens=body["tokens"]) == (200, {"prompt": text})


async def test_long_texts_are_tokenised_off_the_loop(post: Post, engine: FakeEngine) -> None:
    for text, is_here in (("x" * 100, True), ("x" * 100_000, False)):
        for fields in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
            engine.tokenizer.threads.clear()
            _, body = await post("/tokenize", **fields)
            assert body["count"] >= len(text)
            [thread] = engine.tokenizer.threads
            # Chat templates are foreign code, and never run on the loop.
            assert (thread == threading.get_ident()) == (is_here and "prompt" in fields)


@pytest.mark.parametrize("num_tokens", [100, 100_000])
async def test_tokens_are_named_and_decoded_off_the_loop(
    post: Post, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    threads = []
    for name in ("id_to_token", "decode"):
        work = getattr(engine.tokenizer, name)

        def noted(*args: Any, work: Any = work, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*args, **kwargs)

        monkeypatch.setattr(engine.tokenizer, name, noted)
    long = "x" * num_tokens
    await post("/tokenize", prompt=long)
    assert not threads  # nobody asked for names
    asked = [{"prompt": long}, {"messages": [{"role": "user", "content": long}]}] * 4
    answers = await asyncio.gather(*(post("/tokenize", return_token_strs=True, **each) for each in asked))
    answers += await asyncio.gather(*(post("/detokenize", tokens=[97] * num_tokens) for _ in range(4)))
    assert {status for status, _ in answers} == {200}
    assert len(set(threads)) == 1  # one at a time
    assert (threading.get_ident() in threads) == (num_tokens == 100)


async def test_many_texts_are_tokenised_off_the_loop_too(post: Post, engine: FakeEngine) -> None:
    await post("/v1/completions", prompt=["x" * 200] * 100, max_tokens=1)
    assert len(engine.tokenizer.threads) == 100
    assert threading.get_ident() not in engine.tokenizer.threads


async def test_detokenize_keeps_special_tokens(post: Post) -> None:
    assert await post("/detokenize", tokens=[256, 97]) == (200, {"prompt": "<bos>a"})


@pytest.mark.parametrize("tokens", [[260], [-1], ["a"], "a", None, [10**30]])
async def test_detokenize_refuses(post: Post, tokens: object) -> None:
    status, body = await post("/detokenize", tokens=tokens)
    assert status == 400
    assert body["error"]["param"].startswith("tokens")


async def test_waiting_is_timed(client: TestClient, post: Post, engine: FakeEngine) -> None:
    await post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=1)
    engine.hold(0)
    running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
    await engine.until_submitted(3)
    metrics = await scrape(client)
    assert metrics["vllm:request_queue_time_seconds_count", "", ""] == 4
    engine.release()
    await running
    assert (await scrape(client))["vllm:request_queue_time_seconds_count", "", ""] == 5


async def test_virtual_times_and_drafts(client: TestClient, post: Post, engine: FakeEngine) -> None:
    """Of an engine whose steps take 2 ms of virtual time and whose drafts are counted."""
    engine.step_ns = 2_000_000
    engine.more_stats = {
        "rows_per_step": {1: 5, 3: 2, 100: 1},
        "num_drafted": (10, 4),
        "num_accepted": (7, 1),
        "virtual_ns": 3_000_000_000,
    }
    await post("/v1/completions", prompt="hi", max_tokens=5)
    metrics = await scrape(client)

    def value(name: str, le: str = "") -> float:
        return metrics[name, "", le]

    for name, count, total in (
        ("time_to_first_token", 1, 0.002),
        ("inter_token_latency", 4, 0.008),
        ("request_time_per_output_token", 1, 0.002),
        ("request_queue_time", 1, 0.0),
        ("e2e_request_latency", 1, 0.010),
    ):
        assert value(f"xdeepserve:{name}_virtual_seconds_count") == count
        assert value(f"xdeepserve:{name}_virtual_seconds_sum") == pytest.approx(total)
    assert value("xdeepserve:request_tokens_per_step_sum") == 1.0
    assert value("xdeepserve:virtual_time_seconds") == 3.0
    assert value("vllm:iteration_tokens_total_count") == 8
    assert value("vllm:iteration_tokens_total_sum") == 111
    assert value("vllm:iteration_tokens_total_bucket", "2") == 5
    assert value("vllm:iteration_tokens_total_bucket", "4") == 7
    assert value("vllm:spec_decode_num_drafts_total") == 10
    assert value("vllm:spec_decode_num_draft_tokens_total") == 14
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 8
    text = await (await client.get("/metrics")).text()
    assert 'accepted_tokens_per_pos_total{engine="0",model_name="fake",position="0"} 7' in text
    assert 'accepted_tokens_per_pos_total{engine="0",model_name="fake",position="1"} 1' in text


async def test_tokenize_tells_what_a_request_would_be(post: Post, engine: FakeEngine) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tool = {"type": "function", "function": {"name": "f"}}
    status, body = await post("/tokenize", messages=chat, tools=[tool])
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "its template shows none" in body["error"]["message"]
    engine.formats = OutputFormats(shows_tools=True)
    _, body = await post("/tokenize", messages=chat, tools=[tool], continue_final_message=True, user="me")
    assert body["tokens"][-1] == ord("s")  # no prompt for another answer
    assert engine.tokenizer is not None
    assert engine.tokenizer.chats[-1][1] == [tool]
    for path, messages in (("/tokenize", chat), ("/v1/chat/completions", chat)):
        assert (await post(path, messages=messages, add_special_tokens=False))[0] == 200
        status, body = await post(path, messages=messages, add_special_tokens=True)
        assert (status, body["error"]["param"]) == (400, "add_special_tokens")
    for adds, expected in ((True, [256, 97]), (False, [97]), (None, [97])):
        _, body = await post("/tokenize", prompt="a", add_special_tokens=adds)
        assert body["tokens"] == expected
        await post("/v1/completions", prompt="a", add_special_tokens=adds, max_tokens=1)
        assert engine.submitted[-1].prompt == expected
    for name, value in (
        ("tools", [tool]),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"a": 1}),
    ):
        status, body = await post("/tokenize", prompt="a", **{name: value})
        assert (status, body["error"]["param"]) == (400, name)
    assert (await post("/detokenize", tokens=[97], user="me", metadata={}))[1] == {"prompt": "a"}
