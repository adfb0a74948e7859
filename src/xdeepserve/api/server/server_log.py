"""The log of a server: events of its pod, refused requests and, if wanted, every request.

Lines go to the logger "xdeepserve.api". `log_to` writes them from a thread of its own, so a slow reader
delays no request: lines are dropped and counted instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from xdeepserve.api.answers.generation import GENERATION
from xdeepserve.api.server.endpoint import REQUEST_ID
from xdeepserve.api.server.http_errors import REFUSAL
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.engine.dp.events import DiesLost, Event, Observed, TEChanged, named
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.request import AsyncEngine

REFUSALS_PER_S = 5  # lines; the others of a second are counted
MAX_CHARS = 400  # of a line
WAITING_LINES = 1000  # that have not been written yet
LAST_WORDS_S = 1.0  # that the end waits for them

log = logging.getLogger("xdeepserve.api")


class PodLog:
    """Observer of an engine (engine/dp/events.py) that logs a line when dies or TEs come, go or recover."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def see(self, event: Observed) -> None:
        """Log an event of dies or TEs; ignore other events, and what the line of a lost TE says."""
        if isinstance(event, Event | DiesLost) or not event.said:
            return
        text, at_s = event.said, self._engine.plan.pod.clock.now / 1e9
        if isinstance(event, TEChanged):
            has_dies = event.life in ("ready", "loading")
            text = self._loss(event.te) if event.is_loss else f"{text}{self._on_dies(event.te) * has_dies}"
        log.log(logging.WARNING if event.is_loss else logging.INFO, "%s (pod at %.6f s)", text, at_s)

    def _loss(self, te: str) -> str:
        """Describe the loss of a TE: its lost dies, the reason, and the consequence."""
        engine, plan = self._engine, self._engine.plan
        dies = next((each.every_die for each in plan.tes if each.sizes.place.name == te), ())
        lost = sorted(engine.je.tell.lost.intersection(dies))
        verb = "is" if len(lost) == 1 else "are"
        what = f"{named(lost)} of {te} {verb} lost" if lost else f"{te} is lost"
        if engine.unhealthy_reason is not None and te != engine.failed_te:
            return f"{what if lost else f'{te} ends'}: no TE can serve any more"
        why = engine.unhealthy_reason or str(engine.lost.get(te, "all TEs are started anew"))
        if engine.unhealthy_reason is not None:
            now = "no TE can serve, and requests end with an error"
        elif engine.je.unplaced.is_open:
            now = "another TE comes in its place, and requests go on or wait for it"
        else:
            now = "others go on with its requests"
        return f"{what}; the TE is given up, {now}: {why}"

    def _on_dies(self, te: str) -> str:
        dies = next((each.every_die for each in self._engine.plan.tes if each.sizes.place.name == te), ())
        return f" on {named(dies)}" if dies else ""


@contextlib.contextmanager
def pod_logged(engine: AsyncEngine) -> Iterator[None]:
    """Log the events of an engine's pod, if it has one."""
    if not isinstance(engine, Engine):
        yield
        return
    observer = PodLog(engine).see
    engine.observe(observer)
    try:
        yield
    finally:
        engine.ignore(observer)


class RefusalLog:
    """Log of refused requests, a few lines each second: a flood of requests is no flood of lines."""

    def __init__(self) -> None:
        self._num = 0

    def say(self, line: str) -> None:
        """Log a refused request, or only count it."""
        if not self._num:
            asyncio.get_running_loop().call_later(1.0, self._end_second)
        self._num += 1
        if self._num <= REFUSALS_PER_S:
            log.info("%s", line)

    def _end_second(self) -> None:
        more, self._num = self._num - REFUSALS_PER_S, 0
        if more > 0:
            log.info("%d more requests were refused within a second", more)


def log_middleware(options: ServerOptions) -> Middleware:
    """Log refused and failed requests, and with `log_requests` all of them when they have ended."""
    refusals = RefusalLog()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        began, status = time.monotonic(), "aborted"
        try:
            response = await handler(request)
            if request.transport is not None and not request.transport.is_closing():
                status = str(response.status)
            return response
        finally:
            line = f"{request.method} {request.rel_url.raw_path} {status}"
            if (detail := request.get(REFUSAL)) is not None:
                refusals.say(f"{line} {detail.code or detail.type}: {detail.message} ({request[REQUEST_ID]})")
            if options.log_requests:
                tokens, virtual_ms = 0, 0.0
                if (generation := request.get(GENERATION)) is not None:
                    tokens = generation.num_generated
                    virtual_ms = max(0, generation.last_ns - generation.began_ns) / 1e6
                wall_ms = 1000 * (time.monotonic() - began)
                times = f"{wall_ms:.1f} ms, {virtual_ms:.3f} ms virtual"
                log.info("%s, %d tokens, %s (%s)", line, tokens, times, request[REQUEST_ID])

    return note


class _LineFormatter(logging.Formatter):
    """Formats time of day and message, without control characters that a client may have sent."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(char if char.isprintable() else " " for char in line[:MAX_CHARS])


class LineWriter(logging.Handler):
    """Log handler for passing lines to a writing thread. It neither blocks nor raises."""

    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__()
        self.setFormatter(_LineFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._write, self._num_left_out = write, 0
        self._lines: queue.Queue[str | None] = queue.Queue(WAITING_LINES)
        self._thread = threading.Thread(target=self._run, name="server log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Exception:  # a full queue, or a message that cannot be made
            self._num_left_out += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            left_out, self._num_left_out = self._num_left_out, 0
            more = f"\n{left_out} lines were left out: they were not read in time" if left_out else ""
            with contextlib.suppress(OSError, ValueError):
                self._write(f"{line}{more}\n")

    def close(self) -> None:
        """Write the remaining lines, for at most `LAST_WORDS_S` seconds, and close."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(LAST_WORDS_S)
        super().close()


@contextlib.contextmanager
def log_to(write: Callable[[str], object], level: int) -> Iterator[None]:
    """Write the package's log, from a level on, with the time of day."""
    logger, writer = logging.getLogger("xdeepserve"), LineWriter(write)
    before = logger.level, logger.propagate
    logger.addHandler(writer)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(writer)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        writer.close()
