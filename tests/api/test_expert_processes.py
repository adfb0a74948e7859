"""The commands for expert server processes, with the OpenAI client: killed, joined, left, under load.

The campaign's run is as long as XDEEPSERVE_SOAK_S says (60 s), on eight servers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api.commands import SHM, Deployed, Load, expected, refusal, served
from xdeepserve.cli import main


@contextmanager
def deployed(*settings: str, seats: Sequence[int] = ()) -> Iterator[Deployed]:
    there = Deployed(*settings)
    try:
        for seat in seats:
            there.server(f"s{seat}", "--seat", str(seat))
        for command in there.servers.values():
            command.says("serves")
        yield there
    finally:
        there.close()


def soak(
    there: Deployed, seats: list[int], vacancy: int, seconds: float, tell: Callable[[str], None]
) -> None:
    """Kill one of `seats` and start it again, in turn, for so long; one joins at `vacancy`, one leaves.

    What is lost while a server is away is told apart from what it takes to start its process, which shares
    this computer's processors with all others.
    """
    texts = expected()
    with served(there) as client:
        load = Load(client, texts)
        try:
            tell(f"before: {load.during(seconds / 6, 8):.0f} tokens/s")
            begin, kills, away = time.monotonic(), 0, []
            while kills < 2 or time.monotonic() - begin < seconds * 4 / 6:
                name = f"s{seats[kills % len(seats)]}"
                there.servers[name].end(signal.SIGKILL)
                there.monitor.says(f"server {name} at seat {name[1:]} is gone", kills // len(seats) + 1)
                away.append(load.during(seconds / 60, 2))  # nobody is there
                there.server(name, "--seat", name[1:]).says("serves")
                load.during(1.0, 2)
                kills += 1
                if kills == 1:
                    there.server("joiner", "--seat", str(vacancy)).says("serves")
            tell(f"with one away: {sum(away) / len(away):.0f} tokens/s")
            tell(f"during: {load.rate(begin, time.monotonic()):.0f} tokens/s, {kills} servers killed")
            assert there.servers["joiner"].end(signal.SIGTERM) == 0  # it leaves
            there.monitor.says(f"server joiner at seat {vacancy} is gone")
            tell(f"after: {load.during(seconds / 6, 8):.0f} tokens/s, {len(load.done)} requests in all")
        finally:
            load.end()


FEW = ("experts.routed_dies=2", "experts.copies=1", "experts.vacancies=1", "attention.dies=2")


@pytest.mark.campaign
def test_servers_come_and_go_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    with deployed(*FEW, "max_model_len=128", SHM, seats=(0, 1, 3, 4)) as there:  # the last two: shared
        soak(there, [0, 1], 2, 0.0, print)
    assert "2 servers killed" in capsys.readouterr().out


@pytest.mark.campaign
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_eight_servers_are_killed_again_and_again(transport: str) -> None:
    """Six with routed experts, two with the shared one, and one that joins."""
    settings = ("experts.routed_dies=6", "experts.shared_dies=2", "experts.vacancies=1", "attention.dies=2")
    settings += ("experts.copies=1", "max_model_len=128", f"experts.transport={transport}")
    with deployed(*settings, seats=(0, 1, 2, 3, 4, 5, 7, 8)) as there:
        seconds = float(os.environ.get("XDEEPSERVE_SOAK_S", "60"))
        soak(there, [0, 1, 2, 3, 4, 5, 7, 8], 6, seconds, lambda text: print(transport, text, flush=True))


# ---- two addresses as two machines ------------------------------------------------------------------


@pytest.mark.always
def test_servers_on_two_addresses() -> None:
    """Clients on 127.0.0.1, servers on 127.0.0.2: bytes go by TCP alone."""
    settings = ("experts.routed_dies=1", "attention.dies=2", "max_model_len=128", "experts.transport=tcp")
    with deployed(*settings) as there:
        for seat in range(2):
            there.server(f"s{seat}", "--seat", str(seat), "--listen", "127.0.0.2:0").says("serves")
        assert any("tcp:127.0.0.2:" in line for line in there.servers["s0"].lines)
        texts = expected()
        with served(there) as client:
            load = Load(client, texts, 2)
            load.during(0.0, 4)
            load.end()


# ---- refusals: one line, and exit code 1 or 2 -------------------------------------------------------


def said_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which a command that runs here refuses."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_who_cannot_come() -> None:
    settings = ("experts.routed_dies=2", "max_model_len=128")
    with deployed(*settings, SHM, seats=[0]) as there:
        there.monitor.says("server s0 at seat 0 is there")
        port = there.address.rpartition(":")[2]
        assert f"cannot listen on 127.0.0.1:{port}" in refusal("monitor", "--port", port)
        server = ("expert-server", *there.settings, "--monitor", there.address)
        assert "a server of the name s0 is there already, at seat 0" in refusal(*server, "--name", "s0")
        assert "seat 0 is taken, by server s0" in refusal(*server, "--name", "x", "--seat", "0")
        assert "there is no seat 7: seats are 0 to 2" in refusal(*server, "--name", "x", "--seat", "7")
        for other in (("--precision", "fp32"), ("--model", "tiny-random"), ("--mtp", "1")):
            assert "is of another model, precision or layout" in refusal(*server, "--name", "x", *other)
        generate = ("generate", "--deployment", "eaas", *there.settings, "--prompt-ids", "1,2")
        generate += ("--set", f"experts.monitor={there.address}")
        assert "is of another model, precision or layout" in refusal(*generate, "--precision", "fp32")


def test_what_is_wrong_by_itself(tmp_path: Path) -> None:
    assert "the monitor at 127.0.0.1:1 cannot be reached" in refusal(
        "expert-server", "--set", SHM, "--monitor", "127.0.0.1:1"
    )
    assert "is a process with experts.transport shm or tcp" in refusal("expert-server")
    assert "--listen is for experts.transport=tcp" in refusal(
        "expert-server", "--set", SHM, "--listen", "127.0.0.1:0"
    )
    assert "must be HOST:PORT" in refusal("expert-server", "--set", SHM, "--monitor", "here")
    assert "--port is 0 to 65535" in refusal("monitor", "--port", "70000")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("monitor", "--heartbeat-ms", "nan"), "--heartbeat-ms more than 0"),
        (("monitor", "--heartbeat-ms", "inf"), "--heartbeat-ms more than 0"),
        (("monitor", "--host", "0.0.0.0"), "--host 0.0.0.0 is for other computers, too, and needs a token"),
        (("monitor", "--host", "::"), "--host :: is for other computers, too, and needs a token"),
        (("monitor", "--host", "here.example"), "--host here.example is for other computers, too"),
        (("place", "--set", SHM, "--host", "0.0.0.0"), "--host 0.0.0.0 is for other computers, too"),
    ],
)
def test_monitors_that_cannot_be(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDEEPSERVE_TOKEN", raising=False)
    assert said in said_by(capsys, *words)


LISTEN = ("expert-server", "--set", "experts.transport=tcp", "--listen")


@pytest.mark.parametrize(
    "words", [(*LISTEN, "0.0.0.0:0"), (*LISTEN, "[::]:0"), ("place", "--set", SHM, "--host", "0.0.0.0")]
)
def test_who_listens_does_so_where_others_can_come(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDEEPSERVE_TOKEN", "a token")
    assert "others are told to come there" in said_by(capsys, *words)
