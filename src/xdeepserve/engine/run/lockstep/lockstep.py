"""The meeting of all dies of a step: the last die to come runs the layers for all of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import numpy as np

from xdeepserve.comm.twin import FAULTS
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.dimensions import Shape
from xdeepserve.engine.run.lockstep.heads import Heads
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels.side_by_side import layer_stage
from xdeepserve.engine.run.lockstep.kernels.sync import LOST, new_sync, wait_for_others
from xdeepserve.engine.run.lockstep.shares import Contribution, RowCounts, addresses
from xdeepserve.engine.run.lockstep.staged import StagedAttention, as_kernels_see
from xdeepserve.engine.run.lockstep.timetable import Ns, Timetable
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.engine.walk.schedule import EndLayer, Visit, Visits
from xdeepserve.errors import DeploymentError, ProtocolError, XDeepServeError
from xdeepserve.hw.clock import Clock, Waiter, Waiting
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import LATENT_NORM_EPS
from xdeepserve.model.sharding import Shard
from xdeepserve.model.tensors import Layer
from xdeepserve.model.weights import is_routed
from xdeepserve.step.frame import KVCache
from xdeepserve.step.stage import LayerProgram, Meet

Call: TypeAlias = tuple[Callable[..., None], tuple[Any, ...]]
"""Kernel over dies and its arguments, except the last two: number of the worker, and of all workers."""

QUICK = 4e9
"""Rows times parameters of a run that takes only milliseconds. The event loop waits for such a run, because
being woken by another thread takes about as long."""


Span: TypeAlias = tuple[str, ...]
"""Names of stages, or of an exchange, that one kernel runs."""


def spans(program: LayerProgram) -> list[Span]:
    """Cut a layer into spans at the exchanges where dies meet."""
    result: list[Span] = []
    for is_meet, items in groupby((*program.attention, *program.feed), lambda item: isinstance(item, Meet)):
        names = tuple(item.op if isinstance(item, Meet) else item.name for item in items)
        result += [(name,) for name in names] if is_meet else [names]
    return result


class Lockstep(ABC):
    """All dies of a TE in lockstep; each die with attention calls `attend` once a run.

    A run is one pass through the main model's layers, or through an MTP layer. Before and after it every die
    is a task of its own: plans, sampling, KV transfers and the host's part do not change. `kernels` are the
    spans of stages that it can run. `members` are the dies' names in errors, those with attention
    first. `num_threads` of this computer share kernels.
    """

    kernels: frozenset[Span]
    timetable: Timetable
    num_microbatches = 1
    inputs: np.ndarray  # [dies with attention, NUM_INPUTS]: of the run that goes on
    cuts: Sequence[np.ndarray]  # by microbatch, the rows of each die that are in it [dies, 2]

    def __init__(self, executors: Sequence[Executor], members: Sequence[str], num_threads: int) -> None:
        self.executors, self.members, self.num_threads = executors, members, num_threads
        self.dies = [executor.die for executor in executors]  # of all members
        self.spaces = [executor.ws for executor in executors]  # what kernels read and write
        self.clock: Clock = executors[0].die.clock
        self._came: dict[int, int] = {}  # member -> when it came
        self._shares: dict[int, Contribution] = {}
        self._waiters: dict[int, Waiter] = {}
        self.pool: ThreadPoolExecutor | None = None
        self._num_parameters = num_parameters(executors[0].config)
        self._is_ready = False
        self.sync = new_sync()  # what threads wait by, here and in kernels
        self.staged = StagedAttention(executors, num_threads)
        self._walk = executors[0].traversal.schedule  # that of a die by itself
        self._heads = Heads(executors, self.spread)

    def join(self) -> None:
        """Make lockstep run the layers of all executors; DeploymentError for a span without a kernel."""
        for executor in self.executors:
            for program in executor.traversal.programs:
                for span in spans(as_kernels_see(program)):
                    if span not in self.kernels:
                        raise DeploymentError(f"lockstep has no kernel for {' + '.join(span)}")
            rank = executor.rank
            executor.traversal = executor.traversal._replace(
                schedule=partial(self._schedule, rank), head=self._heads.program(rank)
            )

    async def _schedule(
        self, rank: int, runners: Sequence[Runner], visits: Visits, end_layer: EndLayer
    ) -> None:
        """Schedule of a die in lockstep: its layers are run together with those of all others."""
        frame = runners[0].frame
        await self.attend(rank, Contribution(frame.whole, visits, frame.batch))

    # ---- the meeting --------------------------------------------------------------------------------

    async def attend(self, rank: int, share: Contribution) -> None:
        """Run layers in place on the rows of an attention die; return when they are done on this die."""
        self._shares[rank] = share
        await self.meet(rank)

    async def meet(self, member: int) -> None:
        """Take a die's part in a run; return when its work there is done, in virtual time."""
        clock, size, name = self.clock, len(self.members), self.members[member]
        if self.dies[member].gate.is_shut:
            await self.dies[member].gate.passed()
        if member in self._came:
            raise ProtocolError(f"{name} came to a run twice")
        self._came[member] = clock.now
        if len(self._came) < size:
            waiter = self._waiters[member] = clock.waiter(lambda: self._describe(name))
            try:
                await clock.wait(waiter, clock.now + self.executors[0].mem.walk.timeout_ns)
            finally:
                if self._waiters.get(member) is waiter:  # there was no run: it leaves the meeting
                    del self._waiters[member], self._came[member]
            return
        shares = [self._shares[rank] for rank in range(len(self.executors))]
        came = np.array([self._came[each] for each in range(size)], np.int64)
        waiters = dict(self._waiters)
        self._came.clear()
        self._shares.clear()
        self._waiters.clear()
        self._heads.begin()
        try:
            for die in self.dies:  # one may have been lost since it came
                die.check_alive()
            came = np.maximum(came, self.free_ns())
            work = self._num_parameters * sum(len(share.h) for share in shares)
            if self._is_ready and work < QUICK:  # the first run may have to compile
                ends = self._begin(shares, came)
            else:
                # A plain await: virtual time stands still, and the event loop does not.
                loop = asyncio.get_running_loop()
                ends = await loop.run_in_executor(self.threads, self._begin, shares, came)
                for die in self.dies:  # its weights may have served others
                    die.check_alive()
            # Exchanges are barriers: who is slow sets the pace of all.
            slowness = max(die.slowness for die in self.dies)
            if slowness > 1:
                ends = clock.now + np.ceil((ends - clock.now) * slowness).astype(np.int64)
        except Exception as error:
            for waiter in waiters.values():
                waiter.fail(error)
            raise
        for each, waiter in waiters.items():
            waiter.wake(delay_ns=max(0, int(ends[each]) - clock.now))
        await clock.sleep_until(int(ends[member]))

    def free_ns(self) -> int:
        """Return the time in ns from which all dies reach each other; LinkError if a link between two is
        down."""
        links = self.dies[0].fabric.links
        return links.free_ns([die.index for die in self.dies]) if links else 0

    def _describe(self, name: str) -> Waiting:
        missing = [each for number, each in enumerate(self.members) if number not in self._came][:8]
        size = len(self.members)
        return Waiting("lockstep", name, ", ".join(missing), "meeting", size, len(self._came))

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Pool of worker threads, started at their first use."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.num_threads + 1, thread_name_prefix="lockstep")
        return self.pool

    def close(self) -> None:
        """End the worker threads that ran kernels together."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
        self.staged.close()

    def check_integrity(self) -> None:
        """Check weights for equal bytes, where one die computes with them for all
        (kernels/side_by_side.py)."""
        seen: dict[tuple[str, Shard], tuple[int, Array]] = {}
        lost = self.dies[0].fabric.memories.silent
        for executor in self.executors:
            if executor.die.index in lost:
                continue
            for name, array in executor.mem.weights().items():
                if is_routed(name):
                    continue
                rank, other = seen.setdefault((name, executor.mem.shard.of(name)), (executor.rank, array))
                if not np.array_equal(array.view(np.uint8), other.view(np.uint8)):
                    raise XDeepServeError(
                        f"rank {executor.rank} holds other bytes of {name} than rank {rank}"
                    )

    # ---- the run ------------------------------------------------------------------------------------

    def _begin(self, shares: Sequence[Contribution], came: np.ndarray) -> np.ndarray:
        self.find_tables()
        return self.run(shares, came)

    def find_tables(self) -> None:
        """Find the addresses of all that kernels need; once, when the memories are real."""
        if not self._is_ready:
            self._find_layers()
            self.prepare()
            self._is_ready = True

    def _find_layers(self) -> None:
        """Find the addresses of buffers and weights; once, when the memories are real."""
        executors, first = self.executors, self.executors[0]
        mem = first.mem
        # Passes through layers: an MTP layer that is used again has a cache of its own each time.
        self.columns = [list(column) for column in zip(*map(_passes, executors), strict=True)]
        layer_nbytes = max(tables.weights_nbytes(column[0]) for column in self.columns)
        self.shape = Shape.of(mem, LATENT_NORM_EPS, layer_nbytes)
        self.buffers = tables.buffers(executors, self.spaces)
        self._pass_at = {id(cache): i for i, cache in enumerate(first.caches)}
        replicas = [executor.mem.replicas for executor in executors]
        self.weights = np.stack(
            [
                tables.layer_weights(column, [each.caches[i] for each in executors], replicas)
                for i, column in enumerate(self.columns)
            ]
        )
        rows = mem.steps.max_tokens * self.shape.copies
        size = max(self.shape.scratch, rows * mem.config.hidden_size)
        self.scratch = np.empty((self.num_threads, size), np.float32)
        num_beside = min(a.AT_ONCE, len(executors) * mem.steps.max_tokens) if len(executors) > 1 else 0
        places = [
            tables.beside(first, self.spaces[0], self.buffers[0], num_beside) for _ in range(self.num_threads)
        ]
        self.beside, self._beside = np.stack([table for table, _ in places]), [memory for _, memory in places]

    @abstractmethod
    def prepare(self) -> None:
        """Find further addresses for a run; once, when the memories are real."""

    def run(self, shares: Sequence[Contribution], came: np.ndarray) -> np.ndarray:
        """Run all layers for all dies, which arrived at `came` [members] in ns; return when each is done, in
        ns.

        The first die's layers and event IDs hold for all. Faults and virtual time are looked at when all
        layers are done.
        """
        visits = shares[0].visits()
        passes = [self.pass_of(visit.cache) for visit in visits]
        rows, parts = np.array([len(share.h) for share in shares], np.int64), self.num_microbatches
        bounds = [rows * m // parts for m in range(parts + 1)]
        self.inputs, self.cuts = addresses(shares), [np.stack(pair, axis=1) for pair in pairwise(bounds)]
        self.compute(shares, visits, passes)
        self.check_faults(visits, passes)
        self.timetable.begin(came)
        self.tell_time(shares, visits, passes)
        return self.timetable.ends_ns

    @abstractmethod
    def compute(self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Compute all bytes of a run."""

    @abstractmethod
    def check_faults(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Raise ProtocolError for the first fault that a die has found, if there is any."""

    @abstractmethod
    def experts_ns(self, microbatch: int, layers: Sequence[int]) -> Ns:
        """Price the experts of each die in passes through layers with experts [layers, domains, dies], in
        ns."""

    def tell_time(
        self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]
    ) -> None:
        """Compute when the stages happen in virtual time, by the schedule of a die by itself."""
        layers = [at for visit, at in zip(visits, passes, strict=True) if visit.layer.moe is not None]
        counts = [RowCounts.of(shares, cuts) for cuts in self.cuts]
        experts_ns = [self.experts_ns(m, layers) for m in range(self.num_microbatches)]
        self.timetable.pass_layers(self._walk, visits, counts, experts_ns)

    def pass_of(self, cache: KVCache) -> int:
        """Return the number of the step's pass that uses this cache of the first die."""
        return self._pass_at[id(cache)]

    def layer(self, at: int, cuts: np.ndarray, is_moe: bool) -> Call:
        """Return the call for a layer up to the gate, or a whole layer without experts, on rows `cuts` [dies,
        2]."""
        args = (self.shape, self.buffers, self.beside, self.weights[at], self.inputs, cuts, is_moe)
        return layer_stage, (*args, self.scratch, self.sync)

    def spread(self, *rounds: Sequence[Call]) -> None:
        """Run kernels round by round on all threads.

        Threads wait for each other between rounds, and within kernels by `sync`. ProtocolError if they have
        lost each other.
        """
        num, sync, rounds = self.num_threads, self.sync, tuple(filter(None, rounds))

        def work(worker: int) -> None:
            is_done = False
            try:
                for number, calls in enumerate(rounds):
                    if number and num > 1:
                        wait_for_others(sync, num)
                        if sync[LOST]:  # what others have left is not whole
                            return
                    for kernel, args in calls:
                        kernel(*args, worker, num)
                is_done = True
            finally:
                if not is_done:
                    sync[LOST] = 1  # nobody need wait for this thread

        jobs = [self.threads.submit(work, worker) for worker in range(1, num)]
        try:
            work(0)
        finally:
            for job in jobs:
                job.exception()  # it has ended
            self.sync = new_sync()  # nobody who is still under way has this one
        for job in jobs:
            job.result()
        if sync[LOST]:
            raise ProtocolError(f"lockstep: the {num} threads of a step have lost each other")

    @staticmethod
    def check(faults: np.ndarray, op: str, side: str, event: int) -> None:
        """Raise ProtocolError, naming the first die, if a die has found a fault."""
        if faults.any():
            rank = int(np.flatnonzero(faults)[0])
            raise ProtocolError(f"{op}: {side} {rank} {FAULTS[int(faults[rank])]} in event {event}")


def _passes(executor: Executor) -> list[Layer]:
    """List the layers of a step in order: the main model's, then MTP's, repeated where one is used again."""
    drafter = executor.drafter
    return [*executor.weights.layers, *(mtp.layer for mtp in (drafter.layers if drafter else []))]
