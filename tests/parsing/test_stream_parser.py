"""Reasoning and tool calls out of a stream: what is well formed, what comes when, and what a limit cuts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.parsing.texts import SHREDS, cut
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.stream_parser import Parsed, StreamParser
from xdeepserve.parsing.tool_formats import NOTATIONS, ToolFormat

TEXT = {"type": "string"}
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
KIMI_SEP, KIMI_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"

FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)


def spell(tools: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """Calls as a model writes them."""
    if tools == "hermes":
        bodies = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if tools == "kimi":
        inner = "".join(
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            for i, (name, arguments) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    if NOTATIONS[tools].tags:
        return spell_tagged(tools, calls)
    if tools == "deepseek":
        spelt = [f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```" for name, arguments in calls]
    else:
        spelt = [f"{name}<｜tool▁sep｜>{arguments}" for name, arguments in calls]
    inner = "\n".join(f"<｜tool▁call▁begin｜>{each}<｜tool▁call▁end｜>" for each in spelt)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


SECTIONS: dict[ToolFormat, tuple[str, str, str]] = {  # around all calls, and around each
    "glm": ("{}", "<tool_call>", "</tool_call>"),
    "qwen3_coder": ("{}", "<tool_call>\n", "\n</tool_call>"),
    "minimax": ("<minimax:tool_call>\n{}\n</minimax:tool_call>", "", ""),
    "deepseek_v32": ("<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>", "", ""),
}


def spell_tagged(tools: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """As the models' templates write calls: a text as it is, anything else as JSON."""
    t, (around, begin, end), spelt = NOTATIONS[tools].tags, SECTIONS[tools], []
    assert t is not None
    for name, arguments in calls:
        body = f"{t.first}{name}{t.named}"
        for key, value in json.loads(arguments).items():
            is_text = isinstance(value, str)
            tag = t.is_text if is_text and t.is_text else t.value
            body += f"{t.key}{key}{tag}{value if is_text else json.dumps(value)}{t.end}"
        spelt.append(begin + body + t.last + end)
    return around.format("\n".join(spelt))


def joined(parts: list[Parsed]) -> tuple[str, str, list[list[str | None]]]:
    """Content, reasoning and calls as [name, id, arguments]."""
    calls: list[list[str | None]] = []
    for part in parts:
        for call in part.tool_calls:
            assert call.index == len(calls)
            calls.append([call.name, call.id, call.arguments])
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


def parse(
    chunks: list[str],
    tools: ToolFormat | None,
    reasoning: bool = True,
    in_reasoning: bool = False,
    functions: Sequence[Function] = (),
) -> tuple[str, str, list[list[str | None]]]:
    parser = StreamParser(reasoning, tools, in_reasoning=in_reasoning, functions=functions)
    return joined([*(parser.push(chunk) for chunk in chunks), parser.finish()])


ARGUMENTS = st.dictionaries(
    st.text("abé_", min_size=1, max_size=4),
    st.integers(-(2**60), 2**60) | st.text("ab1é \n<`{", max_size=12) | st.none(),
    max_size=3,
).map(lambda value: json.dumps(value, ensure_ascii=False))
CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), ARGUMENTS),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call[0],
)
SPEECH = st.text("abc <`\n", max_size=12)
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


def function_of(name: str, arguments: str) -> Function:
    """One that takes such arguments."""
    kinds = {str: "string", int: "integer", type(None): "null"}
    properties = {key: {"type": kinds[type(value)]} for key, value in json.loads(arguments).items()}
    return Function(name, json.dumps({"type": "object", "properties": properties}))


@given(st.sampled_from(FORMATS), SPEECH, st.none() | SPEECH, CALLS, SPEECH, PLACES)
def test_well_formed_answers(
    tools: ToolFormat,
    content: str,
    reasoning: str | None,
    calls: list[tuple[str, str]],
    after: str,
    places: list[int],
) -> None:
    thought = "" if reasoning is None else f"<think>{reasoning}</think>"
    text = f"{thought}{content}{spell(tools, calls)}{after}"
    functions = [function_of(name, arguments) for name, arguments in calls]
    found_content, found_reasoning, found_calls = parse(cut(text, places), tools, functions=functions[::-1])
    assert found_reasoning == (reasoning or "")
    before, behind = content.rstrip(), after.lstrip()
    space = content[len(before) :] or after[: len(after) - len(behind)]  # as it separates the words
    assert found_content == before + (space if before and behind else "") + behind
    ids = [f"functions.{name}:{i}" if tools == "kimi" else None for i, (name, _) in enumerate(calls)]
    expected = [[name, i, arguments] for (name, arguments), i in zip(calls, ids, strict=True)]
    assert found_calls == expected


@given(st.none() | st.sampled_from(FORMATS), st.booleans(), st.booleans(), SHREDS, PLACES)
@example("hermes", True, False, ' <think>a</think> <tool_call>{"name":"f"}</tool_', [3, 7, 30])
@example("deepseek", True, False, "<think", [2])
def test_chunks_do_not_matter(
    tools: ToolFormat | None, reasoning: bool, in_reasoning: bool, text: str, places: list[int]
) -> None:
    whole = parse([text], tools, reasoning, in_reasoning)
    assert parse(list(text), tools, reasoning, in_reasoning) == whole
    assert parse(cut(text, places), tools, reasoning, in_reasoning) == whole


@given(st.none() | st.sampled_from(FORMATS), st.booleans(), SHREDS)
def test_nothing_is_sent_that_may_become_a_tag(tools: ToolFormat | None, reasoning: bool, text: str) -> None:
    """Half a tag that was sent would not be where the final text begins, since there the tag is gone."""
    parser, parts = StreamParser(reasoning, tools), [Parsed()]
    final = parse([text], tools, reasoning)
    for char in text:
        parts.append(parser.push(char))
        content, thought, calls = joined(parts)
        assert final[0].startswith(content)
        assert final[1].startswith(thought)
        assert [call[:2] for call in calls] == [call[:2] for call in final[2]][: len(calls)]


@given(SHREDS, PLACES)
def test_without_formats_text_passes_at_once(text: str, places: list[int]) -> None:
    parser = StreamParser(False, None)
    for chunk in cut(text, places):
        assert parser.push(chunk).content == chunk
    assert parser.finish() == Parsed()


@pytest.mark.parametrize(
    ("text", "in_reasoning", "content", "reasoning"),
    [
        ("<think>a</think>b", False, "b", "a"),
        ("\n <think>\na\n</think>\n\nb", False, "\n\nb", "\na\n"),
        ("a</think>b", True, "b", "a"),
        ("a", True, "", "a"),
        ("a</th", True, "", "a</th"),
        ("</think>b", True, "b", ""),
        ("b <think>a</think>", False, "b <think>a</think>", ""),
        ("a</think>b", False, "a</think>b", ""),
        ("<think", False, "<think", ""),
        ("<thinker>", False, "<thinker>", ""),
        ("<think>a<think>b</think></think>", False, "</think>", "a<think>b"),
    ],
)
def test_reasoning(text: str, in_reasoning: bool, content: str, reasoning: str) -> None:
    assert parse([text], None, True, in_reasoning) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        # Cut off by the length limit.
        ("deepseek", f'x{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n{{"a',
         f'x{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n{{"a', []),
        ("deepseek", f"x {DEEPSEEK}function<｜tool▁sep｜>f", f"x {DEEPSEEK}function<｜tool▁sep｜>f", []),
        ("deepseek", "x<｜tool▁calls", "x<｜tool▁calls", []),
        ("deepseek", spell("deepseek", [("f", "{}")])[:-3], "", [["f", None, "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [["f", None, "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool', "", [["f", None, "{}"]]),
        ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        # Not to the format.
        ("hermes", "a <tool_call>soon</tool_call> b", "a <tool_call>soon</tool_call> b", []),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ("hermes", "<tool_call>" + "[" * 10_000, "<tool_call>" + "[" * 10_000, []),
        ("kimi", f"{KIMI} {KIMI_SEP}{{}}{KIMI_END}", f"{KIMI} {KIMI_SEP}{{}}{KIMI_END}", []),
        ("deepseek_v31", DEEPSEEK + "f" + "".join(DEEPSEEK_ENDS),
         DEEPSEEK + "f" + "".join(DEEPSEEK_ENDS), []),
        ("deepseek", DEEPSEEK[:20] + "?" + DEEPSEEK_ENDS[1], DEEPSEEK[:20] + "?" + DEEPSEEK_ENDS[1], []),
        # Nearly to the format.
        ("deepseek_v31", f"{DEEPSEEK}f<｜tool▁sep｜>{{}}" + " \n".join(DEEPSEEK_ENDS), "",
         [["f", None, "{}"]]),
        ("kimi", f"{KIMI} f {KIMI_SEP}{{}}{KIMI_END}", "", [["f", "f", "{}"]]),
        ("deepseek", f"{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n{{}}{DEEPSEEK_ENDS[0]}", "",
         [["f", None, "{}"]]),
        ("hermes", '<tool_call>{"arguments": {"b":  1}, "name": "f"}</tool_call>', "",
         [["f", None, '{"b":  1}']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         [["f", None, '{"a": 1}']]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [["f", None, "{}"]]),
    ],
)  # fmt: skip
def test_broken_and_unfinished_calls(
    tools: ToolFormat, text: str, content: str, calls: list[list[str | None]]
) -> None:
    assert parse([text], tools) == (content, "", calls)
    assert parse(list(text), tools) == (content, "", calls)


@pytest.mark.parametrize("tools", FORMATS)
def test_a_call_that_is_cut_off_is_no_content(tools: ToolFormat) -> None:
    """Wherever the limit comes: what is known of the calls is given out, and no tag, nor half of one."""
    calls = [("find", '{"city": "Bern"}'), ("go", "{}")]
    text = f"<think>hm</think>Let me see. {spell(tools, calls)}"
    most = 0
    for length in range(len(text) + 1):
        parser = StreamParser(True, tools)
        content, reasoning, found = joined([parser.push(text[:length]), parser.finish(is_cut=True)])
        assert "Let me see.".startswith(content.removesuffix("<").rstrip())
        assert "hm".startswith(reasoning.removesuffix("<"))
        for (name, arguments), (found_name, _, found_arguments) in zip(calls, found, strict=False):
            assert found_name == name
            assert found_arguments is not None
            assert arguments.startswith(found_arguments.rstrip("}")) or tools == "deepseek"
        assert len(found) >= most
        most = len(found)
    assert most == len(calls)


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        # Without line breaks, as GLM-4.7 has it; a value that is no text; one of which nobody knows.
        ("glm", "a<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value><arg_key>t</arg_key>"
         "<arg_value>5</arg_value></tool_call>", "a", [["f", None, '{"n": 5, "t": "5"}']]),
        ("glm", "<tool_call>g\n<arg_key>x</arg_key>\n<arg_value>[1, {}]</arg_value>\n</tool_call>", "",
         [["g", None, '{"x": [1, {}]}']]),
        ("glm", "<tool_call>f</tool_call>\n<tool_call>f\n</tool_call>", "",
         [["f", None, "{}"], ["f", None, "{}"]]),
        ("glm", "<tool_call>f<arg_key>n</tool_call>b", "<tool_call>f<arg_key>n</tool_call>b", []),
        ("glm", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
        # A text or null: what is null, and what is neither a text nor null.
        ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="o">null</parameter>\n'
         '<parameter name="t">null</parameter></invoke></minimax:tool_call>', "",
         [["f", None, '{"o": null, "t": "null"}']]),
        ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="o">7</parameter></invoke>', "",
         [["f", None, '{"o": "7"}']]),
        ("minimax", "x<minimax:tool_call>?</minimax:tool_call>",
         "x<minimax:tool_call>?</minimax:tool_call>", []),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n a\n\n</parameter>\n</function>\n"
         "</tool_call>", "", [["f", None, '{"s": " a\\n"}']]),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" '
         'string="false">{"a":  1}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "",
         [["f", None, '{"n": {"a":  1}}']]),
    ],
)  # fmt: skip
def test_calls_between_tags(
    tools: ToolFormat, text: str, content: str, calls: list[list[str | None]]
) -> None:
    properties: dict[str, object] = {
        "n": {"type": "number"},
        "t": {"enum": ["5", "a"]},
        "o": {"type": ["string", "null"]},
        "s": TEXT,
    }
    functions = [Function("f", json.dumps({"properties": properties}))]
    for chunks in ([text], list(text)):
        assert parse(chunks, tools, functions=functions) == (content, "", calls)


@pytest.mark.parametrize("tools", FORMATS)
def test_each_call_comes_when_it_is_whole(tools: ToolFormat) -> None:
    """A client may begin with the first call while the model writes the second."""
    parser = StreamParser(False, tools, functions=[function_of("f", '{"a": "x"}'), Function("g", "{}")])
    text = spell(tools, [("f", '{"a": "x"}'), ("g", '{"b": 1}')])
    at = {call.name: place for place, char in enumerate(text) for call in parser.push(char).tool_calls}
    # Between tags, words behind the last call would make its ends a part of its value.
    is_sure = NOTATIONS[tools].body != "tags"
    at |= {call.name: len(text) for call in parser.finish().tool_calls}
    assert at["f"] < text.index("g", at["f"]) < at["g"]
    assert (at["g"] < len(text)) == is_sure


@pytest.mark.parametrize("is_closed", [True, False])
def test_words_between_and_behind_calls_are_content(is_closed: bool) -> None:
    """Some models talk on inside the section of calls."""
    call = f"{DEEPSEEK}f<｜tool▁sep｜>{{}}{DEEPSEEK_ENDS[0]}"
    parser = StreamParser(False, "deepseek_v31")
    parts = [parser.push(call), parser.push(" and this"), parser.push(" is why\n")]
    parts.append(parser.finish(DEEPSEEK_ENDS[1] if is_closed else ""))
    assert "".join(part.content for part in parts).strip() == "and this is why"
    assert [each.name for part in parts for each in part.tool_calls if each.name] == ["f"]
