"""Which formats a model speaks, and that its tags are found in the tokens of a real tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from xdeepserve.engine.deploy.deployment import OutputConfig
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken
from xdeepserve.engine.serving.formats import make_parser, output_formats
from xdeepserve.engine.serving.output import ChoiceOutput
from xdeepserve.engine.serving.request import OutputDelta, OutputFormats, Parse
from xdeepserve.errors import DeploymentError, RequestError
from xdeepserve.model.chat_template import ChatTemplate, JsonText
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.tokenizer import Tokenizer

ALL = Parse(reasoning=True, tools=True)
TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


def tokenizer_with(
    tiny: TinyCheckpoint, template: str = "", special: tuple[str, ...] = (), plain: tuple[str, ...] = ()
) -> Tokenizer:
    """The bytes of tiny's tokenizer, without its own tags."""
    raw = json.loads((tiny.directory / "tokenizer.json").read_text())
    raw["added_tokens"] = raw["added_tokens"][:3]
    raw["model"]["vocab"] = {
        token: i
        for token, i in raw["model"]["vocab"].items()
        if i < 259 and token not in ("<think>", "</think>")
    }
    raw["model"]["merges"] = []
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(plain))
    return Tokenizer(backend, {}, {"default": ChatTemplate(template, "test")})


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("", (), OutputFormats()),
        ("{{ '<think>' }}", (), OutputFormats()),
        ("{{ content.split('</think>')[-1] }}", (), OutputFormats(reasoning=True)),
        ("", ("</think>",), OutputFormats(reasoning=True)),
        (TOOLS, (), OutputFormats(shows_tools=True)),
        (TOOLS + "<tool_call>", (), OutputFormats(tools="hermes", shows_tools=True)),
        (TOOLS + "<tool_call>", ("<arg_key>",), OutputFormats(tools="glm", shows_tools=True)),
        (TOOLS + "<tool_call><function=", (), OutputFormats(tools="qwen3_coder", shows_tools=True)),
        ("<minimax:tool_call>", (), OutputFormats(tools="minimax")),
        ("", ("｜DSML｜", "<｜tool▁calls▁begin｜>"), OutputFormats(tools="deepseek_v32")),
        ("```json", ("<｜tool▁calls▁begin｜>",), OutputFormats(tools="deepseek")),
        ("", ("<｜tool▁calls▁begin｜>",), OutputFormats(tools="deepseek_v31")),
        (TOOLS, ("<|tool_calls_section_begin|>",), OutputFormats(tools="kimi", shows_tools=True)),
    ],
)
def test_formats_are_found(
    tiny: TinyCheckpoint, template: str, tokens: tuple[str, ...], expected: OutputFormats
) -> None:
    for kinds in ({"special": tokens}, {"plain": tokens}):
        assert output_formats(OutputConfig(), tokenizer_with(tiny, template, **kinds)) == expected


def test_formats_can_be_set(tiny: TinyCheckpoint) -> None:
    tokenizer = tokenizer_with(tiny, "<tool_call>", ("</think>",))
    off = resolve("monolithic", ["output.reasoning=off", "output.tools=off"]).output
    assert output_formats(off, tokenizer) == OutputFormats()
    other = resolve("monolithic", ["output.reasoning=deepseek", "output.tools=kimi"]).output
    assert output_formats(other, tokenizer_with(tiny)) == OutputFormats(reasoning=True, tools="kimi")
    assert output_formats(other, None) == OutputFormats()
    with pytest.raises(DeploymentError, match="output"):
        resolve("monolithic", ["output.tools=xml"])


def run(tokenizer: Tokenizer, text: str, prompt: str = "", **params: Any) -> list[OutputDelta]:
    formats = output_formats(OutputConfig(), tokenizer)
    parser = make_parser(ALL, formats, tokenizer, tokenizer.encode(prompt))
    output = ChoiceOutput(0, SamplingParams(**params), 1000, frozenset([1]), tokenizer, parser)
    deltas = []
    for token_id in [*tokenizer.encode(text), 1]:
        delta = output.push([SampledToken(token_id, False, None)], now_ns=7)
        assert delta is not None
        deltas.append(delta)
        if delta.finish_reason is not None:
            break
    return deltas


TEXT = (
    "<think>né\n</think>So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    '```json\n{"a": "é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
TAGS = ("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
TAGS += ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kinds", [{"special": TAGS}, {"plain": TAGS}, {}])
def test_tags_are_found_however_they_are_tokens(
    tiny: TinyCheckpoint, kinds: dict[str, tuple[str, ...]], skip: bool
) -> None:
    template = TOOLS + "</think><｜tool▁calls▁begin｜>```json"
    deltas = run(tokenizer_with(tiny, template, **kinds), TEXT, skip_special_tokens=skip)
    assert "".join(delta.reasoning for delta in deltas) == "né\n"
    assert "".join(delta.text for delta in deltas) == "So:"
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.name for call in calls if call.name] == ["f"]
    assert "".join(call.arguments for call in calls) == '{"a": "é"}'
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "in_reasoning"),
    [
        ("hi<think>", True),
        ("hi<think>\n", True),
        ("<think>hi", False),
        ("<think></think>", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
def test_a_prompt_may_open_the_reasoning(
    tiny: TinyCheckpoint, prompt: str, in_reasoning: bool, tokens: tuple[str, ...]
) -> None:
    deltas = run(tokenizer_with(tiny, "</think>", tokens), "a</think>b", prompt)
    text, reasoning = ("b", "a") if in_reasoning else ("a</think>b", "")
    assert ("".join(d.text for d in deltas), "".join(d.reasoning for d in deltas)) == (text, reasoning)


def test_stop_strings_end_what_is_parsed(tiny: TinyCheckpoint) -> None:
    deltas = run(tokenizer_with(tiny, "</think>"), "<think>abSTOPcd", stop=("STOP",))
    assert "".join(delta.reasoning for delta in deltas) == "ab"
    assert deltas[-1].finish_reason == "stop"


def test_nothing_is_parsed_unless_asked(tiny: TinyCheckpoint) -> None:
    tokenizer = tokenizer_with(tiny, "</think><tool_call>")
    formats = output_formats(OutputConfig(), tokenizer)
    assert make_parser(Parse(), formats, tokenizer, []) is None
    assert make_parser(ALL, OutputFormats(), tokenizer, []) is None
    parser = make_parser(Parse(tools=True), formats, tokenizer, tokenizer.encode("<think>"))
    assert parser is not None
    assert parser.push("<think>").content == "<think>"


# As DeepSeek's templates write a call, as Qwen's do, and as a loop.
DIALECTS = {
    "{{ '<' + call.function.name + '\n' + call.function.arguments + '\n>' }}": '<f\n{"b":1, "a":2}\n>',
    "{{ call.function.arguments ~ '!' }}": '{"b":1, "a":2}!',
    "{{ call.function.arguments }}": '{"b":1, "a":2}',
    "{{ call.function.arguments + '' }}": '{"b":1, "a":2}',
    "{{ 's' if call.function.arguments is string else call.function.arguments | tojson }}": (
        '{"b": 1, "a": 2}'
    ),
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}": "b=1;a=2;",
}


@pytest.mark.parametrize(("dialect", "expected"), DIALECTS.items())
def test_arguments_suit_every_dialect_of_templates(dialect: str, expected: str) -> None:
    template = ChatTemplate("{% for call in messages[0].tool_calls %}" + dialect + "{% endfor %}", "test")
    function = {"name": "f", "arguments": JsonText('{"b":1, "a":2}')}
    shown = template.render(messages=[{"role": "assistant", "tool_calls": [{"function": function}]}])
    assert shown == expected


def test_a_template_that_fails_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="refuses"):
        ChatTemplate("{{ messages[0].content + 1 }}", "test").render(
            messages=[{"role": "user", "content": "x"}]
        )


def test_a_prompt_may_end_within_a_reasoning(tiny: TinyCheckpoint) -> None:
    tokenizer, formats = tokenizer_with(tiny), OutputFormats(reasoning=True)
    prompt = tokenizer.encode("<think>7 + 9 = 16, and")
    for is_within in (True, False):
        parser = make_parser(Parse(reasoning=True, in_reasoning=is_within), formats, tokenizer, prompt)
        assert parser is not None
        parsed = parser.finish(" so.</think>16")
        expected = (" so.", "16") if is_within else ("", " so.</think>16")
        assert (parsed.reasoning, parsed.content) == expected


def test_what_stopped_a_choice_is_told_with_its_last_delta(tiny: TinyCheckpoint) -> None:
    tokenizer = tokenizer_with(tiny)
    [end] = tokenizer.encode("c")
    for params, reason in (({"stop": ["b"]}, "b"), ({"stop_token_ids": [end]}, end), ({}, None)):
        *before, last = run(tokenizer, "abc", **params)
        assert [delta.stop_reason for delta in before] == [None] * len(before)
        assert last.stop_reason == reason
