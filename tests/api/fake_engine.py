"""An engine without a model: deterministic tokens, and steps that a test can hold back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from xdeepserve.api.answers.logprobs import BYTE_LEVEL
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.serving.request import (
    NOTHING,
    EngineStats,
    OutputDelta,
    OutputFormats,
    Parse,
    PositionLogprobs,
    TokenLogprob,
    check_request,
)
from xdeepserve.engine.te.reports import TEHealth
from xdeepserve.errors import OverloadedError, RequestError
from xdeepserve.parsing.stream_parser import StreamParser

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB_SIZE = 260
_SPECIAL = {BOS: "<bos>", EOS: "<eos>", USER: "<user>", ASSISTANT: "<assistant>"}
_STAND_IN = {byte: char for char, byte in BYTE_LEVEL.items()}


class FakeTokenizer:
    """One token a byte, and four special ones."""

    has_regexes = False
    template_variables = frozenset(
        ("messages", "tools", "reasoning_effort", "thinking", "forbidden", "enable_thinking")
    )
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.chats: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = []  # messages, tools

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.threads.append(threading.get_ident())
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {i: b"" if skip_special_tokens else text.encode() for i, text in _SPECIAL.items()}
        return b"".join(special[i] if i in special else bytes([i]) for i in ids).decode(errors="replace")

    def fewest_tokens(self, num_chars: int) -> int:
        return num_chars

    def id_to_token(self, token_id: int) -> str | None:
        return _SPECIAL.get(token_id) or _STAND_IN.get(token_id)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        if kwargs.get("forbidden"):
            raise RequestError("the chat template refuses this", param="messages")
        self.chats.append((messages, tools))
        self.variables = kwargs
        ids = [BOS]
        for message in messages:
            ids += [USER if message["role"] == "user" else ASSISTANT, *self.encode(message["content"] or "")]
        return [*ids, ASSISTANT] if add_generation_prompt else ids


class FakeHandle:
    def __init__(
        self,
        engine: FakeEngine,
        prompt: list[int],
        params: SamplingParams,
        budget: int,
        request_id: str,
        parse: Parse,
        on_scheduled: Callable[[int], None] | None,
    ) -> None:
        self.prompt, self.params, self.budget, self.request_id = prompt, params, budget, request_id
        self.on_scheduled, self.parse = on_scheduled, parse
        tools = engine.formats.tools if parse.tools else None
        reasoning = parse.reasoning and engine.formats.reasoning
        self.parsers = [
            StreamParser(reasoning, tools, in_reasoning=parse.in_reasoning, functions=parse.functions)
            for _ in range(params.n)
        ]
        self.counters = [parser.reasoning_only() for parser in self.parsers]
        self.is_aborted = asyncio.Event()
        self._engine = engine
        self._outputs = self.outputs_of_steps()
        engine.live.add(self)

    def abort(self) -> None:
        if self in self._engine.live:
            self._engine.live.discard(self)
            self.is_aborted.set()

    async def accepted(self) -> None:
        """It is, by `submit`."""

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        try:
            return await anext(self._outputs)
        except BaseException:
            self.abort()
            raise

    async def outputs_of_steps(self) -> AsyncIterator[OutputDelta]:
        texts = [""] * self.params.n
        running = list(range(self.params.n))
        step = 0
        while running:
            await self._engine.step()
            if step == 0 and self.on_scheduled is not None:
                for index in running:
                    self.on_scheduled(index)
            for index in list(running):
                delta = self.step_of(index, step)
                texts[index] += delta.text
                found = [stop for stop in self.params.stop if stop in texts[index]]
                if found:
                    keep = len(texts[index].split(found[0])[0])
                    surplus = len(texts[index]) - keep
                    delta.text = delta.text[: max(0, len(delta.text) - surplus)]
                    delta.finish_reason, delta.stop_reason = "stop", found[0]
                parser, counter = self.parsers[index], self.counters[index]
                if counter is not None and counter.state != "content":
                    was_reasoning = counter.state == "reasoning"
                    counter.push(delta.text)
                    delta.num_reasoning = was_reasoning or counter.state == "reasoning"
                if delta.finish_reason is None:
                    parsed = parser.push(delta.text)
                else:
                    parsed = parser.finish(delta.text, is_cut=delta.finish_reason == "length")
                delta.text, delta.reasoning = parsed.content, parsed.reasoning
                delta.tool_calls = parsed.tool_calls
                if delta.finish_reason is not None:
                    running.remove(index)
                    if not running:
                        self._engine.live.discard(self)
                yield delta
            step += 1

    def step_of(self, index: int, step: int) -> OutputDelta:
        token_id = self._engine.token(self, index, step)
        is_last = step + 1 >= self.budget
        is_eos = token_id == EOS and not self.params.ignore_eos
        skip = self.params.skip_special_tokens
        delta = OutputDelta(
            index=index,
            text=self._engine.new_text(self, index, step, skip),
            token_ids=[token_id],
            finish_reason="stop" if is_eos else "length" if is_last else None,
            at_ns=(step + 1) * self._engine.step_ns,
        )
        if delta.finish_reason is not None:
            delta.metrics = RequestMetrics(
                arrival_ns=0,
                scheduled_ns=0,
                first_token_ns=self._engine.step_ns,
                last_token_ns=delta.at_ns,
                num_tokens=step + 1,
                num_steps=step + 1,
            )
        if self.params.logprobs is not None:
            delta.logprobs = [_position(token_id, self.params.logprobs)]
        if step == 0 and index == 0 and self.params.prompt_logprobs is not None:
            rest = [_position(i, self.params.prompt_logprobs) for i in self.prompt[1:]]
            delta.prompt_logprobs = [None, *rest]
        return delta


def _position(token_id: int, num_top: int) -> PositionLogprobs:
    """The chosen token is the second likeliest: it appears among the top only from two on."""
    others = [(token_id + 1 + i) % 256 for i in range(num_top)]
    top = [TokenLogprob(others[0], -0.5, 1), TokenLogprob(token_id, -1.0, 2)] if num_top else []
    top += [TokenLogprob(i, -2.0 - rank, rank + 3) for rank, i in enumerate(others[1:])]
    return PositionLogprobs(TokenLogprob(token_id, -1.0, 2), tuple(top[:num_top]))


class FakeEngine:
    """Continues prompts with `script`'s tokens, or letters that depend on prompt, choice and seed."""

    model_name = "fake"
    directory = None
    vocab_size = VOCAB_SIZE

    def __init__(
        self, *, max_model_len: int = 256, script: Sequence[int] = (), tokenizer: bool = True
    ) -> None:
        self.max_model_len = max_model_len
        self.tokenizer = FakeTokenizer() if tokenizer else None
        self.script = list(script)
        self.formats = OutputFormats()
        self.max_live = 10_000
        self.prepared: list[tuple[SamplingParams, Parse]] = []
        self.step_ns = 0  # of virtual time; counted from each request's arrival
        self.more_stats: dict[str, Any] = {}
        self.live: set[FakeHandle] = set()
        self.submitted: list[FakeHandle] = []
        self.healthy = True
        self.suspect: tuple[int, ...] = ()
        self.unhealthy_reason: str | None = None
        self.events: list[str] = []
        self.failure: Exception | None = None
        self.fail_at_step = 0
        self.num_steps = 0
        self.stepped = asyncio.Event()
        self._arrived = asyncio.Event()
        self._allowance: asyncio.Semaphore | None = None

    def hold(self, num_steps: int) -> None:
        """Allow only this many more steps, over all requests."""
        self._allowance = asyncio.Semaphore(num_steps)

    def release(self) -> None:
        held, self._allowance = self._allowance, None
        for _ in range(10_000 if held else 0):
            held.release()

    async def until_submitted(self, count: int = 1) -> None:
        while len(self.submitted) < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def step(self) -> None:
        if self._allowance is not None:
            await self._allowance.acquire()
        await asyncio.sleep(0)
        if self.failure is not None and self.num_steps >= self.fail_at_step:
            raise self.failure
        self.num_steps += 1
        self.stepped.set()

    def token(self, handle: FakeHandle, index: int, step: int) -> int:
        if self.script:
            return self.script[step % len(self.script)]
        seed = handle.params.seed or 0
        return 97 + (sum(handle.prompt) + 7 * index + 3 * step + seed) % 26

    def new_text(self, handle: FakeHandle, index: int, step: int, skip_special: bool) -> str:
        """What the newest token adds: complete characters only, until the last step."""
        ids = [self.token(handle, index, i) for i in range(step + 1)]
        whole, before = (FakeTokenizer().decode(part, skip_special) for part in (ids, ids[:-1]))
        if self.tokenizer is None:
            return ""
        if step + 1 < handle.budget:
            whole, before = whole.rstrip("\ufffd"), before.rstrip("\ufffd")
        return whole[len(before.rstrip("\ufffd")) :]

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        parse: Parse = NOTHING,
        on_scheduled: Callable[[int], None] | None = None,
    ) -> FakeHandle:
        if len(self.live) >= self.max_live:
            raise OverloadedError("the engine is overloaded")
        budget = check_request(
            prompt_token_ids, params, max_model_len=self.max_model_len, vocab_size=self.vocab_size
        )
        handle = FakeHandle(self, list(prompt_token_ids), params, budget, request_id, parse, on_scheduled)
        self.submitted.append(handle)
        self._arrived.set()
        return handle

    def check_room(self, num_new: int) -> None:
        if len(self.live) + num_new > self.max_live:
            raise OverloadedError("the engine is overloaded")

    def prepare(self, params: SamplingParams, parse: Parse = NOTHING) -> None:
        self.prepared.append((params, parse))

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.live), kv_cache_usage=len(self.live) / 64, **self.more_stats)

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")

    def is_healthy(self) -> bool:
        return self.healthy

    async def check_health(self) -> list[TEHealth]:
        return [TEHealth(name="te", num_groups=2, suspect_groups=self.suspect)]
