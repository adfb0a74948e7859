"""Forms of prompts: what `LLM` takes, and one clear line for each of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import RequestError

TWO = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
IDS = [17, 4, 250]
USER = {"role": "user", "content": "Good day"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny") as made:
        yield made
        made.engine.check_integrity()
        assert made.engine.left().requests == 0


FORMS = [
    tuple(IDS), np.array(IDS), np.array(IDS, np.uint16), [np.int32(each) for each in IDS],
    [np.uint8(17), 4, np.int64(250)], [IDS], np.array([IDS]), [np.array(IDS)], (tuple(IDS),),
]  # fmt: skip


@pytest.mark.parametrize(
    "prompts", FORMS, ids=lambda form: f"{type(form).__name__} of {type(form[0]).__name__}"
)
def test_token_ids_may_be_any_integers(llm: LLM, prompts: Any) -> None:
    (wanted,) = llm.generate([IDS], TWO)
    (output,) = llm.generate(prompts, TWO)
    assert output.prompt_token_ids == IDS
    assert {type(each) for each in output.prompt_token_ids} == {int}
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_other_calls_take_numpy_integers_too(llm: LLM) -> None:
    assert np.array_equal(llm.logits(np.array(IDS)), llm.logits(IDS))  # type: ignore[arg-type]
    (wanted,) = llm.generate([IDS], TWO)
    first, second = wanted.outputs[0].token_ids
    kind: Any = np.int64
    params = SamplingParams(
        max_tokens=kind(4), temperature=np.float32(0.0), n=kind(1), seed=kind(3),  # type: ignore[arg-type]
        stop_token_ids=np.array([second]), allowed_token_ids=[kind(first), kind(second)],  # type: ignore[arg-type]
        logit_bias={kind(first): np.float64(0.5)}, ignore_eos=np.bool_(True),  # type: ignore[arg-type, dict-item]
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=4, temperature=0.0, n=1, seed=3, stop_token_ids=(second,),
        allowed_token_ids=(first, second), logit_bias={first: 0.5}, ignore_eos=True,
    )  # fmt: skip
    assert {type(each) for each in (*params.stop_token_ids, *params.logit_bias)} == {int}
    (output,) = llm.generate([IDS], params)
    assert output.outputs[0].finish_reason == "stop"


WRONG: list[tuple[Any, str]] = [
    (None, "found None"),
    (3, "found 3"),
    (2.5, "found 2.5"),
    (True, "found True"),
    (b"Good day", "found b'Good day'; decode it to a text"),
    (bytearray(b"ab"), "decode it to a text"),
    (memoryview(b"ab"), "decode it to a text"),
    ({"prompt": "Good day"}, "pass its text or its token ids"),
    ({"prompt_token_ids": IDS}, "pass its text or its token ids"),
    ([{"prompt_token_ids": IDS}], "prompts[0] must be a text or a list of token ids, found {"),
    ([USER], "messages to LLM.chat"),
    ({1, 2}, "found {1, 2}"),
    (iter([IDS]), "pass a list of it"),
    (np.array(7), "found array(7)"),
    ([None], "prompts[0] must be a text or a list of token ids, found None"),
    (["Good day", None], "prompts[1] must be"),
    (["Good day", 7], "prompts[1] must be a text or a list of token ids, found 7"),
    ([7, "Good day"], "the prompt must be a text or a list of token ids, found 'Good day' at position 1"),
    ([1, 2.0, 3], "found 2.0 at position 1"),
    ([1, None], "found None at position 1"),
    ([True, False], "found True at position 0"),
    ([[1, 2], [3, False]], "prompts[1] must be a text or a list of token ids, found False at position 1"),
    ([[[1, 2]]], "found [1, 2] at position 0"),
    (np.ones((1, 2, 2), np.int64), "found array([1, 1]) at position 0"),
    (np.array([0.0, 1.0]), "at position 0"),
    (np.array([True, False]), "at position 0"),
    ([["1", "2"]], "found '1' at position 0"),
    ([-1], "token id -1 is out of range: the vocabulary has ids 0 to "),
    ([[5], [1, 10**30]], "is out of range"),
    (np.array([2**63], np.uint64), "token id 9223372036854775808 is out of range"),
    ([[]], "the prompt is empty"),
    ("", "the prompt is empty"),
]


@pytest.mark.parametrize(("prompts", "words"), WRONG, ids=lambda each: repr(each).partition(" at 0x")[0][:40])
def test_another_form_gets_one_clear_line(llm: LLM, prompts: Any, words: str) -> None:
    if isinstance(prompts, str) and llm.tokenizer is not None and llm.tokenizer.encode(prompts):
        pytest.skip("an empty text has a token here")
    refused(words, lambda: llm.generate(prompts, TWO))


def refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(RequestError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("token_ids", [None, b"ab", 3, 1.5, {"a": 1}, [0.5], [[1, 2]], [True], [-4], []])
def test_logits_refuse_what_are_no_token_ids(llm: LLM, token_ids: Any) -> None:
    refused("", lambda: llm.logits(token_ids))


@pytest.mark.parametrize(
    "messages", [None, "Good day", b"Good day", 5, USER, [[USER]], ["Good day"], [], {1}]
)
def test_chat_refuses_what_are_no_messages(llm: LLM, messages: Any) -> None:
    refused("messages must ", lambda: llm.chat(messages, TWO))


@pytest.mark.parametrize("tools", ["clock", {"type": "function"}, ["clock"], 5])
def test_chat_refuses_what_are_no_tools(llm: LLM, tools: Any) -> None:
    refused("tools must be a list", lambda: llm.chat([USER], TWO, tools=tools))


@pytest.mark.parametrize("arrivals", [5, "0", {0}, b"0"])
def test_arrivals_are_a_list(llm: LLM, arrivals: Any) -> None:
    refused("arrivals_ns must be a list", lambda: llm.generate([IDS], TWO, arrivals_ns=arrivals))
