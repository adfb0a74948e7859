"""A request while the engine serves it: its choices, and the queue on which their output leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from xdeepserve.engine.dp.events import notify
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.serving.output import ChoiceOutput
from xdeepserve.engine.serving.request import OutputDelta
from xdeepserve.errors import XDeepServeError, as_named
from xdeepserve.hw.clock import Clock


class Request:
    """Submitted request: iterate over the object to get its OutputDeltas.

    Leaving the iteration early aborts the request.
    """

    def __init__(
        self,
        clock: Clock,
        request_id: str,
        on_scheduled: Callable[[int], None] | None,
        release: Callable[[Request], None],
        finished: Callable[[Request], None],
    ) -> None:
        self._clock, self.request_id = clock, request_id
        self._on_scheduled, self._release, self._finished = on_scheduled, release, finished
        self.sequences: list[Sequence] = []
        self.outputs: list[ChoiceOutput] = []
        self._queue: asyncio.Queue[OutputDelta | XDeepServeError | None] = asyncio.Queue()
        self.num_open = 0  # choices that are not finished
        self.is_over = False

    def add(self, seq: Sequence, output: ChoiceOutput) -> None:
        """Add a further choice, before the request is dispatched."""
        self.sequences.append(seq)
        self.outputs.append(output)
        self.num_open += 1

    def begin(self, seq: Sequence) -> None:
        """Tell the request's listener of a choice's first step."""
        if self._on_scheduled is not None and not self.is_over:
            notify(self._on_scheduled, seq.choice, about=f"request {self.request_id}")

    def take(self, seq: Sequence, rows: list[SampledToken]) -> bool:
        """Take a step's results from the scheduler; return whether the choice is finished."""
        output = self.outputs[seq.choice]
        try:
            delta = output.push(rows, self._clock.now)
        except Exception as error:  # of a tokenizer, say: no other request need know
            self.fail(as_named(error, "output: "))
            return True
        if delta is not None:
            if output.finish_reason is not None:
                delta.metrics = output.metrics(seq)
            self._queue.put_nowait(delta)
        if output.finish_reason is None:
            return False
        self.num_open -= 1
        if self.num_open == 0:
            self.is_over = True
            self._queue.put_nowait(None)
            self._finished(self)
        return True

    def abort(self) -> None:
        """Stop computing and free the KV blocks at once. Harmless when repeated or after the end."""
        if self.is_over:
            return
        for seq, output in zip(self.sequences, self.outputs, strict=True):
            if output.finish_reason is None:
                output.finish_reason = "abort"
                delta = OutputDelta(
                    index=output.index,
                    text="",
                    token_ids=[],
                    finish_reason="abort",
                    at_ns=self._clock.now,
                    metrics=output.metrics(seq),
                )
                self._queue.put_nowait(delta)
        self._release(self)
        self.is_over = True
        self._queue.put_nowait(None)

    async def accepted(self) -> None:
        """Return at once: the engine takes a request as it is submitted."""

    def fail(self, error: XDeepServeError) -> None:
        """End the iteration of a request with an error."""
        if not self.is_over:
            self._queue.put_nowait(error)
            self.is_over = True
            self._release(self)

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, XDeepServeError):
                    raise item.with_traceback(None)  # it may end many requests: no frames of others
                yield item
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                self.abort()
