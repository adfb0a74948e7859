"""What SamplingParams and check_request accept and refuse, and the name that they blame."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.request import check_request
from xdeepserve.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("temperature", -1),
        ("temperature", -1e-9),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 0.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("n", 0),
        ("n", 129),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", [""]),
        ("stop", ["x"] * 129),
        ("stop", ["x" * 1025]),
        ("stop", [7]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [10**5000]),
        ("stop_token_ids", [[10**5000]]),
        ("stop_token_ids", 7),
        ("stop", 7),
        ("max_tokens", -(10**5000)),
        ("temperature", 1.1e30),
        ("temperature", 10**400),
        ("temperature", 10**5000),
        ("temperature", -(10**5000)),
        ("temperature", True),
        ("top_p", 10**400),
        ("top_p", 10**30),
        ("top_p", math.inf),
        ("top_k", 2**31),
        ("top_k", 10**5000),
        ("top_k", True),
        ("top_k", math.nan),
        ("seed", 10**5000),
        ("priority", 2**63),
        ("priority", 0.0),
        ("logprobs", True),
        ("n", 10**5000),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
        ("include_stop_str_in_output", None),
        ("prompt_cache_key", 7),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # some cannot be printed
)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name.split("_")[0]) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 1),
        ("temperature", 0),
        ("top_p", 1),
        ("top_k", -1),
        ("top_k", 2**31 - 1),
        ("temperature", 1e30),
        ("temperature", 5e-324),
        ("top_p", 5e-324),
        ("max_tokens", 10**5000),
        ("priority", -(2**63)),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("n", 128),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_accepts_the_edges(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_sequences_become_tuples() -> None:
    params = SamplingParams(stop="ab", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("ab",), (1, 2))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_decoding_checks_too() -> None:
    """msgspec runs the same checks, so that params in a plan or a file cannot be invalid either."""
    with pytest.raises(RequestError, match="temperature"):
        msgspec.json.decode(b'{"temperature": -1}', type=SamplingParams)


@given(
    prompt_len=st.integers(0, 40),
    max_tokens=st.none() | st.integers(1, 60),
    max_model_len=st.integers(1, 32),
)
def test_budget_fits_the_context(prompt_len: int, max_tokens: int | None, max_model_len: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    prompt = [0] * prompt_len
    if not 0 < prompt_len < max_model_len:
        with pytest.raises(RequestError) as caught:
            check_request(prompt, params, max_model_len=max_model_len, vocab_size=1)
        assert caught.value.param == "prompt"
        assert (caught.value.code == "context_length_exceeded") == (prompt_len > 0)
        return
    budget = check_request(prompt, params, max_model_len=max_model_len, vocab_size=1)
    assert budget >= 1
    assert prompt_len + budget <= max_model_len
    assert budget == max_tokens or prompt_len + budget == max_model_len
    assert max_tokens is None or budget <= max_tokens


@pytest.mark.parametrize("token_id", [-1, 10, 2**70])
def test_token_ids_are_in_the_vocabulary(token_id: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token_id} is out of range.*0 to 9"):
        check_request([3, token_id, 4], SamplingParams(), max_model_len=32, vocab_size=10)
    assert check_request([0, 9], SamplingParams(), max_model_len=32, vocab_size=10) == 16


@pytest.mark.parametrize(
    "token_id", [True, 1.0, math.nan, None, "1", 10**5000], ids=lambda v: type(v).__name__
)
def test_token_ids_are_whole_numbers(token_id: Any) -> None:
    with pytest.raises(RequestError, match="token id") as caught:
        check_request([3, token_id], SamplingParams(), max_model_len=32, vocab_size=10)
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_vocabulary_has_no_more_alternatives_than_tokens(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is 11") as caught:
        check_request([1], SamplingParams(**{name: 11}), max_model_len=32, vocab_size=10)
    assert caught.value.param == name
    check_request([1], SamplingParams(**{name: 10}), max_model_len=32, vocab_size=10)


def test_stop_token_ids_are_in_the_vocabulary() -> None:
    with pytest.raises(RequestError) as caught:
        check_request([1], SamplingParams(stop_token_ids=(10,)), max_model_len=32, vocab_size=10)
    assert caught.value.param == "stop_token_ids"
