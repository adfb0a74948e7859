"""Models made by jobs, served beside the server's first model: each has TEs of its own on the same pod."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from xdeepserve.api.server.served_models import ServedModels, drain
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.request import AsyncEngine
from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import PRESETS

DRAIN_S = 5.0  # of wall time for the requests of a model that goes

log = logging.getLogger("xdeepserve.api")


def source_of(engine: AsyncEngine) -> str:
    """Return how another process finds an engine's checkpoint: a preset's name, or a directory."""
    if not isinstance(engine, Engine) or engine.plan.checkpoint.name in PRESETS:
        return engine.model_name
    return str(engine.plan.checkpoint.directory.resolve())


class ModelShelf:
    """Shelf of models made by jobs: loads and unloads them.

    Loading takes turns with the serving of others.
    """

    def __init__(self, models: ServedModels, store: JobStore) -> None:
        self._models, self._store = models, store
        self._loaded: set[str] = set()
        self._refused: set[str] = set()  # told once

    async def load(self, name: str, directory: Path) -> None:
        """Serve the checkpoint at `directory` under a name, in the first model's deployment, on dies of its
        pod. Raises InputError if the pod has no room, or the model cannot be served. Harmless when it is
        served already."""
        if name in self._loaded:
            return
        host = self._models.first.engine
        if not isinstance(host, Engine):
            raise InputError("the engine of this server cannot take another model to its pod")
        plan = host.plan
        engine = build_engine(directory, plan.deployment, "int8", warm_up=True, pod=plan.pod)
        engine.model_name = name
        try:
            for _ in engine.pieces():
                await asyncio.sleep(0)
            await engine.start()
        except BaseException:
            await engine.stop()
            raise
        self._loaded.add(name)
        self._models.add(name, engine, int(self._store.now()))

    async def unload(self, name: str) -> None:
        """Stop serving a model: no request finds it any more, and its running requests may end, for a few
        seconds."""
        if name not in self._loaded:
            return
        self._loaded.remove(name)
        engine = self._models.take(name)
        try:
            await drain([engine], DRAIN_S, asyncio.Event())
        finally:
            await engine.stop()

    async def follow(self) -> None:
        """Serve exactly the models of the store. A model that cannot be served is reported once."""
        wanted = self._store.models()
        for name in sorted(self._loaded - wanted.keys()):
            await self.unload(name)
        for name, (directory, _) in wanted.items():
            if name not in self._loaded | self._refused:
                try:
                    await self.load(name, directory)
                except XDeepServeError as error:
                    self._refused.add(name)
                    log.error("the model %s cannot be served: %s", name, error)

    async def close(self) -> None:
        """Stop the engines of all models."""
        for name in sorted(self._loaded):
            self._loaded.remove(name)
            await self._models.take(name).stop()
