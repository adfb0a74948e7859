"""The models of a server, by the names that clients use: the first, and those that have come to its pod."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import msgspec
from aiohttp import web
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from xdeepserve.api.endpoint import MAX_NAME_CHARS, ApiEndpoint
from xdeepserve.api.http_errors import ApiError
from xdeepserve.engine.serving.request import AsyncEngine
from xdeepserve.errors import abridged


class ServedModels:
    """`first` is the one that a request without a name means. Others have one name each."""

    def __init__(self, first: ApiEndpoint) -> None:
        self.first = first
        self._more: dict[str, ApiEndpoint] = {}

    def __iter__(self) -> Iterator[ApiEndpoint]:
        return iter((self.first, *self._more.values()))

    @property
    def names(self) -> list[str]:
        """All of all models, those of the first one first."""
        return [*self.first.model_names, *self._more]

    def find(self, name: str | None) -> ApiEndpoint:
        """The model that a request names. ApiError if there is none of that name."""
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
        """One more, which has been started and runs until `take`."""
        assert name not in self.names, f"there is a model {name}"
        options = msgspec.structs.replace(self.first.options, served_model_names=(name,))
        endpoint = ApiEndpoint(engine, options)
        endpoint.created, endpoint.store = created, self.first.store
        self._more[name] = endpoint

    def take(self, name: str) -> AsyncEngine:
        """One less: no request finds it any more. Its engine goes on until somebody stops it."""
        return self._more.pop(name).engine

    def render_metrics(self) -> bytes:
        """The text exposition format: of each metric the samples of all models."""
        return generate_latest(_Merged(self))


class _Merged(Collector):
    """Metrics of several registries as if they were one's: every name once, as Prometheus wants it."""

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
