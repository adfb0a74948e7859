"""What is an example, and which line is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from xdeepserve.errors import InputError, RequestError
from xdeepserve.jobs.training_text import read_lines, split

CHAT = '{"messages": [{"role": "user", "content": "a"}]}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 3, column 2: not valid JSON: "),
        ("[]", "line 3: must be an object, found []"),
        ("\xff", "line 3: "),
        ("{}", "line 3: give messages, or else prompt and completion"),
        ('{"prompt": "a"}', "line 3: give messages"),
        ('{"messages": []}', "line 3: give messages"),
        (CHAT[:-1] + ', "prompt": "a", "completion": "b"}', "line 3: give messages"),
        (
            '{"messages": [{"role": "user", "content": 1}]}',
            "line 3: messages[0].content must be a text",
        ),
        (
            '{"messages": [{"role": "king", "content": "a"}]}',
            "line 3: messages[0].role must be one of ",
        ),
        ('{"text": "a"}', "line 3: unknown field text; known are messages, prompt, completion"),
        ("[" * 100_000, "line 3: "),
    ],
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(f"{CHAT}\n\n".encode() + line.encode("latin-1") + b"\n" + CHAT.encode())
    with pytest.raises(RequestError) as caught:
        list(read_lines(path))
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("file", "invalid_jsonl")


def test_both_shapes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text(f'{CHAT}\r\n   \n{{"prompt": "", "completion": "b"}}')
    chat, text = read_lines(path)
    assert chat.messages is not None
    assert (chat.messages[0].content, text.prompt, text.completion) == ("a", "", "b")
    path.write_text("\n\n")
    with pytest.raises(RequestError, match="no examples"):
        list(read_lines(path))


def test_the_last_fifth_is_held_out() -> None:
    for count, held_out in ((2, 1), (9, 1), (10, 2), (100, 20)):
        examples = [[i] for i in range(count)]
        work, rest = split(examples)
        assert work + rest == examples
        assert len(rest) == held_out
    with pytest.raises(InputError, match="two are needed"):
        split([[1]])
