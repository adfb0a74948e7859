"""Progress of long work: one line on stderr once two seconds have passed, on a terminal or without one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from xdeepserve import compile_ahead

AFTER_S = 2.0  # of wall time: work that ends sooner shows nothing
EVERY_S = 5.0  # without a terminal, a line so often
now = time.monotonic  # tests bring a clock of their own


class Status:
    """The state of some work, in a line: how far it is, and which kernels are being compiled."""

    def __init__(self, text: str, is_quiet: bool = False, runs_int8: bool = False) -> None:
        self.text, self.is_quiet, self.runs_int8 = text, is_quiet, runs_int8
        self.detail: str | Callable[[], str] = ""
        self.kernels: list[str] = []  # compiled since the beginning, the current one included
        self.is_compiling = False
        self._started = now()

    @property
    def seconds(self) -> float:
        """Wall time since the work began."""
        return now() - self._started

    def progress(self, done: int, total: int) -> None:
        """Show which share of the work has been done."""
        self.detail = f"{100 * done // max(total, 1)} %"

    def row(self, text: str) -> None:
        """Print a row of the answer if there is no terminal; the line then names the row's first word."""
        self.detail = text
        if not sys.stderr.isatty():
            print(f"{self.text}: {text}", file=sys.stderr, flush=True)
            self.detail = f"{re.split(r',? ', text, maxsplit=1)[0]} done"

    def line(self) -> str:
        """Where the work stands; without a detail of its own, where the work within it stands."""
        detail = self._shown_detail()
        if not detail and (inner := next(iter(_active[::-1]), self)) is not self:
            detail = ", ".join(filter(None, (inner.text[:1].lower() + inner.text[1:], inner._shown_detail())))
        parts = [self.text + (f": {detail}" if detail else "")]
        if self.is_compiling:
            parts.append(f"compiling kernels, once ({len(self.kernels)}: {self.kernels[-1]})")
        elif self.kernels:
            parts.append(f"kernels compiled: {len(self.kernels)}")
        return f"{', '.join(parts)} ... {self.seconds:.0f} s"

    def _shown_detail(self) -> str:
        return self.detail if isinstance(self.detail, str) else self.detail()


_lock = threading.Lock()
_active: list[Status] = []  # work that is being done, the outermost first: its line is the one that is shown
_while_active = contextlib.ExitStack()


def _forget() -> None:
    """Forget the work of the process that forked this one: the threads that did it have not come along."""
    global _lock, _while_active
    _lock, _while_active = threading.Lock(), contextlib.ExitStack()
    _active.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def working(text: str, is_quiet: bool = False, runs_int8: bool = False) -> Iterator[Status]:
    """Show on stderr where work stands: a line that changes on a terminal, else a line every few seconds.

    Work within other work is shown in the outer one's line. `is_quiet` shows nothing. `runs_int8`: somebody
    waits for a model of that recipe, so a second process compiles kernels ahead.
    """
    status = Status(text, is_quiet, runs_int8)
    with _lock:
        _active.append(status)
        if len(_active) == 1:
            _while_active.enter_context(_noting_kernels())
            if not is_quiet:
                _while_active.enter_context(_showing())
    try:
        yield status
    finally:
        with _lock:
            _active.remove(status)
            if not _active:
                _while_active.close()


@contextlib.contextmanager
def _showing() -> Iterator[None]:
    """Have a thread show the outermost work."""
    is_done = threading.Event()
    show = _show_on_terminal if sys.stderr.isatty() else show_lines
    thread = threading.Thread(target=show, args=(is_done.wait,), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _line_to_show() -> str | None:
    """The line of the outermost work, once that has taken long."""
    status = next(iter(_active), None)
    return status.line() if status is not None and status.seconds >= AFTER_S else None


def show_lines(wait: Callable[[float], bool]) -> None:
    """Print a line now and then, until `wait(seconds)` says that the work is done."""
    pause = AFTER_S
    while not wait(pause):
        pause = EVERY_S
        if (line := _line_to_show()) is not None:
            print(line, file=sys.stderr, flush=True)


def _show_on_terminal(wait: Callable[[float], bool]) -> None:
    """Keep one line up to date, until `wait(seconds)` says that the work is done."""
    if wait(AFTER_S):
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots", style="status.spinner")
    # What is printed meanwhile goes above the line, but never to the terminal if stdout is a file.
    with Live(spinner, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()):
        while True:
            spinner.update(text=Text(_line_to_show() or ""))
            if wait(0.2):
                return


@contextlib.contextmanager
def _noting_kernels() -> Iterator[None]:
    """Note the kernels that Numba compiles meanwhile; those in its cache are not compiled."""
    from numba.core import event

    class Listener(event.Listener):
        """Counts kernels, which may compile others within them."""

        depth = 0

        def on_start(self, happens: Any) -> None:
            """A function is about to be compiled."""
            self.depth += 1
            if self.depth == 1:
                if any(status.runs_int8 for status in _active):
                    compile_ahead.begin()
                for status in _active:
                    status.kernels.append(happens.data["dispatcher"].py_func.__name__)
                    status.is_compiling = True

        def on_end(self, happens: Any) -> None:
            """The function has been compiled."""
            self.depth -= 1
            for status in _active:
                status.is_compiling = self.depth > 0

    with event.install_listener("numba:compile", Listener()):
        yield
