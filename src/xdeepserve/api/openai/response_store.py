"""Store of answers of /v1/responses, from which later requests may continue."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from xdeepserve.api.openai.requests import ChatMessage
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.errors import abridged

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20


class KeptResponse(msgspec.Struct, frozen=True):
    """An answer with the conversation before, and the items of its request.

    The conversation has no instructions: those belong to each request.
    """

    response: dict[str, Any]
    messages: list[ChatMessage]
    items: list[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """Store of the latest answers, as many as fit. It ends with the server."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._max_bytes, self._num_bytes = max_bytes, 0

    def keep(
        self, response: dict[str, Any], messages: list[ChatMessage], items: list[dict[str, Any]]
    ) -> None:
        """Keep an answer, and forget the oldest ones beyond the limit."""
        num_bytes = sum(len(msgspec.json.encode(each)) for each in (response, messages, items))
        self._kept[response["id"]] = KeptResponse(response, messages, items, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes or len(self._kept) > MAX_RESPONSES:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def find(self, response_id: str, param: str) -> KeptResponse:
        """Find an answer. Raises ApiError if there is none of that id, or no longer."""
        kept = self._kept.get(response_id)
        if kept is None:
            raise ApiError(
                404,
                f"there is no response {abridged(response_id, 80)}: it was not stored, or was forgotten",
                param=param,
                code="response_not_found",
            )
        return kept

    def forget(self, response_id: str) -> None:
        """Forget an answer. Raises ApiError if there is none of that id."""
        self._num_bytes -= self.find(response_id, "response_id").num_bytes
        del self._kept[response_id]
