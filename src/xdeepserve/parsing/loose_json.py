"""Reader of JSON as models write it, from text that arrives in pieces.

What is read comes back as JSON, and JSON itself as it was written. Taken beside JSON: Python's `True`,
`False` and `None`, tuples, and numbers (`.5`, `1.`, `+3`, `1_000`, `0x1F`), words in capitals, single quotes,
a comma behind the last member, line breaks within strings, and a backslash before a character that needs
none. Within calls braces may be doubled, as in Python's format strings: Qwen2.5's template shows them so.
Everything else raises NoCallError.
"""

from __future__ import annotations

import json
import re

from xdeepserve.parsing.text_source import Steps, T, TextSource

MAX_DEPTH = 100  # of lists and objects: readers of JSON have limits too
MAX_WORD = 1000  # characters; Python's reader refuses whole numbers from 4,300 digits on

_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"""[^'"\\\x00-\x1f]*""")}
_LOOSE_NUMBER = re.compile(r"([+-]?)(?:(0|[1-9][0-9]*)(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?")
_LOOSE_INTEGER = re.compile(r"[+-]?(?:[1-9][0-9]*(?:_[0-9]+)+|0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_CLOSERS = {"[": "]", "(": ")"}
HALF_PAIR = re.compile("[\ud800-\udfff]")
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')


class NoCallError(Exception):
    """The text is no call of a tool, or no JSON."""


class TooDeepError(NoCallError):
    """The text has lists or objects within more than `MAX_DEPTH` others."""


class JsonReader:
    """Reads values of JSON from a source, which stands behind each afterwards."""

    def __init__(self, source: TextSource, may_double: bool = False) -> None:
        self._source, self._may_double = source, may_double
        self.is_loose = False  # something was read that is no JSON
        self._ends_with_comma = False  # the value before

    def value(self, depth: int = 0) -> Steps[str]:
        """Read a value of any kind; return it as JSON."""
        source = self._source
        char = yield from self._next()
        begin, was_loose = source.at, self.is_loose
        self.is_loose = False
        if char in ("{", "[", "("):
            value = yield from self._many(char, depth)
        elif char in _PLAIN:
            value = yield from self.string()
        else:
            word = yield from source.run(_WORD)
            value = _WORDS.get(word.lower()) or _number(word)
            self.is_loose = value != word
        if not self.is_loose:
            value = source.text[begin : source.at]
        self.is_loose |= was_loose
        return value

    def members(self, depth: int = 0, stops: tuple[str, ...] = ()) -> Steps[dict[str, str]]:
        """Read an object; return the JSON of each member. A mark of `stops` may stand for its brace."""
        source, found = self._source, {}
        if (yield from source.char()) != "{":
            raise NoCallError
        source.at += 1
        char = yield from self._next()
        is_doubled = self._may_double and char == "{"
        if is_doubled:
            source.at += 1
            char, self.is_loose = (yield from self._next()), True
        while char != "}":
            if char not in _PLAIN:
                raise NoCallError
            key = json.loads((yield from self.string()))
            if (yield from self._next()) != ":":
                raise NoCallError
            source.at += 1
            yield from self.begin_member(key)
            found[key] = yield from self.value(depth + 1)
            char = yield from self._separator("}", stops)
            if not char:
                return found
        source.at += 1
        if is_doubled:
            yield from source.take("}")
        return found

    def object(self, depth: int = 0, stops: tuple[str, ...] = ()) -> Steps[str]:
        """Read an object, and return its JSON. A mark of `stops` may stand for its brace."""
        begin = self._source.at
        members = yield from self.members(depth, stops)
        if self.is_loose:
            return "{" + ", ".join(f"{json_text(key)}: {value}" for key, value in members.items()) + "}"
        return self._source.text[begin : self._source.at]

    def begin_member(self, key: str) -> Steps[None]:
        """Take notice of a member whose value comes next, for readers that want to refuse or remember it."""
        yield from ()

    def string(self) -> Steps[str]:
        """Read a text between quotes; return it as JSON."""
        source = self._source
        quote = source.text[source.at]
        source.at += 1
        begin, parts, is_json = source.at, ['"'], quote == '"'
        while True:
            parts.append((yield from source.run(_PLAIN[quote])))
            char = yield from source.char()
            if not char:
                raise NoCallError
            source.at += 1
            if char == quote:
                break
            if char != "\\":
                parts.append(json.dumps(char)[1:-1])
                is_json = False
                continue
            escaped = yield from source.char()
            if escaped in _SIMPLE_ESCAPES and escaped:
                parts.append(char + escaped)
                source.at += 1
            elif escaped == "u" and (digits := (yield from self._hex())):
                parts.append(char + digits)
            else:
                is_json = False
                if escaped == "'":
                    source.at += 1
                    parts.append("'")
                else:
                    parts.append("\\\\")
        self.is_loose |= not is_json
        return '"' + source.text[begin : source.at] if is_json else "".join(parts) + '"'

    def _hex(self) -> Steps[str]:
        """Take `u` and four digits of an escaped character; "" if they are not there."""
        source, begin = self._source, self._source.at
        for _ in range(5):
            if not (yield from source.char()):
                source.at = begin
                return ""
            source.at += 1
        found = source.text[begin : source.at]
        if not _HEX.fullmatch(found[1:]):
            source.at = begin
            return ""
        return found

    def _many(self, opener: str, depth: int) -> Steps[str]:
        if depth >= MAX_DEPTH:
            raise TooDeepError
        if opener == "{":
            reader = JsonReader(self._source, self._may_double)
            value = yield from reader.object(depth)
            self.is_loose |= reader.is_loose
            return value
        source, values, closer = self._source, [], _CLOSERS[opener]
        source.at += 1
        char, has_comma = (yield from self._next()), False
        while char != closer:
            values.append((yield from self.value(depth + 1)))
            char = yield from self._separator(closer)
            has_comma |= len(values) > 1 or self._ends_with_comma
        source.at += 1
        self.is_loose |= opener == "("
        if opener == "(" and len(values) == 1 and not has_comma:
            return values[0]
        return "[" + ", ".join(values) + "]"

    def _separator(self, closer: str, stops: tuple[str, ...] = ()) -> Steps[str]:
        """Take a comma between values; return what comes next: the closer, a value, or "" before a stop."""
        char = yield from self._next()
        self._ends_with_comma = char == ","
        if char == ",":
            self._source.at += 1
            char = yield from self._next()
            self.is_loose |= char == closer
        elif char != closer:
            if stops and (yield from self._source.peek(*stops)):
                self.is_loose = True
                return ""
            raise NoCallError
        if not char:
            raise NoCallError
        return char

    def _next(self) -> Steps[str]:
        """Take white space; return the character behind it."""
        yield from self._source.run(_SPACE)
        return (yield from self._source.char())


def _number(word: str) -> str:
    """Return a number as JSON, from JSON or Python. Raises NoCallError."""
    if len(word) < MAX_WORD:
        if _NUMBER.fullmatch(word):
            return word
        if found := _LOOSE_NUMBER.fullmatch(word):
            sign, whole, fraction, alone, exponent = found.groups("")
            return f"{sign.strip('+')}{whole or 0}{(fraction or alone) + '0' * (fraction == '.')}{exponent}"
        if _LOOSE_INTEGER.fullmatch(word):
            return str(int(word, 0))
    raise NoCallError


def json_text(text: str) -> str:
    """Return a text as a string of JSON, in which half a surrogate pair stays escaped: no bytes stand for
    it."""
    return json.dumps(text, ensure_ascii=bool(HALF_PAIR.search(text)))


def read_loosely(text: str) -> tuple[str, bool] | None:
    """Read a whole text; return it as JSON, and whether it was JSON before. None if it is neither."""
    source = TextSource(text.strip(), is_ended=True)
    reader = JsonReader(source)
    try:
        value = finished(reader.value())
    except NoCallError:
        return None
    return (value, not reader.is_loose) if source.at == len(source.text) else None


def members_of(text: str) -> dict[str, str]:
    """Split an object into the JSON of each member, as it is written. Raises NoCallError."""
    return finished(JsonReader(TextSource(text, is_ended=True)).members())


def finished(steps: Steps[T]) -> T:
    """Return the result of steps whose text has ended, so that none of them waits."""
    try:
        next(steps)
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("a grammar waits behind the end of its text")
