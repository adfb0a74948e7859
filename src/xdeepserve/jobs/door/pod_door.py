"""Door of a pod: job executors (JEs) in other processes reach its engines by a Unix socket (xDeepServe 5.1).

The output of a request is kept until its JE gives it up. If a JE is lost, its requests go on for KEEP_S.
Whoever asks for one of them within that time gets all its output, in the same pieces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from aiohttp import web

from xdeepserve.api.server.served_models import ServedModels
from xdeepserve.api.server.server import bind_unix, remove_socket
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.errors import ProtocolError, XDeepServeError, as_named
from xdeepserve.jobs.pod_frames import (
    AcceptedFrame,
    AskFrame,
    BegunFrame,
    DeltaFrame,
    EndedFrame,
    FrameChannel,
    FromJE,
    JoinFrame,
    LeaveFrame,
    PodState,
    RoomFrame,
    SharedModel,
    SubmitFrame,
    ToldFrame,
    encoded,
    failed,
)

KEEP_S = 20.0  # that requests of a lost JE wait for another one; a door looks for one for 10 s
STATE_S = 0.5  # between two reports to all JEs

log = logging.getLogger("xdeepserve.api")


class JECaller:
    """A job executor that is connected: its number, and why its present requests have no room, if so."""

    def __init__(self, channel: FrameChannel) -> None:
        self.channel = channel
        self.je = 0
        self.refusal: XDeepServeError | None = None


class PodOrder:
    """A request of a JE, its output so far, and who gets what follows: None if that JE was lost."""

    def __init__(self, caller: JECaller) -> None:
        self.caller: JECaller | None = caller
        self.request: Request | None = None
        self.sent: list[bytes] = []
        self.end: asyncio.TimerHandle | None = None  # of its time without a JE

    def tell(self, data: bytes) -> None:
        """Keep a frame, and send it to the JE, if there is one."""
        self.sent.append(data)
        if self.caller is not None:
            self.caller.channel.send(data)

    def go_to(self, caller: JECaller) -> None:
        """Send all output so far to another JE, and what follows."""
        self.caller = caller
        if self.end is not None:
            self.end.cancel()
            self.end = None
        for data in self.sent:
            caller.channel.send(data)


class PodDoor:
    """Serves the job executors that connect to `path` with the engines of `models`."""

    def __init__(self, models: ServedModels, path: str) -> None:
        self._models, self._path = models, path
        self._orders: dict[str, PodOrder] = {}
        self._callers: set[JECaller] = set()
        self._work: set[asyncio.Task[None]] = set()

    async def run(self, app: web.Application | None = None) -> AsyncIterator[None]:
        """Listen while the pod runs. Raises InputError if the socket cannot be made."""
        listener = bind_unix(self._path)
        server = await asyncio.start_unix_server(self._meet, sock=listener)
        self._spawn(self._report(), "reports to job executors")
        try:
            yield
        finally:
            server.close()
            for caller in self._callers:
                caller.channel.close()
            for request_id in list(self._orders):
                self._drop(request_id)
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            remove_socket(self._path)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _report(self) -> None:
        """Send the state of all models to all job executors, regularly."""
        while True:
            await asyncio.sleep(STATE_S)
            data = encoded(self.state())
            for caller in self._callers:
                caller.channel.send(data)

    def state(self) -> PodState:
        """Report on all models, the first one first."""
        states = []
        for endpoint in self._models:
            engine = endpoint.engine
            states.append(
                SharedModel(
                    name=engine.model_name,
                    directory=None if engine.directory is None else str(engine.directory.resolve()),
                    max_model_len=engine.max_model_len,
                    vocab_size=engine.vocab_size,
                    formats=engine.formats,
                    created=endpoint.created,
                    stats=engine.stats(),
                    is_healthy=engine.is_healthy(),
                    unhealthy_reason=engine.unhealthy_reason,
                )
            )
        return PodState(states)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of a job executor to its end."""
        caller = JECaller(FrameChannel(reader, writer, FromJE))
        caller.channel.send(encoded(self.state()))
        self._callers.add(caller)
        try:
            async for frame in caller.channel.frames():
                self._take(caller, frame)
        except ProtocolError as error:
            log.error("job executor %d: %s", caller.je, error)
        finally:
            self._callers.discard(caller)
            caller.channel.close()
            for request_id, order in self._orders.items():
                if order.caller is caller:
                    order.caller = None
                    order.end = asyncio.get_running_loop().call_later(KEEP_S, self._drop, request_id)

    def _take(
        self, caller: JECaller, frame: JoinFrame | RoomFrame | SubmitFrame | LeaveFrame | AskFrame
    ) -> None:
        if isinstance(frame, JoinFrame):
            caller.je = frame.je
        elif isinstance(frame, RoomFrame):
            caller.refusal = self._refusal(frame)
        elif isinstance(frame, SubmitFrame):
            self._submit(caller, frame)
        elif isinstance(frame, LeaveFrame):
            order = self._orders.get(frame.request_id)
            if order is not None and order.caller is caller:  # not if another JE has asked for it since
                self._drop(frame.request_id)
        else:
            self._spawn(self._answer(caller, frame), "question of a job executor")

    def _engine(self, name: str) -> Engine:
        """Find the engine of a model. Raises XDeepServeError if the pod has it no more."""
        for endpoint in self._models:
            if endpoint.engine.model_name == name and isinstance(endpoint.engine, Engine):
                return endpoint.engine
        raise XDeepServeError(f"the pod does not serve the model {name} any more")

    def _refusal(self, frame: RoomFrame) -> XDeepServeError | None:
        """Return why the engine has no room for further sequences; None if it has."""
        try:
            self._engine(frame.model).check_room(frame.num_new)
        except XDeepServeError as error:
            return error
        return None

    def _submit(self, caller: JECaller, frame: SubmitFrame) -> None:
        """Give a request to its engine; if it has it already, send its output to this JE from now on."""
        known = self._orders.get(frame.request_id)
        if known is not None:
            known.go_to(caller)
            return
        order = PodOrder(caller)

        def begin(choice: int) -> None:
            order.tell(encoded(BegunFrame(frame.request_id, choice)))

        try:
            if caller.refusal is not None:
                raise caller.refusal
            order.request = self._engine(frame.model).submit(
                frame.prompt,
                frame.params,
                frame.request_id,
                parse=frame.parse,
                on_scheduled=begin,
                je=caller.je,
            )
        except Exception as error:
            if not isinstance(error, XDeepServeError):
                log.exception("request %s failed", frame.request_id)
            caller.channel.send(encoded(failed(frame.request_id, as_named(error))))
            return
        self._orders[frame.request_id] = order
        order.tell(encoded(AcceptedFrame(frame.request_id, order.request.sequences[0].seed)))
        self._spawn(self._serve(order, order.request), f"output of {frame.request_id}")

    async def _serve(self, order: PodOrder, request: Request) -> None:
        """Send all output of a request to its job executor."""
        try:
            async for delta in request:
                order.tell(encoded(DeltaFrame(request.request_id, delta)))
            order.tell(encoded(EndedFrame(request.request_id)))
        except XDeepServeError as error:
            order.tell(encoded(failed(request.request_id, error)))

    def _drop(self, request_id: str) -> None:
        """Forget a request, and stop computing it if it has not ended."""
        order = self._orders.pop(request_id)
        order.caller = None
        if order.end is not None:
            order.end.cancel()
        if order.request is not None:
            order.request.abort()

    async def _answer(self, caller: JECaller, frame: AskFrame) -> None:
        try:
            engine = self._engine(frame.model)
            if frame.params is not None:
                await asyncio.to_thread(engine.prepare, frame.params, frame.parse)
                answer = ToldFrame(frame.request_id, [])
            else:
                answer = ToldFrame(frame.request_id, await engine.check_health())
            caller.channel.send(encoded(answer))
        except XDeepServeError as error:
            caller.channel.send(encoded(failed(frame.request_id, error)))
