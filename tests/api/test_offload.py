"""Long work beside the event loop lets others have the interpreter."""

from __future__ import annotations

import math

import pytest

from tests.api.conftest import Post
from xdeepserve.api.answers import offload
from xdeepserve.api.answers.offload import MAX_TOKENS_ON_LOOP, REST_SECONDS, TOKENS_IN_PIECE, pieces


@pytest.mark.parametrize("length", [0, 1, TOKENS_IN_PIECE, TOKENS_IN_PIECE + 1, 5 * TOKENS_IN_PIECE])
def test_pieces_are_all_tokens_with_rests_between(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(offload.time, "sleep", rests.append)
    tokens = list(range(length))
    found = list(pieces(tokens))
    assert [token for piece in found for token in piece] == tokens
    assert all(0 < len(piece) <= TOKENS_IN_PIECE for piece in found)
    assert len(found) == math.ceil(length / TOKENS_IN_PIECE)
    assert rests == [REST_SECONDS] * max(len(found) - 1, 0)


async def test_long_requests_are_handled_in_pieces(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(offload.time, "sleep", rests.append)
    length = 2 * MAX_TOKENS_ON_LOOP + 1
    num_rests = math.ceil(length / TOKENS_IN_PIECE) - 1
    status, answer = await post("/tokenize", prompt="a" * length, return_token_strs=True)
    assert (status, answer["count"], len(answer["token_strs"])) == (200, length, length)
    assert len(rests) == num_rests
    status, answer = await post("/detokenize", tokens=[97] * length)
    assert (status, answer["prompt"]) == (200, "a" * length)
    assert len(rests) == 2 * num_rests
    status, answer = await post("/detokenize", tokens=[97] * (length - 1) + [-7])
    assert status == 400
    assert f"tokens[{length - 1}] is out of range" in answer["error"]["message"]
    assert answer["error"]["message"].endswith("found -7")
