"""GET endpoints: which model, is it well, which version, how busy."""

from __future__ import annotations

from aiohttp import web

from xdeepserve import __version__
from xdeepserve.api import metrics
from xdeepserve.api.endpoint import ENDPOINT, ApiEndpoint
from xdeepserve.api.responses import Health, ModelCard, ModelList, Version, json_response


async def list_models(request: web.Request) -> web.Response:
    return json_response(ModelList(data=[_card(request.app[ENDPOINT])]))


async def get_model(request: web.Request) -> web.Response:
    endpoint = request.app[ENDPOINT]
    endpoint.check_model(request.match_info["model"])
    return json_response(_card(endpoint))


def _card(endpoint: ApiEndpoint) -> ModelCard:
    name = endpoint.engine.model_name
    return ModelCard(
        id=name, root=name, created=endpoint.created, max_model_len=endpoint.engine.max_model_len
    )


async def health(request: web.Request) -> web.Response:
    """200 while the engine can serve, with the state of its DP groups; those without work are asked."""
    endpoint = request.app[ENDPOINT]
    tes = await endpoint.engine.check_health()
    endpoint.check_healthy()
    is_well = not any(te.suspect or te.lost for te in tes)
    return json_response(Health(status="ok" if is_well else "degraded", tes=tes))


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=__version__))


async def show_metrics(request: web.Request) -> web.Response:
    body = request.app[ENDPOINT].metrics.render()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})
