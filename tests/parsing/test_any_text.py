"""Any text, cut anywhere: one result, no exception, and nothing lost of what the model said."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.parsing.texts import SHREDS, cut, text_at_random, text_with_words
from xdeepserve.parsing import parse_answer, parse_pieces
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.stream_parser import Parsed, StreamParser
from xdeepserve.parsing.tool_formats import NOTATIONS, ToolFormat

TOOLS = [
    {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}},
    {"name": "get_time", "parameters": {}},
    {"name": "get", "parameters": {"anyOf": [{"$ref": "#"}, {"properties": {"c": {"$ref": "#/anyOf/1"}}}]}},
]
FORMATS = st.sampled_from(list(NOTATIONS))
PLACES = st.lists(st.integers(0, 10_000), max_size=8)


def check_sound(found: Parsed, text: str, is_cut: bool = False) -> None:
    """Calls have arguments that are JSON objects, but for the last one of a text that is cut; the rest is the
    text's own, in its order."""
    for number, call in enumerate(found.tool_calls, 1):
        assert call.index == number - 1
        assert call.name
        assert (is_cut and number == len(found.tool_calls)) or isinstance(json.loads(call.arguments), dict)
    for said in (found.content, found.reasoning):
        letters = iter(text)
        assert all(letter in letters for letter in said)


@given(FORMATS, st.booleans(), st.booleans(), SHREDS | st.text(max_size=30), PLACES)
@example("hermes", True, False, "<tool_call><think></tool_call>a</tool_call>", [])
@example("glm", True, False, "<tool_call>call<arg_key", [5])
def test_streamed_is_whole(
    form: ToolFormat, has_tools: bool, in_reasoning: bool, text: str, places: list[int]
) -> None:
    tools = TOOLS if has_tools else []
    whole = parse_answer(text, format=form, tools=tools, in_reasoning=in_reasoning)
    check_sound(whole, text)
    for pieces in (list(text), cut(text, places)):
        assert parse_pieces(pieces, format=form, tools=tools, in_reasoning=in_reasoning) == whole


@given(FORMATS, st.lists(SHREDS, max_size=6), st.booleans())
def test_every_word_is_somewhere(form: ToolFormat, shreds: list[str], in_reasoning: bool) -> None:
    """Words of their own between marks are found again: in text, in a name or in arguments."""
    text = "".join(f"{shred}w{number}w" for number, shred in enumerate(shreds))
    found = parse_answer(text, format=form, tools=TOOLS, in_reasoning=in_reasoning)
    calls = "".join(f"{call.id} {call.name} {call.arguments}" for call in found.tool_calls)
    for number in range(len(shreds)):
        word = f"w{number}w"
        assert found.content.count(word) + found.reasoning.count(word) + (word in calls) >= 1


@given(FORMATS, SHREDS)
def test_what_is_no_call_is_text(form: ToolFormat, text: str) -> None:
    found = parse_answer(text, format=form, tools=TOOLS)
    begun = re.match(r"\s*</?think>", text)
    if not found.tool_calls and begun is None:
        assert found == Parsed(content=text)
    elif not found.tool_calls and "</think>" not in text:
        assert begun is not None
        assert found == Parsed(reasoning=text[begun.end() :])


@pytest.mark.parametrize("form", NOTATIONS)
@pytest.mark.parametrize(
    "part", ["{opener}", "{opener}f", "{call}", '{{"name": "f", "arguments": {{"a": "', "{{"]
)
def test_time_is_bounded_where_nothing_ends(form: ToolFormat, part: str) -> None:
    """A model in a loop repeats openers: each could begin a call, and none does."""
    n = NOTATIONS[form]
    opener = n.begins[0]
    call = (
        f"{opener}{n.tags.first}g{n.tags.named}{n.tags.key}a{n.tags.value}"
        if n.tags
        else n.begins[0] + n.call
    )
    text = part.format(opener=opener, call=call) * (4_000 // len(part))
    found = parse_answer(text, format=form, tools=TOOLS)
    assert found.tool_calls or found.content == text


@pytest.mark.parametrize("part", ['{"name": ', '{"arguments": ', '{"parameters": {"a": ', '{"name": [{"a": '])
def test_time_is_bounded_where_objects_nest(part: str) -> None:
    """Each brace could begin a call, and each reader would go as deep as it may; 180,000 characters took
    some ten seconds."""
    text = part * (180_000 // len(part))
    begin = time.process_time()
    assert parse_answer(text, format="hermes", tools=TOOLS) == Parsed(content=text)
    assert time.process_time() - begin < 4


@pytest.mark.parametrize("form", ["deepseek", "deepseek_v31", "kimi"])
def test_time_is_linear_where_openers_repeat(form: ToolFormat) -> None:
    """Each opener becomes text of its own, and was joined to all text before: 16,000 took eight seconds."""
    n = NOTATIONS[form]
    text = f"{n.begins[0]}{n.call}f{n.separator}" * 16_000
    begin = time.process_time()
    assert parse_answer(text, format=form, tools=TOOLS) == Parsed(content=text)
    assert time.process_time() - begin < 4


SEEDS = 1000


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(SEEDS))
def test_ten_million_texts(seed: int) -> None:
    """In all seeds together; of each text, one cut, and of some each letter by itself."""
    fuzz(seed, 10_000)


@pytest.mark.long
def test_ten_thousand_texts() -> None:
    fuzz(SEEDS, 10_000)


def test_some_texts() -> None:
    fuzz(SEEDS + 1, 300)


FORMS = list(NOTATIONS)
WORD = re.compile(r"w\d+w")
FUNCTIONS = [Function(str(tool["name"]), json.dumps(tool["parameters"])) for tool in TOOLS]


def fuzz(seed: int, num_texts: int) -> None:
    """Parse texts at random, whole and in pieces; a length limit cuts some off, others have words to be found
    again."""
    rng = random.Random(seed)
    num_calls = 0
    for number in range(num_texts):
        form, functions = rng.choice(FORMS), FUNCTIONS if rng.random() < 0.5 else []
        within, kind = rng.random() < 0.2, rng.random()
        is_cut, has_words = kind < 0.1, kind > 0.9
        text = text_with_words(rng, form) if has_words else text_at_random(rng, form)
        pieces = list(text) if number % 20 == 0 else cut(text, [rng.randrange(10_000) for _ in range(4)])
        whole, streamed = (
            parsed(each, StreamParser(True, form, in_reasoning=within, functions=functions), is_cut)
            for each in ([text], pieces)
        )
        assert streamed == whole, (form, text, pieces, within, is_cut)
        check_sound(whole, text, is_cut)
        if has_words:
            calls = " ".join(f"{call.id} {call.name} {call.arguments}" for call in whole.tool_calls)
            found = f"{whole.content} {whole.reasoning} {calls}"
            assert all(word in found for word in WORD.findall(text)), (form, text, within)
        num_calls += len(whole.tool_calls)
    assert num_calls > num_texts / 10


def parsed(pieces: list[str], parser: StreamParser, is_cut: bool) -> Parsed:
    """Parse pieces of a text; `is_cut`: a length limit has ended the text."""
    found = [*map(parser.push, pieces[:-1]), parser.finish("".join(pieces[-1:]), is_cut)]
    calls = [call for each in found for call in each.tool_calls]
    return Parsed("".join(each.content for each in found), "".join(each.reasoning for each in found), calls)
