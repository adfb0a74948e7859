"""What templates make of histories as agents send them: tried once for each, and the right form is used."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from xdeepserve.errors import RequestError
from xdeepserve.model.chat_template import (
    CALLS,
    NO_CONTENT,
    RESULTS,
    SEVERAL,
    TEXTS,
    ChatTemplate,
    JsonText,
    MessageForms,
)

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


def call(arguments: str = '{"a": 1}', call_id: str = "c") -> dict[str, Any]:
    function = {"name": "look", "arguments": JsonText.of_call(arguments)}
    return {"id": call_id, "type": "function", "function": function}


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
    turns = [{"content": None}, {"content": ""}, {}, {"content": []}, {"content": "\n\n"}]
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


# Turns with a text beside calls, and with several calls. As Llama-3.1's, the first two.
SHOWS_CALLS_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    + WRITES_CALLS
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TAKES_ONE_CALL = SHOWS_CALLS_ALONE.replace(
    WRITES_CALLS,
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + WRITES_CALLS,
)
WRITES_THE_FIRST_CALL = WRITES_NONE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
WRITES_THE_LAST_CALL = WRITES_NONE.replace("m.tool_calls or []", "(m.tool_calls or [])[-1:]")
WRITES_ONE_RESULT = (
    "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.role != 'tool' %}<{{ m.role }}>"
    "{{ m.content }}" + WRITES_CALLS + "{% endif %}{% endfor %}"
)
TAKES_TURNS = (  # as Mistral-0.3's: a text of its own would be one of the assistant's turns too many
    "{% set said = namespace(n=0) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% endfor %}" + SHOWS_CALLS_ALONE
)
WRITES_THE_FIRST_OF_ALL = (
    "{% set seen = namespace(n=0) %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] if seen.n == 0 %}{% set seen.n = 1 %}[{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "splits_text", "splits_calls"),
    [
        (WRITES_NONE, False, False),
        (LOSES_CALLS_OF_EMPTY, True, False),
        (SHOWS_CALLS_ALONE, True, False),
        (TAKES_ONE_CALL, True, True),
        (WRITES_THE_FIRST_CALL, False, True),
        (WRITES_THE_LAST_CALL, False, True),
        (WRITES_ONE_RESULT, False, True),
    ],
)
def test_nothing_is_lost_of_a_turn_with_a_text_and_calls(
    source: str, splits_text: bool, splits_calls: bool
) -> None:
    forms = ChatTemplate(source, "test").forms
    assert (forms.loses, forms.splits_text, forms.splits_calls) == ((), splits_text, splits_calls)
    user: dict[str, Any] = {"role": "user", "content": "u"}
    turn = {"role": "assistant", "content": "Let me.", "tool_calls": [call(), call('{"b": 2}', "d")]}
    results = [{"role": "tool", "tool_call_id": each, "content": f"r{each}"} for each in "dc"]
    told = said(source, user, turn, *results, {"role": "assistant", "content": "So."}, user)
    for part in ("Let me.", '[look {"a": 1}]', '[look {"b": 2}]', "rd", "rc", "<assistant>So.<user>u"):
        assert told.count(part) == 1
    if splits_calls:
        places = list(map(told.index, ("Let me.", '{"a": 1}', "rc", '{"b": 2}', "rd")))
        assert places == sorted(places)
    one = said(source, user, {**turn, "tool_calls": [call()]}, results[1], user)
    apart = "<assistant>" if splits_text else ""
    assert one == f'<user>u<assistant>Let me.{apart}[look {{"a": 1}}]<tool>rc<user>u'


def test_results_without_ids_belong_to_calls_in_order() -> None:
    user: dict[str, Any] = {"role": "user", "content": "u"}
    calls = [{"function": {"name": "look", "arguments": {"a": number}}} for number in (1, 2)]
    results = [{"role": "tool", "content": f"r{number}"} for number in (1, 2, 3)]
    told = said(TAKES_ONE_CALL, user, {"role": "assistant", "tool_calls": calls}, *results)
    first, second = (f'<assistant>[look {{"a": {number}}}]<tool>r{number}' for number in (1, 2))
    assert told == f"<user>u{first}{second}<tool>r3"


@pytest.mark.parametrize(
    ("source", "lost", "advice"),
    [
        (TAKES_TURNS, TEXTS, "leave the texts out"),
        (WRITES_THE_FIRST_OF_ALL, SEVERAL, "have tools called one at a time"),
    ],
)
def test_what_no_split_shows_is_refused_by_name(source: str, lost: str, advice: str) -> None:
    assert ChatTemplate(source, "test").forms.loses == (lost,)
    user: dict[str, Any] = {"role": "user", "content": "u"}
    turns = {TEXTS: {"content": "t", "tool_calls": [call()]}, SEVERAL: {"tool_calls": [call(), call()]}}
    with pytest.raises(RequestError, match=f"does not show {lost}: .*; {advice}"):
        said(source, user, {"role": "assistant", **turns[lost]})
    other = {"role": "assistant", **turns[SEVERAL if lost == TEXTS else TEXTS]}
    assert said(source, user, other).count('[look {"a": 1}]') == 1 + (lost == TEXTS)


TELLS_LAST_USER = (  # as Mistral-0.3's: a system message is a part of the last message, if that is the user's
    "{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{% if loop.last and m.role == 'user' %}({{ told }}){% endif %}{{ m.content }}"
    + WRITES_CALLS
    + "{% endfor %}"
)


def test_a_system_message_is_not_lost_behind_results() -> None:
    assert ChatTemplate(TELLS_LAST_USER, "test").forms.untold == ("tool", "assistant")
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    assert said(TELLS_LAST_USER, system, user) == "<user>(s)u"
    turn = {"role": "assistant", "tool_calls": [call()]}
    told = said(TELLS_LAST_USER, system, user, turn, {"role": "tool", "content": "r"})
    assert told == '<user>s\n\nu<assistant>[look {"a": 1}]<tool>r'
    assert said(TELLS_LAST_USER, system, {"role": "assistant", "content": "a"}) == "<assistant>a"


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
    told = said(source, {"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert told == ("<user>s\n\nu" if source == LOSES_SYSTEM else "<system>s<user>u")


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
