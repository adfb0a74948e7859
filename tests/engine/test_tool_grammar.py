"""What `tool_choice`, `strict` and reasoning make of a grammar, in every format, read back by the parser."""

import json
import random
from types import SimpleNamespace

import jsonschema
import pytest

from xdeepserve.engine.dp.grammar import GrammarMatcher, Grammars
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.request import OutputFormats, Parse, ToolRules
from xdeepserve.engine.serving.steer import Steersman
from xdeepserve.engine.serving.tool_grammar import tool_grammar
from xdeepserve.errors import RequestError
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.stream_parser import Parsed, StreamParser
from xdeepserve.parsing.tool_formats import NOTATIONS, ToolFormat

EOS = 1
LOADED = load_tokenizer(PRESET_DIRECTORY / "tiny")
assert LOADED is not None
TOKENIZER = LOADED
GRAMMARS = Grammars(TOKENIZER.to_json(), 1280, [EOS])
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Zürich"]},
        "day": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "clock.now": NOTHING}
FUNCTIONS = tuple(Function(name, json.dumps(schema)) for name, schema in SCHEMAS.items())


def written(matcher: GrammarMatcher, rng: random.Random, hurry: float = 0.5) -> str:
    """A text that the grammar allows, at random; it ends as soon as it may with a chance of `hurry`."""
    ids: list[int] = []
    while len(ids) < 2000:
        mask = matcher.allowed()
        assert mask is not None
        allowed = mask.nonzero()[0].tolist()
        token = EOS if EOS in allowed and (rng.random() < hurry or len(allowed) == 1) else rng.choice(allowed)
        assert matcher.take(token)
        if token == EOS:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
    raise AssertionError("it does not end")


def parsed(form: ToolFormat, text: str) -> Parsed:
    return StreamParser(False, form).finish(text)


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("form", NOTATIONS)
def test_a_forced_call_is_a_call(form: ToolFormat, is_single: bool) -> None:
    rules = ToolRules(functions=FUNCTIONS, must_call=True, is_single=is_single)
    grammar = tool_grammar(form, rules, None, TOKENIZER.token_to_id)
    counts = set()
    for seed in range(12):
        said = parsed(form, written(GRAMMARS.matcher(grammar), random.Random(seed), hurry=0.3))
        assert said.content == ""
        counts.add(len(said.tool_calls))
        for call in said.tool_calls:
            assert call.name is not None
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert 0 not in counts
    assert (counts == {1}) == is_single


@pytest.mark.parametrize("form", NOTATIONS)
def test_a_call_that_is_not_forced_is_text_or_a_call(form: ToolFormat) -> None:
    rules = ToolRules(functions=FUNCTIONS)
    grammar = tool_grammar(form, rules, None, TOKENIZER.token_to_id)
    called = TOKENIZER.encode(
        {
            "deepseek": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            "clock.now\n```json\n",
            "deepseek_v31": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock.now<｜tool▁sep｜>",
            "kimi": "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.clock.now:0"
            "<|tool_call_argument_begin|>",
            "hermes": 'Hm.<tool_call>\n{"name": "clock.now", "arguments": ',
            "glm": "Hm.<tool_call>clock.now\n",
            "qwen3_coder": "Hm.<tool_call>\n<function=clock.now>\n",
            "minimax": 'Hm.<minimax:tool_call>\n<invoke name="clock.now">\n',
            "deepseek_v32": 'Hm.<｜DSML｜function_calls>\n<｜DSML｜invoke name="clock.now">\n',
        }[form]
    )
    free = GRAMMARS.matcher(grammar)
    for token in TOKENIZER.encode("4 + 4 = 8, said < the cat >."):
        assert free.take(token)
    mask = free.allowed()
    assert mask is not None
    assert mask[EOS]
    matcher = GRAMMARS.matcher(grammar)
    for token in called:
        assert matcher.take(token)
    # Inside a call nothing but its arguments may follow.
    assert not matcher.copy().take(TOKENIZER.encode("x")[0])
    assert not matcher.copy().take(EOS)
    text = TOKENIZER.decode(called, skip_special_tokens=False)
    said = parsed(form, text + written(matcher, random.Random(1)))
    assert said.content == "Hm."
    assert (said.tool_calls[0].name, json.loads(said.tool_calls[0].arguments)) == ("clock.now", {})


def test_content_of_a_form_excludes_free_text() -> None:
    rules, content = ToolRules(functions=FUNCTIONS), StructuredOutputsParams(choice=("yes", "no"))
    grammar = tool_grammar("deepseek_v31", rules, content, TOKENIZER.token_to_id)
    for seed in range(12):
        said = parsed("deepseek_v31", written(GRAMMARS.matcher(grammar), random.Random(seed)))
        assert said.content in ("yes", "no") or (said.tool_calls and not said.content)
    own = StructuredOutputsParams(grammar='start: "a"')
    with pytest.raises(RequestError, match="cannot be combined with tools"):
        tool_grammar("deepseek_v31", rules, own, TOKENIZER.token_to_id)


def test_a_grammar_holds_for_what_follows_the_reasoning() -> None:
    end = TOKENIZER.encode("</think>")
    matcher = GRAMMARS.matcher(StructuredOutputsParams(choice=("yes",)), end)
    for token in TOKENIZER.encode("4 + 4, no."):
        assert matcher.allowed() is None
        assert matcher.take(token)
    ahead = matcher.copy()  # as for a draft
    assert ahead.take(end[0])
    assert not ahead.take(TOKENIZER.encode("no")[0])
    assert matcher.allowed() is None
    assert matcher.take(end[0])
    assert written(matcher, random.Random(0)) == "yes"
    late = matcher.allowed()
    assert late is not None
    assert late.nonzero()[0].tolist() == [EOS]


def test_only_a_prompt_that_begins_a_reasoning_puts_the_grammar_off() -> None:
    """A model that begins one by itself might never come to its answer."""
    formats = OutputFormats(reasoning=True)
    config = SimpleNamespace(vocab_size=1280, eos_token_ids=(EOS,))
    steersman = Steersman(config, TOKENIZER, formats)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("yes",)))
    for text, parse, is_free in (
        ("hi<think>", Parse(reasoning=True), True),
        ("hi<think>\n", Parse(reasoning=True), True),
        ("hi<think>", Parse(), False),
        ("hi", Parse(reasoning=True), False),
    ):
        prompt = TOKENIZER.encode(text)
        steering = steersman.steer(params, prompt, parse)
        assert steering is not None
        [edits] = steering.edits(prompt, [], 1)
        assert (edits.allowed is None) == is_free


def test_texts_between_tags_follow_their_schemas() -> None:
    """A text may have any characters, or so many, or be one of some; what else there is, is JSON."""
    schema = {
        "type": "object",
        "properties": {
            "any": {"type": "string"},
            "few": {"type": "string", "minLength": 2, "maxLength": 3},
            "one": {"const": "5"},
            "list": {"$ref": "#/$defs/numbers"},
        },
        "required": ["any", "few", "one", "list"],
        "$defs": {"numbers": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}},
    }
    function = Function("f", json.dumps(schema))
    rules = ToolRules(functions=(function,), must_call=True, is_single=True)
    for form, notation in NOTATIONS.items():
        if (t := notation.tags) is None:
            continue
        matcher = GRAMMARS.matcher(tool_grammar(form, rules, None, TOKENIZER.token_to_id))
        begin = {
            "glm": "<tool_call>",
            "qwen3_coder": "<tool_call>\n",
            "minimax": "<minimax:tool_call>\n",
        }.get(form, "<｜DSML｜function_calls>\n")
        text = f"{begin}{t.first}f{t.named}{t.key}any{t.is_text or t.value}a < b\n</x>{t.end}"
        for token in TOKENIZER.encode(text):
            assert matcher.take(token)
        text += written(matcher, random.Random(3))
        (call,) = StreamParser(False, form, functions=[function]).finish(text).tool_calls
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schema)
        assert (arguments["any"], arguments["one"], len(arguments["few"]) in (2, 3)) == (
            "a < b\n</x>",
            "5",
            True,
        )
    for keyword in ("pattern", "format"):
        asked = {"properties": {"a": {"type": "string", keyword: "x"}}}
        rules = ToolRules(functions=(Function("f", json.dumps(asked)),), must_call=True)
        with pytest.raises(RequestError, match=f"wants a {keyword} of the text a"):
            tool_grammar("glm", rules, None, TOKENIZER.token_to_id)


def test_tags_that_are_made_of_tokens() -> None:
    """DeepSeek-V3.2 has a token for what is within its tags: no text can spell that."""
    rules = ToolRules(functions=FUNCTIONS)
    grammar = tool_grammar("deepseek_v32", rules, None, {"｜DSML｜": 7, "<": 8}.get).grammar
    assert grammar is not None
    assert "｜DSML｜" not in grammar
    assert 'start: text ("<" <[7]> "function_calls>" calls)?' in grammar
