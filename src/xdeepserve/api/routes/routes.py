"""The table of all routes: the endpoint's own, and those that wings bring (`wings.ENDPOINT`)."""

from __future__ import annotations

from functools import cache

from xdeepserve import wings
from xdeepserve.api.answers import responses as given
from xdeepserve.api.anthropic.message_endpoint import count_message_tokens, create_message
from xdeepserve.api.anthropic.message_items import MessagesRequest
from xdeepserve.api.openai import requests as asked
from xdeepserve.api.openai import response_endpoint as answers
from xdeepserve.api.openai.chat import create_chat_completion
from xdeepserve.api.openai.completions import create_completion
from xdeepserve.api.openai.input_items import PAGE_QUERY, list_input_items
from xdeepserve.api.openai.response_items import ResponsesRequest
from xdeepserve.api.routes.openapi import show_docs, show_openapi
from xdeepserve.api.routes.route import ANTHROPIC, Route
from xdeepserve.api.server import admin, info
from xdeepserve.api.server.tokenize import detokenize, tokenize

_CHATS, _ANSWERS = "/v1/chat/completions", "/v1/responses"
OWN = (
    Route(
        "POST",
        _CHATS,
        create_chat_completion,
        "Answer a conversation.",
        asked.ChatRequest,
        given.ChatCompletion,
        given.ChatChunk,
    ),
    Route(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue texts or token ids.",
        asked.CompletionRequest,
        given.TextCompletion,
        given.TextCompletion,
    ),
    Route(
        "POST", _ANSWERS, answers.create_response, "Answer, also from an earlier answer on.", ResponsesRequest
    ),
    Route(
        "POST",
        f"{_ANSWERS}/input_tokens",
        answers.count_input_tokens,
        "Count the tokens of a request's prompt.",
        ResponsesRequest,
    ),
    Route(
        "POST",
        f"{_ANSWERS}/compact",
        answers.compact_conversation,
        "Refuse: conversations are not compacted.",
    ),
    Route("GET", f"{_ANSWERS}/{{id}}", answers.get_response, "Show an answer that was kept."),
    Route("DELETE", f"{_ANSWERS}/{{id}}", answers.delete_response, "Forget an answer."),
    Route(
        "GET",
        f"{_ANSWERS}/{{id}}/input_items",
        list_input_items,
        "List the input of an answer's request, in pages.",
        query=PAGE_QUERY,
    ),
    Route(
        "POST",
        f"{_ANSWERS}/{{id}}/cancel",
        answers.cancel_response,
        "Refuse: no answer is made in the background.",
    ),
    Route(
        "POST",
        "/v1/messages",
        create_message,
        "Answer a conversation in Anthropic's form.",
        MessagesRequest,
        errors=ANTHROPIC,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        "Count the tokens of a request's prompt.",
        MessagesRequest,
        errors=ANTHROPIC,
    ),
    Route("GET", "/v1/models", info.list_models, "List the models, by all names.", answer=given.ModelList),
    Route("GET", "/v1/models/{model:.+}", info.get_model, "Show a model.", answer=given.ModelCard),
    Route(
        "POST",
        "/tokenize",
        tokenize,
        "Return the token ids of a text or a chat.",
        asked.TokenizeRequest,
        given.TokenizeResponse,
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        "Return the text of token ids.",
        asked.DetokenizeRequest,
        given.DetokenizeResponse,
    ),
    Route("GET", "/health", info.health, "Tell the health of all parts.", answer=given.Health, is_open=True),
    Route("GET", "/ping", info.ping, "Tell whether the engine can serve.", is_open=True),
    Route("POST", "/ping", info.ping, "Tell whether the engine can serve.", is_open=True),
    Route("GET", "/load", info.load, "Count sequences in the engine.", answer=given.ServerLoad, is_open=True),
    Route("GET", "/version", info.version, "Tell the version.", answer=given.Version, is_open=True),
    Route("GET", "/metrics", info.show_metrics, "Show metrics in Prometheus' text format.", is_open=True),
    Route("GET", "/openapi.json", show_openapi, "Describe this API for machines.", is_open=True),
    Route("GET", "/docs", show_docs, "Describe this API for people.", is_open=True),
    Route(
        "GET",
        "/admin/tes",
        admin.list_tes,
        "List the task executors.",
        answer=admin.TEList,
        option="admin",
    ),
    Route("POST", "/admin/tes", admin.add_te, "Add a task executor.", admin.NewTE, option="admin"),
    Route(
        "DELETE",
        "/admin/tes/{name}",
        admin.remove_te,
        "Remove a task executor.",
        answer=admin.TEList,
        query={"drain": {"enum": ["0", "1"], "default": "0"}},
        option="admin",
    ),
    Route(
        "GET",
        "/admin/servers",
        admin.list_servers,
        "List the expert servers.",
        answer=admin.ServerList,
        option="admin",
    ),
    Route(
        "POST", "/admin/servers", admin.add_server, "Add an expert server.", admin.NewServer, option="admin"
    ),
    Route(
        "DELETE",
        "/admin/servers/{te}/{number}",
        admin.remove_server,
        "Remove an expert server.",
        answer=admin.ServerList,
        option="admin",
    ),
)


@cache
def routes() -> tuple[Route, ...]:
    """Return all rows, whatever a server's options are."""
    return (*OWN, *(row for module in wings.endpoint() for row in module.ROUTES))
