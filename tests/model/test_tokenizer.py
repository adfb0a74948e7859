"""Tokenizer files, chat templates and streaming text."""

import importlib.util
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import CheckpointError, RequestError
from xdeepserve.model.chat_template import ChatTemplate
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer, require_tokenizer

TINY = PRESET_DIRECTORY / "tiny-random"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & so on?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "世界"},
]
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def load_tiny() -> Tokenizer:
    tokenizer = load_tokenizer(TINY)
    assert tokenizer is not None
    return tokenizer


TOKENIZER = load_tiny()


@pytest.fixture
def load(tmp_path: Path):
    """Tiny's tokenizer with another tokenizer_config.json (None: without)."""

    def load_with(config: dict[str, Any] | None, **files: str) -> Tokenizer:
        shutil.copy(TINY / "tokenizer.json", tmp_path)
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if "jinja" in files:
            (tmp_path / "chat_template.jinja").write_text(files["jinja"])
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        return tokenizer

    return load_with


@given(st.text())
def test_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


def test_bytes_have_known_ids() -> None:
    assert TOKENIZER.encode("~\n") == [3 + 0x7E, 3 + 0x0A]
    assert TOKENIZER.encode("é") == [3 + 0xC3, 3 + 0xA9]
    assert TOKENIZER.vocab_size == 320


def test_frequent_pairs_are_merged() -> None:
    assert [TOKENIZER.token_text(token_id) for token_id in TOKENIZER.encode("hello station")] == [
        "he",
        "ll",
        "o",
        " s",
        "t",
        "ation",
    ]


def with_regex(part: str, regex: str, path: Path) -> None:
    said = json.loads((TINY / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": {"Regex": regex}, "content": "x"}
    said[part] = {"decoder": replace, "normalizer": replace, "pre_tokenizer": split}[part]
    path.write_text(json.dumps(said))


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_regex_that_gives_up_is_an_error_of_the_text(part: str, tmp_path: Path) -> None:
    with_regex(part, "(a+)+$", tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.has_regexes
    assert not TOKENIZER.has_regexes
    with pytest.raises(RequestError, match=r"tokenizer gave up on the text: .*retry-limit-in-match over"):
        tokenizer.encode("a" * 100 + "b")
    assert tokenizer.encode("b")


def test_a_decoder_with_a_regex_is_refused(tmp_path: Path) -> None:
    with_regex("decoder", "a", tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="its decoder has a regular expression"):
        load_tokenizer(tmp_path)


def test_no_token_is_added_to_a_prompt() -> None:
    assert TOKENIZER.encode("hi") == TOKENIZER.encode("hi", add_special_tokens=True)
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1)


def test_special_tokens_are_skipped_on_request() -> None:
    ids = TOKENIZER.encode(f"{BEGIN}a<think>b{END}")
    assert TOKENIZER.decode(ids) == "a<think>b"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"{BEGIN}a<think>b{END}"


def test_the_template_begins_a_chat_with_one_begin_token() -> None:
    text = f"{BEGIN}Be brief.<｜User｜>1 < 2 & so on?<｜Assistant｜>Yes.{END}<｜User｜>世界<｜Assistant｜>"
    assert TOKENIZER.render_chat(CHAT) == text
    assert TOKENIZER.render_chat(CHAT, add_generation_prompt=False) == text.removesuffix("<｜Assistant｜>")
    ids = TOKENIZER.apply_chat_template(CHAT)
    assert ids == TOKENIZER.encode(text)
    assert (ids.count(0), ids[0], ids[-1]) == (1, 0, 260)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        TOKENIZER.render_chat([{"role": "user", "content": parts}]) == f"{BEGIN}<｜User｜>a\nb<｜Assistant｜>"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "robot", "content": "x"}], r"must be one of .*, found \"robot\""),
        ([{"role": "user"}], r"messages\[0\]\.content is required"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a text such as user, found null"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\]\.type must be text, found \"image_url\": this model reads text only",
        ),
    ],
)
def test_a_template_may_refuse(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        TOKENIZER.apply_chat_template(messages)
    assert str(caught.value.param).startswith("messages")


SHOWS_ALL = ChatTemplate(
    """{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %} {{ m.reasoning_content }}{% endif %}|
{{- m.content or '' }}{% for call in m.tool_calls or [] %}|{{ call.type }} {{ call.function.name }} {{ '' +
call.function.arguments }} {{ call.function.arguments | tojson }}{% endfor %}]{% endfor %}""",
    "a test",
)
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    *((given, "{} {}") for given in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": {}})),
    *((given, '{"k": 7} {"k": 7}') for given in ({"arguments": {"k": 7}}, {"arguments": '{"k": 7}'})),
    ({"arguments": '{"k": '}, '{"k":  {"arguments": "{\\"k\\": "}'),
]


@pytest.mark.parametrize(("given", "shown"), ARGUMENTS)
@pytest.mark.parametrize("is_flat", [False, True])
def test_arguments_of_calls_in_every_form(given: dict[str, Any], shown: str, is_flat: bool) -> None:
    function = {"name": "f", **given}
    call = {"id": "c", **(function if is_flat else {"type": "function", "function": function})}
    for content in ({}, {"content": None}, {"content": ""}):
        said = {"role": "assistant", **content, "tool_calls": [call]}
        text = SHOWS_ALL.render(messages=[{"role": "user", "content": "hi"}, said])
        assert text == f"[user|hi][assistant||function f {shown}]"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm", "reasoning_content": ""},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}, {"type": "reasoning.encrypted"}]},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "output_text", "text": "yes"}]},
        {"reasoning": "hm", "content": [{"type": "refusal", "refusal": "yes"}]},
        {"reasoning": "hm", "content": None, "refusal": "yes"},
    ],
)
def test_reasoning_is_shown_from_every_field(fields: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": "yes", **fields}
    assert (
        SHOWS_ALL.render(messages=[{"role": "user", "content": "hi"}, said]) == "[user|hi][assistant hm|yes]"
    )


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    TOKENIZER.apply_chat_template(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_without_tokenizer_files_there_is_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is None
    with pytest.raises(
        RequestError, match=r"model m has no tokenizer\.json, so it takes token ids, not text"
    ):
        require_tokenizer(tokenizer, "m")
    assert require_tokenizer(TOKENIZER, "m") is TOKENIZER


def test_a_tokenizer_alone_has_no_chat_template(load) -> None:
    tokenizer = load(None)
    assert tokenizer.encode("~") == [3 + 0x7E]
    assert tokenizer.bos_token_id is None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize("bos", [BEGIN, {"__type": "AddedToken", "content": BEGIN}])
def test_special_tokens_as_text_or_object(load, bos: object) -> None:
    tokenizer = load({"bos_token": bos, "chat_template": "{{ bos_token }}x"})
    assert tokenizer.bos_token_id == 0
    assert tokenizer.render_chat(CHAT) == f"{BEGIN}x"


def test_named_templates(load) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = load({"chat_template": named})
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{"type": "function", "function": {"name": "f"}}]) == "1 tools"


def test_a_template_file_wins(load) -> None:
    assert load({"chat_template": "old"}, jinja="new").render_chat(CHAT) == "new"


def test_the_dialect_of_transformers(load) -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.index > 2 %}{% break %}{% endif %}\n  {% if true %}\n"
        "{{ m | tojson }}\n  {% endif %}\n{%- endfor %}{% generation %}{{ extra }}{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}"
    )
    rendered = load({"chat_template": source}).render_chat(CHAT, extra="<b>")
    assert rendered == (
        '{"role": "system", "content": "Be brief."}\n{"role": "user", "content": "1 < 2 & so on?"}\n<b>4'
    )


def test_templates_are_sandboxed(load) -> None:
    tokenizer = load({"chat_template": "{{ ''.__class__.__mro__ }}"})
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.render_chat(CHAT)


def test_the_presets_files_are_what_the_tool_writes(tmp_path: Path) -> None:
    path = Path(__file__).parent.parent.parent / "tools" / "make_tiny_random_tokenizer.py"
    spec = importlib.util.spec_from_file_location("make_tiny_random_tokenizer", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.DIRECTORY = tmp_path
    tool.main()
    for written in tmp_path.iterdir():
        assert written.read_bytes() == (TINY / written.name).read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_broken_files(load, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template, line 2"):
        load({"chat_template": "\n{% if %}"})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load({})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


# Ids beyond the vocabulary come from padded models; bytes alone make every kind of broken UTF-8.
ANY_IDS = st.lists(st.integers(0, 330), max_size=120)
BYTE_IDS = st.lists(st.integers(3, 258), max_size=120)
CHARACTER_IDS = st.text(max_size=60).map(TOKENIZER.encode)


@given(st.one_of(ANY_IDS, BYTE_IDS, CHARACTER_IDS), st.booleans())
def test_deltas_add_up_to_the_full_text(ids: list[int], skip_special_tokens: bool) -> None:
    stream = IncrementalDetokenizer(TOKENIZER, skip_special_tokens)
    deltas = [stream.push(token_id) for token_id in ids]
    assert "".join(deltas) + stream.flush() == TOKENIZER.decode(ids, skip_special_tokens)


@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_no_character_is_sent_in_part(text: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
    deltas = [stream.push(token_id) for token_id in TOKENIZER.encode(text)]
    assert "\ufffd" not in "".join(deltas)
    assert stream.flush() == ""
    assert "".join(deltas) == text


def test_text_is_sent_as_soon_as_it_is_certain() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    assert [stream.push(token_id) for token_id in TOKENIZER.encode("a🙂b")] == ["a", "", "", "", "🙂", "b"]


def test_broken_bytes_are_not_held_for_ever() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    deltas = [stream.push(3 + 0x80) for _ in range(100)]
    assert len("".join(deltas)) >= 97
    assert stream.num_kept <= 32
    assert len("".join(deltas) + stream.flush()) == 100


def test_a_flushed_stream_starts_anew() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    stream.push(3 + 0xE4)
    assert stream.flush() == "\ufffd"
    assert stream.push(3 + 0x41) == "A"


def test_a_chat_may_end_within_its_last_message() -> None:
    tokenizer = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert tokenizer is not None
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "One, two, "}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<｜Assistant｜>One, two, ")
    with pytest.raises(RequestError, match="continue_final_message"):
        tokenizer.render_chat([{"role": "user", "content": " "}], False, continue_final_message=True)


ENDS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
STRIPS = ENDS.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("begun", ["im", "end", "|", "<", ">", "<|im_end|>", "user", "two\nlines:\n", " a "])
def test_a_beginning_may_be_like_a_templates_own_words(load, begun: str) -> None:
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": begun}]
    before = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    for source, expected in ((ENDS, begun), (STRIPS, begun.strip())):
        text = load({}, jinja=source).render_chat(messages, False, continue_final_message=True)
        assert text == before + expected


def test_a_beginning_that_a_template_drops_is_refused(load) -> None:
    source = "{% for m in messages %}{{ m.content.split('<')[0] }}{% endfor %}"
    with pytest.raises(RequestError, match="continue_final_message"):
        load({}, jinja=source).render_chat(
            [{"role": "user", "content": "a<b"}], False, continue_final_message=True
        )


def test_other_threads_run_while_much_is_tokenised() -> None:
    tokenizer = TOKENIZER
    num_ticks, is_done = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_done.wait(0.001):
            num_ticks += 1

    def ticks_during(work: Callable[[], object]) -> int:
        before = num_ticks
        work()
        return num_ticks - before

    text, ids = "the cat sat " * 40_000, [5] * 1_000_000
    clock = threading.Thread(target=tick)
    clock.start()
    try:
        assert ticks_during(lambda: tokenizer.encode(text)) > 5
        assert ticks_during(lambda: tokenizer.decode(ids)) > 5
    finally:
        is_done.set()
        clock.join()
    part = text[:12_000]
    plain = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert tokenizer.encode(part) == plain.encode(part, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(part)) == part
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode(part + "\ud800")
