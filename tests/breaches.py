"""Invariants in tests: each breach is noted where it is made, and each task executor (TE) that nobody checks.

Nothing that a test catches, and no rung of the ladder, can hide either of them: `tests/conftest.py` asks at
the end of each test. A test that breaks an invariant on purpose, or turns checks off, is marked
`invariants("broken")` or `invariants("off")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from xdeepserve.engine.te import invariants
from xdeepserve.engine.te.te import TE

_found: dict[str, list[str]] = {"broken": [], "off": []}


class InvariantError(invariants.InvariantError):
    """An invariant that does not hold, which notes itself."""

    def __init__(self, *said: object) -> None:
        super().__init__(*said)
        _found["broken"].append(str(self))


@contextmanager
def noted() -> Iterator[None]:
    """Note breaches, and TEs that run unchecked, from now on."""
    start = TE.start

    def begin(te: TE) -> None:
        if not te.sizes.settings.invariants:
            _found["off"].append(f"TE {te.plan.name} runs, and its invariants are not checked")
        start(te)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariants, "InvariantError", InvariantError)
        patch.setattr(TE, "start", begin)
        yield


def take(allowed: frozenset[str]) -> list[str]:
    """Return what was found since the last time and is not allowed, and forget all of it."""
    taken = [said for kind, each in _found.items() if kind not in allowed for said in each]
    for each in _found.values():
        each.clear()
    return taken
