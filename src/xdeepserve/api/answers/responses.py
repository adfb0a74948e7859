"""Responses to clients: OpenAI's response objects, and the few fields that vLLM adds to them.

A field whose default is UNSET is left out of the JSON; one whose default is None is sent as null.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from xdeepserve.engine.te.reports import TEHealth


class Health(msgspec.Struct, kw_only=True):
    """Health of a server and its task executors (TEs).

    "degraded" means that some DP groups do not answer in good time, or that a lost part has not been
    replaced; the others serve. `num_rollbacks` counts the rollbacks of all TEs so far.
    """

    status: Literal["ok", "degraded"]
    num_rollbacks: int
    tes: list[TEHealth]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int  # between the tags of the reasoning, these included


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four parallel lists with an entry for each token.

    The first token of a prompt has no probability: null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A possible token at a place of the prompt, as in vLLM; `rank` counts from 1."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id, the prompt's own token first; the first token of a prompt has no probability: null.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion, or of one of its chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """Answer of /v1/completions, or a chunk of its stream, where `usage` appears only when asked for."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCallPart(msgspec.Struct, kw_only=True):
    """A call's name and arguments; in a stream the name comes first, the arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPart(msgspec.Struct, kw_only=True):
    """A call of a tool; in a stream, where it has an index, a piece of a call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallPart


class AssistantMessage(msgspec.Struct, kw_only=True):
    """A message of the assistant. `reasoning` is the newer of vLLM's two names for the same text."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None  # vLLM's: the stop token or stop string that ended it
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    max_model_len: int
    owned_by: str = "xdeepserve"
    root: str | None = None
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class ServerLoad(msgspec.Struct, kw_only=True):
    server_load: int


class Version(msgspec.Struct, kw_only=True):
    version: str


encode_json = msgspec.json.encode


def json_answer(encoded: bytes) -> web.Response:
    return web.Response(body=encoded, content_type="application/json")


def json_response(value: Any) -> web.Response:
    return json_answer(encode_json(value))
