"""Processes of the computer that serve experts outside of a pod: each error has an owner who hears it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.comm.services import LAYOUT
from tests.comm.tools import IDENTITY, TOKEN, asks
from tests.engine.owners import (
    BOUND_S,
    OF_THE_CLOCK,
    OF_THE_COMPUTER,
    TRIED,
    fail,
    fails,
    nothing_unheard,
    spawns,
)
from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.errors import LostDieError, XDeepServeError
from xdeepserve.hw.pod import Pod
from xdeepserve.model.presets import resolve_model
from xdeepserve.remote import (
    enlisted,
    expert_process,
    keeper,
    monitor_service,
    network_card,
    server_link,
    watcher,
)
from xdeepserve.remote.children import Children, MonitorTask, ServerTask
from xdeepserve.remote.enlisted import Enlisted
from xdeepserve.remote.expert_process import ExpertProcess
from xdeepserve.remote.handshake import Welcome, listen
from xdeepserve.remote.keeper import Keeper
from xdeepserve.remote.monitor_service import MonitorService, dial, hear, say
from xdeepserve.remote.network_card import Nic
from xdeepserve.remote.placed import Placed
from xdeepserve.remote.registered import SharedBuffer, Window
from xdeepserve.remote.seat_list import Leave, Ready, Refused, Seated, SeatTable, ToServer
from xdeepserve.remote.server_link import CardLink, open_link
from xdeepserve.remote.watcher import Watcher

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
TASK = ServerTask("tiny-random", "int8", {}, f"{HOST}:1", "unix:nowhere", TOKEN, 0)
KNOWN = {part: Window(0, 8) for part in ("card", "slots", "requests", "answers")}
Patch = pytest.MonkeyPatch


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not is_so():
            await asyncio.sleep(0.01)


class There:
    """A monitor: its address, and what it tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.service = MonitorService(TOKEN, 0.05, 1000, self.lines.append)

    async def start(self) -> None:
        self.port = await self.service.start(HOST, 0)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    async def seat(self, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection of a server that has a seat."""
        reader, writer = await dial(HOST, self.port, TOKEN)
        say(writer, asks("a", number))
        assert isinstance(await hear(reader, ToServer, "the monitor"), Seated)
        return reader, writer


@asynccontextmanager
async def monitor() -> AsyncIterator[There]:
    there = There()
    await there.start()
    try:
        yield there
    finally:
        await there.service.close()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def enrolled(address: str) -> AsyncIterator[tuple[Enlisted, list[Exception | None]]]:
    """A server's talk with a monitor, and what ends the server."""
    gone: list[Exception | None] = []
    talk = Enlisted(address, TOKEN, asks("a"), lambda text: None, gone.append)
    yield talk, gone
    await until(lambda: gone or talk.seated.done())


# ---- an error in each, and what its owner hears -----------------------------------------------------


async def a_child_ends(patch: Patch, tmp_path: Path) -> str:
    script = tmp_path / "ends"
    script.write_text("#!/bin/sh\nread task\nexit 3\n")
    script.chmod(0o755)
    patch.setattr(sys, "executable", str(script))
    alone, children = Children(), Children()
    try:
        with pytest.raises(XDeepServeError, match="the monitor's process has not started"):
            alone.start_monitor(MonitorTask(TOKEN))
        children.start_server(TASK)
        with pytest.raises(XDeepServeError, match="the process of expert server 0 has ended: 3"):
            await until(children.check)
    finally:
        alone.close()
        children.close()
    return TRIED


async def a_talk_before_its_seat(patch: Patch, _: Path) -> str:
    patch.setattr(enlisted, "dial", fails)
    talk = Enlisted(f"{HOST}:1", TOKEN, asks("a"), lambda text: None, lambda error: None)
    try:
        await asyncio.wrap_future(talk.seated)
    except ZeroDivisionError as error:
        return str(error)
    return "nothing"


async def a_talk_with_a_seat(patch: Patch, _: Path) -> str:
    async with monitor() as there, enrolled(there.address) as (talk, gone):
        await asyncio.wrap_future(talk.seated)
        patch.setattr(enlisted, "dial", fails)
        await there.service.close()  # the server dials again
        await until(lambda: gone)
        return str(gone[0])


async def a_beat(_: Patch, __: Path) -> str:
    async with monitor() as there, enrolled(there.address) as (talk, gone):
        await asyncio.wrap_future(talk.seated)
        talk.serve(fail)
        await until(lambda: gone)
        return str(gone[0])


async def a_process_with(patch: Patch, owner: Any, name: str, what: Any) -> str:
    """The end of a server's process in which something fails."""
    patch.setattr(owner, name, what)
    deployment = resolve(
        "eaas", ["max_model_len=64", "experts.transport=shm", "experts.routed_dies=2", "threads=1"]
    )
    async with monitor() as there:
        at = f"unix:xdeepserve-{os.getpid()}-{time.monotonic_ns()}"
        task = ServerTask("tiny-random", "int8", msgspec.to_builtins(deployment), there.address, at, TOKEN, 0)
        process = ExpertProcess(task, resolve_model("tiny-random"), "int8", lambda text: None)
        try:
            await process.run()
        except ZeroDivisionError as error:
            return str(error)
    return "nothing"


async def the_warm_up_of_a_server(patch: Patch, _: Path) -> str:
    return await a_process_with(patch, ExpertServerProgram, "warm_up", fails)


async def the_program_of_a_server(patch: Patch, _: Path) -> str:
    return await a_process_with(patch, ExpertServerProgram, "run", fails)


async def the_reports_of_a_server(patch: Patch, _: Path) -> str:
    meta = type("Meta", (type,), {"__instancecheck__": fail})
    patch.setattr(expert_process, "StepFailed", meta("NoReport", (), {}))

    async def reports(self: ExpertServerProgram) -> None:
        self.reports.put(Ready())

    return await a_process_with(patch, ExpertServerProgram, "run", reports)


async def the_watch_of_a_parent(_: Patch, __: Path) -> str:
    script = (
        "import os, time; from tests.engine.owners import fail\n"
        "from xdeepserve.remote.expert_process import end_with_parent\n"
        "os.read = fail; end_with_parent(); time.sleep(600)"
    )
    return await error_of(script)


async def the_watch_of_a_kept_process(patch: Patch, _: Path) -> str:
    class Broken:
        def __init__(self) -> None:
            self.servers = {0: SimpleNamespace(pid=1, poll=fail)}

        def start_server(self, task: ServerTask) -> None: ...

        def close(self) -> None:
            self.servers.clear()

    patch.setattr(keeper, "Children", Broken)
    patch.setattr(keeper, "CHECK_S", 0.01)
    kept = Keeper(msgspec.json.encode(TASK), HOST)
    await until(lambda: kept.kept().is_given_up)
    said = kept.kept()
    kept.close()
    # And who has placed it says so.
    answer = SimpleNamespace(kept=SimpleNamespace(remote=lambda: said))
    ray = SimpleNamespace(
        nodes=lambda: [0],
        remote=lambda **_: lambda _kind: SimpleNamespace(remote=lambda *_: answer),
        wait=lambda *_, **__: None,
        get=lambda what, **_: what,
        exceptions=SimpleNamespace(RayError=OSError),
    )
    placed = Placed(ray, TASK, HOST, lambda text: None)
    placed.place([0])
    try:
        placed.look()
    except XDeepServeError as error:
        return str(error)
    return "nothing"


async def a_look_at_what_is_placed(_: Patch, __: Path) -> str:
    script = (
        "import contextlib, sys; from tests.engine.owners import fail\n"
        "from xdeepserve.remote import on_ray, placed\n"
        "on_ray.connected = lambda *_: contextlib.nullcontext(None)\n"
        "placed.Placed.place, placed.Placed.look = lambda *_: None, fail\n"
        "from xdeepserve.cli import main\n"
        "sys.exit(main(['place', '--set', 'experts.transport=shm', '--port', '0']))"
    )
    return await error_of(script)


async def error_of(script: str) -> str:
    """What a process that fails says."""
    words = [sys.executable, "-c", script]
    ended = await asyncio.to_thread(subprocess.run, words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    return ended.stderr


async def a_connection_of_the_monitor(patch: Patch, _: Path) -> str:
    async with monitor() as there:
        patch.setattr(SeatTable, "register", fail)
        reader, writer = await dial(HOST, there.port, TOKEN)
        say(writer, asks("a"))
        assert await hear(reader, ToServer, "the monitor") is None
        writer.close()
        return there.lines[-1]


class NoTime:
    __radd__ = fail


async def a_server_is_led_away(patch: Patch, _: Path) -> str:
    async with monitor() as there:
        reader, writer = await there.seat(2)
        say(writer, Ready())
        await until(lambda: there.service.table.seats[2].presence == Presence.THERE)
        patch.setattr(SeatTable, "missed_without", lambda *_: [])
        patch.setattr(monitor_service, "SEEN_S", NoTime())
        say(writer, Leave())
        said = await hear(reader, ToServer, "the monitor")
        assert isinstance(said, Refused)
        assert said.why in there.lines
        writer.close()
        return said.why


async def the_doors_of_a_card(_: Patch, __: Path) -> str:
    listener = SimpleNamespace(
        family=socket.AF_INET, accept=fail, shutdown=lambda how: None, close=lambda: None
    )
    heard: list[Exception] = []
    nic = Nic(listener, SharedBuffer(8), KNOWN, IDENTITY, TOKEN, heard.append)  # type: ignore[arg-type]
    await until(lambda: heard)
    nic.close()
    return str(heard[0])


async def a_connection_of_a_card(patch: Patch, _: Path) -> str:
    listener, address = listen(f"tcp:{HOST}:0")
    nic = Nic(listener, SharedBuffer(8), KNOWN, IDENTITY, TOKEN, lambda error: None)
    patch.setattr(network_card, "prepare", fail)
    try:
        with socket.create_connection((HOST, int(address.rpartition(":")[2]))) as sock:
            assert await asyncio.to_thread(sock.recv, 1) == b""
        await until(lambda: nic.refusals)
        return nic.refusals[-1]
    finally:
        nic.close()


async def answers_of_a_card(patch: Patch, _: Path) -> str:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(64))
        await reader.read()
        writer.close()

    patch.setattr(server_link, "RESPONSE", SimpleNamespace(size=8, unpack=fail))
    server = await asyncio.start_server(answer, HOST, 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    link = CardLink(writer.get_extra_info("socket"), reader, writer, Welcome({}, 0))
    try:
        await link.read(0, 8)
    except LostDieError as error:
        return str(error)
    finally:
        server.close()
        await asyncio.sleep(0.01)
    return "nothing"


async def the_opening_of_a_link(patch: Patch, _: Path) -> str:
    patch.setattr(server_link, "connect", fail)
    try:
        await open_link(f"tcp:{HOST}:1", "me", IDENTITY, TOKEN)
    except ZeroDivisionError as error:
        return str(error)
    return "nothing"


@asynccontextmanager
async def watched(address: str) -> AsyncIterator[list[Exception]]:
    """A client process that listens to a monitor, and what its owner hears."""
    heard: list[Exception] = []
    pod = Pod()
    for client in LAYOUT.clients:
        LAYOUT.plan_client(pod.plan(client))
    pod.materialise()
    watches = Watcher(pod, LAYOUT, [[0], [1]], lambda seat: None)
    watches.start(address, TOKEN, IDENTITY, heard.append)
    try:
        yield heard
        with pytest.raises(XDeepServeError, match=TRIED):
            await watches.ready(lambda: None)
    finally:
        await watches.close()


async def a_client_that_listens(patch: Patch, _: Path) -> str:
    patch.setattr(watcher, "dial", fails)
    async with watched(f"{HOST}:1") as heard:
        await until(lambda: heard)
        return str(heard[0])


async def a_client_that_links(patch: Patch, _: Path) -> str:
    patch.setattr(watcher, "open_link", fails)
    async with monitor() as there:
        _, writer = await there.seat(0)
        say(writer, Ready())
        async with watched(there.address) as heard:
            await until(lambda: heard)
        writer.close()
        return str(heard[0])


class Outside(NamedTuple):
    """A place that starts a process of the computer, its owner, and a way to fail there, which returns what
    the owner hears."""

    site: str
    owner: str
    tries: Callable[[Patch, Path], Awaitable[str]]


OUTSIDE = (
    Outside("remote/children.py:_spawn", "who asks for servers, by `Children.check`", a_child_ends),
    Outside("remote/enlisted.py:Enlisted.__init__", "who waits for the seat", a_talk_before_its_seat),
    Outside("remote/enlisted.py:Enlisted.__init__", "the server's process", a_talk_with_a_seat),
    Outside("remote/enlisted.py:Enlisted._talk", "the server's process", a_beat),
    Outside("remote/expert_process.py:ExpertProcess._serve", "the server's process", the_warm_up_of_a_server),
    Outside("remote/expert_process.py:ExpertProcess._serve", "the server's process", the_program_of_a_server),
    Outside("remote/expert_process.py:ExpertProcess._serve", "the server's process", the_reports_of_a_server),
    Outside("remote/expert_process.py:end_with_parent", "the process, which ends", the_watch_of_a_parent),
    Outside("remote/place_command.py:_keep", "the command", a_look_at_what_is_placed),
    Outside("remote/keeper.py:Keeper.__init__", "who has placed it", the_watch_of_a_kept_process),
    Outside(
        "remote/monitor_service.py:MonitorService.start", "who runs the monitor", a_connection_of_the_monitor
    ),
    Outside("remote/monitor_service.py:MonitorService._leave", "the server", a_server_is_led_away),
    Outside("remote/network_card.py:Nic._spawn", "the server's process", the_doors_of_a_card),
    Outside("remote/network_card.py:Nic._spawn", "the card, which lists it", a_connection_of_a_card),
    Outside("remote/server_link.py:CardLink.__init__", "who reads by the link", answers_of_a_card),
    Outside("remote/server_link.py:open_link", "who opens the link", the_opening_of_a_link),
    Outside("remote/watcher.py:Watcher.start", "the engine", a_client_that_listens),
    Outside("remote/watcher.py:Watcher.start", "the engine", a_client_that_links),
)


@pytest.mark.parametrize("outside", OUTSIDE, ids=lambda outside: outside.tries.__name__)
async def test_an_error_outside_is_heard(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The owner hears the error by name; nothing hangs, and nothing is left to asyncio's own log."""
    async with nothing_unheard():
        assert TRIED in await outside.tries(monkeypatch, tmp_path)


def test_every_place_outside_is_in_the_table() -> None:
    found = {where for where, _, _ in spawns(OF_THE_CLOCK + OF_THE_COMPUTER) if where.startswith("remote/")}
    assert found == {each.site for each in OUTSIDE}
