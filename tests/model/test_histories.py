"""What templates make of histories as agents send them: tried once for each, and the right form is used."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from xdeepserve.errors import RequestError
from xdeepserve.model.chat_template import CALLS, NO_CONTENT, RESULTS, ChatTemplate, JsonText, MessageForms

# Templates of the kinds that published checkpoints have.
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WRITES_CALLS = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
)
WRITES_NONE = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{WRITES_CALLS}{{% endfor %}}"
ASKS_WHAT_IS_IN_IT = (
    "{% for m in messages %}<{{ m.role }}>{% if '</think>' in m.content %}{{ m.content[9:] }}{% else %}"
    "{{ m.content }}{% endif %}" + WRITES_CALLS + "{% endfor %}"
)
LOSES_CALLS_OF_EMPTY = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}"
    + WRITES_CALLS
    + "{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
WANTS_NO_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>{% if 'content' not in m %}" + WRITES_CALLS + "{% elif m.content %}"
    "{{ m.content }}{% else %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
)
REFUSES_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ '' + m.content }}" + WRITES_CALLS + "{% endfor %}"
)
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SKIPS_LATE = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ALTERNATES = (
    "{{ bos_token + '' }}{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def said(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source, "test").render(messages=messages, bos_token="")


def call(arguments: str = '{"a": 1}') -> dict[str, Any]:
    function = {"name": "look", "arguments": JsonText.of_call(arguments)}
    return {"id": "c", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("source", "empty"),
    [
        (WRITES_NONE, ""),
        (ASKS_WHAT_IS_IN_IT, ""),
        (LOSES_CALLS_OF_EMPTY, None),
        (WANTS_NO_CONTENT, NO_CONTENT),
        (REFUSES_RESULTS, ""),
    ],
)
def test_a_turn_with_calls_and_no_text_means_the_same_however_it_is_written(
    source: str, empty: str | None
) -> None:
    assert ChatTemplate(source, "test").forms.empty == empty
    user: dict[str, Any] = {"role": "user", "content": "u"}
    turns = [{"content": None}, {"content": ""}, {}, {"content": []}]
    texts = {said(source, user, {"role": "assistant", "tool_calls": [call()], **turn}) for turn in turns}
    [text] = texts
    assert text == '<user>u<assistant>[look {"a": 1}]'
    with_text = said(source, user, {"role": "assistant", "content": "So", "tool_calls": [call()]})
    assert with_text.startswith("<user>u<assistant>So")


# As DeepSeek-V2-Lite's: of an assistant's turn its content, and of a tool's turn nothing.
LOSES_BOTH = (
    "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n{% elif m.role == 'assistant' %}"
    "Assistant: {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
WANTS_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if tools %}"
    + WRITES_CALLS
    + "{% endif %}{% endfor %}"
)
LOSES_RESULTS = (
    "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}" + WRITES_CALLS + "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "loses"),
    [
        (PLAIN, (CALLS,)),
        (LOSES_BOTH, (CALLS, RESULTS)),
        (LOSES_RESULTS, (RESULTS,)),
        (WRITES_NONE, ()),
        (WANTS_TOOLS, ()),
        (REFUSES_RESULTS, ()),
    ],
)
def test_what_a_template_would_lose_is_refused_by_name(source: str, loses: tuple[str, ...]) -> None:
    assert ChatTemplate(source, "test").forms.loses == loses
    user: dict[str, Any] = {"role": "user", "content": "u"}
    histories: dict[str, dict[str, Any]] = {
        CALLS: {"role": "assistant", "content": "", "tool_calls": [call()]},
        RESULTS: {"role": "tool", "tool_call_id": "c", "content": "r"},
    }
    for what, message in histories.items():
        if what in loses:
            with pytest.raises(RequestError, match=f"chat template does not show {what}"):
                said(source, user, message, user)
        elif what == CALLS and source != WANTS_TOOLS:
            assert '[look {"a": 1}]' in said(source, user, message, user)
    assert said(source, user)


@pytest.mark.parametrize("source", [FIRST_ALONE, SKIPS_LATE])
def test_late_system_messages_that_a_template_cannot_take_join_the_first(source: str) -> None:
    assert ChatTemplate(source, "test").forms._replace(empty=None, loses=()) == MessageForms(
        folds_system=True
    )
    messages = [("system", "a"), ("system", "b"), ("user", "u"), ("system", "c"), ("user", "v")]
    told = said(source, *({"role": role, "content": content} for role, content in messages))
    assert told == "<system>a\n\nb\n\nc<user>u<user>v"
    assert (
        said(source, {"role": "system", "content": "a"}, {"role": "user", "content": "u"})
        == "<system>a<user>u"
    )


LOSES_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WANTS_A_USER = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}"
    "{% endif %}" + PLAIN
)


@pytest.mark.parametrize("source", [LOSES_SYSTEM, WANTS_A_USER])
def test_system_messages_alone_are_not_lost(source: str) -> None:
    assert ChatTemplate(source, "test").forms.wants_user
    assert said(source, {"role": "system", "content": "s"}) == "<user>s"
    assert said(source, {"role": "system", "content": "s"}, {"role": "user", "content": "u"}).endswith(
        "<user>u"
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('two\\n  lines') }}", "these messages: two lines"),
        ("{{ raise_exception('') }}", "these messages: TemplateError"),
        ("{{ raise_exception('long ' * 1000) }}", "these messages: long long"),
        ("{{ messages[7].content.x }}", "has no element 7"),
    ],
)
def test_a_template_that_raises_gives_one_line(source: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        said(source, {"role": "user", "content": "u"})
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert len(message) < 600


def test_a_template_of_system_messages_gets_them() -> None:
    assert said(PLAIN, {"role": "system", "content": "s"}) == "<system>s"


def test_arguments_as_the_api_has_them_are_objects_for_templates() -> None:
    user: dict[str, Any] = {"role": "user", "content": "u"}
    as_text = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    texts = {
        said(WRITES_NONE, user, {"role": "assistant", "tool_calls": [each]}, {"role": "tool"})
        for each in (call(), as_text)
    }
    assert texts == {'<user>u<assistant>[look {"a": 1}]<tool>'}
    assert said(PLAIN, {"role": "assistant"}, {"role": "developer", "content": "d"}) == "<assistant><system>d"


def test_users_that_must_take_turns_are_joined() -> None:
    assert ChatTemplate(ALTERNATES, "test").forms.joins_users
    users = ({"role": "user", "content": each} for each in "ab")
    assert said(ALTERNATES, *users, {"role": "assistant", "content": "c"}) == "<user>a\n\nb<assistant>c"


def test_templates_that_take_everything_get_what_clients_sent() -> None:
    assert ChatTemplate(PLAIN, "test").forms == MessageForms("", loses=(CALLS,))
    messages = [("user", "a"), ("user", "b"), ("system", "c"), ("system", "d")]
    told = said(PLAIN, *({"role": role, "content": content} for role, content in messages))
    assert told == "<user>a<user>b<system>c<system>d"


def test_a_template_that_fails_without_a_requests_variables_is_left_alone() -> None:
    assert ChatTemplate("{{ wanted.x }}", "test").forms == MessageForms()


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": "say "hi""}', "[1]", "null", "[" * 9999, " "])
def test_arguments_that_are_no_object_stay_whole(text: str) -> None:
    arguments = pickle.loads(pickle.dumps(JsonText.of_call(text)))
    assert str(arguments) == text
    assert arguments == {"arguments": text}
    assert JsonText.of_call("") == {}
    assert JsonText.of_call('{"a": 1}') == {"a": 1}
