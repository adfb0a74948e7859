"""Keeps an expert server running on its computer: starts it, and starts it again when it has ended.

The server is a child process and ends with its keeper. A keeper that is placed anew on another computer
therefore leaves no process behind. The new server takes the next epoch of its seat, as any server that comes
back.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time

import msgspec

from xdeepserve.remote.children import Children, ServerTask

CHECK_S = 0.2
SOON_S = 30.0  # who ends sooner has not served
TRIES = 5  # of those in a row, and it is given up


class Kept(msgspec.Struct):
    """State of a kept server: process id, exit codes of earlier processes, whether it is given up, and the
    error of the keeper by which it is."""

    pid: int
    ended: list[int]
    is_given_up: bool
    error: str = ""


class Keeper:
    """Keeps the server at `task.seat` running.

    `host` is the host where the server listens with transport tcp.
    """

    def __init__(self, task: bytes, host: str) -> None:
        self._task, self._host = msgspec.json.decode(task, type=ServerTask), host
        self._children, self._ends, self._lock = Children(), threading.Event(), threading.Lock()
        self._kept = Kept(0, [], False)
        self._start()
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def kept(self) -> Kept:
        """Return the server's current state."""
        return self._kept

    def leave(self, patience_s: float) -> bool:
        """Make the server leave, as SIGTERM does, and start no other. Returns whether it has gone within
        `patience_s` seconds. If the monitor refuses, the server stays and is kept running."""
        self._ends.set()
        os.kill(self._kept.pid, signal.SIGTERM)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._ends.clear()
            return False
        return True

    def close(self) -> None:
        """End the server. Harmless when repeated."""
        self._ends.set()
        with self._lock:
            self._children.close()

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        (process,) = self._children.servers.values()
        return process

    def _start(self) -> None:
        is_tcp = self._task.address.startswith("tcp")
        self._task.address = f"tcp:{self._host}:0" if is_tcp else f"unix:xdeepserve-{secrets.token_hex(8)}"
        self._children.start_server(self._task)
        self._begun = time.monotonic()
        self._kept = Kept(self._process.pid, self._kept.ended, False)

    def _keep(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            self._kept = Kept(self._kept.pid, self._kept.ended, True, repr(error))

    def _keep_running(self) -> None:
        """Check the process every `CHECK_S` seconds and start another when it has ended."""
        in_a_row = 0
        while True:
            time.sleep(CHECK_S)
            with self._lock:
                if not self._children.servers:
                    return
                if self._ends.is_set() or (code := self._process.poll()) is None:
                    continue
                in_a_row = in_a_row + 1 if time.monotonic() - self._begun < SOON_S else 1
                self._kept = Kept(self._kept.pid, [*self._kept.ended, code], in_a_row >= TRIES)
                if self._kept.is_given_up:
                    return
                self._start()
