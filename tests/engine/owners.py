"""Places in the sources that start processes, and an error that is tried in each."""

from __future__ import annotations

import ast
import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from tests.sources import SRC, tree_of

TRIED = "tried on purpose"
BOUND_S = 60.0  # of wall time: what takes longer hangs
OF_THE_CLOCK = ("spawn", "detach")
OF_THE_COMPUTER = ("Popen", "Thread", "create_task", "ensure_future", "asyncio.start_server", "to_thread")


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError(TRIED)


async def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError(TRIED)


def spawns(names: tuple[str, ...] = OF_THE_CLOCK) -> Iterator[tuple[str, ast.Call, bool]]:
    """Calls by which processes start: file and function, the call, and whether its result is dropped."""
    for path in sorted(SRC.rglob("*.py")):
        yield from _spawns_in(tree_of(path), f"{path.relative_to(SRC)}:", names)


def _spawns_in(node: ast.AST, where: str, names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call, bool]]:
    for value in ast.iter_child_nodes(node):
        is_named = isinstance(value, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
        if is_call and _is_one_of(value.func, names) and (value.args or value.keywords):
            yield where, value, isinstance(node, ast.Expr)
        inside = f"{where}{'' if where.endswith(':') else '.'}{value.name}" if is_named else where
        yield from _spawns_in(value, inside, names)


def _is_one_of(called: ast.Attribute, names: tuple[str, ...]) -> bool:
    return called.attr in names or (isinstance(called.value, ast.Name) and ast.unparse(called) in names)


@asynccontextmanager
async def nothing_unheard() -> AsyncIterator[None]:
    """Fail if what happens meanwhile hangs, or ends in an error that only asyncio is left to log."""
    loop, unheard = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    try:
        async with asyncio.timeout(BOUND_S):
            yield
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()  # a task that nobody has asked for its error says so when it goes
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert unheard == []
