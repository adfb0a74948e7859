"""A generation of an HTTP request: prompts submitted to the engine together, outputs merged as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType

from aiohttp import web
from msgspec import UNSET

from xdeepserve.api.answers.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from xdeepserve.api.server.metrics import Metrics, RequestTracker
from xdeepserve.engine.dp.events import notify
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.request import NOTHING, AsyncEngine, OutputDelta, Parse, RequestHandle
from xdeepserve.errors import XDeepServeError


class Generation:
    """Submits prompts on entry, iterates as (prompt_idx, OutputDelta), and aborts unfinished prompts on exit.

    However the `async with` is left (return, error, cancellation because the client has gone), none of its
    requests stays in the engine. Entry raises RequestError if any prompt is refused; then none is kept.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        request_id: str,
        parse: Parse = NOTHING,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.num_generated = 0
        # Drop the one token that an engine makes at least: it is neither given, nor counted anywhere.
        self.scores_only = False
        self.began_ns = self.last_ns = (
            0  # virtual time, of its submission where that is wanted, of its last output
        )
        self.texts: list[list[str]] = [[] for _ in range(len(prompts) * params.n)]  # pieces, by choice
        self._num_cached = self._num_reasoning = 0
        self._engine = engine
        self._metrics = metrics
        self._request_id = request_id
        self._parse = parse
        self._handles: list[RequestHandle] = []
        self._trackers: list[RequestTracker] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._is_measured = False
        self._has_failed = False  # the engine, not the client, ended it before its time

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def choice_idx(self, prompt_idx: int, delta: OutputDelta) -> int:
        """Number a choice over several prompts, as vLLM does."""
        return prompt_idx * self.params.n + delta.index

    def usage(self) -> Usage:
        """Count the tokens so far. A prompt counts once, however many choices it has. Its cached part is
        known when its first choice has ended."""
        prompt_tokens = sum(map(len, self.prompts))
        details = CompletionTokensDetails(reasoning_tokens=self._num_reasoning)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.num_generated,
            total_tokens=prompt_tokens + self.num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached),
            completion_tokens_details=details if self._parse.reasoning else UNSET,
        )

    async def __aenter__(self) -> Generation:
        self._engine.check_room(self.num_choices)  # all of them or none
        try:
            for i, prompt in enumerate(self.prompts):
                handle = self._engine.submit(
                    prompt,
                    self.params,
                    f"{self._request_id}-{i}",
                    parse=self._parse,
                    on_scheduled=partial(self._begin, i),
                )
                self._handles.append(handle)
            for handle in self._handles:
                await handle.accepted()
        except BaseException:
            self._abort()
            raise
        self._is_measured = notify(self._track, about=f"request {self._request_id}")
        return self

    def _track(self) -> None:
        for prompt in self.prompts:
            tracker = self._metrics.track(len(prompt), self.params.n, self.params.max_tokens)
            self._trackers.append(tracker)

    def _measure(self, prompt_idx: int, note: Callable[..., None], *args: object) -> None:
        """Call a method of a prompt's tracker. An error in metrics ends the measuring, not the request."""
        if self._is_measured:
            tracker, about = self._trackers[prompt_idx], f"request {self._request_id}"
            self._is_measured = notify(note, tracker, *args, about=about)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()  # first, and without awaiting: KV blocks are free before anything else runs
        for i in range(len(self._trackers)):
            self._measure(i, RequestTracker.close, "error" if self._has_failed else "abort")
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _begin(self, prompt_idx: int, choice: int) -> None:
        """Record a choice's first part in a step."""
        self._measure(prompt_idx, RequestTracker.begin, choice)

    def _abort(self) -> None:
        for handle in self._handles:
            handle.abort()

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        num_unfinished = self.num_choices
        async with aclosing(self._deltas()) as deltas:
            async for i, delta in deltas:
                if self.scores_only:
                    delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", [], [], None
                    delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
                self.num_generated += len(delta.token_ids)
                self.last_ns = delta.at_ns
                self.texts[self.choice_idx(i, delta)].append(delta.text)
                self._num_reasoning += delta.num_reasoning
                num_unfinished -= delta.finish_reason is not None
                if delta.metrics is not None and delta.index == 0:
                    self._num_cached += delta.metrics.num_cached_tokens
                self._measure(i, RequestTracker.observe, delta)
                yield i, delta
        if num_unfinished:
            self._has_failed = True
            raise XDeepServeError(f"the engine ended request {self._request_id} before it had finished")

    async def _deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yield the handles' outputs as they come. A single handle needs no queue, and no task to fill it."""
        try:
            if len(self._handles) == 1:
                async for delta in self._handles[0]:
                    yield 0, delta
                return
            queue: asyncio.Queue[tuple[int, OutputDelta | Exception | None]] = asyncio.Queue()
            self._pumps = [
                asyncio.create_task(_pump(i, handle, queue)) for i, handle in enumerate(self._handles)
            ]
            num_open = len(self._handles)
            while num_open:
                i, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield i, item
        except Exception:
            self._has_failed = True
            raise


GENERATION = web.RequestKey("GENERATION", Generation)  # of a request that generates


async def _pump(
    i: int, handle: RequestHandle, queue: asyncio.Queue[tuple[int, OutputDelta | Exception | None]]
) -> None:
    """Move a handle's outputs into the shared queue; then its failure, or None at its end."""
    try:
        async for delta in handle:
            queue.put_nowait((i, delta))
    except Exception as exc:
        queue.put_nowait((i, exc))
    else:
        queue.put_nowait((i, None))
