"""Files that a forked child closes at once.

A child of `os.fork()` has copies of all open files, and none of the threads that used them. As long as it
has a copy, a lock stays taken, and a process that waits for the end of a pipe or of a connection hears
nothing when the parent ends. Therefore the child closes its copies before anything else runs there.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """Open file, pipe or socket."""

    def close(self) -> None: ...


_kept: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_child(file: Closable) -> None:
    """Close a file in every child that this process forks from now on; the file here stays open."""
    _kept.add(file)


def _let_go() -> None:
    for file in list(_kept):
        with contextlib.suppress(OSError, ValueError):  # closed here before
            file.close()
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
