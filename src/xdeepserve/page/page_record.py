"""Record the page's data as lines of JSON in a file, to be opened on a page later (docs/page.md).

A server's record has the frames that a watcher would have seen. A run's record has a frame for each step of a
DP group, so equal runs make equal files.
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
    """A file of frames, written until it has `MAX_BYTES`. InputError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_full, self._nbytes = path, False, 0
        self.error: InputError | None = None  # why nothing more can be written
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise InputError(f"--record {path}: {error.strerror}") from None
        self.write(HELLO)

    def write(self, line: bytes) -> None:
        """Write a line, unless the file is full."""
        self.is_full |= self._nbytes + len(line) >= MAX_BYTES
        if not self.is_full:
            with self._noting():
                self._nbytes += self._file.write(line + b"\n")

    def close(self) -> None:
        with self._noting():
            self._file.close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Note a disk error and end the record; the engine goes on."""
        try:
            yield
        except OSError as error:
            if self.error is None:
                self.error = InputError(f"--record {self.path}: {error.strerror}: the record is cut off")
            self.is_full = True

    @contextlib.asynccontextmanager
    async def of_watch(self, watch: PodWatch) -> AsyncIterator[None]:
        """Write a watcher's frames until the end of the context. If the disk is full, the other watchers go
        on."""

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
    """Records a run step by step, as the only watcher of an engine.

    Create it and call `end` while the engine runs nothing.
    """

    def __init__(self, engine: Engine, file: PageRecord) -> None:
        self._engine, self._file, self._look, self._number = engine, file, Look(engine), 0
        self._look.begin()
        engine.observe(self._see)
        self._write()

    def _see(self, event: Observed) -> None:
        """Write a frame when a step ends: observers added earlier, as the look's own, have seen it by
        then."""
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
        """Write a last frame and stop watching; the engine is as if it had not been watched."""
        self._write()
        self._engine.ignore(self._see)
        self._look.end()
        self._file.close()
        if self._file.error is not None:
            raise self._file.error


@contextlib.contextmanager
def recording(engine: Engine, path: Path) -> Iterator[None]:
    """Record the steps of an engine in a file. InputError if the file cannot be written."""
    record = RunRecord(engine, PageRecord(path))
    try:
        yield
    finally:
        record.end()
