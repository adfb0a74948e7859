"""The engine takes requests and gives tokens; it may share its pod with other engines."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import cast
from weakref import WeakSet

import msgspec

from xdeepserve.engine.balance.heat_map import read_heat_map
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.deploy.policies import ORDER
from xdeepserve.engine.dp.events import EventLog, Observer, Preempted, ReplicasChanged, notify
from xdeepserve.engine.dp.group import DPGroup, Left
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import KeepLogits, OrderPolicy, Sequence
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.job.links import Carriage
from xdeepserve.engine.job.peer_prefixes import Peers
from xdeepserve.engine.job.router import CachedPrompts, Router
from xdeepserve.engine.loading import Progress, Source
from xdeepserve.engine.serving.formats import make_parser, output_formats
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.serving.output import ChoiceOutput
from xdeepserve.engine.serving.request import NOTHING, EngineStats, Parse, check_request
from xdeepserve.engine.serving.steer import Steersman
from xdeepserve.engine.serving.te_group import TEGroup
from xdeepserve.engine.te.reports import ServerReport, TEHealth, TEReport
from xdeepserve.errors import OverloadedError, RequestError, XDeepServeError
from xdeepserve.hw.clock import Hears
from xdeepserve.hw.pod import Pod
from xdeepserve.model.answer_lengths import read_answer_lengths
from xdeepserve.model.sampling import philox4x32
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.step.linear import Threads

FEW_OBJECTS = 10_000  # new ones, before Python looks for cycles among objects


def collect_garbage_seldom() -> None:
    """Have Python seldom look for cycles among objects.

    A pod is many objects that stay: looking through them at every turn takes a fifth of a step.
    """
    young, *old = gc.get_threshold()
    if young:  # 0: this program wants no collection at all
        gc.set_threshold(max(young, FEW_OBJECTS), *old)


class Engine:
    """Serves a model on a pod. `AsyncEngine` in request.py is the contract that the endpoint sees.

    Construction plans the pod and refuses what cannot be built; `load` allocates it and reads the weights;
    `start` sets the dies going, and with `warm_up` runs a small request first.
    """

    def __init__(self, plan: PodPlan, model_name: str | None = None, warm_up: bool = False) -> None:
        self.plan = plan
        self._warms_up = warm_up
        self.model_name = model_name or plan.checkpoint.name
        self.max_model_len, self.vocab_size = plan.max_model_len, plan.config.vocab_size
        self.directory = plan.checkpoint.directory
        self.tokenizer = load_tokenizer(self.directory)
        self.formats = output_formats(plan.deployment.output, self.tokenizer)
        self._steersman = Steersman(plan.config, self.tokenizer, self.formats, plan.timing is None)
        self._threads = Threads(plan.deployment.threads)
        self._seq_ids = itertools.count()
        self._order: OrderPolicy = ORDER.function(plan.deployment.scheduler.order)
        self._num_unseeded = 0
        self._requests: dict[str, Request] = {}
        self._entering: list[Request] = []  # those that wait until the pod rests
        self._is_watched = False  # at the pod's next rest
        self._failure: XDeepServeError | None = None
        self.failed_te: str | None = None  # for want of which nothing can serve any more
        self._je: JobExecutor | None = None
        self._observers: list[Observer] = []

    def load(self, progress: Progress | None = None) -> None:
        """Allocate the pod and load the weights. Called by `start` if needed."""
        for done, total in self.pieces():
            if progress is not None:
                progress(done, total)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Load as `load` does, but yield (tensors done, total) after each tensor. A guest engine thus lets
        the others on its pod run in between."""
        if self._je is not None:
            return
        yield from self.plan.pieces()
        self._je = make_executor(self.plan, self._observers, self._hear)
        self._group = TEGroup(self.plan, self._je, self._threads, self.fail)
        join(self.plan.pod, self)

    @property
    def je(self) -> JobExecutor:
        """Job executor of the engine; exists after `load`."""
        assert self._je is not None, "the engine has not been loaded"
        return self._je

    @property
    def num_served(self) -> int:
        return max(0, len(self._requests) - len(self._entering))

    @property
    def groups(self) -> list[DPGroup]:
        """DP groups of all TEs of the engine."""
        return [group for te in self.je.tes for group in te.groups]

    # ---- the contract -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all TEs and the control plane, warm up if asked for, and wait until the pod rests."""
        self.load()
        for te in self.je.tes:
            te.start()
            self.je.take(te)
        for outside in self.plan.outside:
            await outside.start(self._hear)
        self._group.control_plane.start()
        for elastic in self._group.scalers:
            elastic.begin()
        if (period_s := self.plan.deployment.health.link_probe_s) is not None:
            self.je.probe_links(round(1e9 * period_s))
        if self._warms_up:
            await self.warm_up()
        await self.settle()
        collect_garbage_seldom()

    async def settle(self) -> None:
        """Wait until the pod has finished all remaining work. Returns at once while any engine on the pod
        serves requests."""
        if self._requests or self._failure is not None or not is_quiet(self.plan.pod):
            return
        at_rest = asyncio.Event()
        self.plan.pod.clock.when_at_rest(at_rest.set)
        await at_rest.wait()

    async def warm_up(self) -> None:
        """Run a small request, so that every kernel is compiled before the first user waits for it."""
        prompt = [0] * min(2, self.max_model_len - 1)
        params = SamplingParams(max_tokens=1, temperature=1.0, logprobs=0)
        async for _ in self.submit(prompt, params, "warm-up"):
            pass

    # ---- TEs that come and go -----------------------------------------------------------------------

    def tes(self) -> list[TEReport]:
        """Report on all TEs, including those that load or are pre-warmed."""
        return self._group.reports()

    @property
    def lost(self) -> dict[str, XDeepServeError]:
        """Failed TEs with the errors that ended them, while other TEs went on."""
        return self._group.lost

    @property
    def lost_dies(self) -> set[int]:
        """Dies that the engine does without, as far as it has found: lost, or not yet tested after a loss."""
        return set() if self._je is None else self._group.lost_dies

    async def add_te(self, role: Role = "both", source: Source = "auto") -> str:
        """Add a TE like the first of its role; return the name once the TE takes requests.

        Its weights come from `source` (engine/loading.py); "auto": a peer, else its hosts, the pool, storage.

        Raises DeploymentError, with nothing changed, if the deployment has no such TEs, the pod no room or
        the source no weights.
        """
        self._check_runs()
        return await self._group.joining.add(role, source)

    async def drain(self, te: str) -> None:
        """Stop giving new work to a TE, and wait until its work has ended and its dies are free.

        Raises RequestError, with nothing changed, if there is no such TE or the others could not serve.
        """
        self._check_runs()
        await self._group.part_with(te, moves_out=False)

    async def remove(self, te: str) -> None:
        """Remove a TE at the end of its step. Other TEs continue its sequences from the same tokens.

        Raises RequestError as `drain` does.
        """
        self._check_runs()
        await self._group.part_with(te, moves_out=True)

    def cannot_lose(self, die: int) -> str | None:
        """Explain why requests would not outlive the loss of a die; None if they would."""
        return self._group.cannot_lose(die)

    def servers(self) -> list[ServerReport]:
        """Report the seats of expert servers and who occupies them, where experts are services."""
        return self._group.servers()

    async def add_server(self, te: str | None = None, server: int | None = None) -> ServerReport:
        """Add an expert server, or replace a lost one; return once clients send requests to it.

        Raises RequestError, with nothing changed, if there is no such seat or a server occupies it.
        """
        self._check_runs()
        return await self._group.add_server(te, server)

    async def remove_server(self, te: str, server: int) -> None:
        """Remove an expert server once no client waits for it.

        Raises RequestError, with nothing changed, if no other server has its experts.
        """
        self._check_runs()
        await self._group.remove_server(te, server)

    def _check_runs(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._je is None or not any(te.is_running for te in self._je.tes):
            raise XDeepServeError("the engine has not been started, or has been stopped")

    async def stop(self) -> None:
        """Abort all remaining requests and end every task."""
        for request in list(self._requests.values()):
            request.abort()
        if self._je is not None:
            await self._group.close()
            await self._je.stop()
            if self.plan.is_guest:  # the pod goes on without it
                await self._group.settle()
        for outside in self.plan.outside:
            await outside.stop()
        self.plan.close()
        self._threads.close()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def is_healthy(self) -> bool:
        if self._failure is not None or self._je is None:
            return False
        return self._group.is_recovering or any(te.is_running for te in self._je.tes)

    @property
    def unhealthy_reason(self) -> str | None:
        """Reason why the engine cannot serve any more; None if it can."""
        return None if self._failure is None else str(self._failure)

    def health(self) -> list[TEHealth]:
        """Report the health of every TE, including loading and lost ones."""
        return self._group.health() if self._je is not None else []

    async def check_health(self) -> list[TEHealth]:
        """Probe all idle dies, look at late expert servers again, then report the health of every TE."""
        if self.is_healthy():
            await asyncio.gather(*(te.health.probe_all() for te in self.je.tes))
            await asyncio.gather(*(te.plan.look_at_late_servers() for te in self.je.tes))
        return self.health()

    def observe(self, observer: Observer) -> None:
        """Call `observer` with each event (dp/events.py) from now on, as it happens.

        It runs in the engine's loop, and must neither wait nor change anything. An observer that raises is
        logged and called no more. Without observers, events cost nothing.
        """
        self._observers.append(observer)

    def ignore(self, observer: Observer) -> None:
        """Stop calling an observer. Harmless when repeated, or after the observer has failed."""
        if observer in self._observers:
            self._observers.remove(observer)

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Observers of events, in the order in which they are called."""
        return tuple(self._observers)

    def stats(self) -> EngineStats:
        groups, counters = self.groups, self._group.counters()
        pending = self.je.num_pending + sum(request.num_open for request in self._entering)
        return EngineStats(
            num_running=sum(len(g.places.running) for g in groups),
            num_waiting=sum(g.places.num_waiting for g in groups) + pending,
            # No group is there while all TEs are started anew.
            kv_cache_usage=sum(g.rtc.usage for g in groups) / max(1, len(groups)),
            kv_block_size=self.plan.deployment.cache.block_size,
            num_kv_blocks=sum(g.kv.num_blocks for g in groups),
            num_host_kv_blocks=sum(g.kv.num_host_blocks for g in groups),
            num_promised=self.je.router.num_promised,
            num_broken=self.je.router.num_broken,
            num_cache_keys=sum(g.rtc.index.num_ids for g in groups),
            expert_load=tuple(load for te in self.je.tes for load in te.expert_load),
            virtual_ns=self.plan.pod.clock.now,
            pool={} if self.plan.pool_use is None else self.plan.pool_use.pool.counts(),
            pool_usage={} if self.plan.pool_use is None else self.plan.pool_use.pool.usage(),
            health=tuple(self.health()),
            num_preemptions=self.je.tell.counts[Preempted],
            num_reconfigurations=self.je.tell.counts[ReplicasChanged],
            num_recoveries=self._group.recoveries(),
            **counters._asdict(),
        )

    def prepare(self, params: SamplingParams, parse: Parse = NOTHING) -> None:
        """Compile a request's grammar before `submit`. Call it from another thread, because it may take a
        while."""
        self._steersman.prepare(params, parse)

    def submit(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        request_id: str,
        keep_logits: KeepLogits = "none",
        *,
        parse: Parse = NOTHING,
        on_scheduled: Callable[[int], None] | None = None,
        is_bounded: bool = True,
        je: int | None = None,
    ) -> Request:
        """Check and enqueue a request. Raises RequestError if it cannot be served.

        The request arrives now if the pod serves others, or if a process submits it. A request from outside
        to a pod without requests arrives when the pod rests, together with those that come until then.
        Otherwise its schedule would depend on how often the event loop has turned.

        `is_bounded=False` is for a caller that holds all its requests anyway: the queue's bound, which
        protects a server from its clients, does not apply. `je` is the number of the job executor that has
        the request; by default it is drawn.
        """
        if self._failure is not None:
            raise self._failure
        if request_id in self._requests:
            raise RequestError(f"request id {request_id} is in use", param="request_id")
        config = self.plan.config
        # Scoring needs no room for a new token: the one that is sampled is never computed.
        room = self.max_model_len + (keep_logits == "all")
        max_tokens = check_request(prompt_token_ids, params, max_model_len=room, vocab_size=config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"model {self.model_name} has no tokenizer, so it cannot find stop strings", param="stop"
            )
        if is_bounded:
            self.check_room(params.n)
        clock = self.plan.pod.clock
        request = Request(clock, request_id, on_scheduled, self.release, self.finished)
        self._add_choices(request, prompt_token_ids, params, max_tokens, keep_logits, parse, je)
        is_alone = is_quiet(self.plan.pod)
        self._requests[request_id] = request
        if clock.runs_caller or not (is_alone or self._entering):
            self._give(request)
        else:
            self._entering.append(request)
            if len(self._entering) == 1:
                clock.when_at_rest(self._enter)
        return request

    def _add_choices(
        self,
        request: Request,
        prompt: Seq[int],
        params: SamplingParams,
        max_tokens: int,
        keep_logits: KeepLogits,
        parse: Parse,
        je: int | None,
    ) -> None:
        """Add a sequence and an output to the request for each choice. Raises RequestError."""
        seed, eos = self._seed_of(params), frozenset(self.plan.config.eos_token_ids)
        for choice in range(params.n):
            parser = make_parser(parse, self.formats, self.tokenizer, prompt)
            # Log probabilities of the prompt are the same for all choices: the first one computes them.
            own = params if choice == 0 else msgspec.structs.replace(params, prompt_logprobs=None)
            output = ChoiceOutput(choice, own, max_tokens, eos, self.tokenizer, parser)
            seq = Sequence(
                seq_id=next(self._seq_ids),
                choice=choice,
                token_ids=list(prompt),
                num_prompt=len(prompt),
                max_tokens=max_tokens,
                params=own,
                seed=seed,
                on_tokens=request.take,
                on_scheduled=request.begin,
                on_failed=request.fail,
                keep_logits=keep_logits,
                steering=self._steersman.steer(own, prompt, parse),
                arrival_ns=self.plan.pod.clock.now,
                priority=params.priority,
                order=self._order,
                je=je,
            )
            request.add(seq, output)

    def _enter(self) -> None:
        """Let waiting requests arrive, in order, because the pod rests now."""
        entering, self._entering = self._entering, []
        for request in entering:
            if self._requests.get(request.request_id) is request:
                for seq in request.sequences:
                    seq.arrival_ns = self.plan.pod.clock.now
                self._give(request)

    def _give(self, request: Request) -> None:
        """Give a request to the job executor, and look after it when the pod rests."""
        self.je.submit(request.sequences)
        if not self._is_watched:
            self._is_watched = True
            self.plan.pod.clock.when_at_rest(self._watch)

    def _watch(self) -> None:
        """End the engine if requests are left when the pod rests, because nobody ever would work on them.

        Only a mistake in the engine's own books can leave one so.
        """
        self._is_watched = False
        for request in self._requests.values():
            if not (request.is_over or request in self._entering):
                where = ", ".join(self.je.where(seq) for seq in request.sequences if not seq.is_finished)
                self._hear(
                    XDeepServeError(
                        f"the pod rests, and request {request.request_id} has not ended ({where}): "
                        "this is a mistake of the engine, please report it with the command and its seed"
                    )
                )
                return

    def check_room(self, num_new: int) -> None:
        """Admission control: refuse requests beyond the queue length that the deployment allows.

        A caller with several requests that belong together checks for all of them first.
        """
        num_places = sum(group.steps.max_seqs for group in self.groups)
        limit = num_places + self.plan.deployment.scheduler.max_waiting
        if num_new > limit:
            raise RequestError(
                f"this engine holds at most {limit} sequences, running and waiting, found {num_new}",
                param="n",
            )
        num_open = sum(request.num_open for request in self._requests.values())
        if num_open + num_new > limit:
            raise OverloadedError(
                f"the engine is overloaded: it holds {num_open} sequences, {limit} at most; try again later"
            )

    def _seed_of(self, params: SamplingParams) -> int:
        """Return the request's own seed, else one drawn from the deployment's seed and the order of
        arrival."""
        if params.seed is not None:
            return params.seed
        self._num_unseeded += 1
        words = philox4x32((self._num_unseeded, 0, 0, 1), (self.plan.deployment.seed & 0xFFFFFFFF, 0))
        return words[0] | words[1] << 32

    def fail(self, error: XDeepServeError, te: str | None = None) -> None:
        """End every request with the reason why nothing can serve any more; `te` names the TE that failed, if
        any."""
        self._failure, self.failed_te = error, te
        self._group.end(f"the engine has failed: {error}")
        for each in sorted(self.je.tes, key=lambda each: each.sizes.place.name != te):  # the cause first
            each.kill()
        for request in list(self._requests.values()):
            # What has failed may be the books of blocks: one request that cannot give its own back must not
            # leave the others waiting.
            notify(request.fail, self._failure, about=f"request {request.request_id}")
        self.je.abandon()

    def _hear(self, error: Exception) -> None:
        """End the engine by an error in a process that belongs to no TE."""
        if self._failure is None:
            self._group.fail(error)

    def release(self, request: Request) -> None:
        """Forget a request and free all it holds. Harmless when repeated."""
        for seq in request.sequences:
            self.je.remove(seq)
        self._requests.pop(request.request_id, None)

    def finished(self, request: Request) -> None:
        """Forget a finished request, all choices of which have ended; their schedulers remove the
        sequences."""
        if self._group.scalers:  # the first choice stands for all: they step side by side
            first = request.sequences[0]
            self._group.hear_ended(request.outputs[0].metrics(first), first.num_prompt)
        for seq in request.sequences:
            self.je.forget(seq)
        self._requests.pop(request.request_id, None)

    def left(self) -> Left:
        """Count entries still held here by requests; 0 once the last request has ended and the pod rests."""
        groups = [group.left() for group in self.groups]
        parts = [Left(requests=len(self._requests)), self.je.left(), *groups]
        return Left(*map(sum, zip(*parts, strict=True)))

    def check_integrity(self) -> None:
        """Check the account of every KV block of every DP group."""
        self.je.check_integrity()


def join(pod: Pod, engine: Engine) -> None:
    """Register a loaded engine with its pod, for as long as the engine object lives.

    Engines own the processes of the pod's virtual hardware: an error there ends all of them.
    """
    engines = _engines(pod)
    engines.add(engine)
    pod.clock.hears = partial(_tell, engines)


def is_quiet(pod: Pod) -> bool:
    """Whether no engine on the pod serves a request: only then is the pod sure to come to rest."""
    return not any(each.num_served for each in _engines(pod))


def _tell(engines: WeakSet[Engine], error: Exception) -> None:
    for each in sorted(engines, key=lambda each: each.model_name):
        each._hear(error)


def _engines(pod: Pod) -> WeakSet[Engine]:
    return cast("WeakSet[Engine]", pod.services.setdefault("engines", WeakSet()))


def make_executor(plan: PodPlan, observers: list[Observer], hears: Hears | None = None) -> JobExecutor:
    """Make the job executor that a plan's deployment asks for, without TEs yet.

    `observers` are told what happens to requests, `hears` of an error in the executor's processes.
    InputError for a file that is no heat map.
    """
    d = plan.deployment
    carriage = Carriage(plan.pod, d.fabric, d.transfer_over, plan.kv_weight)
    heat = None if d.scheduler.heat is None else read_heat_map(Path(d.scheduler.heat))
    lengths = None if heat is None else read_answer_lengths(plan.checkpoint.directory)
    clock, policy = plan.pod.clock, d.scheduler
    cached = CachedPrompts(lambda: clock.now, round(1e6 * policy.hint_age_ms))
    router = Router(cached, policy.job_executors, policy.route, d.seed, heat, lengths, joins=d.cache.peers)
    retry_ns = round(1e9 * d.health.probe_s)
    peers = Peers(plan.pod, cached, d.cache.load, retry_ns) if d.cache.peers else None
    events, admission = EventLog(observers), d.scheduler.admission
    return JobExecutor(plan.pod, events, carriage, router, retry_ns, admission, hears, peers)
