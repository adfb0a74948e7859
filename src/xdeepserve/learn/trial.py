"""Check an exercise once: the learner's function in the pod, compared call by call and in the final bits."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.learn.differences import first_difference
from xdeepserve.learn.exercise import Exercise
from xdeepserve.learn.stand_in import NotYetError, StandIn, blamed

Guard = Callable[[], contextlib.AbstractContextManager[None]]


@functools.cache
def own_bits(scene: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Run a scene with the package's own functions, once, and keep its arrays."""
    return scene()


def try_file(exercise: Exercise, path: Path, guard: Guard = contextlib.nullcontext) -> int:
    """Run the exercise's scene with the function of `path`, and return the number of its calls if all bits
    are equal.

    NotYetError, one line, if not; InputError if there is no such file.
    """
    theirs = load(exercise, path, guard)
    expected = own_bits(exercise.scene)
    stand_in = StandIn(exercise, theirs, path, guard)
    try:
        with stand_in.installed():
            found = exercise.scene()
    except Exception as error:
        if stand_in.failure is not None:
            raise stand_in.failure from None
        if isinstance(error, XDeepServeError):
            raise NotYetError(f"the pod says: {' '.join(str(error).split())}") from error
        raise
    if stand_in.failure is not None:
        raise stand_in.failure
    if text := first_difference(expected, found, {}):
        raise NotYetError(f"every call is equal, but what comes of them is not: {text}")
    if not stand_in.num_calls:
        raise XDeepServeError(f"exercise {exercise.number}: its scene never calls {exercise.solution}")
    return stand_in.num_calls


def load(exercise: Exercise, path: Path, guard: Guard) -> Callable[..., Any]:
    """Load the learner's function. InputError if there is no file, NotYetError if it cannot be loaded."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; begin with xdeepserve learn start {exercise.number}")
    spec = importlib.util.spec_from_file_location(f"learnt_{exercise.slug}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with guard(), blamed(path):
            spec.loader.exec_module(module)
    except NotYetError as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError):
            line = "" if cause.lineno is None else f", line {cause.lineno}"
            raise NotYetError(f"{path.name}{line}: SyntaxError: {cause.msg}") from None
        raise
    found = getattr(module, exercise.name, None)
    if not callable(found):
        raise NotYetError(f"{path.name} has no function {exercise.name}")
    theirs: Callable[..., Any] = found
    return theirs
