"""Detects a model's formats of reasoning and tool calls from its tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import OutputConfig
from xdeepserve.engine.serving.request import OutputFormats, Parse
from xdeepserve.model.tokenizer import Tokenizer
from xdeepserve.parsing.stream_parser import StreamParser
from xdeepserve.parsing.tool_formats import DSML, NOTATIONS, THINK, THINK_END, ToolFormat

TAIL = 16  # tokens, enough to spell the tag that may end a prompt, byte by byte


def output_formats(config: OutputConfig, tokenizer: Tokenizer | None) -> OutputFormats:
    """Return the configured formats; where a format is "auto", detect it by tags that tokenizer or template
    know."""
    if tokenizer is None:
        return OutputFormats()

    def knows(tag: str) -> bool:
        return tokenizer.token_to_id(tag) is not None or tag in tokenizer.template_source

    def writes(form: ToolFormat) -> bool:
        return any(map(knows, NOTATIONS[form].begins))

    tools: ToolFormat | None = None
    if config.tools != "auto":
        tools = None if config.tools == "off" else config.tools
    elif knows(DSML):
        tools = "deepseek_v32"
    elif writes("deepseek"):
        # Up to V3-0324 the arguments stand in a code block; from V3.1 on they follow the name.
        tools = "deepseek" if "```json" in tokenizer.template_source else "deepseek_v31"
    elif writes("kimi"):
        tools = "kimi"
    elif writes("minimax"):
        tools = "minimax"
    elif writes("hermes"):
        tools = "glm" if knows("<arg_key>") else "qwen3_coder" if knows("<function=") else "hermes"
    return OutputFormats(
        reasoning=config.reasoning == "deepseek" or (config.reasoning == "auto" and knows(THINK_END)),
        tools=tools,
        shows_tools=tokenizer.template_takes_tools,
    )


def make_parser(
    parse: Parse, formats: OutputFormats, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]
) -> StreamParser | None:
    """Make the output parser of a choice; None if there is nothing to parse."""
    reasoning = parse.reasoning and formats.reasoning
    tools = formats.tools if parse.tools else None
    if tokenizer is None or not (reasoning or tools):
        return None
    within = is_reasoning(parse, tokenizer, prompt_token_ids)
    return StreamParser(reasoning, tools, in_reasoning=within, functions=parse.functions)


def is_reasoning(parse: Parse, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside reasoning: by the client's word, or because it ends with the opening
    tag."""
    if parse.in_reasoning:
        return True
    tail = tokenizer.decode(prompt_token_ids[-TAIL:], skip_special_tokens=False)
    return tail.rstrip().endswith(THINK)
