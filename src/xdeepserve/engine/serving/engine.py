"""The engine: requests in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq

import msgspec

from xdeepserve.engine.build import PodPlan, Progress
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import KeepLogits, SampledToken, Sequence
from xdeepserve.engine.programs.ops import Threads
from xdeepserve.engine.serving.job_executor import JobExecutor
from xdeepserve.engine.serving.output import ChoiceOutput
from xdeepserve.engine.serving.request import EngineStats, OutputDelta, SamplingParams, check_request
from xdeepserve.engine.serving.te import TE
from xdeepserve.errors import RequestError, XDeepServeError
from xdeepserve.model.sampling import philox4x32
from xdeepserve.model.tokenizer import Tokenizer, load_tokenizer


class Engine:
    """Serves one model on one pod. `AsyncEngine` in request.py is the contract that the endpoint sees.

    Construction plans the pod and refuses what cannot be built; `load` allocates it and reads the weights;
    `start` sets the dies going, and with `warm_up` runs a small request first.
    """

    def __init__(self, plan: PodPlan, model_name: str | None = None, warm_up: bool = False) -> None:
        self.plan = plan
        self._warms_up = warm_up
        self._model_name = model_name or plan.checkpoint.name
        self._tokenizer = load_tokenizer(plan.checkpoint.directory)
        self._threads = Threads(plan.deployment.threads)
        self._seq_ids = itertools.count()
        self._num_unseeded = 0
        self._requests: dict[str, Request] = {}
        self._failure: XDeepServeError | None = None
        self._je: JobExecutor | None = None

    def load(self, progress: Progress | None = None) -> None:
        """Allocate the pod and load the weights. Called by `start` if it has not been."""
        if self._je is None:
            self.plan.materialise(progress)
            policy = self.plan.deployment.scheduler.dispatch
            self._je = JobExecutor([TE(te, policy, self._threads, self._fail) for te in self.plan.tes])

    @property
    def je(self) -> JobExecutor:
        """The job executor; there is one after `load`."""
        assert self._je is not None, "the engine has not been loaded"
        return self._je

    @property
    def groups(self) -> list[DPGroup]:
        """The DP groups of all TEs."""
        return [group for te in self.je.tes for group in te.groups]

    # ---- the contract -------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.plan.config.vocab_size

    async def start(self) -> None:
        """Spawn the die programs and the main loop."""
        self.load()
        for te in self.je.tes:
            te.start()
        if self._warms_up:
            await self.warm_up()

    async def warm_up(self) -> None:
        """Run a small request, so that every kernel is compiled before somebody waits for it."""
        prompt = [0] * min(2, self.max_model_len - 1)
        params = SamplingParams(max_tokens=1, temperature=1.0, logprobs=0)
        async for _ in self.submit(prompt, params, "warm-up"):
            pass

    async def stop(self) -> None:
        """Abort what is left and end every task."""
        for request in list(self._requests.values()):
            request.abort()
        if self._je is not None:
            for te in self._je.tes:
                await te.stop()
        self._threads.close()

    def is_healthy(self) -> bool:
        return self._failure is None and self._je is not None and all(te.is_running for te in self._je.tes)

    def stats(self) -> EngineStats:
        groups = self.groups
        pending = sum(te.te_shell.num_pending for te in self.je.tes)
        return EngineStats(
            num_running=sum(len(g.scheduler.running) for g in groups),
            num_waiting=sum(g.scheduler.num_waiting for g in groups) + pending,
            kv_cache_usage=sum(g.rtc.usage for g in groups) / len(groups),
            num_preemptions=sum(g.scheduler.num_preemptions for g in groups),
            prefix_cache_queries=sum(g.scheduler.num_prefix_queries for g in groups),
            prefix_cache_hits=sum(g.scheduler.num_prefix_hits for g in groups),
        )

    def submit(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        request_id: str,
        keep_logits: KeepLogits = "none",
    ) -> Request:
        """Check and enqueue a request; RequestError if it cannot be served."""
        if self._failure is not None:
            raise self._failure
        if request_id in self._requests:
            raise RequestError(f"request id {request_id} is in use", param="request_id")
        config = self.plan.config
        # Scoring needs no room for a new token: the one that is sampled is never computed.
        room = self.max_model_len + (keep_logits == "all")
        max_tokens = check_request(prompt_token_ids, params, max_model_len=room, vocab_size=config.vocab_size)
        if params.stop and self._tokenizer is None:
            raise RequestError(
                f"model {self._model_name} has no tokenizer, so it cannot find stop strings", param="stop"
            )
        seed = self._seed_of(params)
        request = Request(self, request_id)
        eos = frozenset(config.eos_token_ids)
        for choice in range(params.n):
            # Log probabilities of the prompt are the same for all choices: the first one computes them.
            own = params if choice == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
            output = ChoiceOutput(choice, own, max_tokens, eos, self._tokenizer)
            seq = Sequence(
                seq_id=next(self._seq_ids),
                choice=choice,
                token_ids=list(prompt_token_ids),
                num_prompt=len(prompt_token_ids),
                max_tokens=max_tokens,
                params=own,
                seed=seed,
                on_tokens=request.take,
                keep_logits=keep_logits,
            )
            request.add(seq, output)
        self._requests[request_id] = request
        self.je.submit(request.sequences)
        return request

    def _seed_of(self, params: SamplingParams) -> int:
        """The request's own seed, else one drawn from the deployment's seed and the order of arrival."""
        if params.seed is not None:
            return params.seed
        self._num_unseeded += 1
        words = philox4x32((self._num_unseeded, 0, 0, 1), (self.plan.deployment.seed & 0xFFFFFFFF, 0))
        return words[0] | words[1] << 32

    def _fail(self, error: Exception) -> None:
        """The pod is lost: every request ends with the reason."""
        self._failure = error if isinstance(error, XDeepServeError) else XDeepServeError(f"engine: {error!r}")
        self._failure.__cause__ = error
        for te in self.je.tes:
            te.kill()
        for request in list(self._requests.values()):
            request.fail(self._failure)

    def release(self, request: Request) -> None:
        """Forget a request and free all it holds. Harmless when repeated."""
        for seq in request.sequences:
            self.je.remove(seq)
        self._requests.pop(request.request_id, None)

    def finished(self, request: Request) -> None:
        """All choices of a request have ended by themselves; their schedulers remove them."""
        for seq in request.sequences:
            self.je.forget(seq)
        self._requests.pop(request.request_id, None)

    def check_integrity(self) -> None:
        """Every KV block of every group is accounted for."""
        self.je.check_integrity()


class Request:
    """A submitted request: iterate it for its OutputDeltas. Leaving early aborts it."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine, self.request_id = engine, request_id
        self.sequences: list[Sequence] = []
        self.outputs: list[ChoiceOutput] = []
        self._queue: asyncio.Queue[OutputDelta | XDeepServeError | None] = asyncio.Queue()
        self._num_open = 0
        self._is_over = False

    def add(self, seq: Sequence, output: ChoiceOutput) -> None:
        """One more choice, before the request is dispatched."""
        self.sequences.append(seq)
        self.outputs.append(output)
        self._num_open += 1

    def take(self, seq: Sequence, rows: list[SampledToken]) -> bool:
        """Called by the scheduler with a step's results; True when the choice is finished."""
        output = self.outputs[seq.choice]
        delta = output.push(rows)
        if delta is not None:
            self._queue.put_nowait(delta)
        if output.finish_reason is None:
            return False
        self._num_open -= 1
        if self._num_open == 0:
            self._is_over = True
            self._queue.put_nowait(None)
            self._engine.finished(self)
        return True

    def abort(self) -> None:
        """Stop computing and free the KV blocks at once. Harmless when repeated or after the end."""
        if self._is_over:
            return
        for output in self.outputs:
            if output.finish_reason is None:
                output.finish_reason = "abort"
                delta = OutputDelta(index=output.index, text="", token_ids=[], finish_reason="abort")
                self._queue.put_nowait(delta)
        self._engine.release(self)
        self._is_over = True
        self._queue.put_nowait(None)

    def fail(self, error: XDeepServeError) -> None:
        """End the iteration with an error."""
        if not self._is_over:
            self._queue.put_nowait(error)
            self._engine.release(self)
            self._is_over = True

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, XDeepServeError):
                    raise item
                yield item
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                self.abort()
