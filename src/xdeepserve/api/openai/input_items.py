"""GET /v1/responses/ID/input_items: the input items of a request of /v1/responses, as OpenAI lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.openai.response_items import item_kind
from xdeepserve.api.server.endpoint import ENDPOINT
from xdeepserve.errors import RequestError, abridged

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PAGE_QUERY: dict[str, dict[str, Any]] = {  # as /openapi.json describes it
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "after": {"type": "string"},
}

Item = dict[str, Any]


def input_items(given: str | list[Item], answer_id: str) -> list[Item]:
    """Convert a request's input to items, each with a type, and with parts for a content that is a text.

    Each item gets an id: its own, unless that is no text or is already used. Pages are asked for by the id
    before them.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[Item] = []
    prefix, taken = f"in_{answer_id}-", {""}
    for number, each in enumerate(given):
        kind, item_id = item_kind(each), each.get("id")
        if not isinstance(item_id, str) or item_id.startswith(prefix) or item_id in taken:
            item_id = f"{prefix}{number}"
        taken.add(item_id)
        item = {name: value for name, value in each.items() if value is not None}
        item = {**item, "id": item_id, "type": kind}
        if isinstance(content := item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": content}]
        items.append({"status": "completed", **item} if kind == "message" else item)
    return items


async def list_input_items(request: web.Request) -> web.Response:
    """Handle GET of input items: a page by `order` (asc or desc, the default), `limit`, and `after`."""
    kept = request.app[ENDPOINT].store.find(request.match_info["id"], "response_id")
    return json_response(page(kept.items, request.query))


def page(items: list[Item], asked: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list, in OpenAI's format. Raises RequestError."""
    order, limit, after = (
        asked.get("order", "desc"),
        asked.get("limit", str(DEFAULT_LIMIT)),
        asked.get("after"),
    )
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, found {abridged(order)}", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestError(
            f"limit must be an integer, 1 to {MAX_LIMIT}, found {abridged(limit)}", param="limit"
        )
    listed = items if order == "asc" else items[::-1]
    begin = 0
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise RequestError(f"after: there is no item {abridged(after)}", param="after")
        begin = ids.index(after) + 1
    data = listed[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + len(data) < len(listed),
    }
