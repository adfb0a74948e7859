"""What a command is doing while there is no answer yet: on stderr, with a terminal or without."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from xdeepserve.cli import compile_ahead

EVERY_S = 5.0  # of wall time: without a terminal, a line so often


class Status:
    """The state of some work, in a line: a share or a row that has ended, and kernels being compiled."""

    def __init__(self, text: str) -> None:
        self.text, self.detail = text, ""
        self.kernels: list[str] = []  # compiled since the beginning, the current one included
        self.is_compiling = False
        self._started = time.monotonic()

    def progress(self, done: int, total: int) -> None:
        """So much of it has been done."""
        self.detail = f"{100 * done // max(total, 1)} %"

    def row(self, text: str) -> None:
        """A row of the answer is there: without a terminal a line, of which others say the first word."""
        self.detail = text
        if not sys.stderr.isatty():
            print(f"{self.text}: {text}", file=sys.stderr, flush=True)
            self.detail = f"{re.split(r',? ', text, maxsplit=1)[0]} done"

    def line(self) -> str:
        """Where the work stands."""
        parts = [self.text + (f": {self.detail}" if self.detail else "")]
        if self.is_compiling:
            parts.append(f"compiling kernels, once ({len(self.kernels)}: {self.kernels[-1]})")
        return f"{', '.join(parts)} ... {time.monotonic() - self._started:.0f} s"


@contextlib.contextmanager
def working(text: str, is_quiet: bool = False, runs_int8: bool = False) -> Iterator[Status]:
    """Show on stderr where work stands: a status line on a terminal, else a line every few seconds.

    `is_quiet`: nothing without a terminal, for those who read both streams. `runs_int8`: somebody waits for a
    model of that recipe, so two processes compile kernels.
    """
    status, is_done = Status(text), threading.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compiling(status, runs_int8))
        if sys.stderr.isatty():
            from rich.console import Console

            shown = stack.enter_context(Console(stderr=True).status(status.line()))

            def show() -> None:
                while not is_done.wait(0.2):
                    shown.update(status.line())
        elif is_quiet:
            yield status
            return
        else:

            def show() -> None:
                while not is_done.wait(EVERY_S):
                    print(status.line(), file=sys.stderr, flush=True)

        thread = threading.Thread(target=show, name="status line", daemon=True)
        thread.start()
        try:
            yield status
        finally:
            is_done.set()
            thread.join()


@contextlib.contextmanager
def _compiling(status: Status, runs_int8: bool) -> Iterator[None]:
    """Note the kernels that Numba compiles meanwhile; those in its cache are not compiled."""
    from numba.core import event

    stack = contextlib.ExitStack()

    class Listener(event.Listener):
        """Counts kernels, which may compile others within them."""

        depth = 0

        def on_start(self, happens: Any) -> None:
            """A function is about to be compiled."""
            self.depth += 1
            if self.depth == 1:
                if runs_int8 and not status.kernels and compile_ahead.is_worth_it():
                    stack.enter_context(compile_ahead.helper())
                status.is_compiling = True
                status.kernels.append(happens.data["dispatcher"].py_func.__name__)

        def on_end(self, happens: Any) -> None:
            """It has been."""
            self.depth -= 1
            status.is_compiling = self.depth > 0

    with stack, event.install_listener("numba:compile", Listener()):
        yield
