"""Starting and stopping the server: addresses, signals, draining."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from tests.api.fake_engine import FakeEngine
from xdeepserve.api.server import server
from xdeepserve.api.server.server import address_of, bind, serve
from xdeepserve.errors import DeploymentError, InputError


class Running:
    """`serve` as a task, once it is ready."""

    def __init__(self, engine: FakeEngine, host: str = "127.0.0.1") -> None:
        self.engine = engine
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(serve(engine, host, 0, self.address.set_result))

    async def post(self, **body: object) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{await self.address}/v1/completions", json=body) as response,
        ):
            return response.status, await response.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_requests_finish(engine: FakeEngine, number: signal.Signals) -> None:
    running = Running(engine)
    engine.hold(0)
    request = asyncio.create_task(running.post(prompt="hi", max_tokens=3))
    await engine.until_submitted()
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.05)
    with pytest.raises(aiohttp.ClientConnectionError):
        await running.post(prompt="too late")
    assert engine.events == ["start"]
    engine.release()
    status, text = await request
    assert status == 200
    assert '"beh"' in text
    await asyncio.wait_for(running.task, 5)
    assert engine.events == ["start", "stop"]


async def test_two_signals_at_once_are_one_and_a_later_one_does_not_wait(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SHUTDOWN_GRACE_S", 60.0)
    monkeypatch.setattr(server, "SAME_SIGNAL_S", 0.3)
    running = Running(engine)
    engine.hold(0)
    request = asyncio.create_task(running.post(prompt="hi"))
    await engine.until_submitted()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.4)
    assert not engine.submitted[0].is_aborted.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running.task, 5)
    assert engine.submitted[0].is_aborted.is_set()
    with pytest.raises(aiohttp.ClientError):
        await request


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n", b"GET\r\n\r\n"])
async def test_what_is_no_http_is_answered_and_not_logged(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    running = Running(engine)
    host, port = (await running.address).removeprefix("http://").split(":")
    for _ in range(2):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(sent)
        assert (await reader.read()).split()[1] == b"400"
        writer.close()
        await writer.wait_closed()
    assert not caplog.records
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)


async def test_after_the_grace_requests_are_aborted(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SHUTDOWN_GRACE_S", 0.05)
    running = Running(engine)
    engine.hold(0)
    request = asyncio.create_task(running.post(prompt="hi"))
    await engine.until_submitted()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running.task, 5)
    assert engine.submitted[0].is_aborted.is_set()
    assert engine.events == ["start", "stop", "stop"]  # after the grace, and with the application
    with pytest.raises(aiohttp.ClientError):
        await request


async def test_a_disconnected_client_is_noticed(engine: FakeEngine) -> None:
    """The one thing that `build_app` leaves to whoever runs it: handlers are cancelled on disconnect."""
    running = Running(engine)
    engine.hold(0)
    request = asyncio.create_task(running.post(prompt="hi"))
    await engine.until_submitted()
    request.cancel()
    assert await asyncio.wait_for(engine.submitted[0].is_aborted.wait(), 5)
    running.task.cancel()
    await asyncio.wait([running.task])


async def test_cancellation_stops_the_engine(engine: FakeEngine) -> None:
    running = Running(engine)
    await running.address
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert engine.events == ["start", "stop"]


async def test_a_port_in_use_is_one_clear_line(engine: FakeEngine) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError) as caught:
            await serve(engine, "127.0.0.1", port)
    assert (
        str(caught.value)
        == f"cannot listen on 127.0.0.1:{port}: Address already in use; --port 0 picks a free one"
    )
    assert not engine.events  # nothing was built in vain


@pytest.mark.parametrize(
    ("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1), ("192.0.2.1", 0)]
)
def test_addresses_that_cannot_be(host: str, port: int) -> None:
    with pytest.raises(InputError, match=f"^cannot listen on {host}:{port}: .+$"):
        bind(host, port)


async def test_an_engine_that_cannot_start(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> None:
        raise DeploymentError("the dies cannot hold the model")

    monkeypatch.setattr(engine, "start", refuse)
    with pytest.raises(DeploymentError, match="cannot hold"):
        await serve(engine, "127.0.0.1", 0)
    assert not engine.events


def test_addresses_are_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            listener = bind("::1", 0)
        except InputError:
            pytest.skip("this machine has no IPv6 address")
        with listener:
            assert address_of(listener).startswith("http://[::1]:")


def test_run_server_on_uvloop_from_start_to_sigint() -> None:
    """As a user runs it: one line on stdout, service, and a silent end."""
    program = (
        "import asyncio, gc\n"
        "from fake_engine import FakeEngine\n"
        "from xdeepserve.api.server.server import run_server\n"
        "class Engine(FakeEngine):\n"
        "    async def start(self):\n"
        "        loop = type(asyncio.get_running_loop()).__module__\n"
        "        self.model_name = f'{loop}, frozen: {gc.get_freeze_count() > 1000}'\n"
        "run_server(Engine, '127.0.0.1', 0)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(server.__file__).parents[3])])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:")
            with urllib.request.urlopen(line.split()[-1] + "/v1/models", timeout=10) as response:
                assert b'"uvloop, frozen: True"' in response.read()
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=10)
        finally:
            process.kill()
    assert (process.returncode, stdout, stderr) == (0, "", "")
