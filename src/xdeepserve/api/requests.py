"""What clients may send. All else is refused by name, and so are fields that are known but not served.

Every optional field may be null, which means its default, as in OpenAI's and vLLM's schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from xdeepserve.errors import RequestError


def described(*kinds: dict[str, Any]) -> msgspec.Meta:
    """How /openapi.json describes a field that is checked elsewhere, with better words than a type has."""
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


class Harmless(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that clients send and that would change no answer of this server: they are not looked at."""

    media_io_kwargs: Any = None
    metadata: Any = None
    mm_processor_kwargs: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    spaces_between_special_tokens: Any = None
    store: Any = None
    user: Any = None


class Unserved(Harmless, kw_only=True):
    """Fields of OpenAI's and vLLM's requests that would change the answer, and that this server lacks.

    Ignoring them would answer another question than the one asked: all but null and the neutral
    values beside their types, which ask for nothing, is an error.
    """

    audio: Any = None
    cache_salt: Any = None
    chat_template: Any = None
    detokenize: Annotated[Any, True] = None
    documents: Annotated[Any, []] = None
    enable_thinking: Any = None
    function_call: Annotated[Any, "none", "auto"] = None
    functions: Annotated[Any, []] = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Annotated[Any, 1] = None
    logits_processor_pattern: Any = None
    logits_processors: Annotated[Any, []] = None
    modalities: Annotated[Any, ["text"]] = None
    prediction: Any = None
    prompt_embeds: Any = None
    suffix: Annotated[Any, ""] = None
    thinking: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Annotated[Any, False] = None
    verbosity: Annotated[Any, "medium"] = None
    vllm_xargs: Annotated[Any, {}] = None
    web_search_options: Any = None


NEUTRAL = {  # field of `Unserved` -> what, beside null, asks for nothing
    name: get_args(hint)[1:]
    for name, hint in get_type_hints(Unserved, include_extras=True).items()
    if name not in Harmless.__struct_fields__
}


HINTS = {
    "enable_thinking": "; what the chat template knows goes into chat_template_kwargs",
    "thinking": "; what the chat template knows goes into chat_template_kwargs",
}


NOT_FOR_CHATS = {"echo": (False,), "add_special_tokens": (False,)}  # as above, in chats alone
SPECIAL_TOKENS_IN_CHATS = "add_special_tokens is not for chats: their template has all the special tokens"


def refuse_unserved(body: Unserved) -> None:
    """Raises RequestError for the first field that asks for something this server cannot do."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            hint = HINTS.get(name, "")
            raise RequestError(f"{name} is not supported{hint}", param=name, code="unsupported_parameter")
    if isinstance(body, ChatRequest) and body.echo:
        raise RequestError("echo is for completions only", param="echo", code="unsupported_parameter")
    if isinstance(body, ChatRequest) and body.add_special_tokens:
        raise RequestError(SPECIAL_TOKENS_IN_CHATS, param="add_special_tokens", code="unsupported_parameter")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far on every chunk
    include_obfuscation: Any = None  # padding, of which there is none here


class SamplingRequest(Unserved, kw_only=True):
    """What all three endpoints that generate share; below "vLLM's" are extensions to OpenAI's API."""

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
    """What completions and chat completions share."""

    max_tokens: int | float | None = None  # some clients write 5.0
    max_completion_tokens: int | float | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[Any, described(FORMAT)] = None
    # vLLM's
    add_special_tokens: bool | None = None
    best_of: int | None = None
    guided_choice: Annotated[Any, described(TEXTS)] = None
    guided_grammar: Annotated[Any, described(TEXT)] = None
    guided_json: Annotated[Any, described(OBJECT, TEXT)] = None
    guided_regex: Annotated[Any, described(TEXT)] = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. A prompt is text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None


class CacheMarked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a client may mark for another vendor's prompt cache, which changes nothing here."""

    cache_control: Any = None


class FedBack(CacheMarked, kw_only=True):
    """What libraries keep beside an answer and send back with it. None of it is shown to a model."""

    id: Any = None
    annotations: Any = None
    parsed: Any = None
    parsed_arguments: Any = None
    provider_specific_fields: Any = None
    status: Any = None


class ContentPart(FedBack, kw_only=True):
    """What is not of type text or refusal is refused, whatever it has in it."""

    type: str
    text: str | None = None
    refusal: str | None = None
    audio_url: Any = None
    file: Any = None
    image_url: Any = None
    input_audio: Any = None
    logprobs: Any = None
    uuid: Any = None
    video_url: Any = None


class FunctionCall(FedBack, kw_only=True):
    name: str
    arguments: str  # JSON


class ToolCall(FedBack, kw_only=True):
    """A call that the assistant made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: Any = None  # of a stream's pieces


class ChatMessage(FedBack, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of an assistant's message
    tool_call_id: str | None = None  # of a tool's
    reasoning_content: str | None = None  # of an assistant's; templates may show it
    reasoning: str | None = None  # vLLM's newer name for that
    refusal: str | None = None  # of an assistant's, instead of content
    audio: Any = None
    function_call: Any = None
    images: Any = None
    reasoning_details: Any = None  # another form of the same text, as is the next
    thinking_blocks: Any = None
    type: Any = None


class FunctionDefinition(CacheMarked, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(CacheMarked, kw_only=True, omit_defaults=True):
    """A function that the model may call. Fields are in the order in which templates print them."""

    type: str
    function: FunctionDefinition

    def shown(self) -> dict[str, Any]:
        """For chat templates."""
        function = msgspec.structs.replace(self.function, cache_control=None)
        return msgspec.to_builtins(msgspec.structs.replace(self, function=function, cache_control=None))


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's
    continue_final_message: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None  # a variable of chat templates
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Harmless, kw_only=True):
    """POST /tokenize: either `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Harmless, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
