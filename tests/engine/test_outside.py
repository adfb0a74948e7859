"""Expert servers in processes of their own: the same bits, by shared memory and by TCP, whoever goes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.outside import PATIENCE_S, expected, run, until
from tests.engine.owners import TRIED, fail
from xdeepserve import LLM
from xdeepserve.api.server.engine_metrics import EngineCollector
from xdeepserve.comm.services.layout import Presence
from xdeepserve.errors import DeploymentError, FieldError, RequestError, XDeepServeError
from xdeepserve.remote import outside_reach, watcher
from xdeepserve.remote.servers_outside import ServersOutside

COPIES = "experts.copies=1"
TWO = "experts.routed_dies=2"


@contextmanager
def outside(precision: str, *settings: str, transport: str = "shm") -> Iterator[tuple[LLM, ServersOutside]]:
    overrides = ["max_model_len=64", f"experts.transport={transport}", *settings]
    with LLM("tiny-random", "eaas", precision, overrides=overrides) as llm:
        (servers,) = llm.engine.plan.outside
        yield llm, servers
        llm.engine.check_integrity()
        assert not llm.engine.lost


def processes() -> set[int]:
    """Those on this computer that are a server's or a monitor's."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--of-parent" in words:
            found.add(int(path.parent.name))
    return found


def parent_of(pid: int) -> int:
    """Its parent process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def holders() -> set[int]:
    """Processes that have a server's buffer mapped."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            is_mapped = "memfd:xdeepserve expert server" in path.read_text()
        except OSError:
            continue
        if is_mapped:
            found.add(int(path.parent.name))
    return found


# ---- bits -------------------------------------------------------------------------------------------

WAYS: list[tuple[str, ...]] = [
    (),
    ("mtp=1", COPIES, TWO),
    ("experts.counts=[13,1,2]", "attention.dies=3", "services.batch_clients=2"),
]


@pytest.mark.always
@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("fp32", WAYS[2]),
        pytest.param("int8", WAYS[1], marks=pytest.mark.long),
        *(
            pytest.param(precision, settings, marks=pytest.mark.campaign)
            for precision, settings in (
                ("int8", WAYS[0]),  # by either transport, below, of fewer servers
                ("fp32", WAYS[0]),
                ("fp32", WAYS[1]),
                ("int8", WAYS[2]),
            )
        ),
    ],
)
def test_the_same_bits(precision: str, settings: tuple[str, ...]) -> None:
    with outside(precision, *settings) as (llm, _):
        assert run(llm) == expected(precision)
    assert expected(precision, "eaas") == expected(precision)


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp32", marks=pytest.mark.campaign)])
def test_bits_and_virtual_time_are_the_same_by_either_transport(precision: str) -> None:
    """However long servers and their messages take: events of the pod have one order."""
    times = set()
    for transport in ("shm", "tcp"):
        with outside(precision, TWO, "attention.microbatches=1", transport=transport) as (llm, _):
            assert run(llm) == expected(precision)
            times.add(llm.virtual_ns)
    assert len(times) == 1


# ---- who comes and goes -----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.campaign)])
def test_a_server_is_killed_and_another_comes(transport: str) -> None:
    three = ("experts.routed_dies=3", "attention.dies=2", COPIES)
    with outside("int8", *three, transport=transport) as (llm, servers):
        assert run(llm) == expected("int8")
        killed = servers.children.servers[1]
        killing = threading.Timer(0.3, killed.kill)
        killing.start()
        while killing.is_alive():
            assert run(llm) == expected("int8")
        killing.join()
        seats = servers.watcher.seats
        until(lambda: seats[1].presence == Presence.ABSENT, "nobody hears that it is gone")
        assert run(llm) == expected("int8")
        servers.add(1)
        until(lambda: seats[1].presence == Presence.THERE, "nobody hears that another one is there")
        assert seats[1].epoch == 2
        os.kill(servers.children.servers[0].pid, signal.SIGTERM)  # it leaves, now that 1 has what 0 has
        until(lambda: seats[0].presence == Presence.ABSENT, "it does not leave")
        assert servers.children.servers[0].wait(PATIENCE_S) == 0
        assert run(llm) == expected("int8")


def test_the_loss_of_an_only_server_is_said() -> None:
    overrides = ["max_model_len=64", "experts.transport=shm", TWO]
    with LLM("tiny-random", "eaas", "int8", overrides=overrides) as llm:
        run(llm)
        (servers,) = llm.engine.plan.outside
        servers.children.servers[1].kill()
        with pytest.raises(FieldError, match=r"expert server 1, field state .* no replica of physical"):
            run(llm)


def test_an_error_in_keeping_links_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["max_model_len=64", "experts.transport=shm", TWO]
    with LLM("tiny-random", "eaas", "int8", overrides=overrides) as llm:
        assert run(llm) == expected("int8")
        monkeypatch.setattr(watcher, "say", fail)
        until(lambda: llm.engine.unhealthy_reason, "nobody hears that links are kept no more")
        with pytest.raises(XDeepServeError, match=TRIED):
            run(llm)


def test_nothing_is_left_when_a_client_is_killed() -> None:
    """Neither processes nor shared memory."""
    script = (
        "import time; from xdeepserve import LLM\n"
        f"with LLM('tiny-random', 'eaas', overrides=['experts.transport=shm', '{TWO}']):\n"
        "    print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        mine = {pid for pid in processes() if parent_of(pid) == process.pid}
        assert len(mine) == 4  # a monitor, two servers, one of the shared expert
        assert len(holders() & {process.pid, *mine}) == 4  # the client, and three servers
        process.kill()
    until(lambda: not processes() & mine, "processes are left")
    assert not holders() & mine


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("experts.monitor=127.0.0.1:1",), "set experts.transport to shm or tcp"),
        (("experts.transport=shm", "experts.monitor=nowhere"), "experts.monitor must be HOST:PORT"),
        (("experts.transport=shm", "experts.redundant_slots=1"), "experts.copies are there from the start"),
        (("experts.transport=shm", "experts.routed_dies=17"), "17"),
        (("experts.transport=tcp", "experts.monitor=127.0.0.1:1"), "needs a token that all share"),
    ],
)
def test_what_cannot_be_is_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(DeploymentError) as refused:
        LLM("tiny-random", "eaas", "int8", overrides=["max_model_len=64", *settings])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_time_alone_has_no_processes() -> None:
    with pytest.raises(DeploymentError, match="timing-only runs compute nothing that processes"):
        LLM("tiny-random", "eaas", overrides=["experts.transport=shm"], timing_only=True)


def test_a_monitor_that_is_not_there() -> None:
    overrides = ["max_model_len=64", "experts.transport=shm", "experts.monitor=127.0.0.1:1"]
    with pytest.raises(XDeepServeError, match=r"the monitor at 127\.0\.0\.1:1 cannot be reached"):
        LLM("tiny-random", "eaas", "int8", overrides=overrides)


# ---- a server that hangs: stopped, not dead ---------------------------------------------------------

HANGS = (COPIES, TWO, "attention.dies=2", "attention.microbatches=1", "services.process_timeout_ms=300")


def until_all_are_there(llm: LLM) -> None:
    """A client begins when every expert has somebody; the rest of the servers come a little later."""
    until(lambda: [each.presence for each in llm.engine.servers()] == ["there"] * 4, "a server is not there")


def illness(llm: LLM) -> tuple[list[int], list[int]]:
    """Expert servers that `/health` names, as suspect and as lost; `/metrics` and `/admin/servers` agree.

    A server may answer between two of these questions: then they are asked again.
    """
    for _ in range(20):
        (te,) = llm.run(llm.engine.check_health())
        suspect, lost = list(te.suspect_servers), list(te.lost_servers)
        late = [each.server for each in llm.engine.servers() if each.is_late]
        metrics = EngineCollector("m", llm.engine.stats).collect()
        states = {
            sample.labels["state"]: sample.value
            for metric in metrics
            for sample in metric.samples
            if sample.name == "xdeepserve:expert_servers"
        }
        num_ill = len(suspect) + len(lost)
        wanted = {"healthy": te.num_servers - num_ill, "suspect": len(suspect), "lost": len(lost)}
        if (late, states) == (suspect, wanted):
            return suspect, lost
    raise AssertionError((late, states, suspect, wanted))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stopped_server_is_suspect_until_it_answers(transport: str) -> None:
    """Without a request in between: who asks for the health has its slots looked at."""
    with outside("int8", *HANGS, transport=transport) as (llm, servers):
        until_all_are_there(llm)
        assert run(llm) == expected("int8")
        until(lambda: illness(llm) == ([], []), "a server is late that was only slow")
        process = servers.children.servers[1]
        process.send_signal(signal.SIGSTOP)
        assert run(llm) == expected("int8")
        assert illness(llm) in (([1], []), ([], [1]))
        process.send_signal(signal.SIGCONT)
        until(lambda: illness(llm) == ([], []), "it is not said to be well again")
        assert run(llm) == expected("int8")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_server_that_hangs_costs_nothing_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """It is masked until it goes on, in the place that it had. After the first request nobody waits for a
    look at it: that would take an hour here."""
    with outside("int8", *HANGS, transport=transport) as (llm, servers):
        until_all_are_there(llm)
        assert run(llm) == expected("int8")
        process = servers.children.servers[0]
        process.send_signal(signal.SIGSTOP)
        assert run(llm) == expected("int8")  # by its clients' own patience
        assert illness(llm) in (([0], []), ([], [0]))  # the monitor may have noticed, too
        monkeypatch.setattr(outside_reach, "LOOK_S", 3600.0)
        assert run(llm) == expected("int8")
        until(lambda: servers.watcher.seats[0].presence == Presence.LOST, "it is not listed as lost")
        assert run(llm) == expected("int8")
        process.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        until(lambda: servers.watcher.seats[0].presence == Presence.THERE, "it is not taken back")
        assert run(llm) == expected("int8")
        assert not any(link.is_late for link in servers.watcher.links.values()), "it answers again"
        until(lambda: illness(llm) == ([], []), "it is not said to be well again")
        assert servers.watcher.seats[0].epoch == 1


def test_a_monitor_that_hangs_is_not_missed_and_servers_are_not_for_the_pod_to_move() -> None:
    with outside("int8", *HANGS, transport="tcp") as (llm, servers):
        for ask in (lambda: llm.add_server(), lambda: llm.remove_server("te", 0)):
            with pytest.raises(RequestError, match="come by xdeepserve expert-server"):
                ask()
        with pytest.raises(DeploymentError, match="there is one TE"):
            llm.add_te()
        until_all_are_there(llm)
        assert servers.children.monitor is not None
        servers.children.monitor.send_signal(signal.SIGSTOP)
        assert [run(llm) for _ in range(2)] == [expected("int8")] * 2
        servers.children.monitor.send_signal(signal.SIGCONT)


@pytest.mark.campaign
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_hundred_stopped_servers(transport: str) -> None:
    """One is stopped and goes on, then another: at rest, and while requests are served."""
    draw = random.Random(8)
    with outside("int8", *HANGS, transport=transport) as (llm, servers):
        for _ in range(100):
            process = servers.children.servers[draw.choice([*servers.children.servers])]
            timers = [
                threading.Timer(at, process.send_signal, [what])
                for at, what in ((draw.choice([0.0, 0.01, 0.05]), signal.SIGSTOP), (0.5, signal.SIGCONT))
            ]
            for timer in timers:
                timer.start()
            assert run(llm) == expected("int8")
            for timer in timers:
                timer.join()
            assert run(llm) == expected("int8")
        assert all(process.poll() is None for process in servers.children.servers.values())
        until(lambda: illness(llm) == ([], []), "a server is said to be ill that goes on")
