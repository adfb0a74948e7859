"""Facade for users: a model on a pod, with vLLM's names and shapes."""

from __future__ import annotations

import asyncio
import inspect
import os
import reprlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from xdeepserve.engine.deploy.deployment import Deployment, Role
from xdeepserve.engine.deploy.resolve import Overrides
from xdeepserve.engine.deploy.settings import nearest
from xdeepserve.engine.dp.sampling_params import INT64_MAX, SamplingParams
from xdeepserve.engine.dp.sequence import KeepLogits
from xdeepserve.engine.lanes import DEFAULT_SHOWN_DIES
from xdeepserve.engine.loading import Progress, Source
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.te.reports import ServerReport
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeploymentError, InputError, RequestError, XDeepServeError, meant
from xdeepserve.hw.faults import Fault
from xdeepserve.llm.make_engine import build_engine
from xdeepserve.llm.request_outputs import RequestOutput, collected, unfinished
from xdeepserve.loop import new_event_loop
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.tokenizer import Tokenizer, require_tokenizer
from xdeepserve.model.weights import Recipe
from xdeepserve.progress import Status, working

T = TypeVar("T")
Prompt = str | Sequence[int]
# What callers of other engines pass as a prompt, and what to pass here.
INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "; decode it to a text"),
    (Mapping, "; pass its text or its token ids, and messages to LLM.chat"),
    (Iterator, "; pass a list of it"),
)


class LLM:
    """A model served by a virtual pod, in this process. Use it in a `with` block, or call `close`.

    model        a preset (`tiny`, `tiny-random`, `tiny-r1`), `deepseek-r1` for runs that only take time, a
                 Hugging Face checkpoint directory, or a Checkpoint
    deployment   a preset, such as `monolithic` or `pd` (`xdeepserve generate --help` names all of them), a
                 .toml file, or a Deployment
    precision    `int8` or `fp32`
    overrides    settings of the deployment (`xdeepserve settings` lists them): texts `["decode.dies=4"]`, or
                 a mapping `{"decode.dies": 4}` or `{"decode": {"dies": 4}}`
    settings     the same as keywords: `LLM(deployment="colocated", dies=4)`, `LLM(deployment="pd",
                 decode={"dies": 4})`. With `overrides` both apply,
                 keywords last
    progress     True: calls that take longer than two seconds print on stderr what they are doing: loading,
                 compiling kernels (once for each installation), generating. False: nothing is printed. A
                 function is called with (bytes done, bytes in all) while weights load, and nothing is printed
    trace        record a timeline in virtual time; see `write_trace`
    trace_dies   of how many dies of each role; 0: of all
    clock_seed   seed of the order of events that happen at the same virtual time; None: in order of creation
    beside       another LLM, whose pod and clock this one shares: several models on one SuperPod. Close this
                 one first: work that is left when the other one is closed ends with an XDeepServeError
    timing_only  take the time, in INT8 whatever the precision, and compute nothing: token ids are dummies,
                 models without weights will do; True, or a TimingConfig with acceptance of drafts, skew of
                 routing and seed
    faults       what breaks, and when (`hw.faults`)

    Raises InputError with one clear line if the pod cannot be built.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint = "tiny",
        deployment: str | Deployment = "monolithic",
        precision: Recipe = "int8",
        *,
        overrides: Overrides = (),
        trace: bool = False,
        trace_dies: int = DEFAULT_SHOWN_DIES,
        clock_seed: int | None = None,
        timing_only: bool | TimingConfig = False,
        progress: bool | Progress = True,
        beside: LLM | None = None,
        faults: Sequence[Fault] = (),
        **settings: Any,
    ) -> None:
        if not isinstance(beside, LLM | None):
            raise InputError(f"beside is the LLM whose pod this one shares, found {beside!r}")
        if not isinstance(timing_only, bool | TimingConfig):
            raise InputError(f"timing_only is True, False or a TimingConfig, found {timing_only!r}")
        if not (isinstance(progress, bool) or callable(progress)):
            raise InputError(f"progress is True, False or a function of (done, total), found {progress!r}")
        self._process = os.getpid()
        _check_keywords(settings)
        every = [overrides] if isinstance(overrides, str | Mapping) else overrides
        if settings:
            every = [*every, settings]
        self._name = model.name if isinstance(model, Checkpoint) else str(model)
        self._is_quiet = progress is not True
        self._runs_int8 = precision == "int8" and not timing_only

        def build() -> Engine:
            engine = build_engine(
                model,
                deployment,
                precision,
                overrides=every,
                trace=trace,
                trace_dies=trace_dies,
                clock_seed=clock_seed,
                timing_only=timing_only,
                pod=None if beside is None else beside.engine.plan.pod,
                faults=faults,
            )
            engine.load(progress if callable(progress) else loading.progress)
            return engine

        self._num_requests = self._num_served = 0
        # Of all that share the pod.
        self._engines: list[Engine] = [] if beside is None else beside._engines
        with self._working("Loading") as loading:
            if beside is None:
                self.engine = build()
                # A loop in a thread of its own, so that an LLM also works where one is running already
                # (notebooks).
                self._loop = new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="xdeepserve", daemon=True)
                thread.start()
            else:
                self._loop, thread = beside._loop, None
                self.engine = beside.run(
                    _within(build), "Loading"
                )  # the pod must not change under a die's hands
            # Also at the interpreter's end, for those who never close.
            self._engines.append(self.engine)
            self._closing = weakref.finalize(
                self, _close, self.engine, self._engines, self._loop, thread, self._process
            )
            try:
                self.run(self.engine.start(), "Starting")
            except BaseException:
                self.close()
                raise

    def __repr__(self) -> str:
        if "_closing" not in self.__dict__:
            return "<LLM that could not be built>"
        plan = self.engine.plan
        dies = {die for te in self.engine.je.tes for die in te.plan.every_die}
        parts = [_counted(len(dies), "die")]
        if not self._closing.alive:
            parts = ["closed"]
        elif self.engine.unhealthy_reason is not None:
            parts = ["has failed"]
        elif lost := dies & self.engine.lost_dies:
            parts.append(f"{len(lost)} lost")
        parts += [
            f"{_counted(self._num_served, 'request')} served",
            f"{self.virtual_ns / 1e6:.2f} ms of virtual time",
        ]
        recipe = plan.recipe if plan.timing is None else "time only"
        return f"<LLM {self._name}, {recipe}, {plan.deployment.name}: {', '.join(parts)}>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: an engine belongs to its process and is nobody else's."""
        raise XDeepServeError(
            "an LLM cannot be copied or sent to another process; make an LLM where one is needed"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the dies and free their memory. Harmless when repeated, and in a forked child."""
        self._closing()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the checkpoint, or None; without one prompts are token ids."""
        return self.engine.tokenizer

    @property
    def virtual_ns(self) -> int:
        """Virtual time since the pod started, in nanoseconds."""
        return self.engine.plan.pod.clock.now

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        keep_logits: bool = False,
        arrivals_ns: Sequence[int] | None = None,
        meanwhile: Callable[[Engine], Coroutine[Any, Any, object]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or lists of token ids) side by side; outputs in the order of the prompts.

        One SamplingParams is for all prompts, or a sequence gives one for each. Without any, vLLM's defaults
        hold: temperature 1 and 16 new tokens, where `xdeepserve generate` is greedy (temperature 0);
        SamplingParams has the table. `SamplingParams(temperature=0)` gives that command's text.

        All prompts arrive at once, or each at its own virtual time from now (`arrivals_ns`, an integer for
        each one: so a log of real arrivals is replayed; `xdeepserve docs costs` has a walkthrough).
        `meanwhile(engine)` runs beside them in virtual time, from the same instant on: task executors may
        come and go. While no other thread asks for something, the pod rests before and after: the same calls
        are the same events, to the nanosecond.

        Raises RequestError, before anything runs, if any prompt cannot be served; with arrival times, when
        that prompt arrives. If the pod loses what a prompt needs, the other prompts are served first. Then
        the prompt's error is raised. Its `outputs` hold a RequestOutput for every prompt: complete ones, and
        those that were cut, with what was generated so far, `finished=False` and finish_reason "error".
        """
        self._check_open()
        if not _is_list(prompts) and not isinstance(prompts, str):
            raise RequestError(
                f"prompts must be a text, token ids, or a list of either, {_found(prompts)}", param="prompts"
            )
        is_single = _is_single(prompts)
        many: list[Any] = [prompts] if is_single else list(prompts)
        ids = [
            self._ids(prompt, "the prompt" if is_single else f"prompts[{index}]")
            for index, prompt in enumerate(many)
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        params = sampling_params if sampling_params is not None else SamplingParams()
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
            raise RequestError(
                "sampling_params must be SamplingParams, or a list with one for each prompt, "
                f"found {wrong[0]!r}"
            )
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(each)} sampling parameters")
        keep: KeepLogits = "sampled" if keep_logits else "none"
        if arrivals_ns is not None and not _is_list(arrivals_ns):
            raise RequestError(f"arrivals_ns must be a list of integers, {_found(arrivals_ns)}")
        arrivals = [0] * len(many) if arrivals_ns is None else list(arrivals_ns)
        if len(arrivals) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(arrivals)} arrivals")
        if not all(isinstance(ns, (int, np.integer)) and 0 <= ns <= INT64_MAX for ns in arrivals):
            raise RequestError("arrivals_ns must be integers, 0 or more", param="arrivals_ns")
        requests: dict[int, Request] = {}  # by index of their prompt
        work = self._generate(ids, texts, each, keep, arrivals, meanwhile, requests)
        return self.run(work, "Generating with", lambda: _so_far(list(requests.values())))

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template. The text includes the template's tags.

        Messages are those of OpenAI's API: content may be null where calls or nothing stand for it. With
        `continue_final_message` the last one stays open, and the answer goes on where its content ends.
        """
        self._check_open()
        for name, value in (("messages", messages), ("tools", tools or ())):
            if not _is_list(value) or not all(isinstance(each, dict) for each in value):
                example = '[{"role": "user", "content": "Hello"}]' if name == "messages" else "OpenAI's"
                hint = "; put it into a list" if isinstance(value, dict) else ""
                raise RequestError(
                    f"{name} must be a list like {example}, found {_shown(value)}{hint}", param=name
                )
        if not messages:
            raise RequestError("messages must have at least one, found none", param="messages")
        tokenizer = require_tokenizer(self.tokenizer, self.engine.model_name, "messages")
        prompt = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=not continue_final_message,
            tools=tools,
            continue_final_message=continue_final_message,
        )
        return self.generate([prompt], sampling_params)[0]

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute logits of known tokens through the deployment: float32 [len, vocab]. Row i predicts token i
        + 1. Raises RequestError for a text; `tokenizer.encode` gives its token ids."""
        if isinstance(token_ids, str):
            raise RequestError("logits takes token ids, found a text: use llm.tokenizer.encode(text)")
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._check_open()
        return self.run(self._logits(self._ids(token_ids, "token_ids"), params), "Computing logits with")

    def add_te(self, role: Role = "both", source: Source = "auto") -> str:
        """Add a task executor (TE) like the first of its role; return its name when its weights are loaded.

        `source` says where weights come from: storage, host, peer, pool, or auto (engine/loading.py).
        """
        return self.run(self.engine.add_te(role, source), "Adding a task executor to")

    def drain(self, te: str) -> None:
        """Give a task executor no new work; return when its requests have ended and its dies are free."""
        self.run(self.engine.drain(te), f"Draining {te} of")

    def remove(self, te: str) -> None:
        """Remove a task executor at the end of its step; other task executors go on with its requests."""
        self.run(self.engine.remove(te), f"Removing {te} from")

    def add_server(self, te: str | None = None, server: int | None = None) -> ServerReport:
        """Add an expert server (`eaas`), or replace a lost one; return when clients use the server."""
        return self.run(self.engine.add_server(te, server), "Adding an expert server to")

    def remove_server(self, te: str, server: int) -> None:
        """Make an expert server leave; return when no client waits for it and its die is free."""
        self.run(self.engine.remove_server(te, server), "Removing an expert server from")

    def write_trace(self, path: str | Path) -> None:
        """Write the timeline of everything so far, for Perfetto. Needs `trace=True`."""
        if not self.engine.plan.pod.trace.is_on:
            raise XDeepServeError("this LLM was built without trace=True")
        self.engine.plan.pod.trace.write(Path(path))

    def _working(self, doing: str) -> AbstractContextManager[Status]:
        """Show a progress message on stderr while the LLM works, unless `progress` is False."""
        return working(f"{doing} {self._name}", self._is_quiet, self._runs_int8)

    def run(
        self, work: Coroutine[Any, Any, T], doing: str = "Working with", detail: str | Callable[[], str] = ""
    ) -> T:
        """Run a coroutine of the engine on the event loop that serves this LLM, and return its result.

        `doing` and `detail` are shown on stderr if it takes long. Raises XDeepServeError if the LLM is
        closed.
        """
        try:
            self._check_open()
        except XDeepServeError:
            work.close()
            raise
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            with self._working(doing) as status:
                status.detail = detail
                return running.result()
        except CancelledError:
            raise XDeepServeError("this LLM has been closed meanwhile") from None
        except BaseException:  # an interrupt in this thread ends the work in the other
            running.cancel()
            raise

    def _check_open(self) -> None:
        """Raise XDeepServeError if this LLM is closed, or belongs to the process that forked this one: its
        threads do not come along."""
        if self._process != os.getpid():
            raise XDeepServeError(
                f"this LLM belongs to process {self._process}, which forked this one "
                f"({os.getpid()}): make an LLM in this process"
            )
        if self._loop.is_closed() or not self._closing.alive:  # a guest's loop goes on without it
            raise XDeepServeError("this LLM is closed")

    def _ids(self, prompt: Prompt, where: str) -> list[int]:
        """Convert a prompt to token ids. Raises RequestError, naming the place `where`, for another form."""
        if isinstance(prompt, str):
            return require_tokenizer(self.tokenizer, self.engine.model_name).encode(prompt)
        if not _is_list(prompt):
            raise RequestError(
                f"{where} must be a text or a list of token ids, {_found(prompt)}", param="prompt"
            )
        for index, each in enumerate(prompt):
            if type(each) is not int and not isinstance(each, np.integer):
                raise RequestError(
                    f"{where} must be a text or a list of token ids, {_found(each)} at position {index}",
                    param="prompt",
                )
        return [int(token_id) for token_id in prompt]

    async def _generate(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: list[SamplingParams],
        keep: KeepLogits,
        arrivals: list[int],
        meanwhile: Callable[[Engine], Coroutine[Any, Any, object]] | None,
        requests: dict[int, Request],
    ) -> list[RequestOutput]:
        failures: dict[int, XDeepServeError] = {}  # of prompts that find an engine that has failed
        clock = self.engine.plan.pod.clock
        await self.engine.settle()
        start = clock.now

        def arrive(indices: list[int]) -> None:
            for index in indices:
                try:
                    requests[index] = self._submit(prompts[index], params[index], keep)
                except InputError:
                    raise
                except XDeepServeError as error:
                    if not requests:
                        raise
                    failures[index] = error

        async def arrive_later(indices: list[int]) -> None:
            for index in indices:
                await clock.sleep_until(start + int(arrivals[index]))
                arrive([index])

        async def arrive_beside(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
            arrive(at_once)
            return clock.spawn(work, name="meanwhile")

        in_order = sorted(range(len(prompts)), key=lambda index: arrivals[index])
        at_once = [index for index in in_order if arrivals[index] == 0]
        beside: asyncio.Task[object] | None = None
        try:
            if meanwhile is None:
                arrive(at_once)
            else:  # from within a process: what comes from outside waits until the pod rests
                beside = await clock.spawn(arrive_beside(meanwhile(self.engine)), name="arrivals")
            if len(at_once) < len(prompts):
                await clock.spawn(arrive_later(in_order[len(at_once) :]), name="arrivals")
            outputs = [
                await self._collected(requests.get(index), text, prompt, one, failures.get(index))
                for index, (text, prompt, one) in enumerate(zip(texts, prompts, params, strict=True))
            ]
            if beside is not None:
                await beside
            await self.engine.settle()
            if any(output.error is not None for output in outputs):
                raise unfinished(outputs)
            return outputs
        finally:
            if beside is not None:
                beside.cancel()
            for request in requests.values():
                request.abort()

    async def _collected(
        self,
        request: Request | None,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        error: XDeepServeError | None,
    ) -> RequestOutput:
        if request is None:
            return RequestOutput(
                request_id="", prompt=text, prompt_token_ids=ids, outputs=[], finished=False, error=error
            )
        output = await collected(request, text, ids, params, self.tokenizer)
        self._num_served += output.finished
        return output

    async def _logits(self, token_ids: list[int], params: SamplingParams) -> NDArray[np.float32]:
        request = self._submit(token_ids, params, "all")
        async for _ in request:
            pass
        await self.engine.settle()
        self._num_served += 1
        output = request.outputs[0]
        return np.stack([*output.prompt_logits, *output.logits])

    def _submit(self, token_ids: list[int], params: SamplingParams, keep: KeepLogits) -> Request:
        self._num_requests += 1
        return self.engine.submit(token_ids, params, f"llm-{self._num_requests}", keep, is_bounded=False)


def _check_keywords(settings: Mapping[str, Any]) -> None:
    """Raise DeploymentError for a keyword that is neither a parameter of LLM nor a setting."""
    for name in settings:
        if name.partition(".")[0] not in Deployment.__struct_fields__:
            hint = meant(name, inspect.signature(LLM).parameters) or nearest(name)
            raise DeploymentError(f"LLM: unknown setting {name}{hint}")


def _so_far(requests: Sequence[Request]) -> str:
    """Format the number of tokens generated so far."""
    sequences = [seq for request in requests for seq in request.sequences]
    return _counted(sum(len(seq.token_ids) - seq.num_prompt for seq in sequences), "token")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


async def _within(build: Callable[[], Engine]) -> Engine:
    """Build an engine in the event loop's thread."""
    return build()


def _close(
    engine: Engine,
    engines: list[Engine],
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread | None,
    process: int,
) -> None:
    """Stop an LLM's dies. If it has a thread of its own, also stop the engines that share its pod, and the
    thread. Does nothing in a process other than `process`, such as a forked child."""
    if process != os.getpid():
        # No thread would answer here, and nobody need hear that tasks of the parent's have not ended.
        loop.set_exception_handler(lambda loop, context: None)
        return
    if loop.is_closed():
        return  # that of the LLM whose pod it shared, and all went with it
    engines.remove(engine)
    ending = engine.stop() if thread is None else _end(engine, list(engines))
    try:
        asyncio.run_coroutine_threadsafe(ending, loop).result()
    finally:
        if thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            engine.plan.pod.memories.give_back()  # cycles keep it until the garbage collector comes by


async def _end(owner: Engine, guests: Sequence[Engine]) -> None:
    """Stop the engine owning a pod, after the engines that share the pod; cancel tasks that still wait."""
    for guest in guests:
        guest.fail(XDeepServeError("the LLM whose pod this one shares has been closed"))
        await guest.stop()
    await owner.stop()
    for patience_s in (1.0, 0.0, 0.0):  # what ends may start something, such as the answer to a segment
        if waiting := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(waiting, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _is_list(value: object) -> bool:
    """Whether a value is a list, a tuple, an array or the like: neither a text nor bytes."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether prompts are a single text or list of token ids, rather than a list of either."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Number | np.bool_))


def _found(value: object) -> str:
    """Say on one line which value was found instead of a prompt, and what to pass instead if that is
    known."""
    instead = next((words for kinds, words in INSTEAD if isinstance(value, kinds)), "")
    return f"found {_shown(value)}{instead}"


def _shown(value: object) -> str:
    return " ".join(reprlib.repr(value).split())
