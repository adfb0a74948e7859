"""Task executors from outside, where the server allows it: GET, POST and DELETE /admin/tes.

GET     /admin/tes                 what each is at
POST    /admin/tes                 {"role": "both", "source": "auto"}: one more; answers when it is ready
DELETE  /admin/tes/NAME            it goes at the end of its step; others go on with what it had
DELETE  /admin/tes/NAME?drain=1    it goes when it has ended what it has
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
from xdeepserve.engine.te.reports import TEReport
from xdeepserve.errors import DeploymentError, RequestError, abridged


class NewTE(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for."""

    role: Role = "both"
    source: Source = "auto"


class TEList(msgspec.Struct, frozen=True):
    """All task executors."""

    data: list[TEReport]
    object: str = "list"


def add_admin_routes(app: web.Application) -> None:
    """The routes. They need the project's own engine."""
    app.router.add_get("/admin/tes", list_tes)
    app.router.add_post("/admin/tes", add_te)
    app.router.add_delete("/admin/tes/{name}", remove_te)


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
