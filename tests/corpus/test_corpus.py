"""The corpus: the same text for ever, right answers only, and a split that nothing crosses."""

import hashlib
import json
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.corpus import DOMAINS, EXAMINED, chat, sample
from xdeepserve.corpus.arithmetic import add_working, subtract_working
from xdeepserve.corpus.sample import is_held_out
from xdeepserve.corpus.stories import tell
from xdeepserve.corpus.tools import TOOLS
from xdeepserve.evals.scoring import parse_json
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.tokenizer import Tokenizer, load_tokenizer

INDICES = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert loaded is not None
    return loaded


def test_the_text_is_the_same_for_ever() -> None:
    digest = hashlib.sha256()
    for domain in DOMAINS:
        for split in ("train", "held-out") if domain in EXAMINED else ("train",):
            for index in range(20):
                one = sample(domain, split, 1, index)  # type: ignore[arg-type]
                digest.update(f"{one.prompt}\0{one.answer}\0".encode())
    # Golden: the shipped weights and all figures of `eval` rest on this text.
    assert digest.hexdigest()[:16] == "e587e64234d7408a"


@given(st.sampled_from(sorted(DOMAINS)), INDICES)
def test_samples_end_and_are_whole(domain: str, index: int) -> None:
    one = sample(domain, "train", 0, index)
    assert one.answer.endswith(chat.END)
    assert one.answer.count(chat.END) == 1
    assert "{" not in (one.prompt + one.answer) or domain == "tools"
    assert one.prompt.count(chat.BEGIN) <= 1
    assert not one.prompt.count(chat.BEGIN) or one.prompt.startswith(chat.BEGIN)


@given(st.sampled_from(EXAMINED), INDICES)
def test_the_two_sides_of_the_split_differ(domain: str, index: int) -> None:
    held_out, train = sample(domain, "held-out", 0, index), sample(domain, "train", 0, index)
    assert (held_out.prompt, held_out.answer) != (train.prompt, train.answer)


def test_only_examined_domains_have_held_out_text() -> None:
    with pytest.raises(ValueError, match="no held-out"):
        sample("talk", "held-out", 0, 0)


@given(INDICES)
def test_held_out_sums_are_in_no_training_prompt_as_questions(index: int) -> None:
    """Not even as the earlier exchange of a chat."""
    for domain in ("arithmetic", "tools", "recall"):
        one = sample(domain, "train", 0, index)
        # In plain equations; sums told in words are found by their answers.
        for a, sign, b in re.findall(r"(?<![\d+-] )\b(\d+) ?([+-]) ?(\d+) = \d+", one.prompt):
            assert not is_held_out(("arithmetic", sign, int(a), int(b)))


def test_about_a_tenth_is_held_out() -> None:
    share = sum(is_held_out(("arithmetic", "+", a, b)) for a in range(100) for b in range(100)) / 10**4
    assert 0.08 < share < 0.12


@given(st.integers(0, 999), st.integers(0, 999))
def test_workings_write_the_answers_digits_from_the_right(a: int, b: int) -> None:
    a, b = max(a, b), min(a, b)
    for working, result in ((add_working(a, b), a + b), (subtract_working(a, b), a - b)):
        digits = re.findall(r"[wW]rite (\d)", working)
        assert int("".join(reversed(digits))) == result
        for equation in re.findall(r"([\d +-]+) = (\d+)", working):
            left = equation[0].split("borrow 1")[-1].strip(" ,.")
            assert eval(left) == int(equation[1])


@given(INDICES)
def test_arithmetic_answers_are_right(index: int) -> None:
    one = sample("arithmetic", "train", 0, index)
    reply = one.answer.split(chat.END_THINK)[1].removesuffix(chat.END)
    equation = re.fullmatch(r"(\d+ [+-] \d+) = (-?\d+)", reply)
    if equation:
        assert eval(equation[1]) == int(equation[2])
        for number in equation[1].split()[::2]:
            assert re.search(rf"\b{number}\b", one.prompt)


@given(INDICES)
def test_recall_answers_are_in_the_prompt(index: int) -> None:
    one = sample("recall", "held-out", 0, index)
    assert one.answer.removesuffix(chat.END) in one.prompt


@given(INDICES)
def test_calls_use_an_offered_tool_with_its_parameters(index: int) -> None:
    one = sample("tools", "train", 0, index)
    if not one.answer.startswith(chat.CALLS):
        return
    parsed = parse_json(one.answer)
    assert isinstance(parsed, tuple)
    name, arguments = parsed
    assert f"### {name}\n" in one.prompt
    (tool,) = [tool["function"] for tool, _ in TOOLS if tool["function"]["name"] == name]
    assert list(arguments) == tool["parameters"]["required"]
    question = one.prompt.rsplit(chat.USER, 1)[1]
    for value in arguments.values():
        assert str(value).lstrip("0") in question or json.dumps(value) in question


@given(INDICES)
def test_what_a_program_prints(index: int) -> None:
    one = sample("code", "train", 0, index)
    if "What does this print?" in one.prompt:
        program = one.prompt.split("print?\n")[1].removesuffix(chat.ASSISTANT)
        printed: list[int] = []
        exec(program, {"print": printed.append})
        assert printed == [int(one.answer.removesuffix(chat.END))]
    else:
        compile(one.answer.removesuffix(chat.END), "sample", "exec")


def test_a_story_keeps_to_its_hero() -> None:
    for i in range(50):
        story = tell(Random(i))
        assert not re.search(r"\{|\}", story)
        assert not re.search(r"\ba [aeio]", story), story


def test_chats_are_what_the_chat_template_writes(tokenizer: Tokenizer) -> None:
    offered = [tool for tool, _ in TOOLS[:2]]
    user = {"role": "user", "content": "Hello"}
    system = {"role": "system", "content": "Be brief."}
    assert tokenizer.render_chat([user]) == chat.render("Hello")
    assert tokenizer.render_chat([system, user]) == chat.render("Hello", system="Be brief.")
    assert tokenizer.render_chat([user], tools=offered) == chat.render("Hello", tools=offered)
    both = tokenizer.render_chat([system, user], tools=offered)
    assert both == chat.render("Hello", system="Be brief.", tools=offered)


def test_a_conversation_with_a_call(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "set_alarm", "arguments": '{"hour": 7, "minute": 5}'}}
    messages = [
        {"role": "user", "content": "Wake me at 7:05."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    rendered = tokenizer.render_chat(messages)
    called = (
        chat.render("Wake me at 7:05.") + chat.tool_call("set_alarm", {"hour": 7, "minute": 5}) + chat.END
    )
    assert rendered == called + chat.tool_output("done")
    answered = tokenizer.render_chat([*messages, {"role": "assistant", "content": "Done."}], False)
    assert answered == rendered + "Done." + chat.END


def test_earlier_reasoning_is_left_out(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<think>easy</think>1 + 1 = 2"},
        {"role": "user", "content": "Thanks"},
    ]
    assert "easy" not in tokenizer.render_chat(messages)
    assert "1 + 1 = 2" in tokenizer.render_chat(messages)


def test_digits_and_special_tokens_are_single(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2048")) == 4
    for text in (chat.BEGIN, chat.USER, chat.THINK, chat.CALLS, chat.SEPARATOR, chat.END):
        assert len(tokenizer.encode(text)) == 1
    assert tokenizer.decode(tokenizer.encode(chat.BEGIN + chat.USER)) == ""
    assert tokenizer.decode(tokenizer.encode(chat.CALLS)) == chat.CALLS


@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    loaded = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert loaded is not None
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
