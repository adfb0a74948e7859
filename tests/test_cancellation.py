"""What may catch the end of a process: CancelledError always goes on, and clean-up never waits for time."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import SRC, tree_of
from xdeepserve.engine.recovery.rollback_watch import RollbackCalled
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.hw.clock import Clock
from xdeepserve.loop import run

IN_VIRTUAL_TIME = (
    "hw",
    "comm",
    "engine",
    "ems",
    "m2n",
    "machine.py",
)  # a process there is one of the clock's

# Handlers and `suppress` that do not let CancelledError go on, by file, and why each may do that.
MAY_KEEP = {
    "hw/clock.py": "it is that of the process which was waited for (until_ended), and not the caller's",
    "engine/walk/schedule.py": "a part that failed has cancelled the others, and its error goes on",
    "engine/dp/events.py": "a listener is a plain function, and raises its own",
    "jobs/door/desk.py": "it has cancelled the task that it waits for",
    "page/page_record.py": "it has cancelled the task that it waits for",
    "remote/monitor_service.py": "a connection's task has nothing left to do, and nobody waits for it",
}
# Clean-up that waits, by file, and what waits.
MAY_WAIT = {"engine/serving/joining.py": "clock.join(clock.spawn("}  # a process of its own, which goes on
# Handlers of every failure around a wait that do not raise: RollbackCalled must never come there.
MAY_ABSORB = {
    "comm/distflow/endpoint.py": "a transfer between TEs: no part of a step, so never called back",
    "comm/distflow/send_receive.py": "a kernel of a transfer between TEs: no part of a step",
    "engine/die/experts.py": "the last handler of a kernel, behind that of RollbackCalled",
    "engine/die/program.py": "the last handler of a die's program, or of a transfer beside steps",
    "engine/recovery/ladder.py": "the ladder is climbed by the host, which calls rollbacks",
    "engine/serving/elastic.py": "TEs that come and go are the host's",
    "engine/serving/failover.py": "failover is the host's",
    "engine/te/te.py": "the loop of a TE is the host's",
    "engine/walk/schedule.py": "it is raised when all parts have ended",
    "hw/clock.py": "it is raised when all have been joined, or goes to the owner of the process",
}


def files(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    """Sources of some rooms, of all without any, by their paths."""
    for path in sorted(SRC.rglob("*.py")):
        if not rooms or path.relative_to(SRC).parts[0] in rooms:
            yield str(path.relative_to(SRC)), tree_of(Path(path))


def handlers(tree: ast.Module) -> Iterator[tuple[ast.Try, ast.ExceptHandler, str]]:
    """Each handler of a file, with its `try` and the names of what it catches."""
    for node in ast.walk(tree):
        for handler in node.handlers if isinstance(node, ast.Try) else ():
            yield node, handler, "" if handler.type is None else ast.unparse(handler.type)


def suppressed(tree: ast.Module) -> Iterator[tuple[ast.With | ast.AsyncWith, str]]:
    """Each `with suppress(...)` of a file, with the names of what it suppresses."""
    for node in ast.walk(tree):
        for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
            call = item.context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("suppress"):
                yield node, ", ".join(map(ast.unparse, call.args))


def waits(body: list[ast.stmt]) -> list[str]:
    """What some statements await, functions inside them left out."""
    return [
        ast.unparse(node.value) for part in body for node in ast.walk(part) if isinstance(node, ast.Await)
    ]


def catches_the_end(names: str) -> bool:
    return not names or "BaseException" in names or "CancelledError" in names


def test_the_end_of_a_process_goes_on() -> None:
    """What catches it raises at its end: itself, or an error that says who ended the process."""
    kept = set()
    for path, tree in files():
        for _, handler, names in handlers(tree):
            if catches_the_end(names) and not isinstance(handler.body[-1], ast.Raise):
                kept.add(path)
        kept |= {path for _, names in suppressed(tree) if catches_the_end(names)}
    assert kept == MAY_KEEP.keys()


def test_clean_up_waits_for_nothing() -> None:
    """A process that is ended may be ended again: a wait in its clean-up would be cut short."""
    waiting: dict[str, list[str]] = {}
    for path, tree in files(*IN_VIRTUAL_TIME):
        for _, handler, names in handlers(tree):
            if catches_the_end(names):
                waiting.setdefault(path, []).extend(waits(handler.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.Try):
                waiting.setdefault(path, []).extend(waits(node.finalbody))
            if isinstance(node, ast.AsyncFunctionDef) and node.name == "__aexit__":
                waiting.setdefault(path, []).extend(waits(node.body))
    found = {path: said for path, said in waiting.items() if said}
    assert found.keys() == MAY_WAIT.keys()
    for path, (said,) in found.items():
        assert said.startswith(MAY_WAIT[path])


def test_a_rollback_is_no_failure() -> None:
    """What handles errors of the project cannot swallow it; what handles all errors of a wait is listed."""
    assert not issubclass(RollbackCalled, XDeepServeError)
    absorbs = set()
    for path, tree in files(*IN_VIRTUAL_TIME):
        for node, handler, names in handlers(tree):
            is_broad = names in ("Exception", "XDeepServeError") and bool(waits(node.body))
            if is_broad and not isinstance(handler.body[-1], ast.Raise):
                absorbs.add(path)
        absorbs |= {path for node, names in suppressed(tree) if names == "Exception" and waits(node.body)}
    assert absorbs == MAY_ABSORB.keys()


@pytest.mark.parametrize("is_caller", [True, False])
def test_who_waits_for_an_end_hears_of_its_own_alone(is_caller: bool) -> None:
    clock, heard = Clock(), list[str]()

    async def sleeps() -> None:
        await clock.sleep(1000)

    async def waits_for(process: asyncio.Task[None]) -> None:
        try:
            await clock.until_ended(process)
            heard.append("goes on")
        except asyncio.CancelledError:
            heard.append("is cancelled")
            raise

    async def main() -> None:
        process = clock.spawn(sleeps())
        caller = clock.spawn(waits_for(process))
        ended = caller if is_caller else process

        async def ends() -> None:
            await clock.sleep(10)
            ended.cancel()

        await clock.spawn(ends())
        await asyncio.wait([process, caller])

    run(main())
    assert heard == ["is cancelled" if is_caller else "goes on"]


def test_an_error_of_the_process_that_was_waited_for_is_raised() -> None:
    clock = Clock()

    async def fails() -> None:
        raise HardwareError("tried on purpose")

    async def waits_for() -> None:
        await clock.until_ended(clock.spawn(fails()))

    async def main() -> None:
        with pytest.raises(HardwareError, match="tried on purpose"):
            await clock.spawn(waits_for())

    run(main())
