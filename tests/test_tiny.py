"""The trained preset, served: it can do what it was trained for, on samples that it has not seen."""

from collections.abc import Iterator

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.corpus import chat
from xdeepserve.corpus.sample import is_held_out
from xdeepserve.evals.samples import examined
from xdeepserve.evals.scoring import arithmetic, is_json, wants_json

GREEDY = SamplingParams(max_tokens=160, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", "colocated", overrides=["dies=2", "mtp=1", "max_model_len=768"]) as made:
        yield made


def answers(llm: LLM, prompts: list[str]) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]


def test_two_digit_sums(llm: LLM) -> None:
    pairs = [
        (a, b) for a in range(10, 100, 7) for b in range(11, 100, 5) if is_held_out(("arithmetic", "+", a, b))
    ]
    found = answers(llm, [chat.render(f"What is {a} + {b}?") for a, b in pairs])
    right = [arithmetic(f"{a} + {b} = {a + b}", answer) for (a, b), answer in zip(pairs, found, strict=True)]
    assert len(pairs) > 20
    assert sum(right) >= 0.9 * len(pairs)


def test_tool_calls_are_json(llm: LLM) -> None:
    samples = [one for i in range(30) if wants_json(one := examined("tools", i))]
    valid = [is_json(answer) for answer in answers(llm, [one.prompt for one in samples])]
    assert sum(valid) >= 0.95 * len(samples)


@pytest.mark.parametrize("domain", ["stories", "tools"])
def test_drafts_are_accepted(llm: LLM, domain: str) -> None:
    outputs = llm.generate([examined(domain, i).prompt for i in range(8)], GREEDY)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert sum(one.num_accepted for one in metrics) >= 0.7 * sum(one.num_drafts for one in metrics)


def test_stories_end_by_themselves(llm: LLM) -> None:
    outputs = llm.generate(["Once upon a time", chat.render("Tell me a story about a fox.")], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]
    assert all(output.outputs[0].text.endswith((".", "!")) for output in outputs)
