"""The engine of a job executor (JE) whose TEs are in another process, the pod (DeepServe 3, xDeepServe 5.1).

The JE reads, checks, tokenises and answers; the pod computes. If the pod is lost, the JE connects again and
asks for all open requests anew, with the seeds that they had. Equal tokens come again, and what was passed on
already is left out. If there is no pod for AWAY_S, open requests fail, and so does the JE.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from xdeepserve.engine.dp.events import notify
from xdeepserve.engine.dp.sampling_params import INT64_MAX, SamplingParams
from xdeepserve.engine.serving.request import NOTHING, EngineStats, OutputDelta, OutputFormats, Parse
from xdeepserve.engine.te.reports import TEHealth
from xdeepserve.errors import InputError, XDeepServeError, as_named
from xdeepserve.jobs.pod_frames import (
    LENGTH,
    AcceptedFrame,
    AskFrame,
    BegunFrame,
    DeltaFrame,
    EndedFrame,
    FailedFrame,
    FrameChannel,
    FromPod,
    JoinFrame,
    LeaveFrame,
    PodState,
    RoomFrame,
    SharedModel,
    SubmitFrame,
    ToldFrame,
    decoder_of,
    encoded,
    error_of,
)
from xdeepserve.model.tokenizer import Tokenizer, load_tokenizer

START_S = 600.0  # for the pod to load its model
AWAY_S = 60.0  # for the pod to come back, or to answer a question
RETRY_S = 0.1
MOST_LOST = 3  # pods, until a request that they all had is not sent to another one
PARTS = ("token_ids", "logprobs", "text", "reasoning", "tool_calls")  # of a delta: what can be cut
log = logging.getLogger("xdeepserve.api")
NEW = {"token_ids": 0, "logprobs": 0, "text": 0, "reasoning": 0, "tool_calls": 0, "num_reasoning": 0}


class ReceivedOutput:
    """Output of a choice that was received, to be left out when the pod sends it again."""

    def __init__(self) -> None:
        self._ever, self._now = dict(NEW), dict(NEW)  # in all; of the present sending

    def begin_again(self) -> None:
        """Expect the output from its beginning."""
        self._now = dict(NEW)

    def rest(self, delta: OutputDelta) -> OutputDelta | None:
        """Return the new part of a delta; None if all of it was received before."""
        is_again = self._now["token_ids"] < self._ever["token_ids"]
        for name in PARTS:
            value = getattr(delta, name)
            if value is not None:
                setattr(delta, name, value[self._count(name, len(value)) :])
        delta.num_reasoning -= self._count("num_reasoning", delta.num_reasoning)
        if not is_again:
            return delta
        delta.prompt_logprobs = None
        has_new = delta.token_ids or delta.text or delta.reasoning or delta.tool_calls
        return delta if has_new or delta.finish_reason is not None else None

    def _count(self, name: str, length: int) -> int:
        """Count a further part, and return how much of it was received before."""
        known = min(length, max(0, self._ever[name] - self._now[name]))
        self._now[name] += length
        self._ever[name] = max(self._ever[name], self._now[name])
        return known


class RemoteRequest:
    """Request that a pod in another process serves. Iterate over it to get its OutputDeltas."""

    def __init__(self, link: PodLink, frame: SubmitFrame, on_scheduled: Callable[[int], None] | None) -> None:
        self._link, self.frame, self._on_scheduled = link, frame, on_scheduled
        self._queue: asyncio.Queue[OutputDelta | XDeepServeError | None] = asyncio.Queue()
        self._received = [ReceivedOutput() for _ in range(frame.params.n)]
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open_choices = set(range(frame.params.n))
        self.begun: set[int] = set()
        self._is_over = False
        self.num_sent = 0  # to pods, one after the other

    async def accepted(self) -> None:
        """Wait until the pod has taken the request. Raises its refusal."""
        try:
            await self._answer
        except BaseException:
            self.abort()
            raise

    def begin_again(self) -> bool:
        """Expect all output from its beginning, and return whether to ask the pod anew.

        The request fails instead if MOST_LOST pods were lost with it: it may be what ends them.
        """
        if self.num_sent > MOST_LOST:
            self.fail(XDeepServeError(f"{self.num_sent} pods were lost while they had the request"))
            return False
        self.num_sent += 1
        for received in self._received:
            received.begin_again()
        return True

    def take(self, frame: AcceptedFrame | BegunFrame | DeltaFrame | EndedFrame | FailedFrame) -> None:
        """Take a frame of the pod about this request."""
        if isinstance(frame, AcceptedFrame):
            # Asked for once more, perhaps of another pod, it shall be drawn with the same random numbers.
            seed = frame.seed - (1 << 64) * (frame.seed > INT64_MAX)  # the same 64 bits as a client may send
            params = msgspec.structs.replace(self.frame.params, seed=seed)
            self.frame = msgspec.structs.replace(self.frame, params=params)
            if not self._answer.done():
                self._answer.set_result(None)
        elif isinstance(frame, BegunFrame):
            if self._on_scheduled is not None and frame.choice not in self.begun:
                notify(self._on_scheduled, frame.choice, about=f"request {self.frame.request_id}")
            self.begun.add(frame.choice)
        elif isinstance(frame, DeltaFrame):
            delta = self._received[frame.delta.index].rest(frame.delta)
            if delta is not None and delta.index in self.open_choices:
                self._queue.put_nowait(delta)
                if delta.finish_reason is not None:
                    self.open_choices.discard(delta.index)
        elif isinstance(frame, EndedFrame):
            self._queue.put_nowait(None)
        else:
            self.fail(error_of(frame))

    def fail(self, error: XDeepServeError) -> None:
        """End the request with an error; where the pod had not taken it, that is its refusal."""
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # not to be reported if nobody waits for it
        self._queue.put_nowait(error)

    def abort(self) -> None:
        """Have the pod stop computing. Harmless when repeated or after the end."""
        if self._is_over:
            return
        self._is_over = True
        self._link.leave(self)
        for index in sorted(self.open_choices):
            self._queue.put_nowait(OutputDelta(index=index, text="", token_ids=[], finish_reason="abort"))
        self.open_choices.clear()
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, XDeepServeError):
                    raise item
                yield item
        finally:
            self.abort()


class PodLink:
    """Connection of job executor number `je` to the pod that listens at `path`; it is made anew when lost."""

    def __init__(self, path: str, je: int, state: PodState) -> None:
        self.path, self._je = path, je
        self.models = {model.name: model for model in state.models}
        self.gave_up: str | None = None  # why open requests have failed
        self._channel: FrameChannel | None = None
        self.requests: dict[str, RemoteRequest] = {}
        self._questions: dict[str, tuple[AskFrame, asyncio.Future[list[TEHealth]]]] = {}
        self._numbers = itertools.count()
        self._met = asyncio.Event()  # the pod has been reached, or given up
        self.work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and stay connected. Raises XDeepServeError if there is no pod for AWAY_S."""
        self.work = asyncio.create_task(self._run(), name="link to the pod")
        await self._met.wait()
        if self.gave_up is not None:
            raise XDeepServeError(self.gave_up)

    async def stop(self) -> None:
        """Give up all requests and end. Harmless when repeated."""
        for request in list(self.requests.values()):
            request.abort()
        if self.work is not None:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)
            self.work = None
        if self._channel is not None:
            self._channel.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            late = loop.call_later(AWAY_S, self._give_up, f"no pod was at {self.path} for {AWAY_S:g} s")
            try:
                while True:
                    try:
                        reader, writer = await asyncio.open_unix_connection(self.path)
                        break
                    except OSError:
                        await asyncio.sleep(RETRY_S)
            finally:
                late.cancel()
            self._channel = channel = FrameChannel(reader, writer, FromPod)
            self.gave_up = None
            channel.send(encoded(JoinFrame(self._je)))
            for request in self.requests.values():
                if request.begin_again():
                    channel.send(encoded(request.frame))
            for question, _ in self._questions.values():
                channel.send(encoded(question))
            self._met.set()
            try:
                async for frame in channel.frames():
                    self._take(frame)
            except Exception as error:  # frames that are none, or a bug: what waits must not wait for ever
                log.exception("the link to the pod has failed")
                self._give_up(str(as_named(error)))
            finally:
                self._channel = None
                channel.close()
            await asyncio.sleep(RETRY_S)

    def _give_up(self, why: str) -> None:
        """Fail all that waits for the pod."""
        self.gave_up = why
        self._met.set()
        for request in self.requests.values():
            request.fail(XDeepServeError(why))
        for _, answer in self._questions.values():
            if not answer.done():
                answer.set_exception(XDeepServeError(why))

    def _take(self, frame: Any) -> None:
        if isinstance(frame, PodState):
            self.models = {model.name: model for model in frame.models}
        elif (request := self.requests.get(frame.request_id)) is not None:
            request.take(frame)
        elif (found := self._questions.get(frame.request_id)) is not None and not found[1].done():
            if isinstance(frame, ToldFrame):
                found[1].set_result(frame.health)
            elif isinstance(frame, FailedFrame):
                found[1].set_exception(error_of(frame))

    def send(self, frame: RoomFrame | SubmitFrame | LeaveFrame | AskFrame) -> None:
        """Send a frame, if there is a pod. Open requests and questions are sent again to the next one."""
        data = encoded(frame)
        if self._channel is not None:
            self._channel.send(data)

    def open(self, frame: SubmitFrame, on_scheduled: Callable[[int], None] | None) -> RemoteRequest:
        """Ask the pod for a request."""
        request = RemoteRequest(self, frame, on_scheduled)
        self.send(frame)
        request.num_sent += self._channel is not None
        self.requests[frame.request_id] = request
        return request

    def leave(self, request: RemoteRequest) -> None:
        """Forget a request, and have the pod forget it."""
        if self.requests.pop(request.frame.request_id, None) is not None:
            self.send(LeaveFrame(request.frame.request_id))

    async def ask(
        self, model: str, params: SamplingParams | None = None, parse: Parse = NOTHING
    ) -> list[TEHealth]:
        """Ask as AskFrame says. Raises XDeepServeError if no pod answers within AWAY_S."""
        frame = AskFrame(request_id=f"ask-{next(self._numbers)}", model=model, params=params, parse=parse)
        answer: asyncio.Future[list[TEHealth]] = asyncio.get_running_loop().create_future()
        self._questions[frame.request_id] = frame, answer
        self.send(frame)
        try:
            async with asyncio.timeout(AWAY_S):
                return await answer
        except TimeoutError:
            raise XDeepServeError(f"the pod at {self.path} has not answered within {AWAY_S:g} s") from None
        finally:
            del self._questions[frame.request_id]


class RemoteEngine:
    """Engine whose TEs are in the pod at the other end of a link; `AsyncEngine` is its contract.

    A job executor has one for each model of the pod; that of the first model starts and stops the link.
    """

    def __init__(self, link: PodLink, name: str, owns_link: bool = False) -> None:
        self.link, self.model_name, self._owns_link = link, name, owns_link
        self._last = link.models[name]
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def _state(self) -> SharedModel:
        """State of the model, as far as it is known here."""
        self._last = self.link.models.get(self.model_name, self._last)
        return self._last

    @property
    def directory(self) -> Path | None:
        return None if self._last.directory is None else Path(self._last.directory)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.directory is None else load_tokenizer(self.directory)

    @property
    def max_model_len(self) -> int:
        return self._last.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._last.vocab_size

    @property
    def formats(self) -> OutputFormats:
        return self._last.formats

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load nothing: the weights are in the pod."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        parse: Parse = NOTHING,
        on_scheduled: Callable[[int], None] | None = None,
    ) -> RemoteRequest:
        """Ask the pod for a request. Refusals of the pod come from `accepted`."""
        prompt = list(prompt_token_ids)
        frame = SubmitFrame(
            request_id=request_id, model=self.model_name, prompt=prompt, params=params, parse=parse
        )
        return self.link.open(frame, on_scheduled)

    def prepare(self, params: SamplingParams, parse: Parse = NOTHING) -> None:
        """Have the pod compile a request's grammar. Call it from another thread than the loop's."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.link.ask(self.model_name, params, parse), self._loop).result()

    def check_room(self, num_new: int) -> None:
        """Have the pod check its queue for the sequences of the requests that follow."""
        self.link.send(RoomFrame(self.model_name, num_new))

    def stats(self) -> EngineStats:
        """Return the counters of the pod, but for running and waiting sequences: those are this JE's."""
        own = [each for each in self.link.requests.values() if each.frame.model == self.model_name]
        num_open = sum(len(each.open_choices) for each in own)
        num_running = sum(len(each.open_choices & each.begun) for each in own)
        return msgspec.structs.replace(
            self._state.stats, num_running=num_running, num_waiting=num_open - num_running
        )

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._owns_link:
            await self.link.start()

    async def stop(self) -> None:
        """Give up the remaining requests of this model, or of all, and end."""
        for request in list(self.link.requests.values()):
            if request.frame.model == self.model_name:
                request.abort()
        if self._owns_link:
            await self.link.stop()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def is_healthy(self) -> bool:
        """Whether the pod can serve, as far as is known. A pod that was lost may come back for AWAY_S."""
        return self.link.gave_up is None and self._state.is_healthy

    @property
    def unhealthy_reason(self) -> str | None:
        return self.link.gave_up or self._state.unhealthy_reason

    async def check_health(self) -> list[TEHealth]:
        return await self.link.ask(self.model_name)


def remote_engine(path: str, member: str, seconds: float = START_S) -> RemoteEngine:
    """Make the engine of the job executor `member` ("je-2") for the first model of the pod at `path`.

    Waits for the pod to be ready; raises InputError after `seconds`.
    """
    state = _first_state(path, time.monotonic() + seconds)
    if state is None:
        raise InputError(f"no pod was ready at {path} within {seconds:g} s")
    je = int(member.rpartition("-")[2])
    return RemoteEngine(PodLink(path, je, state), state.models[0].name, owns_link=True)


def _first_state(path: str, deadline: float) -> PodState | None:
    """Read the state that a pod sends at once to whoever connects; None if there is none until `deadline`."""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(left_s)
                sock.connect(path)
                with sock.makefile("rb") as stream:
                    data = stream.read(int.from_bytes(stream.read(LENGTH), "big"))
            if data:
                state: PodState = decoder_of(FromPod).decode(data)
                return state
        except OSError:
            pass
        time.sleep(min(RETRY_S, left_s))
    return None
