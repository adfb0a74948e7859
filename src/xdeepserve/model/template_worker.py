"""Child process for rendering chat templates, which may be killed at any moment.

A template is foreign code. A sandbox keeps it from the machine, but not from looping for ever or from making
gigabytes of text; only a process of its own can be stopped. `python -m xdeepserve.model.template_worker`
reads requests from its standard input and writes answers to its standard output, until the input ends.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import sys
from typing import IO

from xdeepserve.errors import XDeepServeError
from xdeepserve.model.chat_template import ChatTemplate

MAX_MEMORY = 1 << 30  # bytes of address space beside what Python had at the start
LENGTH = struct.Struct("<Q")
TEXT, REFUSAL = b"t", b"r"  # first byte of an answer; the rest is UTF-8


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the next frame; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    frame = stream.read(size)
    return frame if len(frame) == size else None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write a frame: first the length, then the bytes."""
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def limit_memory() -> None:
    """Limit the process's memory, so that Python raises MemoryError where a template wants too much. Not
    every system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))


def answer(request: bytes, templates: dict[str, ChatTemplate]) -> bytes:
    """Render a template: (source, origin, most characters, variables), pickled by the parent."""
    source, origin, max_chars, variables = pickle.loads(request)
    try:
        if source not in templates:
            templates[source] = ChatTemplate(source, origin)
        text = templates[source].render(max_chars=max_chars, **variables)
        return TEXT + text.encode("utf-8", "surrogatepass")
    except XDeepServeError as error:
        return REFUSAL + str(error).encode("utf-8", "replace")


def main() -> None:
    """Answer requests until the parent process has gone."""
    limit_memory()
    templates: dict[str, ChatTemplate] = {}
    while (request := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, answer(request, templates))


if __name__ == "__main__":
    main()
