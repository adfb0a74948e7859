"""Tools of the tests of timing: calls that are logged."""

from collections.abc import Callable
from typing import Any

from xdeepserve.engine.walk.runner import Runner


def watch(
    owner: Any, name: str, log: list[tuple[object, ...]], tell: Callable[[Any], tuple[object, ...]]
) -> None:
    call = getattr(owner, name)

    async def watched(*args: Any) -> Any:
        log.append((name, *tell(args)))
        return await call(*args)

    setattr(owner, name, watched)


def watch_end(
    runner: Runner,
    end: str,
    name: str,
    log: list[tuple[object, ...]],
    tell: Callable[[Any], tuple[object, ...]],
) -> None:
    """Log calls of one of a runner's ends, which are records of what it calls."""
    record = getattr(runner, end)
    call = getattr(record, name)

    async def watched(*args: Any) -> Any:
        log.append((name, *tell(args)))
        return await call(*args)

    setattr(runner, end, record._replace(**{name: watched}))


def without_experts(log: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Who has rows for its experts is drawn by seed where nothing is computed."""
    return [entry for entry in log if entry != ("launch", "Experts")]
