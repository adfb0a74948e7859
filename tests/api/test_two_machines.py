"""Servers on another machine: a network namespace behind a cable, which is cut.

Nobody closes a connection then: no FIN and no RST comes, and what is sent is lost. Skipped where no namespace
can be made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.api.commands import Command
from tests.engine.outside import PARAMS, PROMPTS, expected, run, until
from xdeepserve import LLM
from xdeepserve.comm.services.layout import Presence
from xdeepserve.errors import DeadlineError
from xdeepserve.remote.handshake import SILENT_S, listen
from xdeepserve.remote.network_card import Nic
from xdeepserve.remote.registered import SharedBuffer, Window

NEAR, FAR = (f"10.213.{os.getpid() % 250}.{host}" for host in (1, 2))  # workers have networks of their own
TIMEOUT_S, CUT_S, BOUND_S = 1.0, 3.0, 60.0
SETTINGS = (
    "experts.routed_dies=2",
    "attention.dies=2",
    "max_model_len=64",
    "experts.transport=tcp",
    f"services.process_timeout_ms={1000 * TIMEOUT_S:g}",
)
ON_FAR = 1  # the server that is there


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Machine(NamedTuple):
    """The far one: its namespace, in which its end of the cable is `end`."""

    name: str
    end: str

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", self.end, "down")

    def mend(self) -> None:
        ip("-n", self.name, "link", "set", self.end, "up")


@pytest.fixture
def far() -> Iterator[Machine]:
    number = os.getpid()
    machine, near = Machine(f"xdeepserve-{number}", f"far{number}"), f"near{number}"
    try:
        ip("netns", "add", machine.name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace: {error}")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", machine.end, "netns", machine.name)
        ip("addr", "add", f"{NEAR}/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", machine.name, "addr", "add", f"{FAR}/30", "dev", machine.end)
        machine.mend()
        yield machine
        ip("link", "del", near)
    finally:
        ip("netns", "del", machine.name)


@contextmanager
def served(far: Machine, monkeypatch: pytest.MonkeyPatch, *settings: str) -> Iterator[LLM]:
    """The monitor, the client and all other servers are near."""
    monkeypatch.setenv("XDEEPSERVE_TOKEN", "a token")
    there, commands = (*SETTINGS, *settings), [Command("monitor", "--host", NEAR, "--port", "0")]
    try:
        monitor = commands[0].says("listening on")
        words = [word for each in there for word in ("--set", each)]
        for seat in range(3):  # the last has the shared expert
            host, machine = (FAR, ("ip", "netns", "exec", far.name)) if seat == ON_FAR else (NEAR, ())
            where = ("--model", "tiny-random", "--monitor", monitor, "--seat", str(seat))
            commands.append(
                Command("expert-server", *words, *where, "--listen", f"{host}:0", machine=machine)
            )
        for command in commands[1:]:
            command.says("serves")
        with LLM("tiny-random", "eaas", "int8", overrides=[*there, f"experts.monitor={monitor}"]) as llm:
            yield llm
    finally:
        for command in commands:
            command.process.kill()
            command.end()


def presence(llm: LLM) -> Presence:
    (servers,) = llm.engine.plan.outside
    return servers.watcher.seats[ON_FAR].presence


def test_a_cable_is_cut_for_a_while_and_for_ever(far: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(far, monkeypatch, "experts.copies=1") as llm:
        assert run(llm) == expected("int8")
        mending = threading.Timer(CUT_S, far.mend)
        far.cut()
        mending.start()
        assert run(llm) == expected("int8")  # a replica answers
        mending.join()
        until(lambda: presence(llm) == Presence.THERE, "the server is not used again")
        assert run(llm) == expected("int8")
        far.cut()
        begin = time.monotonic()
        assert run(llm) == expected("int8")
        assert time.monotonic() - begin < BOUND_S
        until(lambda: presence(llm) != Presence.THERE, "nobody hears that the server is lost")
        assert run(llm) == expected("int8")
        until(lambda: presence(llm) == Presence.ABSENT, "its seat is free for nobody else")


def test_without_a_replica_the_error_says_who_did_not_answer(
    far: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(far, monkeypatch, "health.lost_s=6") as llm:
        assert run(llm) == expected("int8")
        far.cut()
        begin = time.monotonic()
        said = rf"^expert read: deadline passed .* expert server {ON_FAR}, .* after [\d.]+ s of this computer"
        with pytest.raises(DeadlineError, match=said):
            llm.generate(PROMPTS, PARAMS)
        assert time.monotonic() - begin < BOUND_S


CLIENT = """
import asyncio, sys
from xdeepserve.remote.server_link import open_link

async def stay():
    link = await open_link(sys.argv[1], "far", "tiny", "a token")
    print("linked", flush=True)
    await asyncio.sleep(600)

asyncio.run(stay())
"""


def test_a_client_whose_machine_is_gone_keeps_no_other_one_out(far: Machine) -> None:
    listener, address = listen(f"tcp:{NEAR}:0")
    known = {part: Window(0, 8) for part in ("card", "slots", "requests", "answers")}
    heard: list[Exception] = []
    nic = Nic(listener, SharedBuffer(8), known, "tiny", "a token", heard.append)
    words = ["ip", "netns", "exec", far.name, sys.executable, "-c", CLIENT, address]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"linked\n"
            assert nic.has_client
            far.cut()
            client.kill()
            begin = time.monotonic()
            until(lambda: not nic.has_client, "it is there for ever")
            assert time.monotonic() - begin < 4 * SILENT_S
        finally:
            client.kill()
            nic.close()
    assert heard == []
