"""Compile the kernels that take longest before they are needed, in a second process.

    python -m xdeepserve.compile_ahead

Processes that need the same kernel compile it once and wait for each other (jit/compiling.py). So a process
that finds nothing in the cache goes on with what it needs first, and meets the rest when it comes to it.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from typing import Any

MODULE = "xdeepserve.compile_ahead"
begun: list[subprocess.Popen[bytes]] = []


def signatures() -> list[tuple[Any, tuple[Any, ...]]]:
    """Kernels, and the types that the int8 recipe calls them with; in the order of their use."""
    from numba import types as t

    from xdeepserve.model import kernels as k

    def of(element: Any, ndim: int) -> Any:
        return t.Array(element, ndim, "C")

    i32, f32, f64, u64 = (of(each, 1) for each in (t.int32, t.float32, t.float64, t.uint64))
    rows, tables = of(t.float32, 2), of(t.int32, 2)
    caches = of(t.uint8, 5), rows, of(t.float32, 5)
    sizes = t.int64, t.int64
    attention = (rows, rows, rows, *sizes, i32, i32, *caches, tables, t.float64, t.boolean, f32, *sizes)
    gate = (tables, rows, rows, f32, *sizes, t.boolean, t.float64, t.int64, t.boolean)
    sample = (i32, rows, f32, i32, f64, f32, u64, u64, u64)
    return [(k.attention, attention), (k.gate, gate), (k.sample, sample)]


def begin() -> None:
    """Start the second process, if there is a core for it; a process starts one at most."""
    if not begun and is_worth_it():
        nothing, command = subprocess.DEVNULL, [sys.executable, "-m", MODULE]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing))
        atexit.register(end)


def end() -> None:
    """End the second process, if there is one: this one ends, and needs no more kernels."""
    for process in begun:
        process.kill()
        process.communicate()
    begun.clear()


def is_worth_it() -> bool:
    """Whether there is a core for it, and locks to wait by."""
    return sys.platform != "win32" and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


def _end_with_the_first() -> None:
    """End this process when the first one has ended, however it did: its end of the pipe closes then."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    for kernel, types in signatures():
        kernel.compile(types)
