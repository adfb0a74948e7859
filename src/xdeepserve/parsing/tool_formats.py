"""The formats in which models write calls of tools: a row each, read by the grammar and written by others.

hermes         <tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>
deepseek       <calls><call>function<sep>NAME\\n```json\\n{...}\\n```</call>...</calls>
deepseek_v31   <calls><call>NAME<sep>{...}</call>...</calls>
kimi           the same with marks of its own, and an id for a name: functions.NAME:0
glm            <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
qwen3_coder    <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>,
               each on a line of its own
minimax        <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n
               </invoke>\\n</minimax:tool_call>
deepseek_v32   as minimax, with function_calls around them (V4: tool_calls), ｜DSML｜ at the beginning of
               each tag, and string="true" or "false" behind KEY
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ToolFormat = Literal[
    "deepseek", "deepseek_v31", "deepseek_v32", "kimi", "hermes", "glm", "qwen3_coder", "minimax"
]  # fmt: skip
Body = Literal["json", "header", "tags"]

DSML = "｜DSML｜"  # a token of its own, within tags
THINK, THINK_END = "<think>", "</think>"  # around reasoning, in all formats


class Tags(NamedTuple):
    """Tags around a call's name and parameters, as written: first NAME named (key KEY value VALUE end)* last.

    `is_text` takes the place of `value` before a text, if there is one.
    """

    first: str
    named: str
    key: str
    value: str
    end: str
    last: str
    is_text: str = ""


class ToolNotation(NamedTuple):
    """How a format writes calls.

    body           what a call is: an object with name and arguments, a header before its arguments, or tags
    begins, ends   around all calls or around each; the first spelling is written, the others only read
    call, call_end of a call by itself; "" where `begins` and `ends` are all there is
    separator      between header and arguments
    tags           of `tags`, as written
    between        what is written between two calls
    is_special     its marks are tokens of their own, which no prose spells
    has_ids        the header is an id that holds the name
    """

    body: Body
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    call: str = ""
    call_end: str = ""
    separator: str = ""
    tags: Tags | None = None
    between: str = ""
    is_special: bool = False
    has_ids: bool = False


_DEEPSEEK = ToolNotation(
    body="header",
    begins=(
        "<｜tool▁calls▁begin｜>",
        *("<｜tool_calls_begin｜>", "<｜tool calls begin｜>"),
        *("<｜tool\\_calls\\_begin｜>", "<｜tool▁calls｜>"),
    ),
    ends=("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    separator="<｜tool▁sep｜>",
    is_special=True,
)
_EACH = ToolNotation(body="json", begins=("<tool_call>",), ends=("</tool_call>",), between="\n<tool_call>")

NOTATIONS: dict[ToolFormat, ToolNotation] = {
    "deepseek": _DEEPSEEK._replace(between="\n"),
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": ToolNotation(
        body="tags",
        begins=(f"<{DSML}function_calls>", f"<{DSML}tool_calls>"),
        ends=(f"</{DSML}function_calls>", f"</{DSML}tool_calls>"),
        call=f"<{DSML}invoke",
        call_end=f"</{DSML}invoke>",
        tags=Tags(
            first=f'<{DSML}invoke name="',
            named='">\n',
            key=f'<{DSML}parameter name="',
            value='" string="false">',
            end=f"</{DSML}parameter>\n",
            last=f"</{DSML}invoke>",
            is_text='" string="true">',
        ),
        is_special=True,
    ),
    "kimi": ToolNotation(
        body="header",
        begins=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        call="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        separator="<|tool_call_argument_begin|>",
        is_special=True,
        has_ids=True,
    ),
    "hermes": _EACH,
    "glm": _EACH._replace(
        body="tags",
        tags=Tags("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", ""),
        is_special=True,
    ),
    "qwen3_coder": _EACH._replace(
        body="tags",
        ends=("</tool_call>", "</function_invocation>"),
        call="<function",
        call_end="</function>",
        tags=Tags("<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>"),
    ),
    "minimax": ToolNotation(
        body="tags",
        begins=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        call="<invoke",
        call_end="</invoke>",
        tags=Tags('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>"),
    ),
}
