"""GET endpoints: which model, is it well, which version, how busy."""

from __future__ import annotations

from aiohttp import web

from xdeepserve import __version__
from xdeepserve.api import metrics
from xdeepserve.api.endpoint import ENDPOINT, ApiEndpoint
from xdeepserve.api.responses import Health, ModelCard, ModelList, ServerLoad, Version, json_response


async def list_models(request: web.Request) -> web.Response:
    endpoint = request.app[ENDPOINT]
    return json_response(ModelList(data=[_card(endpoint, name) for name in endpoint.model_names]))


async def get_model(request: web.Request) -> web.Response:
    endpoint = request.app[ENDPOINT]
    name = request.match_info["model"]
    endpoint.check_model(name)
    return json_response(_card(endpoint, name))


def _card(endpoint: ApiEndpoint, name: str) -> ModelCard:
    engine = endpoint.engine
    return ModelCard(
        id=name, root=engine.model_name, created=endpoint.created, max_model_len=engine.max_model_len
    )


async def health(request: web.Request) -> web.Response:
    """200 while the engine can serve, with its TEs and their DP groups; those without work are asked."""
    endpoint = request.app[ENDPOINT]
    tes = await endpoint.engine.check_health()
    endpoint.check_healthy()
    is_well = not any(te.suspect or te.lost or te.shell != "healthy" for te in tes)
    return json_response(Health(status="ok" if is_well else "degraded", tes=tes))


async def ping(request: web.Request) -> web.Response:
    """200 while the engine can serve. Asks no die."""
    request.app[ENDPOINT].check_healthy()
    return web.Response()


async def load(request: web.Request) -> web.Response:
    """How many sequences the engine holds, running and waiting."""
    stats = request.app[ENDPOINT].engine.stats()
    return json_response(ServerLoad(server_load=stats.num_running + stats.num_waiting))


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=__version__))


async def show_metrics(request: web.Request) -> web.Response:
    body = request.app[ENDPOINT].metrics.render()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})
