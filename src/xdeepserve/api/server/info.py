"""GET endpoints for information: models, health, version, load, metrics."""

from __future__ import annotations

from typing import Literal

from aiohttp import web

from xdeepserve import __version__
from xdeepserve.api.answers.responses import Health, ModelCard, ModelList, ServerLoad, Version, json_response
from xdeepserve.api.server import metrics
from xdeepserve.api.server.endpoint import ApiEndpoint
from xdeepserve.api.server.served_models import MODELS
from xdeepserve.engine.te.reports import TEHealth


async def list_models(request: web.Request) -> web.Response:
    models = request.app[MODELS]
    return json_response(ModelList(data=[_card(models.find(name), name) for name in models.names]))


async def get_model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    return json_response(_card(request.app[MODELS].find(name), name))


def _card(endpoint: ApiEndpoint, name: str) -> ModelCard:
    engine = endpoint.engine
    return ModelCard(
        id=name, root=engine.model_name, created=endpoint.created, max_model_len=engine.max_model_len
    )


async def health(request: web.Request) -> web.Response:
    """Answer 200 while all engines can serve, with the states of TEs and DP groups; idle ones are asked for
    heartbeats."""
    tes, num_rollbacks = [], 0
    for endpoint in request.app[MODELS]:
        tes += await endpoint.engine.check_health()
        num_rollbacks += endpoint.engine.stats().num_recoveries["3"]
        endpoint.check_healthy()
    status: Literal["ok", "degraded"] = "ok" if all(map(_is_well, tes)) else "degraded"
    return json_response(Health(status=status, num_rollbacks=num_rollbacks, tes=tes))


def _is_well(te: TEHealth) -> bool:
    """Whether no part of a TE is silent or missing; for a lost TE, whether another has its place."""
    if te.life == "lost":
        return te.replaced_by is not None
    ill = te.suspect_groups, te.lost_groups, te.suspect_servers, te.lost_servers
    return te.shell == "healthy" and not any(ill)


async def ping(request: web.Request) -> web.Response:
    """Answer 200 while all engines can serve, without asking any die."""
    for endpoint in request.app[MODELS]:
        endpoint.check_healthy()
    return web.Response()


async def load(request: web.Request) -> web.Response:
    """Return how many sequences the engines hold, running and waiting."""
    found = [endpoint.engine.stats() for endpoint in request.app[MODELS]]
    return json_response(ServerLoad(server_load=sum(each.num_running + each.num_waiting for each in found)))


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=__version__))


async def show_metrics(request: web.Request) -> web.Response:
    body = request.app[MODELS].render_metrics()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})
