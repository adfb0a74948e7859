"""Virtual time: order, ties, deadlines, deadlocks, cancellation, failure, and what comes from outside."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import DeadlineError, DeadlockError, HardwareError
from xdeepserve.hw.clock import Clock, Waiter, Waiting
from xdeepserve.hw.queue import HostCPU, HostQueue, Queue

FOR_NOTHING = Waiting("test", 0, 1, "flag", "set", "unset")


def waiter_on(clock: Clock) -> Waiter:
    return clock.waiter(lambda: FOR_NOTHING)


async def until_it_rests() -> None:
    """Let the event loop turn until the few processes of a test have nothing left to do."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_events_run_in_order_of_time_then_of_making() -> None:
    clock, log = Clock(), []

    async def process(name: str, *naps: int) -> None:
        for nap in naps:
            await clock.sleep(nap)
            log.append((clock.now, name))

    a, b, c = process("a", 5, 5), process("b", 10, 0), process("c", 1, 2, 20)
    await asyncio.gather(clock.spawn(a), clock.spawn(b), clock.spawn(c))
    # At 10, b made its event (at 0) before a made its second (at 5); b's nap of 0 comes after both.
    assert log == [(1, "c"), (3, "c"), (5, "a"), (10, "b"), (10, "a"), (10, "b"), (23, "c")]


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=6), st.none() | st.integers(0, 9))
def test_same_seed_same_order_and_time_never_goes_back(naps: list[list[int]], seed: int | None) -> None:
    def run(runner: Callable[[Coroutine[Any, Any, None]], None]) -> list[tuple[int, int]]:
        log: list[tuple[int, int]] = []
        clock = Clock(seed)

        async def process(index: int) -> None:
            for nap in naps[index]:
                before = clock.now
                await clock.sleep(nap)
                assert clock.now == before + nap
                log.append((clock.now, index))

        async def main() -> None:
            await asyncio.gather(*[clock.spawn(process(i)) for i in range(len(naps))])

        runner(main())
        return log

    log = run(asyncio.run)
    assert log == sorted(log, key=lambda entry: entry[0])
    assert log == run(asyncio.run) == run(uvloop.run)


async def test_a_seed_explores_other_orders() -> None:
    async def order(seed: int | None) -> str:
        clock, log = Clock(seed), []

        async def process(name: str) -> None:
            await clock.sleep(7)
            log.append(name)

        await asyncio.gather(*[clock.spawn(process(name)) for name in "abc"])
        return "".join(log)

    assert await order(None) == "abc"
    assert {await order(seed) for seed in range(60)} == {"abc", "acb", "bac", "bca", "cab", "cba"}


async def test_who_waits_for_rest_is_told_in_the_instant_in_which_it_begins() -> None:
    clock, log = Clock(), []

    async def naps() -> None:
        assert clock.runs_caller
        await clock.sleep(3)
        await asyncio.sleep(0)  # virtual time stands still, but somebody runs
        await clock.sleep(4)

    assert clock.rests
    clock.when_at_rest(lambda: log.append(("at once", clock.now)))
    process = clock.spawn(naps())
    assert not clock.rests
    assert not clock.runs_caller
    # What is done in that instant ends the rest: the next one is told when it has ended.
    clock.when_at_rest(lambda: (log.append(("first", clock.now)), clock.spawn(naps())))
    clock.when_at_rest(lambda: log.append(("second", clock.now)))
    await process
    await until_it_rests()
    assert log == [("at once", 0), ("first", 7), ("second", 14)]
    assert clock.rests


async def test_who_waits_for_ever_rests_and_who_waits_for_a_future_does_not() -> None:
    clock, real, told = Clock(), asyncio.get_running_loop().create_future(), []

    async def waits_for_work() -> None:
        await clock.wait(waiter_on(clock), idle=True)

    async def waits_for_something_real() -> None:
        await real

    process = clock.spawn(waits_for_work())
    await until_it_rests()
    assert clock.rests
    other = clock.spawn(waits_for_something_real())
    clock.when_at_rest(lambda: told.append(True))
    await until_it_rests()
    assert not clock.rests
    assert not told
    real.set_result(None)
    await other
    assert told == [True]
    process.cancel()


async def test_only_one_process_runs_at_a_time() -> None:
    clock = Clock(seed=3)
    running = 0

    async def process(index: int) -> None:
        nonlocal running
        for nap in range(20):
            running += 1
            assert running == 1
            # A real suspension in the middle of a turn: nobody else may take it.
            await asyncio.sleep(0)
            running -= 1
            await clock.sleep(nap * index % 3)

    await asyncio.gather(*[clock.spawn(process(i)) for i in range(5)])


async def test_wait_returns_what_it_was_woken_with_after_the_delay() -> None:
    clock = Clock()
    waiter = waiter_on(clock)

    async def waits() -> tuple[object, int]:
        return await clock.wait(waiter, deadline_ns=100), clock.now

    async def wakes() -> None:
        await clock.sleep(30)
        assert waiter.wake("news", delay_ns=5)
        assert not waiter.wake("again")

    process = clock.spawn(waits())
    clock.spawn(wakes())
    assert await process == ("news", 35)


async def test_deadline_error_says_who_waited_for_what() -> None:
    clock = Clock()
    seen = "nothing"

    async def changes() -> None:
        nonlocal seen
        await clock.sleep(40)
        seen = "half"

    async def waits() -> None:
        await clock.wait(
            clock.waiter(lambda: Waiting("dispatch", 3, 7, "count", "event 5", seen)), deadline_ns=50
        )

    clock.spawn(changes())
    with pytest.raises(DeadlineError) as caught:
        await clock.spawn(waits())
    assert str(caught.value) == (
        "dispatch: deadline passed at 50 ns: rank 3 waits for peer 7, "
        "field count: expected event 5, seen half"
    )
    assert clock.now == 50


async def test_a_description_that_fails_hurts_only_its_own_process() -> None:
    clock = Clock()

    def describe() -> Waiting:
        raise KeyError("no such field")

    async def waits() -> None:
        await clock.wait(clock.waiter(describe), deadline_ns=5)

    async def other() -> int:
        await clock.sleep(9)
        return clock.now

    waiting, sleeping = clock.spawn(waits()), clock.spawn(other())
    with pytest.raises(KeyError, match="no such field"):
        await waiting
    assert await sleeping == 9


def test_a_clock_outlives_its_event_loop() -> None:
    clock = Clock()

    async def naps() -> int:
        await clock.sleep(5)
        return clock.now

    async def leaves_something_undone() -> None:
        clock.spawn(naps())

    async def starts_again() -> int:
        return await clock.spawn(naps())

    asyncio.run(leaves_something_undone())
    assert asyncio.run(starts_again()) == 5


async def test_deadlock_is_found_at_once_and_sets_others_free() -> None:
    clock = Clock()
    first, second = waiter_on(clock), waiter_on(clock)
    log = []

    async def gives_up() -> None:
        try:
            await clock.wait(first)
        except DeadlockError as error:
            log.append((clock.now, error.op))
            second.wake()

    async def goes_on() -> None:
        await clock.wait(second)
        log.append((clock.now, "free"))

    async def passes_time() -> None:
        await clock.sleep(9)

    await asyncio.gather(clock.spawn(gives_up()), clock.spawn(goes_on()), clock.spawn(passes_time()))
    assert log == [(9, "test"), (9, "free")]


async def test_a_wait_that_ended_is_never_the_deadlocks_victim() -> None:
    clock = Clock()
    first, cancelled = waiter_on(clock), waiter_on(clock)

    async def waits_twice() -> None:
        await clock.wait(first)
        await clock.wait(clock.waiter(lambda: Waiting("second", 0, 1, "flag", "set", "unset")))

    process, victim = clock.spawn(waits_twice()), clock.spawn(clock.wait(cancelled))

    async def ends_both() -> None:
        first.wake()
        victim.cancel()

    clock.spawn(ends_both())
    with pytest.raises(DeadlockError, match="second: deadlock"):
        await process


async def test_queue_items_never_overtake() -> None:
    clock = Clock()
    queue: Queue[str] = Queue(clock, "work")
    queue.put("slow", delay_ns=10)
    queue.put("fast")

    async def gets() -> list[tuple[str, int]]:
        return [(await queue.get(), clock.now), (await queue.get(), clock.now)]

    assert await clock.spawn(gets()) == [("slow", 10), ("fast", 10)]


async def test_what_has_come_is_taken_without_waiting() -> None:
    clock = Clock()
    cpu = HostCPU(clock)
    queue, host = Queue[str](clock, "work"), HostQueue[str](clock, "inbox", cpu)

    async def takes() -> None:
        assert queue.take_now() is None
        for each in (queue, host):
            each.put("first")
            each.put("on its way", delay_ns=10)
            assert (each.take_now(), each.take_now()) == ("first", None)
        await clock.sleep(10)
        assert queue.take_now() == "on its way"
        cpu.stall(5)
        assert host.take_now() is None
        await clock.sleep(5)
        assert host.take_now() == "on its way"

    await clock.spawn(takes())


async def test_idle_waits_are_no_deadlock() -> None:
    clock = Clock()
    queue: Queue[int] = Queue(clock, "requests")
    server = clock.spawn(queue.get())
    await until_it_rests()
    assert not server.done()
    queue.put(7)
    assert await server == 7


async def test_waiting_for_an_idle_process_without_deadline_is_a_deadlock() -> None:
    clock = Clock()
    queue: Queue[int] = Queue(clock, "requests")

    async def waits() -> None:
        server = clock.spawn(queue.get(), name="server")
        await server

    with pytest.raises(DeadlockError, match=r"join: .* waits for peer server"):
        await clock.spawn(waits())


async def test_outside_code_wakes_an_idle_process_at_the_current_virtual_time() -> None:
    clock = Clock()
    queue: Queue[str] = Queue(clock, "requests")
    log = []

    async def serves() -> None:
        while (request := await queue.get()) != "stop":
            log.append((clock.now, request))
            await clock.sleep(10)

    server = clock.spawn(serves())
    for item, delay_ns in [("a", 0), ("b", 3), ("stop", 0)]:
        await until_it_rests()
        queue.put(item, delay_ns)
    await server
    assert log == [(0, "a"), (13, "b")]
    assert clock.now == 23


async def test_queue_is_first_come_first_served_and_skips_getters_that_left() -> None:
    clock = Clock()
    queue: Queue[int] = Queue(clock, "work")

    async def getter(deadline: int | None) -> int:
        return await queue.get(deadline)

    late = clock.spawn(getter(5))
    cancelled = clock.spawn(getter(None))
    third, fourth = clock.spawn(getter(None)), clock.spawn(getter(None))

    async def puts() -> None:
        await clock.sleep(3)
        cancelled.cancel()
        await clock.sleep(3)
        queue.put(1)
        queue.put(2)

    clock.spawn(puts())
    with pytest.raises(DeadlineError):
        await late
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert [await third, await fourth] == [1, 2]
    assert len(queue) == 0


async def test_an_item_whose_getter_is_cancelled_goes_to_the_next() -> None:
    clock = Clock()
    queue: Queue[int] = Queue(clock, "work")
    first, second = clock.spawn(queue.get()), clock.spawn(queue.get())

    async def puts() -> None:
        await clock.sleep(1)
        queue.put(1)
        first.cancel()

    clock.spawn(puts())
    assert await second == 1


async def test_a_failed_process_leaves_and_its_exception_surfaces() -> None:
    clock = Clock()

    async def fails() -> None:
        await clock.sleep(5)
        raise ValueError("broken die")

    async def joins(process: asyncio.Task[None]) -> str:
        try:
            await process
        except ValueError as error:
            return f"{error} at {clock.now}"
        return "no error"

    async def goes_on() -> int:
        await clock.sleep(50)
        return clock.now

    failing = clock.spawn(fails())
    joining, other = clock.spawn(joins(failing)), clock.spawn(goes_on())
    assert await joining == "broken die at 5"
    assert await other == 50
    with pytest.raises(ValueError, match="broken die"):
        await failing


async def test_cancelled_process_cleans_up_in_virtual_time_and_its_events_lapse() -> None:
    clock, log = Clock(), []

    async def victim() -> None:
        try:
            await clock.sleep(1000)
        finally:
            log.append(("cleaning", clock.now))
            await clock.sleep(7)
            log.append(("clean", clock.now))

    async def killer(process: asyncio.Task[None]) -> None:
        await clock.sleep(20)
        process.cancel()
        await clock.sleep(3)
        log.append(("killer", clock.now))

    process = clock.spawn(victim())
    await clock.spawn(killer(process))
    with pytest.raises(asyncio.CancelledError):
        await process
    assert log == [("cleaning", 20), ("killer", 23), ("clean", 27)]
    assert clock.now == 27


async def test_cancelled_before_its_first_step() -> None:
    clock = Clock()

    async def never() -> None:
        raise AssertionError

    async def other() -> int:
        await clock.sleep(4)
        return clock.now

    process, survivor = clock.spawn(never()), clock.spawn(other())
    process.cancel()
    with pytest.raises(asyncio.CancelledError):
        await process
    assert await survivor == 4


@given(st.integers(0, 200), st.data())
def test_random_cancellations_never_hang(seed: int, data: st.DataObject) -> None:
    naps = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=2, max_size=5))
    kills = data.draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, len(naps) - 1)), max_size=4))

    async def main() -> list[tuple[int, object]]:
        clock, log = Clock(seed), []

        async def process(index: int) -> None:
            try:
                for nap in naps[index]:
                    await clock.sleep(nap)
                await clock.wait(waiter_on(clock), deadline_ns=clock.now + 3)
            finally:
                log.append((clock.now, index))

        processes = [clock.spawn(process(i)) for i in range(len(naps))]

        async def kill(at: int, index: int) -> None:
            await clock.sleep_until(at)
            processes[index].cancel()

        killers = [clock.spawn(kill(*args)) for args in kills]
        results = await asyncio.gather(*processes, *killers, return_exceptions=True)
        assert all(isinstance(r, DeadlineError | asyncio.CancelledError | None) for r in results)
        left = clock.counts()
        assert (left.running, left.unbounded, left.joined) == (0, 0, 0)
        return [*log, (clock.now, [type(r) for r in results])]

    assert asyncio.run(main()) == asyncio.run(main())


async def test_gather_joins_all_and_raises_the_first_failure() -> None:
    clock, log = Clock(), []

    async def part(nap: int) -> int:
        await clock.sleep(nap)
        log.append(nap)
        if nap == 2:
            raise ValueError("two")
        return nap

    async def main() -> None:
        assert await clock.gather(part(5), part(1)) == [5, 1]
        with pytest.raises(ValueError, match="two"):
            await clock.gather(part(4), part(2), part(9))

    await clock.spawn(main())
    assert log == [1, 5, 2, 4, 9]


@pytest.mark.parametrize("wait_for", [asyncio.gather, lambda *processes: asyncio.wait(processes)])
async def test_asyncios_own_gather_within_a_process_is_refused_rather_than_hang(wait_for: Any) -> None:
    clock = Clock()

    async def main() -> None:
        await wait_for(clock.spawn(clock.sleep(1)), clock.spawn(clock.sleep(2)))

    with pytest.raises(HardwareError, match=r"use clock\.join or clock\.gather"):
        await clock.spawn(main())


async def test_a_lone_sleeper_lets_the_event_loop_turn() -> None:
    clock = Clock()
    turned = False

    def turn() -> None:
        nonlocal turned
        turned = True

    async def sleeper() -> bool:
        asyncio.get_running_loop().call_soon(turn)
        for _ in range(100):
            await clock.sleep(1)
        return turned

    assert await clock.spawn(sleeper())


async def test_only_processes_can_wait() -> None:
    with pytest.raises(HardwareError, match="only a process"):
        await Clock().sleep(1)


async def test_deadlines_of_waits_that_ended_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod under load never rests, so that nothing else would clear them away. The order stays the same."""

    async def run(min_heap: int) -> tuple[list[tuple[int, int]], int]:
        monkeypatch.setattr("xdeepserve.hw.clock.MIN_HEAP", min_heap)
        clock = Clock(5)
        log: list[tuple[int, int]] = []
        largest = 0

        async def sleeper(index: int) -> None:
            nonlocal largest
            for step in range(200):
                waiter = waiter_on(clock)
                waiter.wake(step, delay_ns=(index * 7 + step * 5) % 11)
                await clock.wait(waiter, deadline_ns=None)
                ended = waiter_on(clock)
                wakes = clock.spawn(wake(ended))
                await clock.wait(ended, deadline_ns=clock.now + 10**12)
                await clock.join(wakes)
                log.append((clock.now, index))
                largest = max(largest, clock.counts().events)

        async def wake(waiter: Waiter) -> None:
            await clock.sleep(1)
            waiter.wake()

        await asyncio.gather(*(clock.spawn(sleeper(i)) for i in range(8)))
        return log, largest

    log, largest = await run(64)
    expected, without = await run(10**9)
    assert log == expected
    assert largest <= 64
    assert without > 1000
