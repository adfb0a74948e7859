"""Grammar of a call in every format: reads one where it begins, or raises NoCallError.

A model leaves out ends, openers and braces, and writes marks within values. The rules for that, in order:

1. Within a string of JSON no mark means anything.
2. A mark within a value between tags ends the value only if what follows it could follow a call: the next
   parameter, the end of a call or a section, another call, or the end of the text. So `</parameter>` in the
   middle of a sentence is text.
3. A value may quote calls, or parts of calls. So a mark that could end the value (rules 2 and 4), but stands
   within a quoted call or, with ends of a call and a section or without, before further words, ends it only
   if the value has no end of its own behind: an end without a beginning.
4. A parameter whose end is missing or misspelt ends before the next one that the function declares, before
   the end of its call, or before another call, whose first parameter its function must declare.
5. If no call comes out of this, the first end of a value, call or section ends the value.

Where a tag is missing or damaged in front of a value, a parameter that the function declares, and no other,
begins there. Then what is left is no call, and all of it is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from xdeepserve.parsing.loose_json import (
    HALF_PAIR,
    JsonReader,
    NoCallError,
    json_text,
    members_of,
    read_loosely,
)
from xdeepserve.parsing.schema_values import FunctionSchema
from xdeepserve.parsing.text_source import SPACE, CutOff, Steps, TextSource, marks_of
from xdeepserve.parsing.tool_formats import THINK_END, ToolNotation

_HEADER = re.compile(r"[^<{\[\"`\n]*")  # an id or a name, up to what follows it
_IN_TAG = re.compile(r"[^<>\n]*")
_NAME_RUN = re.compile(r"[^\s<>{}\"'`]*")
_NAME = re.compile(r"[^\s<>{}\"'`]+")
_BRACES = re.compile(r"[}\s]*")
_LANGUAGE = re.compile(r"[ \t\w]*")  # behind the marks of a fence
_NAMESPACE = re.compile(r"^(?:functions?\.)+", re.IGNORECASE)
_ATTRIBUTES = r"""(?:\s+[\w:.-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'/]+))*?"""
_NAMED = re.compile(  # what stands in a tag behind its kind: =NAME, or name="NAME", and other attributes
    rf"""(?:=\s*|(?P<before>{_ATTRIBUTES})\s+name\s*=\s*)(?P<quote>["']?)(?P<name>[^"']+?)(?P=quote)"""
    rf"""(?P<others>{_ATTRIBUTES})\s*(?P<closed>/?)\s*"""
)
_SAYS_TEXT = re.compile(r"""\sstring\s*=\s*["']?(true|false)""", re.IGNORECASE)
MAX_TAG = 300  # characters of a tag behind its kind
MAX_SEARCHES = (
    8  # in vain, for a value's own end; then its first possible end counts, so that time is bounded
)
_SCHEMALESS = FunctionSchema(None)


class Function(msgspec.Struct, frozen=True):
    """Tool offered to the model; `parameters` is the JSON schema of its arguments, as text."""

    name: str
    parameters: str


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Call of a tool that the model has written.

    index       which call of the choice, from 0
    id          the model's own id for the call, where its format has one
    arguments   a JSON object, as text; only the beginning of one where a length limit has cut the call
    """

    index: int = 0
    id: str | None = None
    name: str
    arguments: str


class OfferedFunctions:
    """Functions that the model may call, by name, with their schemas."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._by_name = {each.name: each for each in functions}
        self._schemas: dict[str, FunctionSchema] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all functions that are offered."""
        return tuple(self._by_name)

    def may_be(self, name: str) -> bool:
        """Whether a call of this name is one of an offered function; where none is known, it may be."""
        return name in self._by_name or not self._by_name

    def is_offered(self, name: str) -> bool:
        """Whether a name, as a model writes it, means an offered function."""
        return self.meant(name) in self._by_name

    def before_key(self, text: str) -> str:
        """Return the function in a text that is its name and one of its parameters, with nothing between."""
        found = [
            name
            for name in self._by_name
            if (names := self.schema(name).names) and text.startswith(name) and text[len(name) :] in names
        ]
        return max(found, key=len, default=text)

    def schema(self, name: str) -> FunctionSchema:
        """Return the schema of a function's arguments; one that says nothing if the function is unknown."""
        if name not in self._by_name:
            return _SCHEMALESS
        if name not in self._schemas:
            self._schemas[name] = FunctionSchema(json.loads(self._by_name[name].parameters))
        return self._schemas[name]

    def meant(self, name: str) -> str:
        """Return the offered function that a name means, before which models also write `functions.`."""
        plain = _NAMESPACE.sub("", name)
        return plain if name not in self._by_name and plain in self._by_name else name

    def of_id(self, call_id: str) -> str:
        """Return the name in an id such as functions.NAME:0, which models also spell functions_NAME_0."""
        plain = re.sub(r":\d+$", "", _NAMESPACE.sub("", call_id))
        if plain in self._by_name:
            return plain
        found = [
            name
            for name in self._by_name
            if re.fullmatch(rf"(?i:functions?|tools?|call)?[._:/ -]*{re.escape(name)}[._:/ -]*\d*", call_id)
        ]
        return max(found, key=len, default=plain)


class _Tag(NamedTuple):
    """Contents of a tag with a name.

    is_text     whether a text follows, where the tag says so
    is_closed   the tag ends what it begins: `<invoke name="now"/>`
    """

    name: str
    is_text: bool | None = None
    is_closed: bool = False


class _CallReader(JsonReader):
    """Reads an object with name and arguments.

    is_sure   an opener of calls stands before it; else only the name of an offered function makes it a call
    """

    def __init__(self, source: TextSource, functions: OfferedFunctions, is_sure: bool) -> None:
        super().__init__(source, may_double=True)
        self._functions, self._is_sure = functions, is_sure

    def begin_member(self, key: str) -> Steps[None]:
        """Refuse an object that is no call at its first member, so that text is not held back."""
        if self._is_sure:
            return
        source = self._source
        if key not in ("name", "arguments", "parameters"):
            raise NoCallError
        if key == "name":
            begin = source.at
            yield from source.run(SPACE)
            if (yield from source.char()) not in ("'", '"'):
                raise NoCallError
            name = read_loosely((yield from JsonReader(source).value()))
            said = "" if name is None else str(json.loads(name[0])).strip()
            if not self._functions.is_offered(said):
                raise NoCallError
            source.at = begin


class CallGrammar:
    """Reads calls of one format from a source.

    partial   the part of the current call that is known: where the text is cut off, it is all there is
    follows   the place is right behind a call in a section that has not ended: another needs no opener
    """

    def __init__(self, source: TextSource, notation: ToolNotation, functions: OfferedFunctions) -> None:
        self._source, self._notation, self._functions = source, notation, functions
        self.partial: ParsedCall | None = None
        self.follows = False
        self._num_searches = 0
        tags = notation.tags
        if tags is not None:
            self._key = tags.key.rstrip().partition(" ")[0].partition("=")[0]
            self._value_end = tags.end.strip()
            self._trims = tags.end.startswith("\n")
            self._has_attributes = "</" not in tags.value
            self._key_end, _, self._value = tags.value.partition("\n")
            n = notation
            self._next_tags = tuple(filter(None, (self._key, n.call_end, *n.ends, n.call, *n.begins)))
            self._in_value = marks_of(self._value_end, *self._next_tags)
            self._around_value = marks_of(self._key, self._value_end)
            self._in_key = marks_of(self._key_end, self._value, self._key, *n.ends)
            self._damaged_end = re.compile(
                rf"{self._value_end[:-1]}(?:\s*/?|\d{{1,2}}|_?{n.call_end[2:-1]})>?\s*\Z", re.IGNORECASE
            )

    @cached_property
    def openers(self) -> tuple[str, ...]:
        """Marks that begin a call without an opener around it, where only an offered function is one."""
        if self._notation.call:
            return (self._notation.call,)
        return ("{",) if self._notation.body == "json" else self._functions.names

    def call(self, is_begun: bool) -> Steps[ParsedCall]:
        """Read a call. `is_begun`: the opener of calls stands before it."""
        body, char = self._notation.body, (yield from self._source.char())
        if body == "json" or (body == "tags" and char == "{"):
            return (yield from self._json_call(is_begun))
        if body == "header":
            return (yield from self._header_call(is_begun))
        begin = self._source.at
        try:
            return (yield from self._tagged_call(is_begun, is_careful=True))
        except NoCallError:
            self._source.at = begin
        return (yield from self._tagged_call(is_begun, is_careful=False))

    def _json_arguments(self, char: str, *stops: str) -> Steps[str]:
        """Read arguments in JSON, which begin with `char`. The end of the call may stand for their brace."""
        reader, n = JsonReader(self._source, may_double=True), self._notation
        if char == "{":
            return (yield from reader.object(stops=(n.call_end, *n.ends, n.call, *stops)))
        return (yield from reader.value())

    def _fence(self) -> Steps[str]:
        """Take the opening line of a fenced block, such as ```json, and white space; return its marks."""
        yield from self._source.run(SPACE)
        if fence := (yield from self._source.take("```")):
            yield from self._source.run(_LANGUAGE)
        yield from self._source.run(SPACE)
        return fence

    def _made(self, name: str, arguments: str, call_id: str | None = None) -> ParsedCall:
        self.partial = ParsedCall(name=name, arguments=arguments, id=call_id)
        return self.partial

    # ---- an object with name and arguments ---------------------------------------------------------------

    def _json_call(self, is_begun: bool) -> Steps[ParsedCall]:
        source, ends = self._source, self._notation.ends
        reader = _CallReader(source, self._functions, is_sure=is_begun)
        fence = (yield from self._fence()) if is_begun else ""
        if is_begun and (yield from source.take("[")):
            yield from source.run(SPACE)
        begin = source.at
        try:
            members = yield from reader.members(stops=(*ends, fence))
        except CutOff:
            if is_begun and (found := _CUT_CALL.match(source.text, begin)):
                self._made_of_cut(found)
            raise
        call = self._of_members(members)
        place = source.at
        if (yield from source.run(_BRACES)).strip() and not (yield from source.peek(*ends)):
            source.at = place
        if fence:
            yield from source.run(SPACE)
            yield from source.take(fence)
        if is_begun or self.follows:
            yield from self._list_separator()
        elif not (yield from source.peek_behind_space(*ends)):
            raise NoCallError
        return call

    def _list_separator(self) -> Steps[None]:
        """Take the separator behind a call in a list: a comma before another call, or the list's end."""
        source = self._source
        place = source.at
        yield from source.run(SPACE)
        mark = yield from source.take(",", "]")
        yield from source.run(SPACE)
        follows = ("{",) if mark == "," else self._notation.ends
        if not mark or not (yield from source.peek(*follows)):
            source.at = place

    def _made_of_cut(self, found: re.Match[str]) -> None:
        said, key = read_loosely(found["name"]), found["key"]
        name = "" if said is None else self._functions.meant(json.loads(said[0]).strip())
        is_around = key and _is_around(key, found["value"], self._functions.schema(name))
        rest = found["value"] if is_around else "" if key in (None, *_BESIDE) else "{" + found["rest"]
        if name and not HALF_PAIR.search(name):
            self._made(name, rest)

    def _of_members(self, members: Mapping[str, str]) -> ParsedCall:
        if "name" not in members and members.get("function", "").startswith("{"):
            members = members_of(members["function"])
        key = next((key for key in _NAMES if key in members), "")
        name = json.loads(members.get(key, "null"))
        name = self._functions.meant(name.strip()) if isinstance(name, str) else ""
        if not name or HALF_PAIR.search(name) or (key != "name" and not self._functions.may_be(name)):
            raise NoCallError
        others = {other: value for other, value in members.items() if other != key}
        return self._made(name, _of_others(others, self._functions.schema(name)))

    # ---- a header before the arguments -------------------------------------------------------------------

    def _header_call(self, is_begun: bool) -> Steps[ParsedCall]:
        source, n = self._source, self._notation
        if not (yield from source.take(n.call)) and not is_begun:
            raise NoCallError
        yield from source.run(SPACE)
        header = (yield from source.run(_HEADER)).strip()
        yield from source.run(SPACE)
        has_separator = bool((yield from source.take(n.separator)))
        yield from source.run(SPACE)
        if name := (yield from source.run(_HEADER)).strip():
            if header not in ("", "function"):
                raise NoCallError
            header = name
        name = self._functions.of_id(header) if n.has_ids else self._functions.meant(header)
        if not _NAME.fullmatch(name):
            raise NoCallError
        fence = yield from self._fence()
        char = yield from source.char_behind_space()
        call_id, begin = header if n.has_ids else None, source.at
        if char in ("{", '"', "["):
            try:
                arguments = _arguments((yield from self._json_arguments(char, fence)))
            except CutOff:
                self._made(name, source.text[begin:], call_id)
                raise
        elif has_separator and (yield from source.peek(n.call_end, *(("```",) if fence else ()))):
            arguments = "{}"
        else:
            raise NoCallError
        if n.has_ids and name not in self._functions.names:
            name, arguments = self._named_within(name, arguments)
        call, place = self._made(name, arguments, call_id), source.at
        yield from source.run(_BRACES)
        if fence and (yield from source.take("```")):
            place = source.at
            yield from source.run(SPACE)
        if not (yield from source.take(n.call_end)):
            source.at = place
        return call

    def _named_within(self, name: str, arguments: str) -> tuple[str, str]:
        """Return the name and arguments of a call whose arguments name the function, as its id does not."""
        try:
            call = self._of_members(members_of(arguments))
        except NoCallError:
            return name, arguments
        return (call.name, call.arguments) if call.name in self._functions.names else (name, arguments)

    # ---- a name and parameters between tags --------------------------------------------------------------

    def _tagged_call(self, is_begun: bool, is_careful: bool) -> Steps[ParsedCall]:
        source, n = self._source, self._notation
        tag = yield from self._name(is_begun, self._functions.is_offered)
        name = self._functions.meant(tag.name)
        schema = self._functions.schema(name)
        if not is_begun and not self._functions.may_be(name):
            raise NoCallError
        if tag.is_closed:
            return self._made(name, "{}")
        self._made(name, "")
        members: dict[str, str] = {}
        whole: str | None = None  # arguments that are an object where parameters should stand
        if (yield from source.char_behind_space()) == "{":
            begin = source.at
            try:
                whole = yield from self._json_arguments("{")
            except CutOff:
                self._made(name, source.text[begin:])
                raise
        elif not n.call:
            yield from source.take(self._value_end)  # of no value
        place, mark = yield from self._next_tag()
        while whole is None and (mark == self._key or (yield from self._is_unopened_key(schema))):
            yield from self._parameter(name, members, is_careful)
            self._made(name, "{" + _joined(members))
            place, mark = yield from self._next_tag()
        has_some = bool(members) or whole is not None
        if mark and mark == n.call_end:
            place += len(mark)
        elif not mark and source.at < len(source.text) and (is_careful or not has_some):
            raise NoCallError  # words where a tag should stand
        elif not mark and not has_some and not is_begun:
            raise NoCallError
        source.at = place
        return self._made(name, _unwrapped(members, schema) if whole is None else whole)

    def _is_unopened_key(self, schema: FunctionSchema) -> Steps[bool]:
        """Whether the key of a declared parameter is here without its opening tag, for which an opener of
        calls may stand. Then goes to the key."""
        source = self._source
        if self._has_attributes or not schema.names:
            return False
        before = source.at
        yield from source.take(*self._notation.begins)
        begin = source.at
        key = yield from source.run(_NAME_RUN)
        is_one = schema.declares(key) and bool((yield from source.peek(self._key_end)))
        source.at = begin if is_one else before
        return is_one

    def _next_tag(self) -> Steps[tuple[int, str]]:
        """Take white space; return the tag behind it, and the place from which to go on."""
        source, before = self._source, self._source.at
        yield from source.run(SPACE)
        mark = yield from source.peek(*self._next_tags)
        if not mark:
            yield from source.char()
        return source.at if mark == self._notation.call_end else before, mark

    def _name(self, is_begun: bool, is_known: Callable[[str], bool] | None = None) -> Steps[_Tag]:
        """Read the name of a call between tags. `is_known` accepts names whose tag may be damaged."""
        source, call = self._source, self._notation.call
        if call:
            if not (yield from source.take(call)):
                raise NoCallError
            tag = yield from self._named(is_known)
        else:
            before = source.text[source.at - 1] if source.at else " "
            tag = _Tag((yield from source.run(_NAME_RUN)))
            if is_begun and is_known and (yield from source.peek(self._key_end)):
                name = self._functions.before_key(tag.name)
                source.at -= len(tag.name) - len(name)
                tag = _Tag(name)
            if not is_begun and (
                _NAME.fullmatch(before) or not (yield from source.peek_behind_space(self._key))
            ):
                raise NoCallError
        if not _NAME.fullmatch(tag.name):
            raise NoCallError
        return tag

    def _named(self, is_known: Callable[[str], bool] | None = None) -> Steps[_Tag]:
        """Read the rest of a tag with a name. A line end may stand for the end of the tag, behind a name that
        `is_known`."""
        source, begin = self._source, self._source.at
        for each in (SPACE, _IN_TAG, SPACE, _IN_TAG, SPACE):
            yield from source.run(each)
        inside = source.text[begin : source.at]
        found = _NAMED.fullmatch(inside) if len(inside) <= MAX_TAG else None
        if (yield from source.char()) != ">":
            found = None
        line = inside.partition("\n")[0]
        if is_known and not (found and is_known(found["name"].strip())) and line.startswith("="):
            named = _NAMED.fullmatch(line) if len(line) <= MAX_TAG else None
            if named and len(line) < len(inside) and is_known(named["name"].strip()):
                found, source.at = named, begin + len(line) - 1
        if found is None:
            raise NoCallError
        source.at += 1
        said = _SAYS_TEXT.search(f"{found['before'] or ''} {found['others']}")
        is_text = None if said is None else said[1].lower() == "true"
        return _Tag(found["name"].strip(), is_text, bool(found["closed"]))

    def _parameter(self, name: str, members: dict[str, str], is_careful: bool) -> Steps[None]:
        """Read a parameter into `members`. Of two of one name the last one counts."""
        source, schema = self._source, self._functions.schema(name)
        yield from source.take(self._key)
        tag = yield from self._parameter_name(schema.declares if schema.names else None)
        key = tag.name
        if tag.is_closed:
            members[key] = schema.json_of(key, "", tag.is_text)
            return
        begin = source.at
        try:
            place, mark = yield from self._end_of_value(schema, is_careful)
        except CutOff:
            text = self._stripped(source.text[begin : source.at], has_end=True)
            known = _joined({**members, key: json_text(text)[:-1]})
            self._made(name, "{" + known)
            raise
        has_end = mark == self._value_end
        text = self._stripped(source.text[begin:place], has_end)
        source.at = place + (len(mark) if has_end else 0)
        members[key] = schema.json_of(key, text, tag.is_text)

    def _end_of_value(self, schema: FunctionSchema, is_careful: bool) -> Steps[tuple[int, str]]:
        """Find the mark that ends a value; return its place, and the mark.

        Where the text is cut off, leaves the source behind what belongs to the value.
        """
        source, depth = self._source, 0  # depth: of parameters that began within the value
        is_quoting = False  # the beginning of a call that is none stands before
        while mark := (yield from source.find(self._in_value)):
            place, has_end = source.at, mark == self._value_end
            behind = place + len(mark)
            later: int | None = None
            try:
                is_end = yield from self._ends_value(mark, schema, is_careful, is_quoting)
                is_sure = has_end and not depth and (yield from self._ends_call(behind))
            except CutOff:
                source.at = place
                raise
            depth = max(depth - has_end, 0)
            if is_end and is_careful and not is_sure:
                source.at = behind if has_end else place
                try:
                    later = yield from self._later_end(depth)
                except CutOff:
                    if not has_end:
                        raise
            if is_end:
                return (place, mark) if later is None else (later, self._value_end)
            is_quoting = mark in (self._notation.call, *self._notation.begins) or (
                is_quoting and mark != self._key
            )
            depth += mark == self._key
            source.at = behind
        raise NoCallError

    def _later_end(self, depth: int) -> Steps[int | None]:
        """Find a later end of the value, which is none of a parameter that begins before it; None if there
        is none. `depth` parameters have begun within the value. Of ends before further words, the last."""
        source = self._source
        last: int | None = None
        while self._num_searches < MAX_SEARCHES:
            if not (mark := (yield from source.find(self._around_value))):
                self._num_searches += last is None
                break
            place = source.at
            source.at += len(mark)
            if mark == self._key:
                depth += 1
            elif depth:
                depth -= 1
            elif (yield from self._goes_on(self._next_tags)):
                if (yield from self._ends_call(source.at)):
                    return place
                last = place
            source.at = place + len(mark)
        return last

    def _ends_call(self, behind: int) -> Steps[bool]:
        """Whether no words come behind an end of a value that ends of its call and section follow."""
        source, n = self._source, self._notation
        source.at = behind
        try:
            yield from source.run(SPACE)
            ends = 0
            while (yield from source.take(n.call_end, *n.ends)):
                ends += 1
                yield from source.run(SPACE)
            return not ends or (yield from self._goes_on((n.call, *n.begins, THINK_END)))
        except CutOff:
            return True

    def _stripped(self, text: str, has_end: bool) -> str:
        """Strip the line breaks that the format writes around a value, and its end if that is misspelt."""
        is_crlf = text.startswith("\r\n") or (text.endswith("\r\n") and not text.startswith("\n"))
        newline = "\r\n" if is_crlf else "\n"
        if not has_end and (damaged := self._damaged_end.search(text)):
            text, has_end = text[: damaged.start()], True
        text = text.removeprefix(newline) if self._trims else text
        return text.removesuffix(newline) if self._trims or not has_end else text

    def _parameter_name(self, is_known: Callable[[str], bool] | None = None) -> Steps[_Tag]:
        """Read a parameter's name behind its opening tag. `is_known` accepts names whose other tags may be
        missing, damaged or there twice."""
        if self._has_attributes:
            return (yield from self._named(is_known))
        source = self._source
        if is_known and (yield from source.peek_behind_space(self._key)):
            yield from source.run(SPACE)
            yield from source.take(self._key)
        begin = source.at
        mark = yield from source.find(self._in_key)
        name = source.text[begin : source.at].strip()
        is_unopened = False  # the value
        if mark == self._key_end:
            source.at += len(mark)
            yield from source.run(SPACE)
            if is_known and (yield from source.take(self._key_end)):
                yield from source.run(SPACE)
            mark = yield from source.peek(self._value, self._key, *self._notation.ends)
            is_unopened = not mark and is_known is not None and is_known(name)
        if not name or (mark != self._value and not is_unopened):
            raise NoCallError
        source.at += len(mark)
        return _Tag(name)

    def _ends_value(
        self, mark: str, schema: FunctionSchema, is_careful: bool, is_quoting: bool
    ) -> Steps[bool]:
        """Whether a mark within a value ends it. Leaves the source anywhere behind the mark."""
        source, n = self._source, self._notation
        is_line = n.is_special or source.text[source.at - 1] == "\n"
        if mark == self._value_end:
            if not is_careful:
                return True
            source.at += len(mark)
            try:
                return (yield from self._goes_on(self._next_tags))
            except CutOff:
                return True
        if mark == self._key:
            source.at += len(mark)
            try:
                tag = yield from self._parameter_name()
            except NoCallError:
                return False
            return (n.is_special and not is_quoting) or (
                schema.declares(tag.name) and (is_line or bool(schema.names))
            )
        if mark in (n.call, *n.begins):
            return is_line and (yield from self._is_call())
        source.at += len(mark)
        if not is_careful:
            return True
        if mark == n.call_end:
            return (yield from self._goes_on((*n.ends, n.call, *n.begins)))
        if is_line and (yield from source.char()) in ("\n", "\r"):
            return True
        return (yield from self._goes_on((n.call, *n.begins)))

    def _goes_on(self, marks: Sequence[str]) -> Steps[bool]:
        """Whether behind white space one of the marks comes, or the end of the text."""
        if (yield from self._source.peek_behind_space(*marks)):
            return True
        return not (yield from self._source.char_behind_space())

    def _is_call(self) -> Steps[bool]:
        """Whether the call of an offered function begins here: with a parameter that is declared, or none."""
        source = self._source
        is_begun = False
        while (yield from source.take(*self._notation.begins)):
            is_begun = True
            yield from source.run(SPACE)
        try:
            tag = yield from self._name(is_begun)
            name = self._functions.meant(tag.name)
            if not self._notation.is_special and not self._functions.may_be(name):
                return False
            if not (yield from source.peek_behind_space(self._key)):
                return True
            yield from source.run(SPACE)
            yield from source.take(self._key)
            first = yield from self._parameter_name()
            return self._functions.schema(name).declares(first.name)
        except NoCallError:
            return False


# A call in JSON that ends anywhere behind its name.
_CUT_CALL = re.compile(
    r'\s*\{{1,2}\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")'
    r'(?:\s*,\s*(?P<rest>"(?P<key>[^"\\]*)"\s*:\s*(?:\{(?=\{))?(?P<value>.*)))?',
    re.DOTALL,
)
_EMPTY_LIST = re.compile(r"\[\s*\]")
_OBJECT_AS_TEXT = re.compile(r'"(\s|\\[nrt])*\{')
_NAMES = ("name", "function", "tool", "tool_name", "function_name")
_ARGUMENTS = ("arguments", "parameters")
_SYNONYMS = (
    *("args", "argument", "kwargs", "params", "parameter", "input", "inputs", "tool_input", "tool_args"),
    *("function_args", "function_arguments", "tool_arguments", "action_input", "payload"),
)
_BESIDE = ("id", "type", "index", "call_id", "tool_call_id")  # members of a call that are no arguments


def _is_around(key: str, value: str, schema: FunctionSchema) -> bool:
    """Whether a member of a call holds its arguments, and is none of them."""
    if key in _ARGUMENTS:
        return True
    is_object, is_text = value.startswith("{"), bool(_OBJECT_AS_TEXT.match(value))
    is_own = key in schema.names and (is_text or "object" in schema.parameter(key))
    return key.lower() in (*_ARGUMENTS, *_SYNONYMS) and (is_object or is_text) and not is_own


def _of_others(members: Mapping[str, str], schema: FunctionSchema) -> str:
    """Return the arguments among the members of a call beside its name. Models also write them under other
    names, or beside the name. Raises NoCallError."""
    around = [key for key, value in members.items() if _is_around(key, value, schema)]
    found = "{}"
    for key in sorted(around, key=lambda key: (*_ARGUMENTS, key).index(key)):
        found = _arguments(members[key])
        if found.strip("{} \t\r\n"):
            break
    inner = members_of(found)
    own = {
        key: value
        for key, value in members.items()
        if key not in (*around, *inner, *_BESIDE) and (not around or key in schema.names)
    }
    if not around:
        own |= {key: members[key] for key in _BESIDE if key in members and key in schema.names}
    return "{" + _joined({**inner, **own}) + "}" if own else found


def _unwrapped(members: Mapping[str, str], schema: FunctionSchema) -> str:
    """Return the arguments of a call between tags. Models also write all of them as one parameter."""
    key, value = next(iter(members.items())) if len(members) == 1 else ("", "")
    if schema.names and key.lower() in (*_ARGUMENTS, *_SYNONYMS) and not schema.declares(key):
        try:
            inner = _arguments(value)
            if all(map(schema.declares, members_of(inner))):
                return inner
        except NoCallError:
            pass
    return "{" + _joined(members) + "}"


def _arguments(found: str) -> str:
    """Return the JSON object of arguments; models also write it as a text, null or an empty list.
    Raises NoCallError."""
    while found.startswith('"'):
        text = json.loads(found)
        read = read_loosely(text) if text.strip() else ("{}", True)
        if read is None:
            raise NoCallError
        found = read[0]
    if found == "null" or _EMPTY_LIST.fullmatch(found):
        return "{}"
    if not found.startswith("{"):
        raise NoCallError
    return found


def _joined(members: Mapping[str, str]) -> str:
    return ", ".join(f"{json_text(key)}: {value}" for key, value in members.items())
