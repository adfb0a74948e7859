"""Keywords of JSON Schema are kept, noted or refused, as the documents say; keys of an object differ."""

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from tools.write_schema_keywords import EOS, TRIALS, Trial, page

from tests.sources import SRC
from xdeepserve.engine.dp.grammar import GrammarMatcher, Grammars
from xdeepserve.engine.dp.json_schema import unread_words
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.dp.written_keys import KeyVocabulary, WrittenKeys
from xdeepserve.errors import RequestError
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.tokenizer import load_tokenizer

DRAFTS = {
    4: jsonschema.Draft4Validator,
    7: jsonschema.Draft7Validator,
    2020: jsonschema.Draft202012Validator,
}
TOKENIZER = load_tokenizer(PRESET_DIRECTORY / "tiny")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars((PRESET_DIRECTORY / "tiny" / "tokenizer.json").read_text(), 1280, [EOS])


def test_the_page_is_what_the_trials_give() -> None:
    assert (SRC.parents[1] / "docs" / "json-schema.md").read_text() == page(), (
        "run tools/write_schema_keywords.py"
    )


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.keyword)
def test_documents_of_the_trials_are_judged_rightly(trial: Trial) -> None:
    draft = DRAFTS[trial.draft]
    validator = draft(trial.schema, format_checker=draft.FORMAT_CHECKER)
    for document in trial.valid:
        assert validator.is_valid(json.loads(document)), document
    for document in trial.invalid:
        # The package checks no format whose own package is not there.
        assert not validator.is_valid(json.loads(document)) or trial.keyword.startswith("format "), document


def takes(matcher: GrammarMatcher, document: str) -> bool:
    for token_id in [*TOKENIZER.encode(document), EOS]:
        mask = matcher.allowed()
        assert mask is not None
        fits = matcher.copy().take(token_id)
        assert fits or not mask[token_id]
        if not mask[token_id] or not matcher.take(token_id):
            return False
    return True


@pytest.mark.parametrize(
    ("document", "is_taken"),
    [
        ('{"a":1,"b":2}', True),
        ('{"a":1,"a":2}', False),
        ('{"a":1,"b":2,"a":3}', False),
        ('{"":1,"":2}', False),
        ('{"ab":1,"a":1,"abc":2}', True),
        ('{"a":{"a":1},"b":{"a":2}}', True),
        ('{"a":[{"b":1,"b":2}]}', False),
        ('{"a":["a","a",{"a":"a"}],"b":"a"}', True),
        ('{"a":"a\\",\\"a\\":1","b":1}', True),
        ('{"a":"x\\"","a":1}', False),
        ('{"a\\n":1,"a\\n":2}', False),
        ('{"a": {}, "a": {}}', False),
        ('{"é":1,"è":2}', True),
        ('{"é":1,"é":2}', False),
        ('{"\\u0061":1}', False),
        ('{"a":"\\u0001"}', True),
    ],
)
def test_no_key_comes_twice(grammars: Grammars, document: str, is_taken: bool) -> None:
    for form in (
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(json={"type": "object", "properties": {"zz": {}}}),
    ):
        assert takes(grammars.matcher(form), document) is is_taken


def test_a_property_has_one_spelling(grammars: Grammars) -> None:
    """An optional integer `a` cannot come as a text under another spelling of its name."""
    form = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert takes(grammars.matcher(form), '{"a":1}')
    assert not takes(grammars.matcher(form), '{"\\u0061":"x"}')


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.parametrize("seed", range(40))
def test_keys_differ_in_texts_drawn_at_random(grammars: Grammars, seed: int) -> None:
    """Names of at most a few letters, so that most would come again."""
    rng = random.Random(seed)
    names = {"^[ab]{0,2}x*$": {"type": ["null", "object"], "additionalProperties": {"type": "null"}}}
    form = StructuredOutputsParams(
        json={"type": "object", "patternProperties": names, "additionalProperties": False, "maxProperties": 8}
    )
    matcher, drawn = grammars.matcher(form), []
    while EOS not in drawn and len(drawn) < 400:
        mask = matcher.allowed()
        assert mask is not None
        drawn.append(int(rng.choice(np.flatnonzero(mask))))
        assert matcher.take(drawn[-1])
    if EOS in drawn:
        json.loads(TOKENIZER.decode(drawn[:-1]), object_pairs_hook=unique)


def test_tokens_that_hold_whole_keys() -> None:
    """Vocabularies of other models have tokens of several marks, and of a name with its marks."""
    texts = [b'{"', b"a", b'":1,"', b'a":1', b'"a"', b'{"a":1,"a"', b",", b'":', b"1", b"}", b'b"', b'"']
    keys = WrittenKeys(KeyVocabulary(texts))
    allowed = np.ones(len(texts), np.bool_)

    def forbidden() -> set[bytes]:
        found = [np.atleast_1d(each) for each in keys.forbidden(allowed)]
        return {texts[i] for each in found for i in each}

    for text in (b'{"', b"a", b'":1,"'):
        assert keys.take(texts.index(text))
    assert forbidden() == {b'a":1'}
    assert keys.copy().take(texts.index(b"a"))
    assert keys.take(texts.index(b'b"'))
    assert keys.take(texts.index(b","))
    assert forbidden() == {b'"a"', b'{"a":1,"a"'}


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_overlooked(seed: int) -> None:
    """What is looked up agrees with every token taken by itself, for texts of few letters and many marks."""
    rng = random.Random(seed)
    marks = [*'""nuab/{}[],:é', "\\", "\\\\", '\\"', "\\n", '","']
    texts = [mark.encode() for mark in marks] + [b'{"', b"\xc3", b"\xa9", b"\\u"]
    texts += ["".join(rng.choices(marks, k=rng.randrange(2, 7))).encode() for _ in range(300)]
    texts = [text for text in texts if not re.search(rb'\\[^n"/u\\]', text)]  # JSON has no such escape
    allowed, vocabulary = np.ones(len(texts), np.bool_), KeyVocabulary(texts)
    for _ in range(40):
        keys, written = WrittenKeys(vocabulary), b""
        for text in (b'{"', b"a", b'","', b"b"):
            keys.take(texts.index(text))
        for _step in range(25):
            is_escape = (len(written) - len(written.rstrip(b"\\"))) % 2
            able = {i for i, text in enumerate(texts) if not is_escape or text[:1] in b'n"/u\\'}
            found = {int(i) for each in keys.forbidden(allowed) for i in np.atleast_1d(each)}
            wrong = {i for i in able if not keys.copy().take(i)}
            assert found & able == wrong
            token_id = rng.choice(sorted(able - wrong))
            written += texts[token_id]
            keys.take(token_id)


def test_text_around_json_is_passed_over() -> None:
    texts = [bytes([i]) for i in range(256)]
    keys = WrittenKeys(KeyVocabulary(texts))
    begin = b'say "a", "a" {"x\n<tool_call>\n{"a": 1, "b": {"a": '
    assert all(keys.take(byte) for byte in begin)
    assert [keys.take(byte) for byte in b'2}, "b"'][-1] is False


def test_words_that_are_read_by_none() -> None:
    schema = {"properties": {"title": {"nullable": True}, "x": {"title": "t"}}, "items": [{"my word": 1}]}
    assert unread_words(json.dumps(schema)) == ("my word", "nullable")
    assert unread_words("true") == ()


@pytest.mark.parametrize("word", ["minlength", "max_length", "requird", "proprties", "Enum", "itmes", "item"])
def test_misspelt_keywords(grammars: Grammars, word: str) -> None:
    schema = {"properties": {"a": {"anyOf": [{word: 1}]}}}
    with pytest.raises(RequestError, match=f"unknown keyword {word} in a JSON schema .did you mean"):
        grammars.matcher(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("word", ["defs", "definition", "components"])
def test_references_to_any_word(grammars: Grammars, word: str) -> None:
    schema = {"$ref": f"#/{word}/a", word: {"a": {"type": "integer"}}}
    form = StructuredOutputsParams(json=schema)
    assert takes(grammars.matcher(form), "1")
    assert not takes(grammars.matcher(form), '"a"')


NODE = {"type": "object", "properties": {"is": {"enum": ["row", "cell"]}, "of": {"items": {"$ref": "#"}}}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # As generators of other languages write them.
        ({"type": "integer", "format": "uint64", "minimum": 0.0, "maximum": 1e30}, "7", "-1"),
        ({"type": "integer", "maximum": 2**53 - 1}, "9007199254740991", "9007199254740992"),
        ({"type": "string", "nullable": True, "example": "x", "xml": {}, "readOnly": True}, '"x"', "1"),
        ({"allOf": [{"$ref": "#/components/S"}], "components": {"S": {"enum": [0, 1]}}}, "1", "2"),
        ({"properties": {"a": {"type": "string", "maxLength": 65_535}}}, '{"a": "x"}', '{"a": 1}'),
        ({"type": "array", "maxItems": 1000, "items": {"type": "null"}}, "[null]", "[1]"),
        # Recursion: of the whole, and of a part of a schema with a name.
        (NODE, '{"is": "row", "of": [{"is": "cell"}]}', '{"is": "row", "of": [{"is": "x"}]}'),
        (
            {
                "$id": "https://a.test/t",
                "$ref": "#/$defs/t",
                "$defs": {"t": {"items": {"$ref": "#/$defs/t"}}},
            },
            "[[], [[]]]",
            None,
        ),
        # Keywords that meet: a named property whose name a pattern matches, a pattern and a length.
        (
            {
                "type": "object",
                "properties": {"ab": {"type": "integer"}},
                "patternProperties": {"^a": {"multipleOf": 5}},
                "required": ["ab"],
                "additionalProperties": False,
            },
            '{"ab": 15}',
            '{"ab": 14}',
        ),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, '"abc"', '"abcd"'),
        (
            {
                "type": "object",
                "oneOf": [
                    {
                        "properties": {"do": {"const": "put"}, "n": {"type": "integer"}},
                        "required": ["do", "n"],
                    },
                    {
                        "properties": {"do": {"const": "get"}},
                        "required": ["do"],
                        "additionalProperties": False,
                    },
                ],
            },
            '{"do": "put", "n": 1}',
            '{"do": "get", "n": 1}',
        ),
    ],
)
def test_schemas_as_generators_write_them(
    grammars: Grammars, schema: dict[str, Any], valid: str, invalid: str | None
) -> None:
    form = StructuredOutputsParams(json=schema)
    assert takes(grammars.matcher(form), valid)
    assert invalid is None or not takes(grammars.matcher(form), invalid)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            {"type": "object", "properties": {}, "required": ["b"], "additionalProperties": False},
            "property 'b' is unsat",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no text"),
        ({"format": "email", "type": "string", "pattern": "^(?!x)"}, "look-around"),
    ],
)
def test_schemas_that_nothing_fulfils_are_refused_at_once(
    grammars: Grammars, schema: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        grammars.matcher(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("word", ["titles", "order", "x-length", "propertyOrdering", "optional", "strict"])
def test_words_of_ones_own(grammars: Grammars, word: str) -> None:
    grammars.matcher(StructuredOutputsParams(json={"properties": {"a": {word: 1}}}))
    assert unread_words(json.dumps({word: 1})) == (word,)


def test_behind_the_end_only_the_end_is_taken(grammars: Grammars) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(json={"enum": [3]}))
    [three, zero] = TOKENIZER.encode("3")[0], TOKENIZER.encode("0")[0]
    assert matcher.take(three)
    assert not matcher.take(zero)
    assert matcher.take(EOS)
    assert matcher.take(EOS)
