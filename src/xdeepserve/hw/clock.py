"""Virtual time: a deterministic clock that asyncio tasks wait on.

A *process* is an asyncio task spawned through `Clock.spawn`. The clock counts the processes that can run.
When the last of them blocks on a clock primitive, the clock pops the earliest event of its heap, moves
`now` there and wakes exactly one process. Hence one process runs at a time, the order is total, and it
depends on nothing but the program and the seed: never on the event loop (uvloop works as well as asyncio's
own), on wall-clock time or on hashing.

Two kinds of waiting:

    sleep, sleep_until    ends by itself
    wait, join            ends when another process wakes the waiter, or at a deadline (DeadlineError)
      ... no deadline     as above, but DeadlockError as soon as nothing in the pod could ever end it
      ... idle=True       waits for work (a die for a command, a host for a request): may last for ever

A process that awaits anything else, say an asyncio future, holds virtual time still until it continues. Code
that is no process (an HTTP handler, a test) may call `spawn`, `Waiter.wake` and `Queue.put`, which take
effect at the current virtual time, and may `await` a process to get its result or its exception. The virtual
time at that moment depends on how often the event loop has turned, unless the clock *rests*: no process runs,
and no event is left. Callers that need the same events every time wait for that (`when_at_rest`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from operator import index
from typing import Any, NamedTuple, TypeVar

from ..errors import DeadlineError, DeadlockError, HardwareError, WaitError

T = TypeVar("T")

Hears = Callable[[Exception], None]
"""Owner of a process that nobody awaits, told of the error that ended the process; it must not raise."""

# A process that never has to suspend must still let the event loop turn (sockets, cancellation) now and then.
_SLEEPS_PER_LOOP_TURN = 32

# Lapsed events are dropped from the heap when it has grown to this, and then whenever it has doubled.
MIN_HEAP = 1024

LAPSED = -1


class Waiting(NamedTuple):
    """Description of a wait, used as the words of its error if the wait fails."""

    op: str
    rank: object
    peer: object
    field: str
    expected: object
    seen: object


class Waiter:
    """A single wait of a process. `wake` or `fail` ends it; the first call counts.

    `describe` is called only if the wait fails, so what it reports is what was seen at that moment.
    """

    __slots__ = (
        *("_clock", "_ending", "_error", "_future", "_is_interrupted", "_process", "_tie", "_value"),
        "describe",
    )

    def __init__(self, clock: Clock, describe: Callable[[], Waiting]) -> None:
        self._clock = clock
        self._future: asyncio.Future[None] | None = None
        self._process: Process | None = None
        self._tie = LAPSED  # key of its only live event in the heap
        self._ending = self._is_interrupted = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.describe = describe

    def wake(self, value: Any = None, delay_ns: int = 0) -> bool:
        """End the wait at now + delay with `value`. Returns False if it had already been ended."""
        if self._ending:
            return False
        self._ending = True
        self._value = value
        self._clock._push(self._clock._now + delay_ns, self)
        return True

    def fail(self, error: BaseException, delay_ns: int = 0) -> bool:
        """End the wait at now + delay by raising `error` in the waiting process."""
        if not self.wake(None, delay_ns):
            return False
        self._error = error
        return True

    def _unpark(self) -> None:
        """Make the waiting process runnable; its other events lapse."""
        self._tie = LAPSED
        self._ending = True
        if self._process is not None:
            self._process.waiter = None
            self._process = None
            self._clock._num_running += 1
        self._clock._unbounded.pop(self, None)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Process(asyncio.Task[Any]):
    """An asyncio task living in virtual time. Only `Clock.spawn` makes processes."""

    clock: Clock
    waiter: Waiter | None  # what it is parked on; None while it can run

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        # Runnable from now on, so that the clock stands still until it has cleaned up.
        if cancelled and self.waiter is not None:
            self.waiter._unpark()
        return cancelled

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for work and has not been woken."""
        waiter = self.waiter
        return waiter is not None and waiter._tie == LAPSED and waiter not in self.clock._unbounded

    def interrupt(self, error: Exception, delay_ns: int = 0) -> bool:
        """End the wait of a process `delay_ns` from now by raising `error` there. An earlier interruption's
        error comes first; returns False if the process does not wait."""
        waiter = self.waiter
        if waiter is None:
            return False
        if not waiter._is_interrupted:
            waiter._ending, waiter._error, waiter._is_interrupted = True, error, True
            self.clock._push(self.clock._now + delay_ns, waiter)
        return True

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Context | None = None) -> None:
        # asyncio.gather, asyncio.wait and their like begin so. Within a process they would never end, since
        # their caller holds the turn that the others need.
        if isinstance(asyncio.current_task(self.get_loop()), Process):
            raise HardwareError("within a process, use clock.join or clock.gather instead of asyncio's")
        super().add_done_callback(fn, context=context)

    def __await__(self) -> Any:
        # A process that awaits another must give up its turn, or neither would ever run again.
        if isinstance(asyncio.current_task(), Process):
            return self.clock.join(self).__await__()
        return super().__await__()


class ClockCounts(NamedTuple):
    """Counts of a clock's processes, waits and events."""

    running: int  # processes that wait for nothing
    events: int  # waits with a time, those included that have lapsed and are not yet cleared away
    unbounded: int  # waits without a time
    joined: int  # processes that have not ended
    made: int  # events since the clock was made


class Clock:
    """Integer nanoseconds of virtual time, and the total order of events.

    `seed=None` breaks ties in the order in which events were made. A seed breaks them at random, but
    reproducibly, so that tests can explore interleavings.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._now = 0
        self._heap: list[tuple[int, int, Waiter]] = []
        self._random = None if seed is None else random.Random(seed)
        self._num_events = 0
        self._compact_at = MIN_HEAP
        self._num_running = 0
        self._num_sleeps_in_turn = 0
        self._unbounded: dict[Waiter, None] = {}  # waits that are a deadlock if nothing else is left
        self._joiners: dict[Process, list[Waiter]] = {}
        self._until_rest: list[Callable[[], None]] = []
        self._planned: list[tuple[int, int, Callable[[], Coroutine[Any, Any, object]], Hears | None]] = []
        self.hears: Hears | None = None  # owner of the processes of virtual hardware
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kicked_on: asyncio.AbstractEventLoop | None = None

    @property
    def now(self) -> int:
        """Virtual time in ns since the clock was made."""
        return self._now

    @property
    def rests(self) -> bool:
        """Whether no process runs and no event is left, until something outside acts."""
        return not (self._num_running or self._heap)

    def counts(self) -> ClockCounts:
        """Count the clock's entries: of a pod at rest only `made` and lapsed events may be left."""
        unbounded, joined = len(self._unbounded), len(self._joiners)
        return ClockCounts(self._num_running, len(self._heap), unbounded, joined, self._num_events)

    @property
    def runs_caller(self) -> bool:
        """Whether the caller is a process, so that virtual time stands still until it waits."""
        return self._loop is not None and isinstance(asyncio.current_task(self._loop), Process)

    def when_at_rest(self, then: Callable[[], None]) -> None:
        """Call `then` when the clock comes to rest, or now if it rests already. `then` must not raise.

        Never, if some process always has something left to do.
        """
        if self.rests:
            then()
        else:
            self._until_rest.append(then)

    def at(
        self, time_ns: int, start: Callable[[], Coroutine[Any, Any, object]], hears: Hears | None = None
    ) -> None:
        """Detach `start()` as a process when time comes to `time_ns`; `hears` as for `detach`.

        Until then it is no event: it keeps nothing from resting, and time does not go there for its sake.
        """
        heappush(self._planned, (max(index(time_ns), self._now), self._num_events, start, hears))
        self._num_events += 1

    # ---- processes ----------------------------------------------------------------------------------

    def spawn(self, coro: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Start a process at the current virtual time. Await (or `join`) it for its result or exception.

        The caller keeps it and hears its error; a process that nobody awaits is started by `detach`.
        """
        self._loop = loop = asyncio.get_running_loop()
        start = Waiter(self, lambda: Waiting("start", name, "-", "clock", "turn", "none"))
        process = Process(self._main(start, coro), loop=loop, name=name)
        process.clock = self
        process.waiter = start
        start._process = process
        self._joiners[process] = []
        asyncio.Task.add_done_callback(process, lambda _: self._finished(process, coro))
        start.wake()
        return process

    def detach(
        self, coro: Coroutine[Any, Any, object], name: str, hears: Hears | None = None
    ) -> asyncio.Task[None]:
        """Start a process; an error that ends it goes to `hears`, because no caller awaits it.

        By default that is the clock's owner, `self.hears`; on a clock without one asyncio logs the error.
        """
        process = self.spawn(self._owned(coro, hears), name)
        asyncio.Task.add_done_callback(process, lambda _: coro.close())  # perhaps it was never entered
        return process

    async def _owned(self, coro: Coroutine[Any, Any, object], hears: Hears | None) -> None:
        try:
            await coro
        except Exception as error:
            if (hears := hears or self.hears) is None:
                raise
            hears(error)

    async def _main(self, start: Waiter, coro: Coroutine[Any, Any, T]) -> T:
        if start._tie != LAPSED:
            start._future = asyncio.get_running_loop().create_future()
            await start._future
        return await coro

    def _finished(self, process: Process, coro: Coroutine[Any, Any, Any]) -> None:
        coro.close()  # a process cancelled before its first step never entered its coroutine
        for joiner in self._joiners.pop(process):
            joiner.wake()
        self._num_running -= 1
        if self._num_running == 0:
            self._advance()

    async def join(
        self, process: asyncio.Task[T], deadline_ns: int | None = None, *, idle: bool = False
    ) -> T:
        """Wait for a process from within another; return its result or raise its exception.

        `idle` if the process may wait for work for ever, so that this is no deadlock.
        """
        assert isinstance(process, Process)
        if not process.done():
            name = process.get_name()
            me = self._current().get_name()
            waiter = self.waiter(lambda: Waiting("join", me, name, "process", "finished", "still waiting"))
            self._joiners[process].append(waiter)
            await self.wait(waiter, deadline_ns, idle=idle)
        return process.result()

    async def until_ended(self, process: asyncio.Task[Any]) -> None:
        """Wait for a process from within another, until it has ended by itself or has been cancelled.

        Raises its exception. CancelledError is raised for the caller's own end alone.
        """
        try:
            await self.join(process)
        except asyncio.CancelledError:
            if not process.cancelled():
                raise

    async def gather(self, *coros: Coroutine[Any, Any, T]) -> list[T]:
        """Run coroutines as processes side by side; return results in order, or raise the first failure in
        that order.

        All are joined before a failure is raised. To be called from within a process.
        """
        processes = [self.spawn(coro) for coro in coros]
        try:
            failures: list[BaseException] = []
            for process in processes:
                try:
                    await self.join(process)
                except Exception as error:
                    failures.append(error)
        except asyncio.CancelledError:
            for process in processes:
                if not process.cancel() and not process.cancelled():
                    process.exception()  # nobody is left to hear of it
            raise
        if failures:
            raise failures[0]
        return [process.result() for process in processes]

    # ---- waiting ------------------------------------------------------------------------------------

    def sleep(self, ns: int) -> Coroutine[Any, Any, None]:
        """Let `ns` nanoseconds of virtual time pass."""
        return self.sleep_until(self._now + index(ns))

    async def sleep_until(self, time_ns: int) -> None:
        """Let virtual time pass until `time_ns`; return at once if it is not in the future."""
        heap = self._heap
        process = asyncio.current_task(self._loop)
        if process.__class__ is not Process or process.clock is not self:
            process = self._current()  # which says what is wrong
        if time_ns < self._now:
            time_ns = self._now
        planned = self._planned
        is_next = not ((heap and heap[0][0] <= time_ns) or (planned and planned[0][0] <= time_ns))
        if self._num_running == 1 and is_next:
            # This would be the next event: nobody else can run before it.
            self._now = time_ns
            self._num_sleeps_in_turn += 1
            if self._num_sleeps_in_turn >= _SLEEPS_PER_LOOP_TURN:
                self._num_sleeps_in_turn = 0
                await asyncio.sleep(0)
            return
        waiter = Waiter(self, _sleeping)
        waiter._ending = True
        self._push(time_ns, waiter)
        await self._park(process, waiter)
        if waiter._error is not None:
            raise waiter._error

    def waiter(self, describe: Callable[[], Waiting]) -> Waiter:
        """Make a wait for another process to end: hand it over, then `await clock.wait(waiter)`."""
        return Waiter(self, describe)

    async def wait(self, waiter: Waiter, deadline_ns: int | None = None, *, idle: bool = False) -> Any:
        """Block until `waiter` is woken; return the value it was woken with.

        `deadline_ns` is absolute. Raises DeadlineError there; without one, DeadlockError when nothing in the
        pod can wake it, unless `idle`. A waiter serves once.
        """
        process = self._current()
        if not waiter._ending:
            if deadline_ns is not None:
                self._push(max(deadline_ns, self._now), waiter)
            elif not idle:
                self._unbounded[waiter] = None
        await self._park(process, waiter)
        if waiter._error is not None:
            raise waiter._error
        return waiter._value

    # ---- the engine room ----------------------------------------------------------------------------

    def _current(self) -> Process:
        process = asyncio.current_task(self._loop)
        if not isinstance(process, Process) or process.clock is not self:
            raise HardwareError("only a process of this clock can wait on it: start it with clock.spawn(...)")
        return process

    def _push(self, time_ns: int, waiter: Waiter) -> None:
        """Give `waiter` a new event, and let its earlier one lapse."""
        tie = self._num_events
        self._num_events += 1
        if self._random is not None:
            tie |= self._random.getrandbits(30) << 48
        waiter._tie = tie
        heappush(self._heap, (time_ns, tie, waiter))
        if len(self._heap) >= self._compact_at:
            self._compact()
        # With nobody running, the pod rests; the waker may be outside. Start again on the loop's next turn,
        # so that all that is handed in now starts from the same instant.
        if self._num_running == 0 and self._kicked_on is not self._loop and self._loop is not None:
            self._kicked_on = self._loop
            self._loop.call_soon(self._kick)

    def _compact(self) -> None:
        """Remove lapsed events from the heap.

        A pod under load never rests, and deadlines lie far ahead: those of waits that ended in time would
        pile up until virtual time has passed them. Keys are unique, so the order of the rest cannot change.
        """
        self._heap[:] = [event for event in self._heap if event[2]._tie == event[1]]
        heapify(self._heap)
        self._compact_at = max(MIN_HEAP, 2 * len(self._heap))

    def _kick(self) -> None:
        self._kicked_on = None
        if self._num_running == 0:
            self._advance()

    def _park(self, process: Process, waiter: Waiter) -> asyncio.Future[None]:
        """Take `process` out of the running until `waiter` is unparked, which resolves the future."""
        waiter._process = process
        process.waiter = waiter
        waiter._future = future = process.get_loop().create_future()
        self._leave()
        return future

    def _leave(self) -> None:
        self._num_running -= 1
        self._num_sleeps_in_turn = 0
        if self._num_running == 0:
            self._advance()

    def _advance(self) -> None:
        """Wake the process of the earliest event when no process runs; without events, call whoever waits for
        rest."""
        heap = self._heap
        while heap:
            time_ns, tie, waiter = heappop(heap)
            if waiter._tie != tie:
                continue
            if self._planned and self._planned[0][0] <= time_ns:
                heappush(heap, (time_ns, tie, waiter))
                self._now, _, start, hears = heappop(self._planned)
                self.detach(start(), "planned", hears)
                continue
            self._now = time_ns
            if not waiter._ending:
                waiter._error = self._failure(DeadlineError, waiter)
            waiter._unpark()
            return
        if self._unbounded:
            # One victim at a time: how it cleans up may set the others free.
            waiter = next(iter(self._unbounded))
            waiter._error = self._failure(DeadlockError, waiter)
            waiter._unpark()
        while self._until_rest and self.rests:
            self._until_rest.pop(0)()

    def _failure(self, kind: type[WaitError], waiter: Waiter) -> Exception:
        try:
            return kind(**waiter.describe()._asdict(), at_ns=self._now)
        except Exception as error:
            # A description that fails is the waiting process's business, not that of whoever ran last.
            return error


def _sleeping() -> Waiting:
    return Waiting("sleep", "-", "-", "clock", "time", "none")  # a sleep cannot fail; never shown
