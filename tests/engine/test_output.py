"""From tokens to text: stop strings, ends, limits, held-back text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken
from xdeepserve.engine.serving.output import ChoiceOutput
from xdeepserve.model.presets import PRESET_DIRECTORY, TinyCheckpoint
from xdeepserve.model.tokenizer import Tokenizer, load_tokenizer
from xdeepserve.parsing.stream_parser import StreamParser


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyCheckpoint) -> Tokenizer:
    loaded = load_tokenizer(tiny.directory)
    assert loaded is not None
    return loaded


EOS = 1


def run(tokenizer: Tokenizer, ids: list[int], max_tokens: int = 1000, group: int = 1, **given: object):
    """Push tokens `group` at a time; the deltas up to the end and the output."""
    params = SamplingParams(max_tokens=max_tokens, **given)  # type: ignore[arg-type]
    output = ChoiceOutput(0, params, max_tokens, frozenset([EOS]), tokenizer)
    deltas = []
    for at in range(0, len(ids), group):
        delta = output.push([SampledToken(token, False, None) for token in ids[at : at + group]])
        if delta is not None:
            deltas.append(delta)
        if output.finish_reason is not None:
            break
    return deltas, output


def text_of(deltas: list) -> str:
    return "".join(delta.text for delta in deltas)


@given(st.text(max_size=40), st.integers(1, 4))
def test_text_streams_whole(tokenizer: Tokenizer, text: str, group: int) -> None:
    ids = tokenizer.encode(text)
    deltas, output = run(tokenizer, [*ids, EOS], group=group)
    assert text_of(deltas) == tokenizer.decode(ids)
    assert output.finish_reason == "stop"
    assert [i for delta in deltas for i in delta.token_ids] == [*ids, EOS]
    assert "\ufffd" not in "".join(delta.text for delta in deltas[:-1]).replace(tokenizer.decode(ids), "")


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_exactly(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    deltas, output = run(tokenizer, [*tokenizer.encode(text), EOS], stop=tuple(stop))
    places = [text.find(s) for s in stop if s in text]
    # The first stop string to be complete ends the choice; the text ends where it begins.
    if places:
        ends = min(text.find(s) + len(s) for s in stop if s in text)
        assert text_of(deltas) in {text[: text.find(s)] for s in stop if s in text[:ends]} | {
            text[: min(places)]
        }
    else:
        assert text_of(deltas) == text
    assert output.finish_reason == "stop"
    for delta in deltas:
        assert not any(s in delta.text for s in stop)


def test_held_text_is_released_when_it_cannot_become_a_stop_string(tokenizer: Tokenizer) -> None:
    deltas, _ = run(tokenizer, tokenizer.encode("xxENx"), stop=("END",))
    assert text_of(deltas) == "xxENx"
    assert [delta.text for delta in deltas][-2:] == ["", "ENx"]


def test_held_text_is_released_at_the_length_limit(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("xxEN")
    deltas, output = run(tokenizer, ids, max_tokens=len(ids), stop=("END",))
    assert text_of(deltas) == "xxEN"
    assert output.finish_reason == "length"


def test_stop_string_may_be_included(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("oneENDtwo")
    deltas, _ = run(tokenizer, ids, stop=("END",), include_stop_str_in_output=True)
    assert text_of(deltas) == "oneEND"


def test_eos_and_stop_tokens_end_without_text(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for ids, given_params in (([a, EOS, b], {}), ([a, b, a], {"stop_token_ids": (b,)})):
        deltas, output = run(tokenizer, ids, **given_params)
        assert text_of(deltas) == "a"
        assert output.finish_reason == "stop"
        assert sum(len(delta.token_ids) for delta in deltas) == 2


def test_ignore_eos_goes_on(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    deltas, output = run(tokenizer, [a, EOS, a], max_tokens=3, ignore_eos=True)
    assert text_of(deltas) == "aa"
    assert output.finish_reason == "length"


def test_what_follows_the_end_in_one_step_is_dropped(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    deltas, _ = run(tokenizer, [a, EOS, a, a], group=4)
    assert deltas[0].token_ids == [a, EOS]
    deltas, _ = run(tokenizer, [a, a, a, a], group=4, max_tokens=3)
    assert deltas[0].token_ids == [a, a, a]


def test_without_a_tokenizer_there_are_ids_only() -> None:
    output = ChoiceOutput(0, SamplingParams(max_tokens=2), 2, frozenset(), None)
    delta = output.push([SampledToken(5, False, None), SampledToken(6, False, None)])
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [5, 6], "length")


def test_tokens_of_the_reasoning_are_counted_however_they_come() -> None:
    tokenizer = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert tokenizer is not None
    ids = tokenizer.encode("<think>4 + 4 = 8.</think>The answer is 8.")
    expected = ids.index(tokenizer.encode("</think>")[0]) + 1
    for size in (1, 2, 3, len(ids)):
        params = SamplingParams(max_tokens=len(ids))
        output = ChoiceOutput(0, params, len(ids), frozenset(), tokenizer, StreamParser(True, None))
        deltas = [
            output.push([SampledToken(token, False, None) for token in ids[i : i + size]])
            for i in range(0, len(ids), size)
        ]
        assert sum(delta.num_reasoning for delta in deltas if delta is not None) == expected
