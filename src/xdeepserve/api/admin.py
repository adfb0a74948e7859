"""Task executors and expert servers from outside, where the server allows it: GET, POST and DELETE.

GET     /admin/tes                 what each is at
POST    /admin/tes                 {"role": "both", "source": "auto"}: one more; answers when it is ready
DELETE  /admin/tes/NAME            it goes at the end of its step; others go on with what it had
DELETE  /admin/tes/NAME?drain=1    it goes when it has ended what it has

GET     /admin/servers             where experts are services: what each server is at
POST    /admin/servers             {"te": "te", "server": 3}: one more, or one in place of one that is lost
DELETE  /admin/servers/TE/NUMBER   it goes when nobody waits for it
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from xdeepserve.api.body import read_body
from xdeepserve.api.endpoint import ENDPOINT
from xdeepserve.api.responses import json_response
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.loading import Source
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.reports import ServerReport, TEReport
from xdeepserve.errors import DeploymentError, RequestError, abridged


class NewTE(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for."""

    role: Role = "both"
    source: Source = "auto"


class TEList(msgspec.Struct, frozen=True):
    """All task executors."""

    data: list[TEReport]
    object: str = "list"


class NewServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for: the first TE that has servers and the first seat that is free, unless they are said.

    Who says which model, or which precision, it has is refused if that is another one.
    """

    te: str | None = None
    server: int | None = None
    model: str | None = None
    precision: str | None = None


class ServerList(msgspec.Struct, frozen=True):
    """All expert servers."""

    data: list[ServerReport]
    object: str = "list"


def add_admin_routes(app: web.Application) -> None:
    """The routes. They need the project's own engine."""
    app.router.add_get("/admin/tes", list_tes)
    app.router.add_post("/admin/tes", add_te)
    app.router.add_delete("/admin/tes/{name}", remove_te)
    app.router.add_get("/admin/servers", list_servers)
    app.router.add_post("/admin/servers", add_server)
    app.router.add_delete("/admin/servers/{te}/{number}", remove_server)


def _engine(request: web.Request) -> Engine:
    engine = request.app[ENDPOINT].engine
    assert isinstance(engine, Engine)
    return engine


async def list_tes(request: web.Request) -> web.Response:
    """What each is at."""
    return json_response(TEList(_engine(request).tes()))


async def add_te(request: web.Request) -> web.Response:
    """One more."""
    engine, asked = _engine(request), await read_body(request, NewTE)
    try:
        name = await engine.add_te(asked.role, asked.source)
    except DeploymentError as error:
        raise RequestError(str(error)) from None
    return json_response(next(te for te in engine.tes() if te.name == name))


async def remove_te(request: web.Request) -> web.Response:
    """One less."""
    engine, name = _engine(request), request.match_info["name"]
    drain = request.query.get("drain", "0")
    if drain not in ("0", "1"):
        raise RequestError(f"drain must be 0 or 1, found {abridged(drain)}", param="drain")
    await (engine.drain(name) if drain == "1" else engine.remove(name))
    return json_response(TEList(engine.tes()))


async def list_servers(request: web.Request) -> web.Response:
    """What each is at."""
    return json_response(ServerList(_engine(request).servers()))


async def add_server(request: web.Request) -> web.Response:
    """One more."""
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
    """One less."""
    engine, number = _engine(request), request.match_info["number"]
    if not number.isdecimal():
        raise RequestError(f"an expert server has a number, found {abridged(number)}", param="server")
    await engine.remove_server(request.match_info["te"], int(number))
    return json_response(ServerList(engine.servers()))
