"""Chat templates: Jinja programs in a checkpoint, for writing a chat as one text.

They run in a sandbox, with the dialect that Hugging Face transformers gives them: trimmed blocks, `tojson`
that leaves HTML alone, `raise_exception`, `strftime_now`, loop controls, and `{% generation %}` blocks.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xdeepserve.errors import CheckpointError, RequestError, abridged
from xdeepserve.model.message_fields import REASONING, TEXT_ONLY, check_fields
from xdeepserve.reading import unreadable

MAX_REASON_CHARS = 500  # of a template's own words, in an error


class ChatTemplate:
    """Compiled chat template. Raises CheckpointError if the source is not Jinja."""

    def __init__(self, source: str, origin: str) -> None:
        self.source, self.origin = source, origin
        try:
            self._template, self.variables = _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{origin}: chat template, line {error.lineno}: {error.message}") from None

    def render(
        self, *, messages: Sequence[Mapping[str, Any]], max_chars: int | None = None, **variables: Any
    ) -> str:
        """Render a chat as text. Raises RequestError with the template's own words if it refuses the
        messages, and for a text longer than `max_chars`."""
        plain = [plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
        for i, tool in enumerate(variables.get("tools") or ()):
            check_tool(f"tools[{i}]", tool)
        try:
            return self._collect(max_chars, messages=self.forms.applied(plain), **variables)
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code: it may fail in any way
            said = " ".join(str(error).split())[:MAX_REASON_CHARS] or type(error).__name__
            raise RequestError(
                f"the chat template refuses these messages: {said}", param="messages"
            ) from None

    @property
    def forms(self) -> MessageForms:
        """Forms of messages that the template renders right, tried once for each template."""
        return _forms(self.source)

    def _collect(self, max_chars: int | None, **variables: Any) -> str:
        """Collect the text, piece by piece as the template makes it."""
        pieces, num_chars = [], 0
        for piece in self._template.generate(**variables):
            pieces.append(piece)
            num_chars += len(piece)
            if max_chars is not None and num_chars > max_chars:
                raise RequestError(
                    f"the chat template makes more than {max_chars} characters of these messages",
                    param="messages",
                )
        return "".join(pieces)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compile a template, and find the variables it uses. Results are cached, because a process may have many
    engines of one checkpoint."""
    environment = _environment()
    variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(variables)


class MessageForms(NamedTuple):
    """Forms of messages that a template renders right, where clients mean the same by several.

    empty          content of an assistant's turn with calls and no text: null, "" or absent (`NO_CONTENT`)
    folds_system   system messages after others would be refused or lost: they join the first message
    joins_users    two users' messages in a row would be refused or lost: they are joined
    wants_user     system messages alone would be refused or lost: they are the user's
    loses          what no text of the template has, though it takes the message: keys of `ADVICE`
    splits_text    calls beside a text, or the text, would be refused or lost: the text is a turn before them
    splits_calls   of several calls in a turn some would be refused or lost: each is a turn, with its result
    untold         roles of a last message behind which system messages would be lost: the last user's
                   message begins with them
    """

    empty: str | None = None
    folds_system: bool = False
    joins_users: bool = False
    wants_user: bool = False
    loses: tuple[str, ...] = ()
    splits_text: bool = False
    splits_calls: bool = False
    untold: tuple[str, ...] = ()

    def applied(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Bring messages into the forms of the template. Raises RequestError for what it would lose."""
        for message in messages if self.loses else ():
            self._check_shown(message)
        written = list(messages)
        if self.splits_text:
            written = [turn for message in written for turn in _text_apart(message)]
        if self.splits_calls:
            written = _calls_apart(written)
        written = [self._with_empty(message) for message in written]
        if self.wants_user and all(message.get("role") == "system" for message in written):
            written = [{**message, "role": "user"} for message in written]
        if self.folds_system and any(message.get("role") == "system" for message in written[1:]):
            told = [message for message in written if message.get("role") == "system"]
            others = [message for message in written if message.get("role") != "system"]
            written = [{**told[0], "content": _joined_text(told)}, *others]
        if written and written[-1].get("role") in self.untold:
            written = _told_by_user(written)
        if self.joins_users:
            groups = itertools.groupby(written, lambda message: message.get("role"))
            written = [each for role, group in groups for each in _joined_users(role, list(group))]
        return written

    def _check_shown(self, message: Mapping[str, Any]) -> None:
        calls = message.get("tool_calls") or ()
        holds = {
            CALLS: bool(calls),
            RESULTS: message.get("role") == "tool",
            TEXTS: bool(calls and _says(message)),
            SEVERAL: len(calls) > 1,
        }
        for lost in self.loses:
            if holds[lost]:
                raise RequestError(
                    f"the model's chat template does not show {lost}: these messages have some, and the "
                    f"model would not see them; {ADVICE[lost]}, or use another template",
                    param="messages",
                )

    def _with_empty(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("role") != "assistant" or not message.get("tool_calls") or _says(message):
            return message
        if self.empty == NO_CONTENT:
            return {name: value for name, value in message.items() if name != "content"}
        return {**message, "content": self.empty}


def _says(message: Mapping[str, Any]) -> bool:
    """Whether a message has more of a text than white space."""
    return bool(str(message.get("content") or "").strip())


def _joined_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages if message.get("content"))


def _joined_users(role: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if role != "user" or len(messages) == 1:
        return messages
    return [{**messages[0], "content": _joined_text(messages)}]


def _told_by_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the text of system messages to the beginning of the last user's message, if there is one."""
    told = [message for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    last = max((i for i, message in enumerate(others) if message.get("role") == "user"), default=-1)
    if not told or last < 0:
        return messages
    others[last] = {**others[last], "content": _joined_text([*told, others[last]])}
    return others


def _text_apart(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Split an assistant's turn with a text and calls in two: the text, and the calls."""
    if not (message.get("tool_calls") and _says(message)):
        return [message]
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    return [text, _calls_alone(message["tool_calls"])]


def _calls_apart(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each call of a turn a turn of its own, with its result behind; other results follow the last."""
    written, rest = [], list(messages)
    while rest:
        turn = rest.pop(0)
        first, *others = turn.get("tool_calls") or [None]
        for call in others:
            written.append({**turn, "tool_calls": [first]})
            results = itertools.takewhile(lambda message: message.get("role") == "tool", rest)
            own = (i for i, result in enumerate(results) if result.get("tool_call_id") == first.get("id"))
            written += [rest.pop(i) for i in itertools.islice(own, 1)]
            turn, first = _calls_alone([call]), call
        written.append(turn)
    return written


def _calls_alone(calls: Sequence[Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


NO_CONTENT = "absent"
CALLS, RESULTS = "calls of tools", "results of tools"
TEXTS, SEVERAL = "texts beside calls of tools", "several calls of tools in a turn"
ADVICE = {  # by what a template may lose
    **dict.fromkeys((CALLS, RESULTS), "write them into the content of a message"),
    TEXTS: "leave the texts out",
    SEVERAL: "have tools called one at a time (parallel_tool_calls false)",
}
_USER = {"role": "user", "content": "trial-user"}
_ANSWER = {"role": "assistant", "content": "trial-answer"}
_ALONE = {"role": "system", "content": "trial-alone"}
_MIDDLE = [
    {"role": "system", "content": "trial-first"},
    {"role": "system", "content": "trial-second"},
    _USER,
    _ANSWER,
    {"role": "system", "content": "trial-third"},
    _USER,
]


@functools.lru_cache(maxsize=16)
def _forms(source: str) -> MessageForms:
    """Try a template on histories: everything in them has to be in its text, and no `None` or `null`."""
    template, _ = _compiled(source)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    tool = {"type": "function", "function": {"name": "trial", "description": "", "parameters": {}}}

    def written(messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> str | None:
        """Return the text of a history; None if the template refuses it."""
        try:
            return "".join(
                template.generate(messages=messages, tools=tools, add_generation_prompt=True, **special)
            )
        except Exception:  # a template is foreign code: it may fail in any way
            return None

    def found(
        messages: Sequence[Mapping[str, Any]], *marks: str, choose: Callable[..., Any] = max
    ) -> tuple[int, int]:
        """Count the marks that the template writes, and the times of `None` and `null`, negative: without
        tools or with some, by default where it writes more; (-1, 0) if refused."""
        texts = [text for tools in (None, [tool]) if (text := written(messages, tools)) is not None]
        counts = [(sum(m in text for m in marks), -text.count("None") - text.count("null")) for text in texts]
        return choose(counts, default=(-1, 0))

    def call(number: int) -> dict[str, Any]:
        arguments = JsonText(f'{{"trial-key{number}": "trial-value{number}"}}')
        function = {"name": f"trial-name{number}", "arguments": arguments}
        return {"id": f"trial000{number}", "type": "function", "function": function}

    def reply(number: int) -> dict[str, Any]:
        said = {"name": f"trial-name{number}", "content": f"trial-result{number}"}
        return {"role": "tool", "tool_call_id": f"trial000{number}", **said}

    def history(
        forms: MessageForms, *behind: Mapping[str, Any], text: str | None = None, num_calls: int = 1
    ) -> list[Mapping[str, Any]]:
        calls = [call(number) for number in range(num_calls)]
        turn = {"role": "assistant", "content": text, "tool_calls": calls}
        return [_USER, *forms.applied([turn, *map(dict, behind)])]

    def quality(empty: str | None) -> tuple[tuple[int, int], ...]:
        marks, form = ("trial-key0", "trial-value0", "trial-result0"), MessageForms(empty)
        # Without a result, too: some templates refuse results.
        return tuple(found(history(form, behind), *marks) for behind in (reply(0), _USER))

    forms = MessageForms(max((None, "", NO_CONTENT), key=quality))  # of equals, the first
    if found([_USER], "trial-user")[0] < 1:  # it needs variables that only a request has
        return forms

    def is_lost(mark: str, *histories: list[Mapping[str, Any]]) -> bool:
        """Whether the template takes some of the histories, and writes a mark of none."""
        return max(found(each, mark)[0] for each in histories) == 0

    replied = history(forms, reply(0)), history(forms, reply(0), _USER)
    is_call_lost = is_lost("trial-value0", *replied, history(forms), history(forms, _USER))
    is_result_lost = is_lost("trial-result0", *replied)
    forms = forms._replace(loses=(CALLS,) * is_call_lost + (RESULTS,) * is_result_lost)

    def shown(forms: MessageForms, text: str | None, num_calls: int) -> tuple[bool, bool]:
        """Whether the template takes a turn with a text or several calls, and whether it shows all of it."""
        replies = [reply(number) for number in range(num_calls)]
        parts = ("name", "key", "value", "result")
        marks = [f"trial-{part}{each}" for part in parts for each in range(num_calls)]
        marks += [text] if text else []
        counts = [
            found(history(forms, *replies, *more, text=text, num_calls=num_calls), *marks)[0]
            for more in ((), (_ANSWER, _USER))
        ]
        return max(counts) >= 0, min(counts) == len(marks)

    trials = ((TEXTS, "trial-text", 1), (SEVERAL, None, 2))
    for lost, text, num_calls in trials if not forms.loses and found(replied[0])[0] == 0 else ():
        is_taken, is_right = shown(forms, text, num_calls)
        split = forms._replace(splits_text=True) if text else forms._replace(splits_calls=True)
        if not is_right and shown(split, text, num_calls)[1]:
            forms = split
        elif not is_right and is_taken:
            forms = forms._replace(loses=(*forms.loses, lost))
    systems = found(_MIDDLE, "trial-first", "trial-second", "trial-third", choose=min)
    users = found([_USER, {**_USER, "content": "trial-next"}], "trial-user", "trial-next", choose=min)
    alone = found([_ALONE], "trial-alone", choose=min)
    ends = (("user", [_USER]), ("tool", replied[0]), ("assistant", [_USER, _ANSWER]))
    untold = tuple(role for role, end in ends if is_lost("trial-alone", [_ALONE, *end]))
    return forms._replace(
        folds_system=systems[0] < 3, joins_users=users[0] < 2, wants_user=alone[0] < 1, untold=untold
    )


def load_chat_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Load the templates of a checkpoint by name. `chat_template.jinja` is "default" and wins over
    `tokenizer_config.json`."""
    stored = tokenizer_config.get("chat_template")
    if isinstance(stored, list):  # of named templates
        named = {str(entry.get("name")): entry.get("template") for entry in stored if isinstance(entry, dict)}
    else:
        named = {"default": stored}
    sources = {name: source for name, source in named.items() if isinstance(source, str)}
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            sources["default"] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {unreadable(error)}") from None
    return {name: ChatTemplate(source, str(directory)) for name, source in sources.items()}


def plain_message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of OpenAI's API to the form that templates take. Raises RequestError, which calls the
    message `where`.

    A list of text parts becomes one text, joined by newlines as in vLLM, arguments of calls become JsonText,
    and reasoning is `reasoning_content`, whatever field or part it is in. Content may be left out in an
    assistant's turn and in a tool's. The role "developer" is that of the system.
    """
    role, calls = message.get("role"), message.get("tool_calls")
    plain = {name: value for name, value in message.items() if name not in (*REASONING, "refusal")}
    if not isinstance(role, str):
        param = f"{where}.role"
        raise RequestError(f"{param} must be a text such as user, found {abridged(role)}", param=param)
    if role not in ROLES:
        param, supported = f"{where}.role", ", ".join(ROLES)
        raise RequestError(f"{param} must be one of {supported}, found {abridged(role)}", param=param)
    check_fields(where, message, "ChatMessage")
    for name, owner in _OWNERS.items():
        if message.get(name) and role != owner:
            raise RequestError(f"{where}.{name} belongs to the role {owner}", param=f"{where}.{name}")
    plain["role"] = ROLES[role]
    plain["content"] = _plain_content(where, role, message)
    parts = message["content"] if isinstance(message.get("content"), list) else []
    thoughts = [part for part in parts if isinstance(part, Mapping) and part.get("type") in _THOUGHTS]
    if reasoning := next(
        filter(None, (_thought(message.get(name)) for name in REASONING)), _thought(thoughts)
    ):
        plain["reasoning_content"] = reasoning
    if calls:  # templates ask whether the key is there
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            param = f"{where}.tool_calls"
            raise RequestError(f"{param} must be a list, found {abridged(calls)}", param=param)
        plain["tool_calls"] = [_plain_call(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
    else:
        plain.pop("tool_calls", None)
    return plain


# OpenAI's newer models call the system role "developer"; templates know only "system".
ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_OWNERS = dict.fromkeys(("tool_calls", *REASONING, "refusal"), "assistant") | {"tool_call_id": "tool"}
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")  # parts of reasoning
_TEXTS = (None, "text", "input_text", "output_text")  # parts of text; the latter are those of /v1/responses
# Parts of other APIs, and what to send instead.
_INSTEAD = {
    **dict.fromkeys(
        ("function_call", "tool_call", "tool-call", "tool_use"), "; use tool_calls of the message"
    ),
    **dict.fromkeys(
        ("function_call_output", "tool-result", "tool_result"), "; use a message of role tool for each result"
    ),
    **dict.fromkeys(("document", "search_result"), "; write its text into a part of type text"),
}


def _plain_content(where: str, role: str, message: Mapping[str, Any]) -> str | None:
    """Return a message's text; None for an assistant's turn that has calls and no text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        # As a client has it from an answer without text.
        return message.get("refusal") or (None if message.get("tool_calls") else "")
    if content is None and role == "tool":
        return ""  # a function that returns nothing
    if content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    if not isinstance(content, list | tuple):
        param = f"{where}.content"
        reason = f"{param} must be a text or a list of parts, found {abridged(content)}"
        raise RequestError(reason, param=param)
    texts = []
    for j, part in enumerate(content):
        param, of = f"{where}.content[{j}]", part if isinstance(part, Mapping) else {"text": part}
        kind = of.get("type")
        if kind in _THOUGHTS and role == "assistant":
            continue
        if kind not in (*_TEXTS, "refusal"):
            instead = _INSTEAD.get(kind, TEXT_ONLY) if isinstance(kind, str) else ""
            raise RequestError(
                f"{param}.type must be text, found {abridged(kind)}{instead}", param=f"{param}.type"
            )
        check_fields(param, of, "ContentPart")
        text = of.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{param}.text is required", param=f"{param}.text")
        texts.append(text)
    return "\n".join(texts)


def check_tool(where: str, tool: Mapping[str, Any]) -> None:
    """Check that a template would show all of a tool. Raises RequestError, which calls the tool `where`."""
    check_fields(where, tool, "Tool")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        param = f"{where}.function"
        example = '{"name": ..., "parameters": ...}'
        raise RequestError(f"{param} must be {example}, found {abridged(function)}", param=param)
    check_fields(f"{where}.function", function, "FunctionDefinition")


def _thought(value: Any) -> str:
    """Return the text of a reasoning: a text, or a list of objects of which each has some; those of hidden
    reasoning have none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_thought, value))
    found = (
        (value.get(name) for name in ("thinking", "text", "summary")) if isinstance(value, Mapping) else ()
    )
    return next(filter(None, map(_thought, found)), "")


def _plain_call(where: str, call: Any) -> dict[str, Any]:
    """Convert a call to a template's form, in which its arguments are an object. A call may have its name and
    arguments under `function`, or without that level."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        param = f"{where}.function"
        example = '{"name": ..., "arguments": ...}'
        raise RequestError(f"{param} must be {example}, found {abridged(function)}", param=param)
    if function is call:
        check_fields(where, call, "FunctionCall", "id", "type")
    else:
        check_fields(where, call, "ToolCall")
        check_fields(f"{where}.function", function, "FunctionCall")
    arguments, param = function.get("arguments"), f"{where}.function.arguments"
    if isinstance(arguments, str) or arguments is None:
        arguments = JsonText.of_call(arguments or "{}")
    elif not isinstance(arguments, JsonText):
        try:
            arguments = JsonText(json.dumps(arguments, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            reason = f"{param} must be an object or its JSON, found {abridged(arguments)}"
            raise RequestError(reason, param=param) from None
    named = ("id", "type") if function is call else ("id", "type", *call)
    plain = {name: call[name] for name in named if name in call}
    plain.setdefault("type", "function")
    function = {"name": function["name"], "arguments": arguments} if function is call else function
    return {**plain, "function": {**function, "arguments": arguments}}


class JsonText(dict[str, Any]):
    """Parsed JSON object, printable as the original text: the arguments of a tool call, in a chat's history.

    Some templates treat arguments as an object (`arguments | tojson`, loops), others as a text to join to
    others; this serves both. Raises ValueError for text that is not a JSON object.
    """

    @classmethod
    def of_call(cls, text: str) -> JsonText:
        """Read a call's arguments as a model wrote them. Text that is no JSON object, because the call was
        cut off or is wrong, stays whole: as the text, and as the one argument `arguments`."""
        try:
            return cls(text or "{}")
        except ValueError:
            kept = cls("{}")
            kept.text = text
            kept["arguments"] = text
            return kept

    def __init__(self, text: str) -> None:
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError(f"found {abridged(value)}")
        super().__init__(value)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    # The one place where the calendar reaches a prompt, and only if the checkpoint's template asks for it.
    return datetime.now().strftime(form)


class _GenerationBlock(Extension):
    """Jinja extension for `{% generation %}...{% endgeneration %}`, which marks text for training.

    The block renders as its contents.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
