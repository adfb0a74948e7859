"""Running of a schedule: a pod serves requests and suffers faults until no event is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from xdeepserve.chaos.fault_schedule import Asked, FaultSchedule, asked
from xdeepserve.chaos.permitted import permits_errors
from xdeepserve.ems.directory import verify
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.te.invariants import is_breach
from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.history import TEChange, make_change
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.trace import TraceSpan
from xdeepserve.llm import RequestOutput, build_engine
from xdeepserve.llm.request_outputs import collected
from xdeepserve.loop import run
from xdeepserve.model.checkpoint import Checkpoint

IN_MEMORY = Path("/dev/shm")  # nobody is killed here, so that nothing has to reach a disk
PATIENCE_S = 60  # of this thread's time, some hundred times what a schedule takes
NUM_LOOKS = 1200  # a second or more apart: other work may want the computer, too, and it may be suspended
LONGEST_NS = 10**13  # of virtual time, near three hours: a die is lost after a minute, and faults are few


class Aftermath(msgspec.Struct):
    """Results of running a schedule. `ends` has an output or an error for each request, None for one that
    hangs.

    With a memory pool there are also its counters, its damage when it is opened again, and the results of the
    same requests served again without faults.
    """

    ends: list[RequestOutput | XDeepServeError | None]
    permits_errors: bool
    lost: dict[str, str]  # TEs that were given up, and why
    log: list[str]  # every event, with its time
    leaks: list[str]  # what is left behind
    stages: Counter[str] = Counter()  # how often each stage of recovery was gone through (xDeepServe 6.2)
    spans: Sequence[TraceSpan] = ()
    moments: Counter[tuple[str, int, int | None]] = Counter()  # how often steps were complete, in a trace
    pool: dict[str, int] = {}
    pool_damage: str = ""
    again: Aftermath | None = None


def endure(schedule: FaultSchedule, checkpoint: Checkpoint, trace: bool = False) -> Aftermath:
    """Run a schedule. Raises InputError if there can be no such pod, or no such faults on it."""
    if schedule.pool == "none":
        return _once(schedule, checkpoint, trace)
    quiet = msgspec.structs.replace(schedule, faults=(), pool="filled")
    where = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="xdeepserve-chaos-", dir=where) as path:
        if schedule.pool == "filled":
            _once(quiet, checkpoint, path=path)
        elif schedule.pool == "crowded":
            half = (quiet.num_requests + 1) // 2
            _once(msgspec.structs.replace(quiet, num_requests=half), checkpoint, path=path)
        after = _once(schedule, checkpoint, trace, path)
        after.pool_damage = _damage(Path(path), schedule, after)
        after.again = _once(quiet, checkpoint, path=path)
    return after


def _damage(path: Path, schedule: FaultSchedule, after: Aftermath) -> str:
    """Describe the damage of a pool that no process uses. A torn volume is found and mended by opening the
    pool, so that does not count as damage."""
    try:
        if any(fault.kind == "torn" for fault in schedule.faults):
            after.pool["found torn"] = sum(report.num_bad for report in verify(path))
        return "; ".join(str(report) for report in verify(path) if report.num_bad)
    except InputError as error:
        return str(error)


def _once(schedule: FaultSchedule, checkpoint: Checkpoint, trace: bool = False, path: str = "") -> Aftermath:
    """Run a schedule on a pool in a directory, or without a pool."""
    engine = build_engine(
        checkpoint,
        schedule.deployment,
        "int8",
        overrides=["invariants=true", *schedule.settings, *([f"ems.path={path}"] if path else [])],
        clock_seed=schedule.clock_seed,
        trace=trace,
        trace_dies=0,
        faults=schedule.faults,
    )
    return run(_endured(engine, schedule))


async def _endured(engine: Engine, schedule: FaultSchedule) -> Aftermath:
    clock, pod = engine.plan.pod.clock, engine.plan.pod
    after = Aftermath([None] * schedule.num_requests, permits_errors(schedule, engine.plan), {}, [], [])
    engine.observe(lambda event: after.log.append(f"{clock.now} {event}"))
    pod.fabric.moments.is_on |= pod.trace.is_on
    await engine.start()
    if schedule.pool == "crowded" and engine.plan.pool_use is not None:
        engine.plan.pool_use.crowd()
    others, requests = asyncio.all_tasks(), asked(schedule)
    submitted: list[Request | XDeepServeError | None] = [None] * len(requests)
    coming = _come(engine, requests, submitted)
    clients = clock.detach(coming, "clients", lambda error: after.leaks.append(repr(error)))
    for number, change in enumerate(schedule.servers):
        name = f"change {number} of servers"
        clock.detach(_move(engine, change), name, lambda error: after.leaks.append(repr(error)))
    at_rest = asyncio.Event()
    clock.when_at_rest(at_rest.set)
    if not await _comes(at_rest, clock):
        after.log.append(f"virtual time stands still at {clock.now} ns, or goes on for ever")
        engine.plan.close()
        return after
    for number, (request, what) in enumerate(zip(submitted, requests, strict=True)):
        after.ends[number] = await _end_of(request, what)
    after.stages = engine.stats().num_recoveries
    after.lost = {name: str(error) for name, error in engine.lost.items()}
    errors = [*engine.lost.values(), *after.ends]
    after.leaks += [str(each) for each in errors if is_breach(each)]
    if clients.done() and engine.is_healthy():
        try:
            engine.check_integrity()
        except (XDeepServeError, AssertionError) as error:
            after.leaks.append(str(error))
    after.pool = engine.stats().pool
    after.log.append(f"the pool has counted {after.pool}")
    await engine.stop()
    after.leaks += sorted(task.get_name() for task in asyncio.all_tasks() - others)
    after.moments = pod.fabric.moments.counts
    after.spans = [span for span in pod.trace.spans if span.node in pod.dies]
    return after


async def _comes(event: asyncio.Event, clock: Clock) -> bool:
    """Wait for an event; return False if that takes too long, in this computer's time or in virtual time.

    The compilation of a kernel takes minutes. So the time between two looks counts as a second at most, and
    the time of other threads does not count.
    """
    spent, seen = 0.0, time.thread_time()
    for _ in range(NUM_LOOKS):
        if spent >= PATIENCE_S or clock.now > LONGEST_NS:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), 1)
            return True
        now = time.thread_time()
        spent, seen = spent + min(1.0, now - seen), now
    return False


async def _come(
    engine: Engine, requests: Sequence[Asked], submitted: list[Request | XDeepServeError | None]
) -> None:
    """Submit the clients' requests, each at its time."""
    clock = engine.plan.pod.clock
    start = clock.now
    for number in sorted(range(len(requests)), key=lambda number: requests[number].at_ns):
        prompt, params, at_ns = requests[number]
        await clock.sleep_until(start + at_ns)
        try:
            submitted[number] = engine.submit(prompt, params, f"request {number}", "sampled")
        except XDeepServeError as error:  # nobody serves any more
            submitted[number] = error


async def _move(engine: Engine, change: TEChange) -> None:
    """Make a change at its time; a refusal with a reason is an acceptable answer."""
    await engine.plan.pod.clock.sleep(round(1000 * change.at_us))
    with contextlib.suppress(XDeepServeError):
        await make_change(engine, change)


async def _end_of(request: Request | XDeepServeError | None, what: Asked) -> Any:
    """Return the end of a request: its output or error; None if it has none."""
    if request is None or isinstance(request, XDeepServeError):
        return request
    if not request.is_over:
        return None
    output = await collected(request, None, what.prompt, what.params, None)
    return output if output.error is None else output.error
