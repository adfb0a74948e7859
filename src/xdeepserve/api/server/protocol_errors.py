"""Errors for requests beyond all handlers: no HTTP, or unknown expectations. Their bodies are JSON, too."""

from __future__ import annotations

from aiohttp import web

from xdeepserve.api.routes.body import ENCODINGS
from xdeepserve.api.server.http_errors import ErrorDetail, encode_error


class JsonProtocol(web.RequestHandler):
    """A connection with JSON errors: aiohttp's own plain-text errors become OpenAI's error body."""

    __slots__ = ()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer; convert aiohttp's plain-text errors to JSON."""
        if isinstance(resp, web.Response) and resp.status >= 400 and resp.content_type == "text/plain":
            message = " ".join((resp.text or resp.reason or "").split())
            if "content-encoding" in message:
                resp.set_status(415)
                message = f"the Content-Encoding of a body must be one of {', '.join(ENCODINGS)}"
            kind = "server_error" if resp.status >= 500 else "invalid_request_error"
            resp.body = encode_error(ErrorDetail(message, type=kind))
            resp.content_type, resp.charset = "application/json", None
        return await super().finish_response(request, resp, start_time)


class JsonServer(web.Server):
    """Server for making connections of JsonProtocol."""

    def __call__(self) -> JsonProtocol:
        return JsonProtocol(self, loop=self._loop, **self._kwargs)


class JsonRunner(web.AppRunner):
    """Runner of an application behind a JsonServer."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = JsonServer  # aiohttp takes no other factory of connections
        return server
