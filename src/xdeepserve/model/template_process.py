"""Chat templates rendered in a process of their own, within limits of time, memory and length."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from typing import Any

from xdeepserve.errors import RequestError
from xdeepserve.forks import close_in_child
from xdeepserve.model.template_worker import TEXT, read_frame, write_frame

MAX_SECONDS = 5.0  # of wall time for one chat; the shipped templates take a few milliseconds
START_SECONDS = 60.0  # for the process itself to come up, on a busy machine
MAX_CHARS = 16 << 20


class TemplateProcess:
    """Renders chats in a child process, in order.

    The process starts with the first chat, and anew after it was killed, or in a forked child of this one.
    """

    def __init__(self, max_seconds: float = MAX_SECONDS, max_chars: int = MAX_CHARS) -> None:
        self._max_seconds, self._max_chars = max_seconds, max_chars
        self._begin()

    def _begin(self) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def render(self, source: str, origin: str, variables: dict[str, Any]) -> str:
        """Render a template as text. Raises RequestError if it refuses, takes too long or wants too much."""
        if self._owner != os.getpid():
            self._begin()  # the process and the lock are those of the parent's threads
        with self._lock:
            self._start()
            found = self._ask(pickle.dumps((source, origin, self._max_chars, variables)), self._max_seconds)
            if found is None:
                self._kill()
                raise RequestError(
                    f"the chat template took longer than {self._max_seconds:g} s for these messages, "
                    "or more memory than it may",
                    param="messages",
                )
        text = found[1:].decode("utf-8", "surrogatepass")
        if found[:1] != TEXT:
            raise RequestError(text, param="messages")
        return text

    def close(self) -> None:
        """End the process, except in a forked child, whose parent has it. Harmless when repeated."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._kill()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "xdeepserve.model.template_worker"]
        # A session of its own, so that an interrupt at the terminal is the parent's alone to handle.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        close_in_child(self._process.stdin)
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self._process, self._answers), daemon=True).start()
        self._ask(pickle.dumps(("", "", 0, {"messages": []})), START_SECONDS)

    def _ask(self, request: bytes, seconds: float) -> bytes | None:
        """Return the process's answer; None if there is none in time."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, request)
            return self._answers.get(timeout=seconds)
        except (OSError, queue.Empty):
            return None

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def _listen(process: subprocess.Popen[bytes], answers: queue.SimpleQueue[bytes | None]) -> None:
    """Hand on the answers of a process, and the news of its end."""
    assert process.stdout is not None
    try:
        while (frame := read_frame(process.stdout)) is not None:
            answers.put(frame)
    except (OSError, ValueError):  # closed in the meantime
        pass
    answers.put(None)
