"""Expert servers and sweeps on a Ray cluster, where Ray is installed; and what holds without it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import pytest

from tests.api.commands import SHM, Command, Load, expected, refusal, served
from xdeepserve.cli import main
from xdeepserve.planner.sweep import measure, points, sweep
from xdeepserve.remote.children import ServerTask
from xdeepserve.remote.keeper import TRIES, Keeper
from xdeepserve.remote.on_ray import over

Capture = pytest.CaptureFixture[str]
PATIENCE_S = 120.0
FOUR = ("experts.routed_dies=2", "experts.copies=1", "experts.vacancies=1", "max_model_len=128", SHM)
SEATS = (0, 1, 3, 4)  # 2 is vacant


class There(NamedTuple):
    """What clients are told."""

    settings: list[str]
    address: str


@contextmanager
def cluster(*words: str) -> Iterator[Command]:
    command = Command("place", *words)
    try:
        yield command
        assert command.end() == 0, command.lines
    finally:
        command.process.kill()
        command.end()


@pytest.mark.campaign
def test_servers_are_placed_started_again_and_scaled() -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install '.[ray]'")
    settings = [word for each in FOUR for word in ("--set", each)]
    with cluster(*settings, "--port", "0") as first:
        there = There(settings, first.says("the monitor listens on"))
        for seat in SEATS:
            first.says(f"at seat {seat} is there, generation 1")
        with served(there) as client:  # type: ignore[arg-type]
            load = Load(client, expected(), 2)
            try:
                load.during(0.0, 4)
                os.kill(int(first.says("server 1 is process")), signal.SIGKILL)
                load.during(0.0, 4)  # others answer
                first.says("since another one ended (-9): server 1")
                first.says("at seat 1 is there, generation 2")
                load.during(0.0, 4)
                more = ("--ray", "auto", "--monitor", there.address, "--seats", "2")
                with cluster(*settings, *more) as second:
                    first.says("at seat 2 is there, generation 1")
                    load.during(0.0, 4)
                    second.process.send_signal(signal.SIGTERM)
                    first.says("at seat 2 is gone")
                assert any("server 2 has left" in line for line in second.lines), second.lines
                load.during(0.0, 4)
            finally:
                load.end()


@pytest.mark.campaign
def test_a_sweep_on_a_cluster_has_the_same_rows() -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install '.[ray]'")
    todo = points("tiny-r1", "colocated", {"dies": ["1", "2"]}, [1, 2, 3, 4, 5], [128, 256])
    assert len(todo) == 20
    assert [*over("local", measure, todo, 2)] == [*sweep(todo, 1)]


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["place", "--set", SHM]) == 2
    assert "place: error: a cluster needs Ray: pip install '.[ray]'\n" in capsys.readouterr().err
    assert main(["sweep", "--ray"]) == 2
    assert "sweep: error: a cluster needs Ray: pip install '.[ray]'\n" in capsys.readouterr().err


def test_refusals() -> None:
    assert "is a process with experts.transport shm or tcp" in refusal("place")
    assert "'x' is not a list of numbers like 32,64" in refusal("place", "--set", SHM, "--seats", "x")
    assert "there is no seat 9" in refusal("place", "--set", SHM, "--seats", "9")


def test_a_server_that_cannot_serve_is_given_up() -> None:
    """Its monitor is not there."""
    deployment = {"name": "eaas", "kind": "eaas"}
    task = ServerTask("tiny", "int8", deployment, "127.0.0.1:1", "unix:", "", 0)
    keeper = Keeper(msgspec.json.encode(task), "127.0.0.1")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not keeper.kept().is_given_up:
            assert time.monotonic() < deadline, keeper.kept()
            time.sleep(0.05)
        assert len(keeper.kept().ended) == TRIES
        assert 0 not in keeper.kept().ended
    finally:
        keeper.close()
