"""Chat templates: Jinja programs in a checkpoint, for writing a chat as one text.

They run in a sandbox, with the dialect that Hugging Face transformers gives them: trimmed blocks, `tojson`
that leaves HTML alone, `raise_exception`, `strftime_now`, loop controls, and `{% generation %}` blocks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import CheckpointError, RequestError, abridged
from ..reading import unreadable


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
        plain = [_plain_message(message) for message in messages]
        try:
            return self._collect(max_chars, messages=plain, **variables)
        except RequestError:
            raise
        except Exception as error:  # a template is foreign code: it may fail in any way
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from None

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


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message's content to a single text: OpenAI's list of text parts is joined by newlines."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise RequestError("message content may only have parts of type text", param="messages")
    return {**message, "content": "\n".join(str(part) for part in parts)}


class JsonText(dict[str, Any]):
    """Parsed JSON object, printable as the original text: the arguments of a tool call, in a chat's history.

    Some templates treat arguments as an object (`arguments | tojson`, loops), others as a text to join to
    others; this serves both. Raises ValueError for text that is not a JSON object.
    """

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
