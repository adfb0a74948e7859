"""Structured output and what else decides which tokens are drawn: the same bits in every deployment."""

import json
import re
from collections import Counter
from collections.abc import Sequence as Seq
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field, SecretStr, TypeAdapter

from xdeepserve import LLM, SamplingParams, StructuredOutputsParams
from xdeepserve.engine.dp.grammar import FORMATS, GrammarMatcher, Grammars
from xdeepserve.engine.dp.steering import Steering
from xdeepserve.engine.plans import LogitEdits
from xdeepserve.errors import RequestError, XDeepServeError
from xdeepserve.history import History, serve
from xdeepserve.llm import RequestOutput, digest
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.sampling import edit, sample

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", 7]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "next": {"$ref": "#/$defs/leaf"},
    },
    "required": ["name", "kind", "tags", "next"],
    "additionalProperties": False,
    "$defs": {
        "leaf": {"properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
        | {"type": "object", "additionalProperties": False}
    },
}


def wants(**form: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**form)}


PROMPTS: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7], wants(json=SCHEMA)),
    (list(range(20, 61)), {**wants(json=SCHEMA), "n": 2}),
    ([200], wants(regex=r"[a-d]{3,9}/[0-9]{1,4}x")),
    (list(range(20, 45)), {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}),
    ([9, 9, 9], {"logit_bias": {33: 4.5, 40: -100.0}, "min_p": 0.02, "ignore_eos": True}),
    ([3, 80], {"bad_words": ["the", "a"], "allowed_token_ids": list(range(14, 600)), "min_tokens": 9}),
    (list(range(70, 88)), {**wants(choice=("left", "right"))}),
]
PARAMS = [
    SamplingParams(max_tokens=60 if i < 2 else 18, temperature=0.7 * (i % 3 < 2), seed=i, logprobs=1, **more)
    for i, (_, more) in enumerate(PROMPTS)
]


def served(deployment: str, overrides: Seq[str]) -> list[RequestOutput]:
    settings, prompts = ("max_model_len=128", *overrides), [prompt for prompt, _ in PROMPTS]
    return serve(History(deployment, settings, prompts, PARAMS, precision="fp32", model="tiny")).outputs


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return served("monolithic", [])


def test_every_form_is_kept_to(expected: list[RequestOutput]) -> None:
    for choice in (*expected[0].outputs, *expected[1].outputs):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert re.fullmatch(r"[a-d]{3,9}/[0-9]{1,4}x", expected[2].outputs[0].text)
    assert expected[6].outputs[0].text in ("left", "right")
    words = expected[5].outputs[0]
    assert set(words.token_ids) <= {*range(14, 600)}
    assert "the" not in words.text
    assert len(words.token_ids) >= 9
    assert 40 not in expected[4].outputs[0].token_ids


def test_tokens_are_those_of_the_reference(expected: list[RequestOutput]) -> None:
    """The logits come as the model made them; penalties and biases are applied before the draw."""
    for index in (3, 4):
        params, choice = PARAMS[index], expected[index].outputs[0]
        prompt = expected[index].prompt_token_ids
        assert choice.logits is not None
        for i, logits in enumerate(choice.logits.copy()):
            output = choice.token_ids[:i]
            has_counts = params.presence_penalty != 0
            edit(
                logits,
                bias=params.logit_bias,
                repetition_penalty=params.repetition_penalty,
                seen=sorted({*prompt, *output}),
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                counts=Counter(output) if has_counts else {},
                allowed=None,
            )
            assert choice.token_ids[i] == sample(
                logits, params.temperature, 0, 1.0, params.min_p, index, 0, len(prompt) + i
            )


TIGHT = ("cache.num_blocks=8", "scheduler.max_num_seqs=4")
SWAP = ("cache.preemption=swap", "cache.num_host_blocks=16", "cache.load=always")
AHEAD = "execution.overlap=true"
WAYS = [
    ("monolithic", ("mtp=1",)),
    ("monolithic", ("mtp=2", "scheduler.max_num_batched_tokens=13", "scheduler.max_num_seqs=4")),
    ("monolithic", ("mtp=2", *TIGHT)),
    ("monolithic", (*TIGHT, *SWAP)),
    ("monolithic", ("mtp=2", *TIGHT, *SWAP, AHEAD)),
    pytest.param("monolithic", ("lockstep=true", "mtp=1"), marks=pytest.mark.long),  # kernels of a whole step
    ("colocated", ("dies=2", AHEAD)),
    ("colocated", ("dies=2", "tp=2", "mtp=2", AHEAD)),
    ("pd", ("prefill.dies=1", "decode.dies=2", AHEAD)),
    ("pd", ("prefill.dies=1", "decode.dies=2", "mtp=2")),
    ("moe-attention", ("attention.microbatches=2",)),
    ("moe-attention", ("attention.microbatches=2", "mtp=2", AHEAD)),
]


@pytest.mark.thin(5)
@pytest.mark.parametrize(("deployment", "overrides"), WAYS)
def test_no_deployment_changes_a_bit(
    expected: list[RequestOutput], deployment: str, overrides: tuple[str, ...]
) -> None:
    outputs = served(deployment, overrides)
    for output, other in zip(outputs, expected, strict=True):
        assert [c.text for c in output.outputs] == [c.text for c in other.outputs]
        assert [c.logprobs for c in output.outputs] == [c.logprobs for c in other.outputs]
    assert digest(outputs) == digest(expected)


def test_a_forbidden_draft_is_rejected_and_others_are_taken() -> None:
    """At temperature 0 drafts and tokens agree where the model would have said what the grammar wants."""
    with LLM("tiny", overrides=["mtp=2", "max_model_len=256"]) as llm:
        prompt = "".join(f"{i}, " for i in range(1, 12))
        free = SamplingParams(max_tokens=24, temperature=0.0)
        text = llm.generate(prompt, free)[0].outputs[0].text
        same = SamplingParams(max_tokens=24, temperature=0.0, **wants(regex=r"(.|\n)*"))
        output = llm.generate(prompt, same)[0]
        assert output.outputs[0].text == text
        assert output.metrics is not None
        assert output.metrics.num_accepted > 0
        odd = SamplingParams(max_tokens=24, temperature=0.0, **wants(regex=r"[#%]{12}"))
        other = llm.generate(prompt, odd)[0]
        assert re.fullmatch(r"[#%]{12}", other.outputs[0].text)


def test_a_grammar_that_cannot_go_on_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    bound = SamplingParams(max_tokens=6, **wants(regex="[a-z]+"))
    with LLM("tiny", overrides=["mtp=1"]) as llm:
        expected = llm.generate([[1, 2, 3]], free)[0].outputs[0].token_ids

        async def serve() -> tuple[list[int], str]:
            asked = {"free": free, "bound": bound}
            requests = [llm.engine.submit([1, 2, 3], params, name) for name, params in asked.items()]
            tokens = [token async for delta in requests[0] for token in delta.token_ids]
            with pytest.raises(XDeepServeError) as caught:
                async for _ in requests[1]:
                    pass
            return tokens, str(caught.value)

        monkeypatch.setattr(GrammarMatcher, "fault", property(lambda matcher: "too complex to go on"))
        assert llm.run(serve()) == (expected, "too complex to go on")
        monkeypatch.undo()
        assert re.fullmatch("[a-z]+", llm.generate([[1, 2, 3]], bound)[0].outputs[0].text)
        llm.engine.check_integrity()


def test_log_probabilities_are_the_models_own() -> None:
    with LLM("tiny-random") as llm:
        free, bent = (
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0, logprobs=5, **more))[0]
            for more in ({}, {"logit_bias": {17: 100.0}})
        )
        assert bent.outputs[0].token_ids == [17]
        assert free.outputs[0].logprobs is not None
        assert bent.outputs[0].logprobs is not None
        for token_id, logprob in free.outputs[0].logprobs[0].items():
            assert bent.outputs[0].logprobs[0][token_id] == logprob


def test_min_tokens_hold_off_every_end() -> None:
    with LLM("tiny-random") as llm:
        eos = 1
        always = {"logit_bias": {eos: 100.0}, "temperature": 0.0, "max_tokens": 8}
        ids = llm.generate([[1, 2, 3]], SamplingParams(**always))[0].outputs[0].token_ids
        assert ids == [eos]
        output = llm.generate([[1, 2, 3]], SamplingParams(**always, min_tokens=5))[0].outputs[0]
        assert len(output.token_ids) == 6
        assert output.token_ids[-1] == eos
        assert eos not in output.token_ids[:5]
        # Where nothing else is left, a choice may end before.
        both = SamplingParams(**always, min_tokens=5, allowed_token_ids=[eos])
        assert llm.generate([[1, 2, 3]], both)[0].outputs[0].token_ids == [eos]


def outcome(llm: LLM, params: SamplingParams) -> str:
    """The text of a choice, or why there is none."""
    try:
        return llm.generate([[5, 6, 7]], params)[0].outputs[0].text
    except RequestError as error:
        return str(error)


def test_a_form_that_other_fields_leave_no_way_to_is_an_error() -> None:
    """Neither cut short nor empty; with drafts as without, though these look ahead into dead ends."""
    texts: dict[int, list[str]] = {}
    for mtp in (0, 2):
        with LLM("tiny", overrides=[f"mtp={mtp}", "max_model_len=128"]) as llm:
            assert llm.engine.tokenizer is not None
            names = {token: llm.engine.tokenizer.decode([token]) for token in range(1280)}
            digits = [token for token, text in names.items() if text.isdigit()]
            nothing = SamplingParams(**wants(regex="[a-z]{4}"), allowed_token_ids=digits)
            assert "leave none of the tokens with which the text could go on" in outcome(llm, nothing)
            no_b = [token for token, text in names.items() if "b" not in text]
            bent = {"temperature": 1.0, "max_tokens": 40, "allowed_token_ids": no_b}
            forms = [wants(regex="[0-9]{2}(ab|cd)[0-9]{2}"), wants(regex="(b|[ac]{2}){2,4}")]
            texts[mtp] = [
                outcome(llm, SamplingParams(seed=seed, **bent, **form))
                for seed in range(12)
                for form in forms
            ]
            # What is whole already may end before `min_tokens`.
            whole = SamplingParams(**wants(choice=("yes",)), min_tokens=9)
            assert outcome(llm, whole) == "yes"
            llm.engine.check_integrity()
    assert texts[0] == texts[2]
    ended = [text for text in texts[0] if "structured output" not in text]
    assert 0 < len(ended) < len(texts[0])
    assert all(re.fullmatch("[0-9]{2}cd[0-9]{2}|[ac]{4,8}", text) for text in ended)


def test_a_dead_end_behind_a_rejected_draft_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = Steering.edits

    def with_dead_ends(steering: Steering, *args: Any) -> list[LogitEdits]:
        first, *behind_drafts = edits(steering, *args)
        return [first, *(LogitEdits(fault="a dead end") for _ in behind_drafts)]

    monkeypatch.setattr(Steering, "edits", with_dead_ends)
    always = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={1000: 100.0})  # which no draft is
    with LLM("tiny", overrides=["mtp=2", "max_model_len=128"]) as llm:
        output = llm.generate([[5, 6, 7]], always)[0]
        assert output.outputs[0].token_ids == [1000] * 8
        assert output.metrics is not None
        assert output.metrics.num_drafts > output.metrics.num_accepted == 0


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars((PRESET_DIRECTORY / "tiny" / "tokenizer.json").read_text(), 1280, [1])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems: not supported in a JSON schema"),
        ({"json": {"if": {}, "then": {}}}, "if, then: not supported in a JSON schema"),
        (
            {"json": {"format": "binary"}},
            "format binary: not supported in a JSON schema; known are date, date-time, duration, email, "
            "hostname, ipv4, ipv6, time, uri, uuid",
        ),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "oneOf: supported only for schemas that types or constant texts tell apart; use anyOf",
        ),
        ({"json": {"type": "nonsense"}}, "JSON schema: Invalid type: nonsense"),
        ({"json": {"pattern": "(a"}}, "JSON schema: unclosed group"),
        ({"json": {"minimum": "x"}}, "JSON schema: Expected number for 'minimum', got \"x\""),
        ({"json": False}, "structured output: nothing fulfils the schema false"),
        ({"regex": "(a"}, 'invalid regex "(a" (in regex): unclosed group'),
        ({"grammar": "start: start"}, "no text is allowed by it"),
        (
            {"grammar": 'start: "a'},
            'line 1, column 10: lexer error; grammars are written in Lark: start: "yes" | "no"',
        ),
        (
            {"grammar": 'root ::= "a"'},
            'grammars are written in Lark, not in EBNF with ::=: start: "yes" | "no"',
        ),
        (
            {"grammar": "start: nowhere"},
            'line 1, column 8: unknown name: "nowhere"; grammars are written in Lark: start: "yes" | "no"',
        ),
        ({"choice": ["a", 1]}, 'choice must be a list of texts, none empty, found ["a", 1]'),
    ],
)
def test_refusals_say_what_can_be_done(grammars: Grammars, form: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.matcher(StructuredOutputsParams(**form))
    assert caught.value.param == "structured_outputs"
    message = str(caught.value)
    assert message.endswith(expected)
    assert message.count(expected) == 1
    assert "coerce" not in message


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    born: datetime


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    owner: UUID


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        *((Pet, ""), (tuple[int, str], ""), (dict[str, int], ""), (Decimal | None, "")),
        *((set[int], "uniqueItems"), (frozenset[str], "uniqueItems")),
        *((bytes, "format binary"), (Path, "format path"), (SecretStr, "format password")),
    ],
)
def test_types_of_pydantic(grammars: Grammars, kind: Any, refused: str) -> None:
    """As docs/api.md says."""
    form = StructuredOutputsParams(json=TypeAdapter(kind).json_schema())
    if refused:
        with pytest.raises(RequestError, match=f"structured output: {refused}: not supported"):
            grammars.matcher(form)
    else:
        grammars.matcher(form)


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_that_refusals_name_are_known(grammars: Grammars, name: str) -> None:
    grammars.matcher(StructuredOutputsParams(json={"type": "string", "format": name}))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"type": "string", "not": {}}}, "not"),
        ({"regex": "(a"}, "structured output"),
        ({"grammar": "start: nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_compiled_is_refused(form: dict[str, Any], words: str) -> None:
    with LLM("tiny-random") as llm, pytest.raises(RequestError, match=words) as caught:
        llm.generate([[1, 2]], SamplingParams(**wants(**form)))
    assert caught.value.param == "structured_outputs"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "form",
    [{}, {"regex": "a", "json_object": True}, {"choice": [1]}, {"json": 5}, {"json": "{"}, {"regex": 7}],
)
def test_a_form_is_one_form(form: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputsParams(**form)


def test_nothing_is_edited_where_nothing_is_asked() -> None:
    """The draws of everybody else are those of the logits as they are."""
    logits = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    assert sample(logits, 0.7, 5, 0.9, 0.0, 1, 0, 3) == sample(logits, 0.7, 5, 0.9, 1e-30, 1, 0, 3)
