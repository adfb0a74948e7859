"""Heartbeats of a server in a cluster: its address, and the states of its TEs (DeepServe 3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator

from aiohttp import web

from xdeepserve.api.server.access import ADDRESS
from xdeepserve.api.server.served_models import MODELS, ServedModels
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.member_table import MemberTable, MemberTE, ReplacedError

BEAT_S = 1.0

log = logging.getLogger("xdeepserve.api")


async def run_member(app: web.Application) -> AsyncIterator[None]:
    """Send heartbeats while the server runs. At an orderly end the member reports it, so the cluster does not
    restart it."""
    options = app[MODELS].first.options
    name = options.member
    assert name is not None
    assert options.state is not None
    store = JobStore(options.state, time.monotonic)
    members = store.members
    beats = asyncio.create_task(_beat(members, name, app[ADDRESS], app[MODELS]), name="heartbeats")
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        with contextlib.suppress(sqlite3.Error):
            members.end(name, os.getpid(), "gone", "it has ended in order")
        store.close()


async def _beat(members: MemberTable, name: str, address: str, models: ServedModels) -> None:
    """Send heartbeats until the engine has failed, or another process has this member's place; then end this
    process."""
    while True:
        try:
            if not models.first.engine.is_healthy():
                why = models.first.engine.unhealthy_reason or "no task executor runs"
                members.end(name, os.getpid(), "lost", f"its engine has failed: {why}")
                break
            members.beat(name, os.getpid(), address, tes_of(models))
        except ReplacedError as error:
            log.error("%s", error)
            break
        except sqlite3.Error as error:  # it is silent as long as that lasts
            log.warning("no heartbeat: %s", error)
        await asyncio.sleep(BEAT_S)
    os.kill(os.getpid(), signal.SIGTERM)


def tes_of(models: ServedModels) -> list[MemberTE]:
    """List the TEs of all models of a server."""
    engines = [(each.model_name, each.engine) for each in models if isinstance(each.engine, Engine)]
    return [MemberTE(te.name, model, te.role, te.life) for model, engine in engines for te in engine.tes()]
