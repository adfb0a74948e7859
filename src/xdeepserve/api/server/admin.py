"""Administration of task executors and expert servers, if the server allows it: GET, POST and DELETE.

GET     /admin/tes                 list the TEs with their states
POST    /admin/tes                 {"role": "both", "source": "auto"}: add a TE; answers when it is ready
DELETE  /admin/tes/NAME            remove a TE at the end of its step; others go on with its requests
DELETE  /admin/tes/NAME?drain=1    remove a TE when its requests have ended

GET     /admin/servers             where experts are services: list the servers with their states
POST    /admin/servers             {"te": "te", "server": 3}: add a server, or replace a lost one
DELETE  /admin/servers/TE/NUMBER   remove a server when no client waits for it
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.routes.body import read_body
from xdeepserve.api.server.endpoint import ENDPOINT
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.loading import Source
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.reports import ServerReport, TEReport
from xdeepserve.errors import DeploymentError, RequestError, abridged


class NewTE(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to add a task executor."""

    role: Role = "both"
    source: Source = "auto"


class TEList(msgspec.Struct, frozen=True):
    """List of all task executors."""

    data: list[TEReport]
    object: str = "list"


class NewServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request to add an expert server; by default in the first TE with servers, at its first free
    seat.

    A `model` or `precision` other than the engine's is refused.
    """

    te: str | None = None
    server: int | None = None
    model: str | None = None
    precision: str | None = None


class ServerList(msgspec.Struct, frozen=True):
    """List of all expert servers."""

    data: list[ServerReport]
    object: str = "list"


def _engine(request: web.Request) -> Engine:
    engine = request.app[ENDPOINT].engine
    assert isinstance(engine, Engine)
    return engine


async def list_tes(request: web.Request) -> web.Response:
    """List the task executors with their states."""
    return json_response(TEList(_engine(request).tes()))


async def add_te(request: web.Request) -> web.Response:
    """Add a task executor; answer when it is ready."""
    engine, asked = _engine(request), await read_body(request, NewTE)
    try:
        name = await engine.add_te(asked.role, asked.source)
    except DeploymentError as error:
        raise RequestError(str(error)) from None
    return json_response(next(te for te in engine.tes() if te.name == name))


async def remove_te(request: web.Request) -> web.Response:
    """Remove a task executor, at the end of its step or (`drain=1`) of its requests."""
    engine, name = _engine(request), request.match_info["name"]
    drain = request.query.get("drain", "0")
    if drain not in ("0", "1"):
        raise RequestError(f"drain must be 0 or 1, found {abridged(drain)}", param="drain")
    await (engine.drain(name) if drain == "1" else engine.remove(name))
    return json_response(TEList(engine.tes()))


async def list_servers(request: web.Request) -> web.Response:
    """List the expert servers with their states."""
    return json_response(ServerList(_engine(request).servers()))


async def add_server(request: web.Request) -> web.Response:
    """Add an expert server, or replace a lost one."""
    engine, asked = _engine(request), await read_body(request, NewServer)
    for what, wanted, has in (
        ("model", asked.model, engine.model_name),
        ("precision", asked.precision, engine.plan.recipe),
    ):
        if wanted is not None and wanted != has:
            raise RequestError(
                f"an expert server of {what} {abridged(wanted)} cannot join: it is {has} here", param=what
            )
    try:
        return json_response(await engine.add_server(asked.te, asked.server))
    except DeploymentError as error:
        raise RequestError(str(error)) from None


async def remove_server(request: web.Request) -> web.Response:
    """Remove an expert server when no client waits for it."""
    engine, number = _engine(request), request.match_info["number"]
    if not number.isdecimal():
        raise RequestError(f"an expert server has a number, found {abridged(number)}", param="server")
    await engine.remove_server(request.match_info["te"], int(number))
    return json_response(ServerList(engine.servers()))
