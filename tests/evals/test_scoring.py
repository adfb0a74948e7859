"""Marks: what counts as right, domain by domain."""

from itertools import pairwise

import pytest

from xdeepserve.corpus import Sample, chat, sample
from xdeepserve.evals.scoring import SCORES, is_json, parse_json, score, wants_json


@pytest.mark.parametrize("domain", SCORES)
def test_every_samples_own_answer_is_right_and_anothers_is_not(domain: str) -> None:
    samples = [sample(domain, "held-out", 3, i) for i in range(40)]
    for one, other in pairwise(samples):
        assert score(one, one.answer) is True
        assert score(one, one.answer.removesuffix(chat.END)) is True
        if one.answer != other.answer and domain != "arithmetic":
            assert score(one, other.answer) is False
        assert score(one, "") is False


def test_stories_have_no_marks() -> None:
    one = sample("stories", "held-out", 3, 0)
    assert score(one, one.answer) is None


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("<think>7 + 5 = 12</think>47 + 35 = 82", True),
        ("82", True),
        ("The sum of 47 and 35 is 82.", True),
        ("82 is 47 + 35", False),
        ("<think>82</think>", False),
        ("47 + 35 = 81", False),
    ],
)
def test_arithmetic_goes_by_the_last_number(answer: str, is_right: bool) -> None:
    assert (
        score(Sample("arithmetic", "47 + 35", f"<think>x</think>47 + 35 = 82{chat.END}"), answer) is is_right
    )


CALL = chat.tool_call("set_alarm", {"hour": 7, "minute": 5})


@pytest.mark.parametrize(
    ("answer", "is_right", "is_valid"),
    [
        (CALL, True, True),
        (CALL.replace(": ", ":"), True, True),
        (CALL.replace("7", "8"), False, True),
        (CALL.replace("set_alarm", "set_light"), False, True),
        (CALL.replace("}", ""), False, False),
        (CALL.replace(chat.SEPARATOR, ""), False, False),
        ('{"hour": 7, "minute": 5}', False, True),
        ("Done.", False, False),
        ("7", False, False),
    ],
)
def test_calls(answer: str, is_right: bool, is_valid: bool) -> None:
    one = Sample("tools", "Wake me at 7:05.", CALL + chat.END)
    assert wants_json(one)
    assert score(one, answer) is is_right
    assert is_json(answer) is is_valid


def test_a_reply_to_a_tool_is_no_json() -> None:
    one = Sample("tools", "", "Done." + chat.END)
    assert not wants_json(one)
    assert score(one, "Done.") is True
    assert score(one, "Done") is False


def test_code_goes_by_its_meaning() -> None:
    one = Sample("code", "", "def f(x):\n    return x + 1\n" + chat.END)
    assert score(one, "def f(x):\n  return x+1") is True
    assert score(one, "def f(x):\n    return x + 2\n") is False
    assert score(one, "def f(x:\n") is False
    assert score(one, "1if 1else 2") is False


def test_parse_json_keeps_lists_out() -> None:
    assert parse_json("[1]") is None
    assert parse_json('{"a": 1}') == (None, {"a": 1})
