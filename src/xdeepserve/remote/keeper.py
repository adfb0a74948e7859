"""Keeps one expert server running on the computer where it is: started, and again when it has ended.

The process is a child, which ends with whoever keeps it, so that a keeper that is placed anew elsewhere
leaves nobody behind. At its seat it takes the next epoch, as any server that comes back.
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
    """What became of a server: its process, the codes with which those before ended, whether that is all."""

    pid: int
    ended: list[int]
    is_given_up: bool


class Keeper:
    """Keeps the server at `task.seat` running. `host` is where that listens, with the transport tcp."""

    def __init__(self, task: bytes, host: str) -> None:
        self._task, self._host = msgspec.json.decode(task, type=ServerTask), host
        self._children, self._ends, self._lock = Children(), threading.Event(), threading.Lock()
        self._kept = Kept(0, [], False)
        self._start()
        threading.Thread(target=self._keep, name="keeper", daemon=True).start()

    def kept(self) -> Kept:
        """What has become of the server until now."""
        return self._kept

    def leave(self, patience_s: float) -> bool:
        """Have the server leave, as SIGTERM does, and start no other; whether it has gone within so many
        seconds. Its monitor may refuse, and then it stays, and is kept."""
        self._ends.set()
        os.kill(self._kept.pid, signal.SIGTERM)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._ends.clear()
            return False
        return True

    def close(self) -> None:
        """End it. Harmless when repeated."""
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
        """Look, again and again."""
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
