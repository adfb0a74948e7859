"""Models of a server, by the names that clients use: the first, and those added to its pod later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator

import msgspec
from aiohttp import web
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from xdeepserve.api.server.endpoint import MAX_NAME_CHARS, ApiEndpoint
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.engine.serving.request import AsyncEngine
from xdeepserve.errors import abridged

DRAIN_POLL_S = 0.05


class ServedModels:
    """Models of a server. `first` serves requests without a name; others have one name each."""

    def __init__(self, first: ApiEndpoint) -> None:
        self.first = first
        self._more: dict[str, ApiEndpoint] = {}

    def __iter__(self) -> Iterator[ApiEndpoint]:
        return iter((self.first, *self._more.values()))

    @property
    def names(self) -> list[str]:
        """Names of all models, beginning with those of the first model."""
        return [*self.first.model_names, *self._more]

    def find(self, name: str | None) -> ApiEndpoint:
        """Find the model named by a request. Raises ApiError if there is none."""
        if name is None or name in self.first.model_names:
            return self.first
        if name not in self._more:
            known = ", ".join(map(json.dumps, self.names))
            raise ApiError(
                404,
                f"the model {abridged(name, MAX_NAME_CHARS)} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )
        return self._more[name]

    def add(self, name: str, engine: AsyncEngine, created: int) -> None:
        """Add a model with a started engine, which runs until `take`."""
        assert name not in self.names, f"there is a model {name}"
        options = msgspec.structs.replace(self.first.options, served_model_names=(name,))
        endpoint = ApiEndpoint(engine, options)
        endpoint.created, endpoint.store = created, self.first.store
        self._more[name] = endpoint

    def take(self, name: str) -> AsyncEngine:
        """Remove a model: no request finds it any more. Its engine runs until the caller stops it."""
        return self._more.pop(name).engine

    def render_metrics(self) -> bytes:
        """Render the metrics of all models in Prometheus' text exposition format."""
        return generate_latest(_Merged(self))


class _Merged(Collector):
    """Collector merging several registries: every metric name appears once, as Prometheus requires."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for endpoint in self._models:
            for metric in endpoint.metrics.registry.collect():
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        return found.values()


MODELS = web.AppKey("MODELS", ServedModels)


async def drain(engines: list[AsyncEngine], seconds: float, hurried: asyncio.Event) -> bool:
    """Let running requests end for at most `seconds`, or until `hurried`; return whether they have ended."""
    for _ in range(int(seconds / DRAIN_POLL_S)):
        if not any(stats.num_running + stats.num_waiting for stats in (each.stats() for each in engines)):
            return True
        if hurried.is_set():
            break
        await asyncio.sleep(DRAIN_POLL_S)
    return False
