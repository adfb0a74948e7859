"""/v1/completions: every form of prompt, choices, streaming, echo and scores."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.conftest import Post
from tests.api.fake_engine import BOS, EOS, FakeEngine
from xdeepserve.api.server.server import build_app

URL = "/v1/completions"


async def test_text_prompt(post: Post, engine: FakeEngine) -> None:
    status, body = await post(URL, model="fake", prompt="hi", max_tokens=3, temperature=0)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    ended = {"finish_reason": "length", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "text": "beh", "logprobs": None, **ended}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert engine.submitted[0].params.temperature == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[104, 105]]),
        ([104, 105], [[104, 105]]),
        (["hi", "a"], [[104, 105], [97]]),
        ([[104, 105], [97]], [[104, 105], [97]]),
        (["hi", [256, 97]], [[104, 105], [256, 97]]),
    ],
)
async def test_forms_of_prompts(post: Post, engine: FakeEngine, prompt: Any, expected: list) -> None:
    status, body = await post(URL, prompt=prompt)
    assert status == 200
    assert [handle.prompt for handle in engine.submitted] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["completion_tokens"] == 16 * len(expected)


async def test_choices_are_numbered_prompt_by_prompt(post: Post) -> None:
    _, together = await post(URL, prompt=["hi", "a"], n=2, max_tokens=3)
    _, first = await post(URL, prompt="hi", n=2, max_tokens=3)
    _, second = await post(URL, prompt="a", n=2, max_tokens=3)
    alone = [choice["text"] for body in (first, second) for choice in body["choices"]]
    assert [choice["text"] for choice in together["choices"]] == alone
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert len(set(alone)) == 4
    assert together["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_null_means_default(post: Post, engine: FakeEngine) -> None:
    names = ["max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "logprobs", "echo", "stream"]
    _, nulls = await post(URL, prompt="hi", **dict.fromkeys(names))
    _, absent = await post(URL, prompt="hi")
    assert nulls["choices"] == absent["choices"]
    assert engine.submitted[0].params == engine.submitted[1].params


async def test_sampling_fields_reach_the_engine(post: Post, engine: FakeEngine) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "ignore_eos": True, "n": 2}
    await post(URL, prompt="hi", stop=["zz", "y"], stop_token_ids=[3], skip_special_tokens=False, **given)
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.stop_token_ids, params.skip_special_tokens) == (("zz", "y"), (3,), False)


async def test_stop(post: Post) -> None:
    _, body = await post(URL, prompt="hi", stop="h")
    assert body["choices"][0]["text"] == "be"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "h"
    _, chunks = await post(URL, prompt="hi", stop="h", stream=True)
    assert [chunk["choices"][0]["stop_reason"] for chunk in chunks[-4:-1]] == [None, None, "h"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [1]}
    _, body = await post("/v1/chat/completions", **chat, max_tokens=2)
    assert body["choices"][0]["stop_reason"] is None


async def test_default_max_tokens_yields_to_the_context(post: Post, engine: FakeEngine) -> None:
    """An unstated 16 is no reason to refuse a long prompt; a stated one is."""
    engine.max_model_len = 12
    status, body = await post(URL, prompt="0123456789")
    assert status == 200
    assert body["usage"]["completion_tokens"] == 2
    status, body = await post(URL, prompt="0123456789", max_tokens=3)
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "max_tokens"


async def test_stream_spells_the_same_text(post: Post) -> None:
    fields = {"prompt": ["hi", "a"], "n": 2, "max_tokens": 4, "logprobs": 1, "echo": True}
    _, whole = await post(URL, **fields)
    _, chunks = await post(URL, stream=True, **fields)
    assert chunks.pop() == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    for expected in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert len(parts) == 4
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts] == [None, None, None, "length"]
        for name, values in expected["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_stream_usage_only_when_asked(post: Post) -> None:
    _, chunks = await post(
        URL, prompt="hi", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    *middle, last, done = chunks
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in middle] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    _, chunks = await post(
        URL, prompt="hi", max_tokens=2, stream=True, stream_options={"include_usage": False}
    )
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks[:-1])


async def test_running_usage(post: Post) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = await post(URL, prompt="hi", max_tokens=2, stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 2, 2]


async def test_logprobs(post: Post) -> None:
    _, body = await post(URL, prompt="hi", max_tokens=2, logprobs=2)
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-1.0, -1.0],
        "tokens": ["b", "e"],
        "top_logprobs": [{"c": -0.5, "b": -1.0}, {"f": -0.5, "e": -1.0}],
    }
    # The chosen token is reported even where it is not among the likeliest, or none was asked for.
    for num_top, expected in ((0, {"b": -1.0}), (1, {"c": -0.5, "b": -1.0})):
        _, body = await post(URL, prompt="hi", max_tokens=1, logprobs=num_top)
        assert body["choices"][0]["logprobs"]["top_logprobs"] == [expected]


async def test_scoring_a_prompt(post: Post) -> None:
    _, body = await post(URL, prompt="hi!", max_tokens=0, echo=True, logprobs=0)
    choice = body["choices"][0]
    assert choice["text"] == "hi!"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["h", "i", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    _, chunks = await post(URL, prompt="hi!", max_tokens=0, echo=True, logprobs=0, stream=True)
    assert [c["text"] for chunk in chunks[:-1] for c in chunk["choices"]] == ["hi!"]


async def test_scoring_several_choices_and_prompts(post: Post) -> None:
    _, body = await post(URL, prompt=["hi", [97, 98]], n=2, max_tokens=1, echo=True, logprobs=0)
    assert [choice["text"] for choice in body["choices"]] == ["hib", "hii", "abn", "abu"]
    for choice in body["choices"]:
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


async def test_an_echoed_prompt_is_shown_whole(post: Post, engine: FakeEngine) -> None:
    """Special tokens are skipped in what is generated, not in what the client sent."""
    engine.script = [EOS, 97]
    _, body = await post(URL, prompt=[BOS, 104], max_tokens=2, echo=True, logprobs=0, ignore_eos=True)
    choice = body["choices"][0]
    assert choice["text"] == "<bos>ha"
    assert choice["logprobs"]["tokens"] == ["<bos>", "h", "<eos>", "a"]
    assert choice["logprobs"]["text_offset"] == [0, 5, 6, 6]


async def test_fragments_of_characters(post: Post, engine: FakeEngine) -> None:
    """Tokens that split a character have names and offsets of their own; the text is whole."""
    engine.script = list("a€b".encode())
    _, body = await post(URL, prompt="hi", max_tokens=5, logprobs=0)
    choice = body["choices"][0]
    assert choice["text"] == "a€b"
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    _, chunks = await post(URL, prompt="hi", max_tokens=5, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "a€b"


async def test_end_of_sequence(post: Post, engine: FakeEngine) -> None:
    engine.script = [97, EOS]
    _, body = await post(URL, prompt="hi", logprobs=0)
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "<eos>"]
    _, body = await post(URL, prompt="hi", ignore_eos=True, max_tokens=4, logprobs=0)
    assert body["choices"][0]["text"] == "aa"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 2]


async def test_token_ids_on_request(post: Post) -> None:
    _, body = await post(URL, prompt="hi", max_tokens=2, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == [104, 105]
    assert body["choices"][0]["token_ids"] == [98, 101]
    _, chunks = await post(URL, prompt="hi", max_tokens=2, return_token_ids=True, stream=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[:-1]] == [[98], [101]]
    assert "prompt_token_ids" not in chunks[1]["choices"][0]


async def test_a_model_without_tokenizer_speaks_token_ids() -> None:
    async with TestClient(TestServer(build_app(FakeEngine(tokenizer=False)))) as client:
        body = {"prompt": [5, 6], "max_tokens": 1, "logprobs": 0, "echo": True, "return_token_ids": True}
        response = await client.post(URL, json=body)
        choice = (await response.json())["choices"][0]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:108"]
        assert choice["token_ids"] == [108]
        for body, param in (({"prompt": "hi"}, "prompt"), ({"prompt": [5], "stop": "x"}, "stop")):
            response = await client.post(URL, json=body)
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["param"] == param
            assert "tokenizer" in error["message"]


async def test_prompt_logprobs(post: Post) -> None:
    _, body = await post(URL, prompt=["hi", "a"], prompt_logprobs=2, n=2, max_tokens=1)
    expected = {
        "105": {"logprob": -1.0, "rank": 2, "decoded_token": "i"},
        "106": {"logprob": -0.5, "rank": 1, "decoded_token": "j"},
    }
    scores = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert scores == [[None, expected]] * 2 + [[None]] * 2
    assert list(scores[0][1]) == ["105", "106"]
    _, body = await post(URL, prompt="hi", prompt_logprobs=0, echo=True, logprobs=2, max_tokens=1)
    [choice] = body["choices"]
    assert choice["prompt_logprobs"] == [None, {"105": expected["105"]}]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    _, body = await post(URL, prompt="hi", prompt_logprobs=5, echo=True, logprobs=1, max_tokens=1)
    [choice] = body["choices"]
    assert (len(choice["prompt_logprobs"][1]), len(choice["logprobs"]["top_logprobs"][1])) == (5, 2)
    for fields in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}):
        status, body = await post(URL, prompt="hi", **fields)
        assert (status, body["error"]["param"]) == (400, "prompt_logprobs")
