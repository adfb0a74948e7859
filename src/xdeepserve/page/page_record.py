"""A record: what the page draws, as lines of JSON in a file, to be opened on a page later (docs/page.md).

A server's record has what a watcher would have seen. One of a run has a frame for each step of a DP group, so
equal runs make equal files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from xdeepserve.engine.dp.events import Observed, StepEnded
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import InputError
from xdeepserve.page.watch import HELLO, Look, PodWatch

MAX_BYTES = 64 << 20

log = logging.getLogger("xdeepserve.page")


class PageRecord:
    """A file that frames are written to, until it has `MAX_BYTES`. InputError where none can be written."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_full, self._nbytes = path, False, 0
        self.error: InputError | None = None  # why nothing more can be written
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise InputError(f"--record {path}: {error.strerror}") from None
        self.write(HELLO)

    def write(self, line: bytes) -> None:
        """One more line, unless the file is full."""
        self.is_full |= self._nbytes + len(line) >= MAX_BYTES
        if not self.is_full:
            with self._noting():
                self._nbytes += self._file.write(line + b"\n")

    def close(self) -> None:
        with self._noting():
            self._file.close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Who is watched goes on if the disk is full; the record ends."""
        try:
            yield
        except OSError as error:
            if self.error is None:
                self.error = InputError(f"--record {self.path}: {error.strerror}: the record is cut off")
            self.is_full = True

    @contextlib.asynccontextmanager
    async def of_watch(self, watch: PodWatch) -> AsyncIterator[None]:
        """Write what a watcher sees, until the end of the context. If the disk is full, others go on."""

        async def write() -> None:
            async with contextlib.aclosing(watch.frames()) as frames:
                async for frame in frames:
                    if frame:
                        self.write(frame)
                    if self.is_full:
                        break
            if self.error is not None:
                log.error("%s", self.error)

        task = asyncio.create_task(write(), name="record")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.close()


class RunRecord:
    """Records a run, step by step: the only watcher of an engine. Begin and `end` when nothing runs there."""

    def __init__(self, engine: Engine, file: PageRecord) -> None:
        self._engine, self._file, self._look, self._number = engine, file, Look(engine), 0
        self._look.begin()
        engine.observe(self._see)
        self._write()

    def _see(self, event: Observed) -> None:
        """Whoever else looks has seen it by now."""
        if isinstance(event, StepEnded) and not self._file.is_full:
            self._write()

    def _write(self) -> None:
        self._look.look()
        frames, step = self._look.frames, self._look.step
        if frames.number > self._number:
            self._file.write(frames.since(self._number))
            self._number = frames.number
        if not step.wants:
            step.want()

    def end(self) -> None:
        """A last frame; the engine is as if nobody had watched."""
        self._write()
        self._engine.ignore(self._see)
        self._look.end()
        self._file.close()
        if self._file.error is not None:
            raise self._file.error


@contextlib.contextmanager
def recording(engine: Engine, path: Path) -> Iterator[None]:
    """Record the steps of an engine in a file. InputError where it cannot be written."""
    record = RunRecord(engine, PageRecord(path))
    try:
        yield
    finally:
        record.end()
