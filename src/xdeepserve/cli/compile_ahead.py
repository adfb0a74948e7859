"""Compiles the kernels that take longest, before they are needed: what a second process does for a command.

    python -m xdeepserve.cli.compile_ahead

Processes that need the same kernel compile it once and wait for each other (jit/compiling.py). So a command
that finds nothing in the cache goes on with what it needs first, and meets the rest when it comes to it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

MODULE = "xdeepserve.cli.compile_ahead"


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
    gate = (tables, rows, rows, f32, *sizes, t.boolean, t.float64, t.boolean)
    sample = (i32, rows, f32, i32, f64, f32, u64, u64, u64)
    return [(k.attention, attention), (k.gate, gate), (k.sample, sample)]


@contextlib.contextmanager
def helper() -> Iterator[subprocess.Popen[bytes]]:
    """That process, as long as somebody waits."""
    with subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def is_worth_it() -> bool:
    """Whether there is a core for it, and locks to wait by."""
    return sys.platform != "win32" and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


if __name__ == "__main__":
    for kernel, types in signatures():
        kernel.compile(types)
