"""Parses a model's answer into reasoning, content and calls of tools, as it streams (xDeepServe 4.2).

    answer     = space? ("<think>" reasoning)? content
    reasoning  = (text | call)* "</think>"
    content    = (text | call)*
    call       = opener* call-of-the-format end*       (call_grammar.py; the formats are in tool_formats.py)

`StreamParser` takes pieces of any size, and gives out each part as soon as more text cannot change it: text
at once, except what may become a mark; a call when it is whole. A whole answer is parsed as one piece. White
space around calls is dropped with their marks, unless words stand on both sides. What looked like a call and
is none stays text, marks included, so nothing that a model said is lost.

A text that a length limit has cut within a call gives the part of the call that is known. What is behind that
is dropped: a mark, half a mark, or a call without its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from xdeepserve.errors import InputError, abridged
from xdeepserve.parsing.call_grammar import CallGrammar, Function, OfferedFunctions, ParsedCall
from xdeepserve.parsing.loose_json import NoCallError, TooDeepError
from xdeepserve.parsing.text_source import SPACE, CutOff, Marks, Steps, TextSource, marks_of
from xdeepserve.parsing.tool_formats import DSML, NOTATIONS, THINK, THINK_END, ToolFormat

# Calls of an answer that may begin and never end, or nest too deeply. Then the rest is text: time is bounded.
MAX_VAIN = 8

State = Literal["start", "reasoning", "content"]


class Parsed(msgspec.Struct):
    """Parts of an answer, or their increments by a piece of text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedCall] = msgspec.field(default_factory=list)


class StreamParser:
    """Splits streamed text into content, reasoning and tool calls: `push` each piece, and end with `finish`.

    parses_reasoning  look for `<think>` at the beginning
    tools             the format of tool calls to look for, if any
    in_reasoning      the prompt has opened `<think>` already
    functions         that are offered: where calls are no JSON, their schemas tell what is text
    """

    def __init__(
        self,
        parses_reasoning: bool,
        tools: ToolFormat | None,
        *,
        in_reasoning: bool = False,
        functions: Sequence[Function] = (),
    ) -> None:
        self.state: State = "start" if parses_reasoning else "content"
        self._parses_reasoning, self._in_reasoning = parses_reasoning, in_reasoning and parses_reasoning
        self._notation = NOTATIONS[tools] if tools is not None else None
        self._functions = OfferedFunctions(functions)
        self._source = TextSource()
        self._content: list[str] = []  # since the last piece, as are the next two
        self._reasoning: list[str] = []
        self._calls: list[ParsedCall] = []
        self._num_calls = self._num_vain = 0
        self._is_open = False  # a section of calls has begun and not ended
        self._follows_call = False  # nothing but white space since a call
        self._has_said = False  # words in this state
        self._space = ""  # between the words before a call and the call
        self._behind_openers = 0  # the place behind those last read: a model may write several
        self._sets: dict[State, Marks] = {}
        if self._notation is not None:
            self._grammar = CallGrammar(self._source, self._notation, self._functions)
        if self._in_reasoning:
            self.state = "reasoning"
        self._steps = self._answer()

    def reasoning_only(self) -> StreamParser | None:
        """Make a parser for the reasoning alone, from the same beginning; None if there is no reasoning."""
        if not self._parses_reasoning:
            return None
        return StreamParser(True, None, in_reasoning=self._in_reasoning)

    @property
    def tags(self) -> list[str]:
        """Every mark of the format and of reasoning, and any special token within such a mark."""
        marks = [THINK, THINK_END] if self._parses_reasoning else []
        if (n := self._notation) is not None:
            marks += [DSML, *n.begins, *n.ends, n.call, n.call_end, n.separator]
            if n.tags is not None:
                marks += [each for tag in n.tags for each in tag.split("\n")]
        return sorted({mark.strip() for mark in marks} - {""})

    def push(self, text: str) -> Parsed:
        """Take more text; return the parts that have become certain with it."""
        source = self._source
        held, source.text = source.text, ""
        held += text  # of a local name alone: an attribute would be copied for each piece
        source.text = held
        del held
        next(self._steps, None)
        parsed = Parsed("".join(self._content), "".join(self._reasoning), self._calls)
        self._content, self._reasoning, self._calls = [], [], []
        return parsed

    def finish(self, text: str = "", is_cut: bool = False) -> Parsed:
        """Take the last text; return all remaining parts. `is_cut`: the model was stopped by the length
        limit."""
        self._source.is_ended, self._source.is_cut = True, is_cut
        return self.push(text)

    # ---- the grammar of an answer ------------------------------------------------------------------------

    def _answer(self) -> Steps[None]:
        """Parse the whole answer; yield when more text is needed."""
        source = self._source
        if self._parses_reasoning:
            yield from self._opening()
        while True:
            marks = self._marks()
            begin = source.at
            mark = source.scan(marks)
            place = source.at
            self._say_to_space(begin, place)
            if mark:
                yield from self._take(mark, place)
            elif not source.is_ended:
                source.drop()
                yield
            else:
                if not self._is_half_mark(place):
                    self._say(source.text[source.at :])
                return

    def _is_half_mark(self, place: int) -> bool:
        """Whether half a mark ends the answer, behind a call or by its limit. One character is text."""
        rest, n = self._source.text[place:], self._notation
        if len(rest) < 2 or not rest.startswith("<"):
            return False
        is_end = n is not None and marks_of(*n.ends, n.call_end).half(rest, 0) == 0
        return self._source.is_cut or (is_end and self._follows_call)

    def _opening(self) -> Steps[None]:
        """Take the mark of reasoning at the beginning. Where the prompt has it, the model may repeat it."""
        source = self._source
        yield from source.run(SPACE)
        mark = yield from source.peek(THINK, THINK_END)
        if self.state == "reasoning" and mark != THINK:
            source.at = 0
            return
        half = source.text[source.at :]
        if source.is_cut and not mark and len(half) > 1 and THINK.startswith(half):
            source.at = len(source.text)
            return
        self.state = "reasoning" if mark == THINK else "content"
        source.at = source.at + len(mark) if mark else 0

    def _marks(self) -> Marks:
        """Return the marks that may mean something in this state."""
        if (found := self._sets.get(self.state)) is None:
            marks = [THINK_END] if self.state == "reasoning" else []
            if (n := self._notation) is not None:
                has_openers = self.state == "content" or (n.is_special and n.call)
                marks += [*n.begins, *n.ends, n.call_end, *(self._grammar.openers if has_openers else ())]
            found = self._sets[self.state] = marks_of(*marks)
        return found

    def _take(self, mark: str, place: int) -> Steps[None]:
        """Take a mark, and the call that it begins; white space before `place` is still to be said."""
        source, n = self._source, self._notation
        space = source.at
        before = source.text[space:place]
        if mark == THINK_END and self.state == "reasoning":
            self._say(before)
            source.at, self.state = place + len(mark), "content"
            self._follows_call = self._has_said = False
            return
        assert n is not None
        source.at, self._behind_openers = place + len(mark), 0
        if mark in n.ends:
            if self._is_open or self._follows_call:
                self._is_open = False
                self._end_words(before)
                return
        elif mark == n.call_end:
            if self._follows_call:  # once more
                return
        elif self._num_vain < MAX_VAIN and (yield from self._call(mark, place)):
            self._is_open |= mark in n.begins
            self._end_words(before)
            return
        elif self._follows_call and mark in n.begins and self._is_last(self._behind_openers):
            source.at = len(source.text)  # an opener in place of the end
            return
        source.at = max(place + len(mark), self._behind_openers)
        self._say(source.text[space : source.at])

    def _is_last(self, place: int) -> bool:
        """Whether the text has ended, and nothing but white space comes behind a place."""
        return self._source.is_ended and not self._source.text[place:].strip()

    def _call(self, mark: str, place: int) -> Steps[bool]:
        """Read the call that a mark begins. Returns False if it is none."""
        source, n, is_begun = self._source, self._notation, False
        assert n is not None
        source.at, source.refuses_end, source.has_met_end = place, True, False
        self._grammar.partial = None
        try:
            while (yield from source.take(*n.begins)):
                is_begun, self._behind_openers = True, source.at
                yield from source.run(SPACE)
            self._grammar.follows = self._is_open and self._follows_call
            call = yield from self._grammar.call(is_begun)
            if self.state == "reasoning" and not self._functions.may_be(call.name):
                return False
        except NoCallError as error:
            self._num_vain += source.has_met_end or isinstance(error, TooDeepError)
            return False
        except CutOff:
            partial = self._grammar.partial
            is_sure = is_begun or self._is_open or n.is_special
            if mark == "{" or (partial is None and not is_sure):
                return False
            source.at = len(source.text)
            if partial is None:
                return True
            call = partial
        finally:
            source.refuses_end = False
        self._calls.append(msgspec.structs.replace(call, index=self._num_calls))
        self._num_calls += 1
        return True

    # ---- what is said ------------------------------------------------------------------------------------

    def _say_to_space(self, begin: int, place: int) -> None:
        """Give out text up to `place`, but for white space before it: before a call that is dropped."""
        text = self._source.text[begin:place]
        said = text if self._notation is None else text.rstrip()
        self._source.at = begin + len(said)
        self._say(said)

    def _end_words(self, space: str) -> None:
        """Take notice of a call behind the words so far, and of the white space between."""
        if not self._follows_call:
            self._follows_call, self._space = True, space

    def _say(self, text: str) -> None:
        """Give out text of the current state. Of white space around calls only what separates words before
        them from words behind."""
        if self._follows_call and (words := text.lstrip()):
            between = self._space or text[: -len(words)]
            text = between + words if self._has_said else words
            self._follows_call = False
        elif self._follows_call:
            return
        self._has_said |= bool(text.strip())
        (self._reasoning if self.state == "reasoning" else self._content).append(text)


def parse_answer(
    text: str,
    format: str | None = None,
    tools: Iterable[Mapping[str, Any]] | None = (),
    in_reasoning: bool = False,
) -> Parsed:
    """Parse a model's whole answer into content, reasoning and tool calls.

    format         of tool calls: one of `ToolFormat`; None looks for reasoning alone
    tools          that the model could call: `name`, and `parameters` (or `input_schema`), a JSON schema
    in_reasoning   the prompt ended with `<think>`

    Raises InputError for an unknown format, a tool without a name or with another schema than an object, and
    for an answer that is no text.
    """
    return parse_pieces([text], format, tools, in_reasoning)


def parse_pieces(
    pieces: Iterable[str],
    format: str | None = None,
    tools: Iterable[Mapping[str, Any]] | None = (),
    in_reasoning: bool = False,
) -> Parsed:
    """Parse an answer that arrives in pieces; the result is the same however it is cut. See parse_answer."""
    pieces = [pieces] if isinstance(pieces, str) else list(pieces)
    if wrong := [piece for piece in pieces if not isinstance(piece, str)]:
        raise InputError(f"the answer must be a text, found {abridged(wrong[0])}")
    parser = StreamParser(True, _known(format), in_reasoning=in_reasoning, functions=_functions(tools or ()))
    found = [*map(parser.push, pieces), parser.finish()]
    calls = [call for parsed in found for call in parsed.tool_calls]
    return Parsed("".join(each.content for each in found), "".join(each.reasoning for each in found), calls)


def _known(name: str | None) -> ToolFormat | None:
    if name is None:
        return None
    for known in NOTATIONS:
        if name == known:
            return known
    raise InputError(f"format must be one of {', '.join(get_args(ToolFormat))}, found {abridged(name)}")


def _functions(tools: Iterable[Mapping[str, Any]]) -> list[Function]:
    """Read tools, also in the forms of OpenAI's API (`function` around name and parameters), Anthropic's
    and MCP's."""
    functions = []
    if isinstance(tools, str | bytes | Mapping):
        raise InputError(f"tools must be a list of objects, found {abridged(tools)}")
    for number, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise InputError(f"tools[{number}] must have a name, found {abridged(tool)}")
        schema: Any = next((inner[key] for key in _SCHEMAS if inner.get(key) is not None), {})
        functions.append(Function(inner["name"], _schema_text(schema, f"tools[{number}]")))
    return functions


# Keys of a tool's schema: OpenAI's, Anthropic's, MCP's.
_SCHEMAS = ("parameters", "input_schema", "inputSchema")


def _schema_text(schema: Any, where: str) -> str:
    """Return a schema as JSON; it may be such a text already. Raises InputError if it is no object."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            return json.dumps(dict(found))
    except (TypeError, ValueError, RecursionError):
        pass
    raise InputError(f"{where}: parameters must be a JSON schema, an object; found {abridged(schema)}")
