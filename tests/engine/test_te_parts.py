"""Parts of a task executor have doors of their own, and none of them holds the TE."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from xdeepserve import LLM
from xdeepserve.engine.te.te import TE

PARTS = "xdeepserve.engine.te."
HEARS = "_fail"  # by which the TE hears of its processes' errors, as their owner
OWN = {"remedies"}  # the TE's own rungs of the ladder; no part has them


def held(value: Any) -> Iterator[Any]:
    """Objects that a value holds: attributes of parts, items, cells of closures, arguments of partials."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
        yield from value.__defaults__ or ()
    elif type(value).__module__.startswith(PARTS):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def paths_back(te: TE) -> list[str]:
    """Ways from a TE's parts back to the TE, but for the door by which it hears of errors."""
    found, seen = [], {id(te)}
    todo = [(name, part) for name, part in vars(te).items() if name not in OWN]
    while todo:
        path, value = todo.pop()
        if value is te:
            found.append(path)
        if id(value) in seen or (isinstance(value, types.MethodType) and value.__name__ == HEARS):
            continue
        seen.add(id(value))
        todo += [(f"{path} > {type(each).__name__}", each) for each in held(value)]
    return found


@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("monolithic", ()),
        ("pd", ("prefill.dies=2", "decode.dies=2")),
        ("moe-attention", ()),
        ("eaas", ()),
        ("colocated", ("dies=2", "experts.redundant_slots=1")),
    ],
)
def test_no_part_of_a_te_holds_the_te(deployment: str, overrides: tuple[str, ...]) -> None:
    with LLM("tiny-random", deployment, overrides=overrides, progress=False) as llm:
        for te in llm.engine.je.tes:
            assert paths_back(te) == []


def test_a_part_that_held_it_would_be_found() -> None:
    with LLM("tiny-random", "monolithic", progress=False) as llm:
        (te,) = llm.engine.je.tes
        wake, te.health.wake = te.health.wake, te.wake
        assert paths_back(te)
        te.health.wake = wake
