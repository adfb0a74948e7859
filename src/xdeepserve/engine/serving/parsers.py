"""Parses reasoning and tool calls out of streamed text (output shortcutting, xDeepServe 4.2).

A model marks the parts of its answer with tags: `<think>...</think>` around its reasoning, and one of the
formats below around calls of tools. `StreamParser` is a state machine over those tags. It is fed text in
chunks of any size and gives out each part as soon as it is certain; a tag never gets out, nor half of one,
and how the text was cut into chunks cannot change what comes out.

`MARKS` is the machine: state -> the marks that end it, and the state that each leads to.

    start      nothing but white space so far: reasoning may begin here, and only here
    reasoning  streamed
    content    streamed
    calls      between two calls of a section
    header     what stands before a call's first separator: the name, or the kind of call
    name       the name, where the header is the kind
    arguments  streamed
    call       a whole call: one JSON object, or a name and parameters between tags

What is swallowed but turns out to be no call is given out as content, tags and all: nothing that a model
said is lost. Only where a text is cut off by its length, tags that it ends within, whole or half, are no
content: what is known of a call by then is given out, and the rest is not. White space around calls only
separates, and belongs to nobody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from xdeepserve.engine.deploy.deployment import ToolFormat
from xdeepserve.engine.serving.request import Function, ToolCallDelta
from xdeepserve.engine.serving.tagged_calls import DSML, TAGGED, CallReader

State = Literal["start", "reasoning", "content", "calls", "header", "name", "arguments", "call"]
Marks = dict[State, tuple[tuple[str, State], ...]]

THINK, THINK_END = "<think>", "</think>"
REASONING: Marks = {"start": ((THINK, "reasoning"),), "reasoning": ((THINK_END, "content"),)}

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI_CALLS, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_SEP = "<|tool_call_argument_begin|>"
MINIMAX_CALLS, MINIMAX_CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
DSML_CALLS, DSML_CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"


def _tagged(form: ToolFormat, begin: str, end: str) -> Marks:
    return {
        "content": ((begin, "calls"),),
        "calls": ((TAGGED[form].first, "call"), (end, "content")),
        "call": ((TAGGED[form].last, "calls"),),
    }


_EACH_BY_ITSELF: Marks = {"content": (("<tool_call>", "call"),), "call": (("</tool_call>", "content"),)}

MARKS: dict[ToolFormat, Marks] = {
    # <calls><call>function<sep>NAME\n```json\n{...}\n```</call>...</calls>
    "deepseek": {
        "content": ((CALLS, "calls"),),
        "calls": ((CALL, "header"), (CALLS_END, "content")),
        "header": ((SEP, "name"), (CALL_END, "calls")),
        "name": (("\n```json\n", "arguments"), (CALL_END, "calls")),
        "arguments": (("\n```" + CALL_END, "calls"), (CALL_END, "calls")),
    },
    # <calls><call>NAME<sep>{...}</call>...</calls>
    "deepseek_v31": {
        "content": ((CALLS, "calls"),),
        "calls": ((CALL, "header"), (CALLS_END, "content")),
        "header": ((SEP, "arguments"), (CALL_END, "calls")),
        "arguments": ((CALL_END, "calls"),),
    },
    # as before, where the header is an id: functions.NAME:0
    "kimi": {
        "content": ((KIMI_CALLS, "calls"),),
        "calls": ((KIMI_CALL, "header"), (KIMI_CALLS_END, "content")),
        "header": ((KIMI_SEP, "arguments"), (KIMI_CALL_END, "calls")),
        "arguments": ((KIMI_CALL_END, "calls"),),
    },
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>...
    "hermes": _EACH_BY_ITSELF,
    # The others: see tagged_calls.py.
    "glm": _EACH_BY_ITSELF,
    "qwen3_coder": _tagged("qwen3_coder", "<tool_call>", "</tool_call>"),
    "minimax": _tagged("minimax", MINIMAX_CALLS, MINIMAX_CALLS_END),
    "deepseek_v32": _tagged("deepseek_v32", DSML_CALLS, DSML_CALLS_END),
}
STREAMED = ("reasoning", "content", "arguments")


class Parsed(msgspec.Struct):
    """New text of each part, as added by a chunk."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)


class StreamParser:
    """Splits streamed text into content, reasoning and tool calls: `push` each chunk, and end with `finish`.

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
        self.tools = tools
        self._reader = CallReader(tools, functions) if tools in TAGGED else None
        self._marks: Marks = {"content": ()}
        self._marks |= REASONING if parses_reasoning else {}
        self._marks |= MARKS[tools] if tools is not None else {}
        self.state: State = "content"
        if parses_reasoning:
            self.state = "reasoning" if in_reasoning else "start"
        self.num_calls = 0
        self._held = ""  # not given out yet: perhaps a mark, or of a state that is not streamed
        self._swallowed = ""  # since content ended, and not yet part of a call
        self._has_call = False  # in this section
        self._skips_space = False

    def reasoning_only(self) -> StreamParser | None:
        """Make a parser for the reasoning alone, from the same beginning; None if there is no reasoning."""
        if "reasoning" not in self._marks:
            return None
        return StreamParser(True, None, in_reasoning=self.state == "reasoning")

    @property
    def tags(self) -> list[str]:
        """Every mark of the machine, and any special token within such a mark."""
        inner = [DSML] if self.tools == "deepseek_v32" else []
        return inner + [mark for marks in self._marks.values() for mark, _ in marks]

    def push(self, text: str) -> Parsed:
        """Take more text; return the parts that have become certain with it."""
        parsed = Parsed()
        self._held += text
        while (found := self._next_mark()) is not None:
            at, mark, following = found
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            self.state = self._leave(before, mark, following, parsed)
        if self.state in STREAMED:
            keep = self._num_held()
            self._stream(self._held[: len(self._held) - keep], parsed)
            self._held = self._held[len(self._held) - keep :]
        return parsed

    def finish(self, text: str = "", is_cut: bool = False) -> Parsed:
        """Take the last text; return all remaining parts. `is_cut`: the model was stopped by the length
        limit."""
        parsed, num_mark = self.push(text), self._num_mark()
        rest, self._held = self._held, ""
        before = rest[: len(rest) - num_mark]
        if self.state == "call" and (
            (not (is_cut and self._reader) and self._take_call(before, parsed))
            or (is_cut and self._take_cut(before, parsed))
        ):
            return parsed  # many a model ends without the last tag
        if self.state == "arguments":
            return parsed  # the beginning of an end mark is no part of a call
        if self.state == "calls" and self._has_call:
            self._say_between(before, parsed)
            return parsed
        if self.state == "start":
            self.state = "content"
        if self.state in STREAMED:
            is_half_tag = is_cut and num_mark > 1  # one character may as well be text
            self._stream(before if is_half_tag else rest, parsed)
        elif not is_cut:
            rest, self.state = self._swallowed + rest, "content"
            self._stream(rest, parsed)
        return parsed

    def _next_mark(self) -> tuple[int, str, State] | None:
        """Find the first mark in the held text; of marks that begin there, the longest."""
        hits = [
            (at, -len(mark), mark, following)
            for mark, following in self._marks[self.state]
            if (at := self._held.find(mark)) >= 0
        ]
        first = min(hits, default=None)
        if self.state == "start":
            begin = self._held.lstrip()
            if not (begin.startswith(THINK) or THINK.startswith(begin)):
                self.state = "content"  # it began with something else than reasoning
                return self._next_mark()
        return None if first is None else (first[0], first[2], first[3])

    def _num_mark(self) -> int:
        """Count the characters at the end of the held text that may begin a mark."""
        marks = [mark for mark, _ in self._marks[self.state]]
        longest = max(map(len, marks), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(mark.startswith(self._held[-length:]) for mark in marks):
                return length
        return 0

    def _num_held(self) -> int:
        """Count the characters at the end of the held text that cannot be given out yet."""
        length = self._num_mark()
        if self.state == "content" and self.tools is not None:
            length = len(self._held) - len(self._held[: len(self._held) - length].rstrip())
        return length

    def _leave(self, text: str, mark: str, following: State, parsed: Parsed) -> State:
        """Leave the current state because `mark` was found after `text`; return the state after it."""
        match self.state:
            case "reasoning" | "arguments":
                self._stream(text, parsed)
            case "content":
                body = text.rstrip()
                self._stream(body, parsed)
                self._swallowed, self._has_call = text[len(body) :] + mark, False
            case "calls":
                if self._has_call:
                    self._say_between(text, parsed)
                self._swallowed = "" if self._has_call else self._swallowed + text
                if following in ("header", "call"):
                    self._swallowed += mark
                elif self._swallowed:
                    self._give_back(mark, parsed)
            case "header" | "name" if following == "arguments":
                if not self._begin_call(text.strip(), parsed):
                    self._give_back(text + mark, parsed)
                    return "content"
            case "header" | "name":
                self._swallowed += text + mark
                if following == "calls":
                    self._give_back("", parsed)
            case "call":
                if not self._take_call(text, parsed):
                    self._give_back(text + mark, parsed)
        return following

    def _say_between(self, text: str, parsed: Parsed) -> None:
        """Give out text between or behind calls as content, unless it is only white space."""
        if text.strip():
            parsed.content += text

    def _stream(self, text: str, parsed: Parsed) -> None:
        """Give out text of a streamed state."""
        if self.state == "content":
            text = text.lstrip() if self._skips_space else text
            self._skips_space = self._skips_space and not text
            parsed.content += text
        elif self.state == "arguments":
            if text:
                self._current_call(parsed).arguments += text
        else:
            parsed.reasoning += text

    def _give_back(self, text: str, parsed: Parsed) -> None:
        """Give out swallowed text and `text` as content, because they make no call."""
        parsed.content += self._swallowed + text
        self._swallowed, self._has_call, self._skips_space = "", True, False

    def _begin_call(self, header: str, parsed: Parsed) -> bool:
        """Begin a call named by `header`. Returns False if the header has no name."""
        name, call_id = header, None
        if self.tools == "kimi":
            name, call_id = re.sub(r"^functions\.|:\d+$", "", header), header
        if not name:
            return False
        self._add_call(ToolCallDelta(index=self.num_calls, id=call_id, name=name), parsed)
        return True

    def _take_call(self, text: str, parsed: Parsed) -> bool:
        """Take a whole call from `text`. Returns False if it is none."""
        if self._reader is not None:
            return self._take_tagged(text, parsed)
        try:
            call = msgspec.json.decode(text, type=_JsonCall)
            arguments = bytes(call.arguments).decode()
            if arguments.startswith('"'):  # JSON within JSON
                arguments = msgspec.json.decode(arguments, type=str)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        if not call.name:
            return False
        self._add_call(ToolCallDelta(index=self.num_calls, name=call.name, arguments=arguments), parsed)
        return True

    def _take_tagged(self, text: str, parsed: Parsed, is_cut: bool = False) -> bool:
        assert self._reader is not None
        call = self._reader.read(text, is_cut)
        if call is not None:
            name, arguments = call
            self._add_call(ToolCallDelta(index=self.num_calls, name=name, arguments=arguments), parsed)
        return call is not None

    def _take_cut(self, text: str, parsed: Parsed) -> bool:
        """Take the beginning of a call: its name, and its arguments so far. Returns False without a name."""
        if self._reader is not None:
            return self._take_tagged(text, parsed, is_cut=True)
        found = _CUT_CALL.match(text)
        if found is None:
            return False
        try:
            name = msgspec.json.decode(found["name"], type=str)
        except msgspec.DecodeError:
            return False
        self._add_call(
            ToolCallDelta(index=self.num_calls, name=name, arguments=found["arguments"] or ""), parsed
        )
        return True

    def _add_call(self, call: ToolCallDelta, parsed: Parsed) -> None:
        parsed.tool_calls.append(call)
        self.num_calls += 1
        self._swallowed, self._has_call, self._skips_space = "", True, True

    def _current_call(self, parsed: Parsed) -> ToolCallDelta:
        """Return the delta of the call whose arguments are being streamed."""
        if not parsed.tool_calls or parsed.tool_calls[-1].index != self.num_calls - 1:
            parsed.tool_calls.append(ToolCallDelta(index=self.num_calls - 1))
        return parsed.tool_calls[-1]


# A call in JSON that ends anywhere behind its name.
_CUT_CALL = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")(?:\s*,\s*"arguments"\s*:\s*(?P<arguments>.*))?',
    re.DOTALL,
)


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
