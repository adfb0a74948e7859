"""Kinds of texts that models write beside their format, with the call that is meant, and with none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parsing.texts import cut
from xdeepserve.errors import InputError
from xdeepserve.parsing import parse_answer, parse_pieces
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.stream_parser import StreamParser
from xdeepserve.parsing.tool_formats import NOTATIONS

TEXT = {"type": "string"}
TOOLS = [
    {
        "name": "save",
        "parameters": {
            "type": "object",
            "properties": {
                "file": TEXT,
                "text": TEXT,
                "count": {"type": "integer"},
                "labels": {"type": "array", "items": TEXT},
                "hidden": {"type": "boolean"},
                "plz": {"anyOf": [TEXT, {"type": "integer"}]},
                "code": {"$ref": "#/$defs/code"},
                "level": {"oneOf": [{"enum": ["low", "high"]}, {"type": "integer"}]},
                "owner": {"allOf": [{"type": ["string", "integer"]}, TEXT]},
                "limit": {"type": ["integer", "null"]},
                "extra": {"type": "object", "nullable": True},
                "tree": {"$ref": "#/$defs/tree"},
                "anchored": {"$ref": "#digits"},
                "named": {"$ref": "https://a.test/digits"},
                "part": {"$ref": "list.json#/items"},
                "lost": {"$ref": "other.json"},
            },
            "$defs": {
                "code": {"$ref": "#/$defs/digits"},
                "digits": {**TEXT, "$anchor": "digits", "$id": "https://a.test/digits"},
                "list": {"$id": "list.json", "type": "array", "items": TEXT},
                "tree": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
            },
        },
    },
    {"name": "look", "parameters": {}},
    {
        "name": "find",
        "parameters": {
            "$ref": "#/$defs/place",
            "$defs": {"place": {"anyOf": [{"properties": {"plz": TEXT}}, {"properties": {"city": TEXT}}]}},
        },
    },
]
D = "｜DSML｜"


def qwen(*parameters: tuple[str, str], name: str = "save") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(*parameters: tuple[str, str], name: str = "save") -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def minimax(*parameters: tuple[str, str], name: str = "save") -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters)
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


def dsml(*parameters: tuple[str, str, str], name: str = "save", section: str = "function_calls") -> str:
    inner = "".join(
        f'<{D}parameter name="{key}" string="{is_text}">{value}</{D}parameter>\n'
        for key, value, is_text in parameters
    )
    return f'<{D}{section}>\n<{D}invoke name="{name}">\n{inner}</{D}invoke>\n</{D}{section}>'


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deepseek(name: str, arguments: str) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def calls_of(form: str, text: str, in_reasoning: bool = False) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls, which are the same in pieces of every size."""
    found = parse_answer(text, format=form, tools=TOOLS, in_reasoning=in_reasoning)
    for pieces in (list(text), cut(text, [len(text) // 3, len(text) // 2])):
        assert parse_pieces(pieces, format=form, tools=TOOLS, in_reasoning=in_reasoning) == found
    for place in range(1, len(text)):
        pieces = [text[:place], text[place:]]
        assert parse_pieces(pieces, format=form, tools=TOOLS, in_reasoning=in_reasoning) == found
    calls = [(call.name, json.loads(call.arguments)) for call in found.tool_calls]
    return found.content, found.reasoning, calls


SAVED = '{"name": "save", "arguments": {"file": "a"}}'

MEANT: dict[str, tuple[str, str, Any]] = {
    # A mark within a string of JSON.
    "mark in JSON, hermes": (
        "hermes",
        hermes('{"name": "save", "arguments": {"text": "</tool_call>"}}'),
        {"text": "</tool_call>"},
    ),
    "mark in JSON, kimi": (
        "kimi",
        kimi("functions.save:0", '{"text": "a<|tool_call_end|>"}'),
        {"text": "a<|tool_call_end|>"},
    ),
    "mark in JSON, V3.1": (
        "deepseek_v31",
        deepseek("save", '{"text": "<｜tool▁calls▁end｜>\\\\"}'),
        {"text": "<｜tool▁calls▁end｜>\\"},
    ),
    "fence in JSON, V3": (
        "deepseek",
        deepseek("function", 'save\n```json\n{"text": "\\n```"}\n```'),
        {"text": "\n```"},
    ),
    # A mark within a value between tags.
    "end in a sentence": (
        "qwen3_coder",
        qwen(("text", "write </parameter>, then </function> and </tool_call>.")),
        {"text": "write </parameter>, then </function> and </tool_call>."},
    ),
    "end in a sentence, glm": ("glm", glm(("text", "a </tool_call> b")), {"text": "a </tool_call> b"}),
    "tag of no parameter": (
        "minimax",
        minimax(("text", '<parameter name="other">')),
        {"text": '<parameter name="other">'},
    ),
    "less than": ("minimax", minimax(("text", "1 <2 && x</y")), {"text": "1 <2 && x</y"}),
    "redirect": ("qwen3_coder", qwen(("text", "make 2>&1")), {"text": "make 2>&1"}),
    **{
        f"quotes {what}, {form}": (
            form,
            write(("text", quoted), ("file", "a")),
            {"text": quoted, "file": "a"},
        )
        for form, write, bare in (
            ("qwen3_coder", qwen, qwen(("x", "1"), ("file", "b"), name="look").replace("<tool_call>\n", "")),
            ("minimax", minimax, minimax(("x", "1"), ("file", "b"), name="look").partition("\n")[2]),
        )
        for what, quoted in {
            "a call": f"As:\n{write(('file', 'b'), name='look')}\nDone.",
            "a call without parameters": f"As:\n{write(name='look')}\nDone.",
            "two calls": f"{write(('file', 'b'))}\n{write(('text', 'c'), ('file', 'd'))}\nDone.",
            "a call behind an equals sign": f"X = '{write(('file', 'b'), ('x', '1'))}'\nDone.",
            "a call of another function": write(("x", "1"), ("y", "2"), name="other") + "\nDone.",
            "a call without its opener": bare + "\nDone.",
            "the end of a call": write(("x", "1")).rpartition("1")[2].rpartition("\n")[0] + "\nDone.",
            "ends without an end of a value": write().partition("\n")[2].partition("\n")[2] + "\nDone.",
            "a parameter": write(("file", "b")).split("\n", 2)[2].rpartition("\n</")[0] + "\nDone.",
        }.items()
    },
    # The beginning of a call within a value, whose parameter the function does not declare.
    **{
        f"quotes the beginning of a call, {form}, {more}": (
            form,
            write(("text", f"see {write(('k', '1')).partition('1')[0]}"), *more),
            {"text": f"see {write(('k', '1')).partition('1')[0]}", **dict(more)},
        )
        for form, write in (
            ("qwen3_coder", qwen),
            ("minimax", minimax),
            ("glm", glm),
            ("deepseek_v32", lambda *some: dsml(*((*each, "true") for each in some))),
        )
        for more in ((), (("file", "a"),))
    },
    # Ends of a call and its section within a value: an end without a beginning, later, is the value's own.
    **{
        f"quotes {what}, {form}": (form, write(("text", value), ("file", "a")), {"text": value, "file": "a"})
        for form, write, write_ends in (
            ("qwen3_coder", qwen, qwen),
            ("minimax", minimax, minimax),
            ("glm", glm, glm),
            ("deepseek_v32", lambda *some: dsml(*((*each, "true") for each in some)), None),
        )
        for ends in [(write_ends or write)(("x", "1")).rpartition("1")[2].lstrip("\n")]
        for what, value in {
            "all ends": f"close: {ends}\nmore",
            "all ends in a line": f"close: {ends} more",
            "all ends twice": f"a {ends}\nb {ends}\nc",
            "all ends and a call": f"a {ends}\nb\n{write(('file', 'b'))}\nc",
            "a call and all ends": f"a\n{write(('file', 'b'))}\nb {ends}\nc",
            "all ends, a thought": f"a {ends}\n<think>b",
        }.items()
    },
    "quotes a call, glm": (
        "glm",
        glm(("text", f"As:\n{glm(('file', 'b'))}\nDone."), ("file", "a")),
        {"text": f"As:\n{glm(('file', 'b'))}\nDone.", "file": "a"},
    ),
    "quotes a call, V3.2": (
        "deepseek_v32",
        dsml(("text", f"As:\n{dsml(('file', 'b', 'true'))}\nDone.", "true"), ("file", "a", "true")),
        {"text": f"As:\n{dsml(('file', 'b', 'true'))}\nDone.", "file": "a"},
    ),
    # Line breaks of Windows.
    "CRLF": (
        "qwen3_coder",
        qwen(("file", "a"), ("text", "b\nc\n")).replace("\n", "\r\n"),
        {"file": "a", "text": "b\r\nc\r\n"},
    ),
    "CRLF of the value alone": ("qwen3_coder", qwen(("text", "a\r\nb")), {"text": "a\r\nb"}),
    "CRLF, no end of a value": (
        "minimax",
        minimax(("file", "a"), ("text", "b")).replace("</parameter>\n", "\r\n", 1),
        {"file": "a", "text": "b"},
    ),
    # Other attributes, and tags that end themselves.
    "attribute behind": ("minimax", minimax(("file", "a")).replace('save"', 'save" id="1"'), {"file": "a"}),
    "attribute before": ("minimax", minimax(("file", "a")).replace(" name", " type='x' name"), {"file": "a"}),
    "attribute of a text": (
        "deepseek_v32",
        dsml(("file", "5", "true")).replace(' name="file"', ' id=1 name="file" kind="x"'),
        {"file": "5"},
    ),
    "attribute of a text before": (
        "deepseek_v32",
        dsml(("file", "5", "x"), ("count", "5", "x"))
        .replace(' string="x"', "")
        .replace(' name="file"', ' string="True" name="file"')
        .replace(' name="count"', " string='false' name=\"count\""),
        {"file": "5", "count": 5},
    ),
    "attribute, qwen": (
        "qwen3_coder",
        qwen(("file", "a")).replace("=file", '=file type="string"'),
        {"file": "a"},
    ),
    "tag that ends itself": ("minimax", '<minimax:tool_call><invoke name="save"/></minimax:tool_call>', {}),
    "tag that ends itself, qwen": ("qwen3_coder", "<tool_call>\n<function=save />\n</tool_call>", {}),
    "parameter that ends itself": (
        "minimax",
        minimax(("file", "a")).replace("<parameter", '<parameter name="text" />\n<parameter'),
        {"text": "", "file": "a"},
    ),
    # Whether a value is a text.
    "text by $ref of a $ref": ("qwen3_coder", qwen(("code", "0815")), {"code": "0815"}),
    "text by other references": (
        "glm",
        glm(("anchored", "0815"), ("named", "15"), ("part", "16"), ("lost", "17")),
        {"anchored": "0815", "named": "15", "part": "16", "lost": "17"},
    ),
    "text or number": ("glm", glm(("plz", "10999"), ("count", "7")), {"plz": "10999", "count": 7}),
    "one of texts, or number": ("minimax", minimax(("level", "3")), {"level": 3}),
    "one of texts": ("minimax", minimax(("level", "low")), {"level": "low"}),
    "all of": ("minimax", minimax(("owner", "12")), {"owner": "12"}),
    "null or number": ("glm", glm(("limit", "null")), {"limit": None}),
    "nullable": ("glm", glm(("extra", "null")), {"extra": None}),
    "null for a list": (
        "qwen3_coder",
        qwen(("labels", "null"), ("text", "null")),
        {"labels": None, "text": "null"},
    ),
    "schema of itself": ("qwen3_coder", qwen(("tree", "[1, [2]]")), {"tree": [1, [2]]}),
    "not of its type": ("minimax", minimax(("count", "a few")), {"count": "a few"}),
    "the model's word, a text": (
        "deepseek_v32",
        dsml(("file", "5", "true"), ("code", "6", "false"), ("count", "7", "false")),
        {"file": "5", "code": "6", "count": 7},
    ),
    # Python's spelling.
    "Python in tags": (
        "qwen3_coder",
        qwen(("hidden", "False"), ("labels", "['x', \"y\"]"), ("limit", "None")),
        {"hidden": False, "labels": ["x", "y"], "limit": None},
    ),
    "Python in JSON": (
        "hermes",
        hermes("{'name': 'save', 'arguments': {'hidden': True, 'limit': None,}}"),
        {"hidden": True, "limit": None},
    ),
    "Python in arguments": (
        "kimi",
        kimi("functions.save:1", "{'text': 'it\\'s \"so\"'}"),
        {"text": 'it\'s "so"'},
    ),
    "line break in a string": ("deepseek_v31", deepseek("save", '{"text": "a\nb"}'), {"text": "a\nb"}),
    # Ends and openers that are left out.
    "no end, hermes": ("hermes", hermes(SAVED).partition("\n</")[0], {"file": "a"}),
    "no brace": ("hermes", hermes(SAVED[:-1]), {"file": "a"}),
    "no brace, kimi": ("kimi", kimi("functions.save:0", '{"file": "a"\n'), {"file": "a"}),
    "no brace, V3.1": (
        "deepseek_v31",
        deepseek("save", '{"file": {"a": "}"}').replace("{}", ""),
        {"file": {"a": "}"}},
    ),
    "no brace, V3": ("deepseek", deepseek("function", 'save\n```json\n{"file": "a"\n```'), {"file": "a"}),
    "no brace, end of the section": (
        "deepseek_v31",
        deepseek("save", '{"file": "a"').replace("<｜tool▁call▁end｜>", ""),
        {"file": "a"},
    ),
    "no brace in tags": (
        "minimax",
        '<minimax:tool_call><invoke name="save">\n{"file": "a"\n</invoke>',
        {"file": "a"},
    ),
    "a brace too many": ("hermes", hermes(SAVED + "}"), {"file": "a"}),
    "no opener, hermes": ("hermes", f"{SAVED}\n</tool_call>", {"file": "a"}),
    "no opener, qwen": ("qwen3_coder", qwen(("file", "a")).removeprefix("<tool_call>\n"), {"file": "a"}),
    "no opener, glm": ("glm", glm(("file", "a")).removeprefix("<tool_call>"), {"file": "a"}),
    "no opener, minimax": ("minimax", minimax(("file", "a")).partition("\n")[2], {"file": "a"}),
    "no opener, V3.2": ("deepseek_v32", dsml(("file", "a", "true")).partition("\n")[2], {"file": "a"}),
    "no section, kimi": ("kimi", kimi("functions.save:0", '{"file": "a"}'), {"file": "a"}),
    "no end of a value": (
        "minimax",
        minimax(("file", "a"), ("text", "b")).replace("</parameter>\n", "\n", 1),
        {"file": "a", "text": "b"},
    ),
    "no end of the last value": (
        "qwen3_coder",
        qwen(("file", "a")).replace("</parameter>\n", ""),
        {"file": "a"},
    ),
    "no end of a value, glm": (
        "glm",
        glm(("file", "a"), ("text", "b")).replace("</arg_value>\n", "\n"),
        {"file": "a", "text": "b"},
    ),
    "no end of a call": (
        "deepseek_v32",
        dsml(("file", "a", "true")).replace(f"</{D}invoke>\n", ""),
        {"file": "a"},
    ),
    "no ends at all": (
        "deepseek_v32",
        dsml(("file", "a", "true")).partition(f"</{D}invoke>")[0],
        {"file": "a"},
    ),
    "two openers": ("qwen3_coder", "<tool_call>\n" + qwen(("file", "a")), {"file": "a"}),
    # Other spellings.
    "section of V4": ("deepseek_v32", dsml(("file", "a", "true"), section="tool_calls"), {"file": "a"}),
    "singular section": (
        "kimi",
        "<|tool_call_section_begin|>"
        + kimi("functions.save:0", '{"file": "a"}')
        + "<|tool_call_section_end|>",
        {"file": "a"},
    ),
    "object in tags": (
        "minimax",
        '<minimax:tool_call><invoke name="save">\n{"file": "a"}\n</invoke>',
        {"file": "a"},
    ),
    "object for tags": ("glm", hermes(SAVED), {"file": "a"}),
    "fence in V3.1": ("deepseek_v31", deepseek("save", '\n```json\n{"file": "a"}\n```'), {"file": "a"}),
    "arguments as a text": ("kimi", kimi("functions.save:0", '"{\\"file\\": \\"a\\"}"'), {"file": "a"}),
    "a parameter twice": ("glm", glm(("file", "b"), ("file", "a")), {"file": "a"}),
    # Arguments under other names, and beside the name.
    **{
        f"arguments, {body}": ("hermes", hermes(body), expected)
        for body, expected in {
            **{
                f'{{"name": "save", "{key}": {{"file": "a"}}}}': {"file": "a"}
                for key in ("args", "argument", "params", "kwargs", "input", "tool_input", "Arguments")
            },
            '{"name": "save", "input": "{\\"file\\": \\"a\\"}"}': {"file": "a"},
            '{"name": "save", "arguments": {}, "parameters": {"file": "a"}}': {"file": "a"},
            '{"name": "save", "arguments": null, "args": {"file": "a"}}': {"file": "a"},
            '{"name": "save", "file": "a", "labels": ["b"]}': {"file": "a", "labels": ["b"]},
            '{"name": "save", "arguments": {"file": "a"}, "count": 5, "id": 7, "why": "so"}': {
                "file": "a",
                "count": 5,
            },
            '{"name": "save", "input": "a"}': {"input": "a"},
            '{"name": "save", "other": {"file": "a"}}': {"other": {"file": "a"}},
            '{"name": "save", "id": "c1", "type": "function"}': {},
            '{"type": "function", "function": {"name": "save", "args": {"file": "a"}}}': {"file": "a"},
            '{"tool": "save", "args": {"file": "a"}}': {"file": "a"},
            '{"tool_name": "save", "file": "a"}': {"file": "a"},
            '{"name": "\\nsave \\n", "arguments": {"file": "a"}}': {"file": "a"},
        }.items()
    },
    # Line breaks around a name, and fences.
    "line break behind an id": ("kimi", kimi("functions.save:0\n", '\n{"file": "a"}\n'), {"file": "a"}),
    "line break before an id": ("kimi", kimi("\n functions.save:0", '{"file": "a"}'), {"file": "a"}),
    "line breaks, V3.1": ("deepseek_v31", deepseek("\nsave\n", '\n{"file": "a"}'), {"file": "a"}),
    "line breaks, V3": (
        "deepseek",
        deepseek("\nfunction\r\n", '\nsave\r\n```json\r\n{"file": "a"}\r\n```\r\n'),
        {"file": "a"},
    ),
    "fence in capitals": (
        "deepseek",
        deepseek("function", 'save\n```JSON\n{"file": "a"}\n```'),
        {"file": "a"},
    ),
    "fence of a language": (
        "deepseek",
        deepseek("function", 'save\n``` json5 \n{"file": "a"}\n```'),
        {"file": "a"},
    ),
    "a list of one call": ("hermes", hermes(f"[{SAVED}]"), {"file": "a"}),
    # Braces doubled, as Qwen2.5's template shows them.
    **{
        f"doubled braces, {body}": ("hermes", hermes(body), {"file": "a"})
        for body in (
            '{{"name": "save", "arguments": {"file": "a"}}}',
            '{{"name": "save", "arguments": {{"file": "a"}}}}',
            '{{"name": "save", "arguments": {"file": "a"}}',
            '{{ "name": "save", "file": "a" }}',
        )
    },
    "doubled braces, no opener": (
        "hermes",
        '{{"name": "save", "arguments": {"file": "a"}}}\n</tool_call>',
        {"file": "a"},
    ),
    "doubled braces, kimi": ("kimi", kimi("functions.save:0", '{{"file": "a"}}'), {"file": "a"}),
    "fence, hermes": ("hermes", hermes(f"```json\n{SAVED}\n```"), {"file": "a"}),
    "line breaks in a tag": (
        "minimax",
        minimax(("file", "a")).replace(" name", "\n  name").replace('">', '"\n>'),
        {"file": "a"},
    ),
    "line breaks in a tag, qwen": (
        "qwen3_coder",
        qwen(("file", "a")).replace("=save", "=\nsave\n").replace("=file", "=\r\n file"),
        {"file": "a"},
    ),
    "no arguments": ("kimi", kimi("functions.save:0", ""), {}),
    "nothing in tags": ("qwen3_coder", qwen(), {}),
    # Tags before a value that are missing, damaged or there twice.
    **{
        f"damaged, {body}": ("glm", f"<tool_call>{body}</tool_call>", {"file": "a"})
        for body in (
            "save<arg_key>file</arg_key>a</arg_value>",
            "save\n<arg_key>file</arg_key>\na</arg_value>\n",
            "savefile</arg_key><arg_value>a</arg_value>",
            "save file</arg_key><arg_value>a</arg_value>",
            "save\nfile</arg_key>\n<arg_value>a</arg_value>\n",
            "save<arg_key>file</arg_key></arg_key><arg_value>a</arg_value>",
            "save<arg_key><arg_key>file</arg_key><arg_value>a</arg_value>",
            "save<tool_call>file</arg_key><arg_value>a</arg_value>",
        )
    },
    "an end of no value": ("glm", "<tool_call>save</arg_value></tool_call>", {}),
    "a key in a value": (
        "glm",
        glm(("text", "see <arg_key>file</arg_key> there"), ("file", "a")),
        {"text": "see <arg_key>file</arg_key> there", "file": "a"},
    ),
    "no end of a parameter's tag": (
        "qwen3_coder",
        qwen(("file", "a")).replace("=file>", "=file"),
        {"file": "a"},
    ),
    "no end of a parameter's tag, >": (
        "qwen3_coder",
        qwen(("text", "a > b"), ("file", "c")).replace("=text>", "=text").replace("=file>", "=file"),
        {"text": "a > b", "file": "c"},
    ),
    "no end of a function's tag": (
        "qwen3_coder",
        qwen(("file", "a")).replace("=save>", "=save"),
        {"file": "a"},
    ),
    # Ends that are misspelt, or there twice.
    **{
        f"{end}, {form}": (
            form,
            write(("file", "a"), ("text", "b\n")).replace(right, end),
            {"file": "a", "text": "b\n"},
        )
        for form, write, right, ends in (
            (
                "qwen3_coder",
                qwen,
                "</parameter>",
                ("</parameter/>", "</parameter1>", "</parameter", "</parameter >", "</Parameter>"),
            ),
            (
                "qwen3_coder",
                qwen,
                "</parameter>\n</function>",
                ("</parameter_function>", "</parameterfunction>"),
            ),
            (
                "qwen3_coder",
                qwen,
                "</function>",
                ("</function_invocation>", "</function>\n</function_invocation>"),
            ),
            ("qwen3_coder", qwen, "</function>", ("</function>\n</function>",)),
            ("minimax", minimax, "</parameter>", ("</parameter/>", "</parameter1>")),
            ("minimax", minimax, "</invoke>", ("</invoke></invoke>",)),
            ("glm", glm, "</arg_value>", ("</arg_value/>",)),
        )
        for end in ends
    },
    "an opener for the end": ("hermes", f"<tool_call>\n{SAVED}\n<tool_call>", {"file": "a"}),
    # All arguments as one parameter.
    **{
        f"{key} as a parameter, {form}": (form, write((key, '{"file": "a"}')), {"file": "a"})
        for form, write in (
            ("qwen3_coder", qwen),
            ("glm", glm),
            ("minimax", minimax),
            ("deepseek_v32", lambda *some: dsml(*((*each, "false") for each in some))),
        )
        for key in ("arguments", "parameters", "input")
    },
    "arguments as a text in a parameter": (
        "deepseek_v32",
        dsml(("arguments", '{"file": "a"}', "true")),
        {"file": "a"},
    ),
    # A function's name with `functions.` before it, where it is no id.
    **{
        f"functions., {form}": (form, text.replace("save", "functions.save"), {"file": "a"})
        for form, text in {
            "hermes": hermes(SAVED),
            "deepseek": deepseek("function", 'save\n```json\n{"file": "a"}\n```'),
            "deepseek_v31": deepseek("save", '{"file": "a"}'),
            "qwen3_coder": qwen(("file", "a")),
            "glm": glm(("file", "a")),
            "minimax": minimax(("file", "a")),
        }.items()
    },
    **{
        f"section {begin}": (
            "deepseek",
            deepseek("function", 'save\n```json\n{"file": "a"}\n```').replace(
                "<｜tool▁calls▁begin｜>", begin
            ),
            {"file": "a"},
        )
        for begin in ("<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool▁calls｜>")
    },
    "the name within, kimi": ("kimi", kimi("call_8d1fa0", '{"name": "save", "file": "a"}'), {"file": "a"}),
    "the name around, kimi": ("kimi", kimi("call_8d1fa0", SAVED), {"file": "a"}),
    "an empty list": ("hermes", hermes('{"name": "save", "arguments": []}'), {}),
    "an empty list, kimi": ("kimi", kimi("functions.save:0", "[ ]"), {}),
    "a text of a text": (
        "hermes",
        hermes(json.dumps({"name": "save", "arguments": json.dumps(json.dumps({"file": "a"}))})),
        {"file": "a"},
    ),
}


@pytest.mark.parametrize("kind", MEANT)
def test_a_call_is_meant(kind: str) -> None:
    form, text, arguments = MEANT[kind]
    assert calls_of(form, text) == ("", "", [("save", arguments)])
    assert calls_of(form, f"So.\n{text}\n") == ("So.", "", [("save", arguments)])


def test_a_parameter_may_be_called_as_arguments_are() -> None:
    properties = {"input": {"type": "object"}, "args": {"type": "array"}, "params": TEXT, "type": TEXT}
    tools = [{"name": "f", "parameters": {"properties": properties}}]
    for members, expected in {
        '"input": {"a": 1}, "type": "b"': {"input": {"a": 1}, "type": "b"},
        '"args": [1]': {"args": [1]},
        '"params": "{}"': {"params": "{}"},
        '"params": {"input": {}}': {"input": {}},
        '"type": "function", "arguments": {"params": "c"}': {"params": "c"},
    }.items():
        [call] = parse_answer(hermes(f'{{"name": "f", {members}}}'), format="hermes", tools=tools).tool_calls
        assert json.loads(call.arguments) == expected
    [call] = parse_answer(glm(("input", '{"a": 1}'), name="f"), format="glm", tools=tools).tool_calls
    assert json.loads(call.arguments) == {"input": {"a": 1}}


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ('"arguments": {"file": "a', '{"file": "a'),
        ('"input": {"file": "a', '{"file": "a'),
        ('"file": "a", "text": "b', '{"file": "a", "text": "b'),
        ('"id": "c', ""),
        ('"fi', ""),
        ('"arguments": {{"file": "a', '{"file": "a'),
    ],
)
def test_a_cut_call_has_the_arguments_so_far(members: str, arguments: str) -> None:
    parser = StreamParser(True, "hermes", functions=[Function("save", json.dumps(TOOLS[0]["parameters"]))])
    found = parser.finish(f'<tool_call>\n{{"name": "\\nsave", {members}', is_cut=True)
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("save", arguments)]
    assert found.content == ""


@pytest.mark.parametrize("name", ["save\\x", "save\n", "\\ud83d"])
def test_a_cut_call_may_have_a_name_that_is_no_json(name: str) -> None:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{"file": "a'
    found = StreamParser(True, "hermes").finish(text, is_cut=True)
    assert found.content == ""
    assert [call.name for call in found.tool_calls] in ([name.strip()], [])


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "save", "arguments": {"text": "\\ud83d"}, "count": 5}', '{"text": "\\ud83d", "count": 5}'),
        ('{"function": {"name": "save", "arguments": {"text": "\\ud83d"}}}', '{"text": "\\ud83d"}'),
        ("{'name': 'save', 'arguments': {'\\ud83d': 1}}", '{"\\ud83d": 1}'),
        ('{"name": "save", "arguments": {"a": 1e999}, "count": 5}', '{"a": 1e999, "count": 5}'),
        ('{"name": "save", "arguments": {"a": 0.10}, "count": 5}', '{"a": 0.10, "count": 5}'),
    ],
)
def test_values_stay_as_they_are_written(body: str, arguments: str) -> None:
    """Half a character that JSON escapes has no bytes, and a number may be beyond Python's."""
    [call] = parse_answer(hermes(body), format="hermes", tools=TOOLS).tool_calls
    assert call.arguments == arguments
    call.arguments.encode()


def test_half_a_character_is_no_name() -> None:
    text = hermes('{"name": "\\ud83d", "arguments": {}}')
    assert parse_answer(text, format="hermes").content == text


@pytest.mark.parametrize(
    "call_id",
    [
        "functions.save:0",
        "save:12",
        "functions.save",
        "save",
        "functionssave3",
        "functions_save_3",
        "function.save:1",
        "functions.functions.save:0",
        "Functions.save:0",
    ],
)
def test_ids_name_a_function(call_id: str) -> None:
    found = parse_answer(kimi(call_id, "{}"), format="kimi", tools=TOOLS)
    assert [(call.id, call.name) for call in found.tool_calls] == [(call_id, "save")]


@pytest.mark.parametrize("between", ["\n", ",\n", ", ", ""])
@pytest.mark.parametrize(("begin", "end"), [("", ""), ("[", "]"), ("[\n", "\n]\n")])
def test_calls_in_one_block(begin: str, end: str, between: str) -> None:
    bodies = [f'{{"name": "save", "arguments": {{"count": {number}}}}}' for number in range(3)]
    text = f"So. {hermes(begin + between.join(bodies) + end)} Done."
    expected = [("save", {"count": number}) for number in range(3)]
    assert calls_of("hermes", text) == ("So. Done.", "", expected)


def test_a_call_that_is_quoted_behind_one_without_an_end_is_text() -> None:
    quoted = f"I sent {SAVED}."
    found = calls_of("hermes", f"<tool_call>{SAVED}\n{quoted}")
    assert found == (quoted, "", [("save", {"file": "a"})])


def test_words_in_a_block_of_calls_stay_text() -> None:
    text = hermes(f'{SAVED}\nand {{"name": "Bern"}}, [1], {SAVED}')
    expected = 'and {"name": "Bern"}, [1],'
    assert calls_of("hermes", text) == (expected, "", [("save", {"file": "a"})] * 2)


def test_ids_of_unknown_functions_lose_what_surely_is_none_of_the_name() -> None:
    for call_id, name in (
        ("functions.my.own:7", "my.own"),
        ("my.own:7", "my.own"),
        ("functions_f_7", "functions_f_7"),
    ):
        assert parse_answer(kimi(call_id, "{}"), format="kimi").tool_calls[0].name == name


@pytest.mark.parametrize("form", NOTATIONS)
def test_calls_within_reasoning(form: str) -> None:
    """A model that calls has not always ended its reasoning; a mere mark in there is a thought."""
    call = {
        "hermes": hermes('{"name": "look"}'),
        "kimi": "<|tool_calls_section_begin|>"
        + kimi("functions.look:0", "{}")
        + "<|tool_calls_section_end|>",
        "deepseek": deepseek("function", "look\n```json\n{}\n```"),
        "deepseek_v31": deepseek("look", "{}"),
        "deepseek_v32": dsml(name="look"),
        "qwen3_coder": qwen(name="look"),
        "glm": glm(name="look"),
        "minimax": minimax(name="look"),
    }[form]
    assert calls_of(form, f"hm {call}", in_reasoning=True) == ("", "hm", [("look", {})])
    assert calls_of(form, f"<think>hm {call}\n</think>ah") == ("ah", "hm", [("look", {})])
    opener = NOTATIONS[form].begins[0]  # type: ignore[index]
    assert calls_of(form, f"is it {opener}? </think>ah", True) == ("ah", f"is it {opener}? ", [])
    unknown = call.replace("look", "lock")
    assert calls_of(form, f"{unknown}</think>", True) == ("", unknown, [])


def test_a_broken_call_does_not_take_the_next_one_with_it() -> None:
    broken = dsml(("file", "a", "true")).replace(f"</{D}parameter>\n", "\n").rpartition("\n")[0]
    _, _, calls = calls_of("deepseek_v32", f"{broken}\n{dsml(('file', 'b', 'true'))}")
    assert calls == [("save", {"file": "a"}), ("save", {"file": "b"})]
    text = f"<tool_call>{{oh}}</tool_call>\n{hermes(SAVED)}"
    assert calls_of("hermes", text) == ("<tool_call>{oh}</tool_call>", "", [("save", {"file": "a"})])


@pytest.mark.parametrize(("form", "write"), [("qwen3_coder", qwen), ("minimax", minimax), ("glm", glm)])
def test_words_behind_a_call_are_no_part_of_it(form: str, write: Any) -> None:
    one, saved = write(("text", "b")), ("save", {"text": "b"})
    assert calls_of(form, f"{one}\nSo it is.") == ("So it is.", "", [saved])
    assert calls_of(form, f"{one}\nThen:\n{one}\nSo.") == ("Then:\nSo.", "", [saved, saved])
    ends = one.rpartition("b")[2].lstrip("\n")
    value = f"close: {ends}\nmore"
    assert calls_of(form, f"{write(('text', value))}\nSo it is.") == (
        "So it is.",
        "",
        [("save", {"text": value})],
    )
    assert calls_of(form, f"hm {one}\n</think>So.", True) == ("So.", "hm", [saved])
    parser = StreamParser(True, form, in_reasoning=True)  # type: ignore[arg-type]
    assert parser.push(f"hm {one}\n</think>So").tool_calls


@pytest.mark.parametrize(("form", "write"), [("qwen3_coder", qwen), ("minimax", minimax)])
def test_a_missing_end_does_not_make_a_call_a_quoted_one(form: str, write: Any) -> None:
    """The value has no later end: each end behind it belongs to a parameter of the call behind it."""
    first, second = write(("file", "a")), write(("file", "b"), ("text", "c"))
    unended = first.replace("</parameter>\n", "\n" if form == "minimax" else "")
    expected = [("save", {"file": "a"}), ("save", {"file": "b", "text": "c"})]
    for ending in (unended, unended.partition("</")[0].rstrip()):
        assert calls_of(form, f"{ending}\n{second}") == ("", "", expected)
    talks = f"{first.rpartition(chr(10))[0]}\nAnd now:\n{second}"
    assert calls_of(form, talks)[2] == expected


def test_a_call_that_is_quoted_in_a_cut_value_is_no_call() -> None:
    text = qwen(("text", f"As:\n{qwen(name='look')}\nDone."))
    parser = StreamParser(True, "qwen3_coder", functions=[Function("save", "{}"), Function("look", "{}")])
    found = parser.finish(text.partition("Done")[0], is_cut=True)
    assert [call.name for call in found.tool_calls] == ["save"]
    assert found.content == ""


VALUES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "whole": {"type": "integer"},
        "number": {"type": "number"},
        "either": {"type": ["number", "string"]},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "p_text": TEXT,
        "any": {},
    },
    "patternProperties": {"^p_": {"type": ["integer", "string"]}, "_n$": {"type": "integer"}, "(a+)+$": TEXT},
    "additionalProperties": TEXT,
}


SPELLINGS = [
    *(("5", 5, name) for name in ("int", "Integer", "INTEGER", "int64", "long", "float", "double", "NUMBER")),
    *(("5", "5", name) for name in ("str", "String", "STRING", "text")),
    *(("true", True, name) for name in ("bool", "Boolean", "BOOLEAN")),
    *(("[1]", [1], name) for name in ("list", "ARRAY", "List[int]", "int[]", "tuple")),
    *(('{"a": 1}', {"a": 1}, name) for name in ("dict", "OBJECT", "dict[str, int]")),
    *(("null", None, name) for name in ("NULL", "none", ["int", "None"])),
]


@pytest.mark.parametrize(("text", "value", "kind"), SPELLINGS)
def test_types_in_other_spellings_are_those_of_json(text: str, value: Any, kind: Any) -> None:
    tools = [{"name": "f", "parameters": {"type": "OBJECT", "properties": {"k": {"type": kind}}}}]
    [call] = parse_answer(minimax(("k", text), name="f"), format="minimax", tools=tools).tool_calls
    assert json.loads(call.arguments) == {"k": value}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        # Which keyword declares a parameter.
        *(("q_n", "1", 1), ("p_n", "1", 1), ("p_text", "1", "1"), ("other", "1", "1"), ("aaa", "1", "1")),
        # Numbers that are none of JSON's.
        *(("number", ".5", 0.5), ("number", "1.", 1.0), ("number", "+3", 3), ("number", "-.5e1", -5.0)),
        *(("whole", "+3", 3), ("whole", "1_000", 1000), ("whole", "0x1F", 31), ("whole", "-2.", -2)),
        *(("number", "1,5", "1,5"), ("whole", "007", "007"), ("number", "NaN", "NaN")),
        *(("either", ".5", ".5"), ("any", "+49", "+49"), ("any", "(1, 2)", "(1, 2)"), ("other", ".5", ".5")),
        ("object", '{"a": .5, "b": [+3, 1.], "c": 0x10}', {"a": 0.5, "b": [3, 1.0], "c": 16}),
        # Python's literals.
        *(("list", "(1, 2)", [1, 2]), ("list", "(1,)", [1]), ("list", "()", []), ("whole", "+-3", "+-3")),
        ("list", "[(1, 2), (3,)]", [[1, 2], [3]]),
        ("object", "{'a': (1, 'b'), 'c': (2), 'd': ((3,),)}", {"a": [1, "b"], "c": 2, "d": [[3]]}),
        *(("flag", "TRUE", True), ("flag", "yes", "yes"), ("object", "None", None)),
        ("object", "(see b)", "(see b)"),
    ],
)  # fmt: skip
def test_kinds_of_values_between_tags(key: str, text: str, value: Any) -> None:
    tools = [{"name": "f", "parameters": VALUES}]
    [call] = parse_answer(minimax((key, text), name="f"), format="minimax", tools=tools).tool_calls
    assert json.loads(call.arguments) == {key: value}
    assert type(json.loads(call.arguments)[key]) in (type(value), float)


def test_a_parameter_of_a_pattern_begins_behind_a_missing_end() -> None:
    tools = [{"name": "f", "parameters": VALUES}]
    text = minimax(("any", "a"), ("p_n", "5"), name="f").replace("a</parameter>", "a", 1)
    [call] = parse_answer(text, format="minimax", tools=tools).tool_calls
    assert json.loads(call.arguments) == {"any": "a", "p_n": 5}


def test_a_parameter_may_be_declared_in_a_branch() -> None:
    assert calls_of("minimax", minimax(("plz", "10999"), ("city", "1"), name="find")) == (
        "", "", [("find", {"plz": "10999", "city": "1"})]
    )  # fmt: skip


NO_CALL = {
    "prose": ("qwen3_coder", "One writes <tool_call>, then <function=NAME> and its <parameter=KEY>."),
    "broken JSON": ("hermes", hermes('{"name": "save", "arguments": {"file": a}}')),
    "broken arguments": ("deepseek_v31", deepseek("save", '{"file": }')),
    "arguments that are no object": ("kimi", kimi("functions.save:0", "[1]")),
    "no name": ("hermes", hermes('{"arguments": {}}')),
    "a name of white space": ("hermes", hermes('{"name": "\\n", "arguments": {}}')),
    "an unknown tool": ("hermes", hermes('{"tool": "hammer", "arguments": {}}')),
    "arguments in a list": ("hermes", hermes('{"name": "save", "arguments": ["a"]}')),
    "no opener of an unknown key's value": (
        "glm",
        "<tool_call>save<arg_key>to</arg_key>a</arg_value></tool_call>",
    ),
    "a key without a value": ("glm", "<tool_call>save<arg_key>file</arg_key></tool_call>"),
    "no end of an unknown parameter's tag": ("qwen3_coder", qwen(("to", "a")).replace("=to>", "=to")),
    "an opener behind words": ("hermes", "So. <tool_call>\n"),
    "a text that is no object": ("hermes", hermes('{"name": "save", "input": "{a"}')),
    "half a string": ("hermes", '<tool_call>\n{"name": "save", "arguments": {"file": "a'),
    "half a value": ("qwen3_coder", qwen(("file", "a")).partition("\n</")[0]),
    "an answer in JSON": ("hermes", '{"name": "Bern", "arguments": {}}\n</tool_call>'),
    "a call without any mark": ("hermes", SAVED),
    "an empty section": ("minimax", "<minimax:tool_call>\n</minimax:tool_call>"),
    "a name alone": ("glm", "I save and look."),
    "ends alone": ("qwen3_coder", "</parameter>\n</function>\n</tool_call>"),
    "too deep": (
        "hermes",
        hermes('{"name": "save", "arguments": {"file": ' + "[" * 5000 + "]" * 5000 + "}}"),
    ),
}


@pytest.mark.parametrize("kind", NO_CALL)
def test_what_cannot_be_a_call_stays_text(kind: str) -> None:
    form, text = NO_CALL[kind]
    found = parse_answer(text, format=form, tools=TOOLS)
    assert (found.content, found.tool_calls) == (text, [])
    assert parse_pieces(cut(text, list(range(0, len(text), 7))), format=form, tools=TOOLS) == found


@pytest.mark.parametrize(
    ("text", "in_reasoning", "content", "reasoning"),
    [
        ("<think>again</think>yes", True, "yes", "again"),  # the prompt has the mark already
        ("</think>yes", False, "yes", ""),  # an empty reasoning whose mark is left out
        (" \n</think>yes", False, "yes", ""),
        ("no <think>, no</think>", False, "no <think>, no</think>", ""),
    ],
)
def test_marks_of_reasoning(text: str, in_reasoning: bool, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        found = parse_pieces(pieces, format=None, in_reasoning=in_reasoning)
        assert (found.content, found.reasoning) == (content, reasoning)


def test_unknown_formats_and_bad_tools_are_refused() -> None:
    with pytest.raises(InputError, match=r"format must be one of deepseek, .*minimax, found \"llama\""):
        parse_answer("x", format="llama")
    with pytest.raises(InputError, match=r"tools\[1\] must have a name"):
        parse_pieces(["x"], format="glm", tools=[{"name": "f"}, {"parameters": {}}])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": TEXT}}}}
    call = parse_answer(glm(("a", "5"), name="f"), format="glm", tools=[tool]).tool_calls[0]
    assert json.loads(call.arguments) == {"a": "5"}


@pytest.mark.parametrize("key", ["parameters", "input_schema", "inputSchema"])
@pytest.mark.parametrize("as_text", [True, False])
def test_schemas_of_other_apis_count(key: str, as_text: bool) -> None:
    schema = {"type": "object", "properties": {"a": TEXT}}
    tool = {"name": "f", key: json.dumps(schema) if as_text else schema}
    call = parse_answer(glm(("a", "5"), name="f"), format="glm", tools=[tool]).tool_calls[0]
    assert json.loads(call.arguments) == {"a": "5"}


def test_answers_and_tools_of_other_types_are_refused_by_name() -> None:
    for answer, found in ((None, "null"), (5, "5"), (b"x", "b'x'")):
        with pytest.raises(InputError, match=f"the answer must be a text, found {found}"):
            parse_answer(answer)  # type: ignore[arg-type]
    wrong: dict[str, Any] = {
        r"tools\[0\] must have a name, found \"f\"": ["f"],
        r"tools\[0\] must have a name, found null": [None],
        r"tools must be a list of objects, found \"f\"": "f",
        r"tools must be a list of objects, found {\"name": {"name": "f"},
        r"tools\[0\]: parameters must be a JSON schema, an object; found \"no JSON\"": [
            {"name": "f", "parameters": "no JSON"}
        ],
        r"tools\[0\]: parameters must be a JSON schema, an object; found \[1\]": [
            {"name": "f", "input_schema": [1]}
        ],
    }
    for match, tools in wrong.items():
        with pytest.raises(InputError, match=match):
            parse_answer("x", format="glm", tools=tools)


@pytest.mark.parametrize(
    ("before", "behind", "content"),
    [
        ("First.\n\n", "\nThen.", "First.\n\nThen."),
        ("First.", "\nThen.", "First.\nThen."),
        ("First. ", "Then.", "First. Then."),
        ("First.\n", "\n\n", "First."),
        ("\n", "\nThen.", "Then."),
    ],
)
@pytest.mark.parametrize("in_reasoning", [True, False])
def test_words_around_calls_stay_apart(before: str, behind: str, content: str, in_reasoning: bool) -> None:
    calls = f"{hermes(SAVED)}\n{hermes(SAVED)}"
    found = calls_of("hermes", f"{before}{calls}{behind}", in_reasoning)
    expected = [("save", {"file": "a"})] * 2
    assert found == (("", content, expected) if in_reasoning else (content, "", expected))
    thinks = f"Hm.\n{hermes(SAVED)}\n</think>\n{calls}\nThen."
    assert calls_of("hermes", thinks, True)[:2] == ("Then.", "Hm.")


def test_schemas_that_go_deep_or_in_circles_say_nothing() -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(200):
        deep = {"allOf": [deep]}
    circle = {"$ref": "#/properties/b"}
    tools = [
        {"name": "f", "parameters": {"allOf": [deep, {"$ref": "#"}], "properties": {"a": deep, "b": circle}}}
    ]
    call = parse_answer(
        glm(("a", "5"), ("b", "6"), ("c", "7"), name="f"), format="glm", tools=tools
    ).tool_calls[0]
    assert json.loads(call.arguments) == {"a": "5", "b": "6", "c": 7}
