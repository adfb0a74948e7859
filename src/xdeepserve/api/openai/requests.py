"""Requests of clients: the fields that this server acts on. All others: api/routes/fields.py.

Every optional field may be null, which means its default, as in OpenAI's and vLLM's schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


def described(*kinds: dict[str, Any]) -> msgspec.Meta:
    """Describe a field in /openapi.json by JSON schemas, where its type alone would say less."""
    return msgspec.Meta(extra_json_schema={"anyOf": [*kinds, {"type": "null"}]})


OBJECT, TEXT = {"type": "object"}, {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
SCHEMA = {"type": "object", "properties": {"name": TEXT, "schema": OBJECT}, "required": ["schema"]}
FORMATS = ("text", "json_object", "json_schema")
FORMAT = {
    "type": "object",
    "properties": {"type": {"enum": FORMATS}, "schema": OBJECT, "json_schema": SCHEMA},
    "required": ["type"],
}
FORM = {
    "type": "object",
    "properties": {
        "json": {"anyOf": [OBJECT, TEXT]},
        "json_object": {"type": "boolean"},
        "regex": TEXT,
        "choice": TEXTS,
        "grammar": TEXT,
    },
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far on every chunk
    include_obfuscation: Any = None  # padding, of which there is none here


class SamplingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields common to all three generating endpoints; those below "vLLM's" are extensions to OpenAI's
    API."""

    model: str | None = None
    prompt_cache_key: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    # vLLM's
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    structured_outputs: Annotated[Any, described(FORM)] = None
    truncate_prompt_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    top_k: int | None = None


class GenerationRequest(SamplingRequest, kw_only=True):
    """Fields common to completions and chat completions."""

    max_tokens: int | float | None = None  # some clients write 5.0
    max_completion_tokens: int | float | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[Any, described(FORMAT)] = None
    # vLLM's
    best_of: int | None = None
    guided_choice: Annotated[Any, described(TEXTS)] = None
    guided_grammar: Annotated[Any, described(TEXT)] = None
    guided_json: Annotated[Any, described(OBJECT, TEXT)] = None
    guided_regex: Annotated[Any, described(TEXT)] = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions.

    A prompt is text, a list of texts, token ids, or a list of lists of token ids.
    """

    prompt: str | list[Any]
    add_special_tokens: bool | None = None  # vLLM's
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content.

    Types other than text and refusal are refused, whatever the part contains.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None  # of a reasoning, as Anthropic and Mistral write it


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON as a text, or an object, as Ollama has it


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call made by the assistant earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of an assistant's message
    tool_call_id: str | None = None  # of a tool's
    reasoning_content: str | None = None  # of an assistant's; templates may show it
    reasoning: str | None = None  # vLLM's newer name for that
    refusal: str | None = None  # of an assistant's, instead of content
    reasoning_details: Any = None  # other forms of the reasoning: OpenRouter's
    thinking: Any = None  # Ollama's
    thinking_blocks: Any = None  # LiteLLM's
    reasoning_text: str | None = None  # GitHub Copilot's


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function for the model to call. Fields are in the order in which templates print them."""

    type: str
    function: FunctionDefinition

    def shown(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        return msgspec.to_builtins(self)


class ThinkingChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons, as Anthropic, DeepSeek and Z.ai write it."""

    type: str
    display: Literal["summarized", "omitted"] | None = None  # of /v1/messages


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions: messages, tools and sampling."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None  # a variable of chat templates
    thinking: ThinkingChoice | bool | None = None  # others
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: either `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize: the token ids."""

    tokens: list[int]
    model: str | None = None
