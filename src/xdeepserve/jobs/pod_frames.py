"""Frames between a pod and the job executors (JEs) that share it, over a Unix socket (xDeepServe 5.1).

A frame is 4 bytes of length, big endian, and a MessagePack object whose tag names its type. `request_id`
names the same request in all frames, also after another JE has asked for it.

    JE -> pod   JoinFrame, RoomFrame, SubmitFrame, LeaveFrame, AskFrame
    pod -> JE   PodState, AcceptedFrame, BegunFrame, DeltaFrame, EndedFrame, FailedFrame, ToldFrame
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.request import NOTHING, EngineStats, OutputDelta, OutputFormats, Parse
from xdeepserve.engine.te.reports import TEHealth
from xdeepserve.errors import OverloadedError, ProtocolError, RequestError, TransferError, XDeepServeError

LENGTH = 4
MAX_FRAME = 256 << 20  # bytes: log probabilities of 160,000 tokens of a prompt with 20 alternatives are less
MAX_UNSENT = 256 << 20  # bytes to a process that does not read them, after which its connection is given up


class JoinFrame(msgspec.Struct, tag=True, frozen=True):
    """First frame of a job executor: its number."""

    je: int


class RoomFrame(msgspec.Struct, tag=True, frozen=True):
    """Announces the requests until the next RoomFrame, which are admitted or refused together."""

    model: str
    num_new: int


class SubmitFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for a request's output, from the first token on, whoever has asked for it before."""

    request_id: str
    model: str
    prompt: list[int]
    params: SamplingParams
    parse: Parse = NOTHING


class LeaveFrame(msgspec.Struct, tag=True, frozen=True):
    """Gives up a request whose output is not wanted any more."""

    request_id: str


class AskFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for the health of a model's TEs; with `params`, has the grammar of a request compiled instead."""

    request_id: str
    model: str
    params: SamplingParams | None = None
    parse: Parse = NOTHING


class SharedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model of the pod, and its state now."""

    name: str
    directory: str | None
    max_model_len: int
    vocab_size: int
    formats: OutputFormats
    created: int
    stats: EngineStats
    is_healthy: bool
    unhealthy_reason: str | None


class PodState(msgspec.Struct, tag=True, frozen=True):
    """All models of the pod, the first one first; sent at once and then regularly."""

    models: list[SharedModel]


class AcceptedFrame(msgspec.Struct, tag=True, frozen=True):
    """The engine has taken a request, and samples with this seed."""

    request_id: str
    seed: int


class BegunFrame(msgspec.Struct, tag=True, frozen=True):
    """A choice of a request takes part in a step for the first time."""

    request_id: str
    choice: int


class DeltaFrame(msgspec.Struct, tag=True, frozen=True):
    """New output of a request."""

    request_id: str
    delta: OutputDelta


class EndedFrame(msgspec.Struct, tag=True, frozen=True):
    """All output of a request has been sent."""

    request_id: str


class FailedFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The error that a request or a question has ended with; `kind` is a key of ERRORS."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class ToldFrame(msgspec.Struct, tag=True, frozen=True):
    """Answers the question of an AskFrame."""

    request_id: str
    health: list[TEHealth]


FromJE = JoinFrame | RoomFrame | SubmitFrame | LeaveFrame | AskFrame
FromPod = PodState | AcceptedFrame | BegunFrame | DeltaFrame | EndedFrame | FailedFrame | ToldFrame

# Errors that the endpoint answers in different ways; the last one stands for all others.
ERRORS: Final[dict[str, type[XDeepServeError]]] = {
    each.__name__: each for each in (OverloadedError, RequestError, TransferError, XDeepServeError)
}


def failed(request_id: str, error: XDeepServeError) -> FailedFrame:
    """Make the frame for an error."""
    kind = next(name for name, each in ERRORS.items() if isinstance(error, each))
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return FailedFrame(request_id=request_id, kind=kind, message=str(error), param=param, code=code)


def error_of(frame: FailedFrame) -> XDeepServeError:
    """Make the error again that a frame was made for, or one that is answered alike."""
    if frame.kind == RequestError.__name__:
        return RequestError(frame.message, frame.param, frame.code)
    return ERRORS.get(frame.kind, XDeepServeError)(frame.message)


def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Make the decoder of frames of a type, such as FromPod."""
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda wanted, found: Counter(found))


def encoded(frame: FromJE | FromPod) -> bytes:
    """Encode a frame with its length. Raises ProtocolError if it is too long."""
    data = msgspec.msgpack.encode(frame)
    if len(data) > MAX_FRAME:
        raise ProtocolError(f"a {type(frame).__name__} has {len(data)} bytes, {MAX_FRAME} at most")
    return len(data).to_bytes(LENGTH, "big") + data


class FrameChannel:
    """Sends and receives frames by a connection; received ones are of type `kind`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder_of(kind)

    def send(self, data: bytes) -> None:
        """Send an encoded frame. Gives the connection up if the other end does not read."""
        if self._writer.is_closing():
            return
        self._writer.write(data)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._writer.transport.abort()

    async def frames(self) -> AsyncIterator[Any]:
        """Yield frames until the connection ends. Raises ProtocolError for bytes that are no frame."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(LENGTH), "big")
                if length > MAX_FRAME:
                    raise ProtocolError(f"a frame has {length} bytes, {MAX_FRAME} at most")
                data = await self._reader.readexactly(length)
                try:
                    frame = self._decoder.decode(data)
                except (msgspec.DecodeError, XDeepServeError) as error:
                    raise ProtocolError(f"{data[:40]!r} is no frame: {error}") from None
                yield frame

    def close(self) -> None:
        """Close the connection when all frames have left. Harmless when repeated."""
        with contextlib.suppress(RuntimeError):  # the loop may be closing
            self._writer.close()
