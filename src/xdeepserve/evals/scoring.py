"""Scoring of answers by domain, on the text alone."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable

from xdeepserve.corpus import Sample, chat

INTEGER = re.compile(r"-?\d+")


def said(text: str) -> str:
    """Strip reasoning and end token from an answer."""
    return text.removesuffix(chat.END).split(chat.END_THINK)[-1].strip()


def arithmetic(expected: str, answer: str) -> bool:
    """Whether the last number of the answer is the right one."""
    wanted, found = INTEGER.findall(said(expected)), INTEGER.findall(said(answer))
    return bool(found) and found[-1] == wanted[-1]


def tools(expected: str, answer: str) -> bool:
    """Whether the answer is the right call with the right arguments, or the right JSON; other replies are
    compared word by word."""
    wanted = parse_json(expected)
    return parse_json(answer) == wanted if wanted is not None else said(answer) == said(expected)


def parse_json(answer: str) -> object | None:
    """Parse (tool, arguments) of a call, or the value of a plain JSON answer; None if it is neither."""
    text, name = said(answer), None
    if text.startswith(chat.CALLS):
        inner = text.removeprefix(chat.CALLS + chat.CALL).removesuffix(chat.END_CALL + chat.END_CALLS)
        name, separator, text = inner.partition(chat.SEPARATOR)
        if not separator:
            return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return (name, value) if isinstance(value, dict) else None


def code(expected: str, answer: str) -> bool:
    """Whether the answer is the expected program, however spaced; printed values must agree to the letter."""
    with warnings.catch_warnings(action="ignore"):  # of odd literals
        try:
            return ast.dump(ast.parse(said(answer))) == ast.dump(ast.parse(said(expected)))
        except (SyntaxError, ValueError):
            return False


def exact(expected: str, answer: str) -> bool:
    return said(answer) == said(expected)


SCORES: dict[str, Callable[[str, str], bool]] = {
    "arithmetic": arithmetic,
    "recall": exact,
    "tools": tools,
    "code": code,
}


def score(sample: Sample, answer: str) -> bool | None:
    """Whether `answer` is right; None for stories, which have no right answer."""
    rule = SCORES.get(sample.domain)
    return None if rule is None else rule(sample.answer, answer)


def wants_json(sample: Sample) -> bool:
    """Whether the right answer to a sample is a tool call or JSON."""
    return sample.domain == "tools" and parse_json(sample.answer) is not None


def is_json(answer: str) -> bool:
    """Whether an answer is a well-formed call or object, right or wrong."""
    return parse_json(answer) is not None
