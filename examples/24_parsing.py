"""Walkthrough 24: the parser of answers, without a model.

A model writes its reasoning and its calls of tools into one text, with marks. A server has to give out each
part as soon as it is certain, and the same parts however the text comes in pieces. This script streams an
answer word by word, cuts it at every place, and shows what the grammar makes of calls that are not quite to
the format, and of text that only looks like one.

    python examples/24_parsing.py
"""

from __future__ import annotations

import json
import re
import textwrap

from xdeepserve.errors import InputError
from xdeepserve.parsing import parse_answer, parse_pieces
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.stream_parser import Parsed, StreamParser

WEATHER = {"properties": {"zip": {"type": "string"}, "days": {"type": "integer"}}}
NOTE = {"properties": {"text": {"type": "string"}, "done": {"type": "boolean"}}}
TOOLS = [{"name": "get_weather", "parameters": WEATHER}, {"name": "note", "parameters": NOTE}]
FORMAT = "qwen3_coder"
ANSWER = (
    "<think>The week?</think>Day 7 is cold.\n<tool_call>\n<function=get_weather>\n<parameter=zip>\n01067\n"
    "</parameter>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>"
)

# What is not quite to the format, and what is not at all.
TEXTS = {
    "no opener, no end": "<function=get_weather>\n<parameter=zip>\n01067\n</parameter>",
    "an end in a sentence": "<tool_call><function=note><parameter=text>close with </parameter>, always"
    "</parameter></function></tool_call>",
    "Python for JSON": "<tool_call>{'name': 'note', 'arguments': {'text': 'a', 'done': True}}</tool_call>",
    "a call while thinking": "<think>hm\n<tool_call><function=get_weather>\n<parameter=zip>\n01067\n"
    "</parameter>\n</function></tool_call>",
    "a tag in prose": "Write <function=NAME> first.",
    "half a value": "<tool_call><function=note>\n<parameter=text>\nto be contin",
}


def title(text: str) -> None:
    print(f"\n--- {text}")


def show(piece: str, parsed: Parsed) -> None:
    """Print a piece and the parts that have become certain with it."""
    parts = [f"{name} {said!r}" for name in ("reasoning", "content") if (said := getattr(parsed, name))]
    parts += [f"call {call.index}, {call.name}({call.arguments})" for call in parsed.tool_calls]
    print(f"{piece!r} -> {', '.join(parts) or 'nothing yet'}")


def stream() -> None:
    title("An answer in pieces: text at once, a call when it is whole, a mark never")
    functions = [Function(tool["name"], json.dumps(tool["parameters"])) for tool in TOOLS]
    parser = StreamParser(True, FORMAT, functions=functions)
    for piece in re.findall(r"\s*[^\s]+\s?", ANSWER):
        show(piece, parser.push(piece))
    show("the end", parser.finish())


def cuts() -> None:
    title("The same answer, cut in two")
    whole = parse_answer(ANSWER, format=FORMAT, tools=TOOLS)
    halves = [[ANSWER[:place], ANSWER[place:]] for place in range(1, len(ANSWER))]
    same = all(parse_pieces(each, format=FORMAT, tools=TOOLS) == whole for each in halves)
    print(f"cut at each of its {len(halves)} places: {'the same' if same else 'it differs'}")


def not_to_the_format() -> None:
    title("What models write beside the format, and what is no call")
    for kind, text in TEXTS.items():
        found = parse_answer(text, format=FORMAT, tools=TOOLS)
        calls = "; ".join(f"{call.name}({call.arguments})" for call in found.tool_calls)
        after = f", after {found.reasoning!r}" if found.reasoning else ""
        print(f"{kind:23}{calls + after if calls else f'no call: {found.content!r}'}")


def main() -> None:
    stream()
    cuts()
    not_to_the_format()
    title("A format that is not known")
    try:
        parse_answer("", format="toolformer")
    except InputError as error:
        print("\n".join(textwrap.wrap(str(error), 96)))


if __name__ == "__main__":
    main()
