"""Processes of our own: a monitor and servers that end when this process does, however it ends.

Each child holds one end of a pipe and exits when the other end is closed. The system closes it even when the
parent is killed. The child's task also goes through the pipe, so no token appears on a command line.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.forks import close_in_child

START_S = 60.0  # until the monitor says where it is
END_S = 10.0


class ServerTask(msgspec.Struct):
    """Task of a server process, sent through a pipe.

    `deployment` holds the builtins of a `Deployment`, for JSON.
    """

    model: str
    precision: str
    deployment: dict[str, Any]
    monitor: str
    address: str
    token: str
    seat: int | None = None
    name: str | None = None


class MonitorTask(msgspec.Struct):
    """Task of a monitor's process, sent through a pipe."""

    token: str
    host: str = "127.0.0.1"
    port: int = 0
    beat_s: float = 0.5
    lost_beats: int = 10
    is_quiet: bool = False


class Children:
    """Processes of a monitor and of servers, started by an engine."""

    def __init__(self) -> None:
        self.monitor: subprocess.Popen[bytes] | None = None
        self.servers: dict[int, subprocess.Popen[bytes]] = {}  # by seat, the latest

    def start_monitor(self, task: MonitorTask) -> str:
        """Start the monitor's process and return its address. Raises XDeepServeError if the process does not
        start."""
        self.monitor = process = _spawn("monitor", task, subprocess.PIPE)
        assert process.stdout is not None
        if select.select([process.stdout], [], [], START_S)[0]:
            words = process.stdout.readline().decode().split()
            if words:
                return words[-1]
        raise XDeepServeError(f"the monitor's process has not started: exit code {process.poll()}")

    def start_server(self, task: ServerTask) -> None:
        """Start a server process for a seat; the process itself registers with the monitor."""
        assert task.seat is not None
        if task.seat in self.servers:
            _end([self.servers.pop(task.seat)])
        self.servers[task.seat] = _spawn("expert-server", task, subprocess.DEVNULL)

    def check(self) -> None:
        """Raise XDeepServeError if a process that was started here has ended."""
        for seat, process in self.servers.items():
            if process.poll() is not None:
                raise XDeepServeError(f"the process of expert server {seat} has ended: {process.returncode}")
        if self.monitor is not None and self.monitor.poll() is not None:
            raise XDeepServeError(f"the process of the monitor has ended: {self.monitor.returncode}")

    def close(self) -> None:
        """End all processes, and wait until they have ended. Harmless when repeated."""
        _end([*self.servers.values(), *([self.monitor] if self.monitor is not None else [])])
        self.servers.clear()
        self.monitor = None


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the pipes of processes, and wait until they have ended."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _spawn(command: str, task: msgspec.Struct, stdout: int) -> subprocess.Popen[bytes]:
    words: Sequence[str] = [sys.executable, "-m", "xdeepserve", command, "--of-parent"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=stdout, start_new_session=True)
    assert process.stdin is not None
    close_in_child(process.stdin)  # else the process would outlive this one beside a forked child
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    process.stdin.flush()
    return process
