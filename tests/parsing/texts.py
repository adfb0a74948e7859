"""Texts at random for parsers: marks of the formats, whole and broken, with words in between."""

from __future__ import annotations

import random
import re
from functools import cache

from hypothesis import strategies as st

from xdeepserve.parsing.tool_formats import NOTATIONS, ToolFormat

WORDS = (
    *(
        "function",
        "f",
        "get_time",
        "functions.f:0",
        "functions_f_3",
        "name",
        "arguments",
        "=a>",
        ' name="a">',
    ),
    *(
        '{"name": "f", "arguments": ',
        '{"a": "x"}',
        '{"name": "f"}',
        "{}",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ":",
        ",",
    ),
    *("\\", "\\u00", "True", "5", "```", "```json", "é", " ", "\n", "\t", "<", ">", "x y", "\x00"),
)


@cache
def marks_of_format(form: ToolFormat) -> list[str]:
    """All that is between angle brackets in a format, and the marks of reasoning."""
    n = NOTATIONS[form]
    tags = n.tags or ()
    named = [f"{tag}a" for tag in tags if tag.endswith(("=", '"'))]
    found = [*n.begins, *n.ends, n.call, n.call_end, n.separator, *tags, *named, "<think>", "</think>"]
    return sorted({mark for mark in found if mark})


MARKS = sorted({mark for form in NOTATIONS for mark in marks_of_format(form)})

FENCE, NEWLINE = re.compile(r"```[ \t\w]*$"), "\n"

SHREDS = st.lists(
    st.sampled_from([*MARKS, *(mark[:-1] for mark in MARKS), *(mark[1:] for mark in MARKS), *WORDS]),
    max_size=12,
).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    """Cut a text at some places."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def text_at_random(rng: random.Random, form: ToolFormat) -> str:
    """A text of one format's marks and any words, in an order that is often nearly that of a call."""
    marks, order = marks_of_format(form), in_order(form)
    parts: list[str] = []
    for _ in range(rng.randrange(8)):
        kind = rng.random()
        if kind < 0.35:
            parts += [part for part in order if rng.random() < 0.9]
        elif kind < 0.6:
            parts.append(rng.choice(marks))
        elif kind < 0.7:
            mark = rng.choice(marks)
            parts.append(mark[: rng.randrange(len(mark) + 1)])
        else:
            parts.append(rng.choice(WORDS))
        if rng.random() < 0.1:
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(WORDS))
    return "".join(parts)


def text_with_words(rng: random.Random, form: ToolFormat) -> str:
    """Some texts at random, each with a word of its own behind, which names no language of a fence; no
    parameter comes twice, since of two of one name the last one counts."""
    text = ""
    for number in range(rng.randrange(1, 4)):
        text += text_at_random(rng, form)
        text += f"{NEWLINE if FENCE.search(text) else ''}w{number}w"
    if (tags := NOTATIONS[form].tags) is None:
        return text
    first, *others = text.split(f"{tags.key}a")
    return first + "".join(f"{tags.key}a{number}{other}" for number, other in enumerate(others))


@cache
def in_order(form: ToolFormat) -> list[str]:
    """Parts of a call that is right if none is left out."""
    n = NOTATIONS[form]
    if n.body == "json":
        return [n.begins[0], '{"name": "f", "arguments": ', '{"a": "x"}', "}", n.ends[0]]
    if n.body == "header":
        header = "functions.f:0" if n.has_ids else "f"
        return [n.begins[0], n.call, header, n.separator, '{"a": "x"}', n.call_end, n.ends[0]]
    t = n.tags
    assert t is not None
    parameter = [t.key, "a", t.value, "5", t.end]
    return [n.begins[0], t.first, "f", t.named, *parameter, *parameter, t.last, n.ends[0]]
