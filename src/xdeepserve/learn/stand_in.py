"""Put the learner's function in the place of the package's own.

Callers of the package's own function reach the stand-in, which has both. The learner's function does the
work: its result goes on through the pod. The package's own computes what the result should have been.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from xdeepserve.errors import XDeepServeError
from xdeepserve.learn.differences import first_difference
from xdeepserve.learn.exercise import Exercise

SHORT = 16  # elements of an array that is said whole
LINE = 240  # characters of another value


class NotYetError(XDeepServeError):
    """The learner's function is not written, fails, or differs: one line that says where.

    `given` has the arguments of the call, for another line, or is empty.
    """

    def __init__(self, text: str, given: str = "") -> None:
        super().__init__(text)
        self.given = given


def place_in(path: Path, error: BaseException) -> str:
    """Find the innermost line of the learner's file that an error passed through."""
    lines = [entry for entry in traceback.extract_tb(error.__traceback__) if entry.filename == str(path)]
    return f"{path.name}, line {lines[-1].lineno} in {lines[-1].name}" if lines else path.name


@contextlib.contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Turn an error of the learner's code into NotYetError, one line with the place in their file."""
    try:
        yield
    except NotImplementedError as error:
        raise NotYetError(f"not written yet ({place_in(path, error)})") from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        text = " ".join(str(error).split())
        raise NotYetError(f"{place_in(path, error)}: {type(error).__name__}: {text}") from error


class StandIn:
    """Calls the learner's function and the package's own, and keeps the first failure.

    `guard` surrounds each call of the learner's.
    """

    def __init__(
        self,
        exercise: Exercise,
        theirs: Callable[..., Any],
        path: Path,
        guard: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.exercise, self.own, self.theirs, self.path = exercise, exercise.own, theirs, path
        self.guard, self.num_calls = guard, 0
        self.failure: NotYetError | None = None  # the first; the pod may say other things of it

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the package's own function, wherever it is known by name, while the context lasts."""

        @functools.wraps(self.own)
        def both(*args: Any, **named: Any) -> Any:
            return self.call(sys._getframe(1), args, named)

        homes = [self.exercise.home]
        if ":" not in self.exercise.owner:  # those who have imported it have names of their own
            modules = [
                module for name, module in sorted(sys.modules.items()) if name.startswith("xdeepserve.")
            ]
            homes = [each for each in modules if vars(each).get(self.exercise.name) is self.own]
        for home in homes:
            setattr(home, self.exercise.name, both)
        try:
            yield
        finally:
            for home in homes:
                setattr(home, self.exercise.name, self.own)

    def call(self, caller: FrameType, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the learner's result. NotYetError, in this call and in all that follow, if it differs."""
        if self.failure is not None:
            raise self.failure
        self.num_calls += 1
        copied = copy.deepcopy((args, named)) if self.exercise.changes else _copied(args, named)
        refusal = None
        try:
            expected = self.own(*copied[0], **copied[1])
        except XDeepServeError as error:
            refusal = error
        try:
            if refusal is not None:
                self._check_refuses(refusal, args, named)
                raise refusal
            with self.guard(), blamed(self.path):
                found = self.theirs(*args, **named)
            self._compare(expected, copied, found, (args, named))
        except NotYetError as error:
            at = _rank(caller) or f", call {self.num_calls}"
            is_written = not isinstance(error.__cause__, NotImplementedError)
            given = _given(self.own, *copied) if is_written else ""
            self.failure = NotYetError(f"{self.exercise.where}{at}: {error}", given)
            raise self.failure from error
        return found

    def _check_refuses(self, refusal: XDeepServeError, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise NotYetError unless the learner's function raises the same kind of error."""
        expected = f"expected {type(refusal).__name__} ({refusal})"
        try:
            with self.guard(), blamed(self.path):
                found = self.theirs(*args, **named)
        except NotYetError as error:
            if isinstance(error.__cause__, type(refusal)):
                return
            if isinstance(error.__cause__, NotImplementedError):
                raise
            raise NotYetError(f"{expected}, yours: {error}") from error
        raise NotYetError(f"{expected}, yours returns a {type(found).__name__}")

    def _compare(self, expected: Any, own: tuple[Any, Any], found: Any, theirs: tuple[Any, Any]) -> None:
        """Raise NotYetError at the first difference, in the result or in changed arguments."""
        parts = self.exercise.parts
        if not self.exercise.changes:
            changed = first_difference(_arguments(*own), _arguments(*theirs), {})
            if changed is not None:
                raise NotYetError(f"it changes what it is given: {changed}")
        mine = parts(expected, own[0])
        try:
            yours = parts(found, theirs[0])
        except Exception as error:
            kind = type(found).__name__
            raise NotYetError(f"it returns a {kind}, of which {', '.join(mine)} cannot be read") from error
        if text := first_difference(mine, yours, self.exercise.axes):
            raise NotYetError(text)


def _copied(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy array, list and dict arguments, so that changes stay apart; pass others as they are."""

    def one(value: Any) -> Any:
        return copy.copy(value) if isinstance(value, np.ndarray | list | dict) else value

    return tuple(map(one, args)), {name: one(value) for name, value in named.items()}


def _arguments(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Collect the arguments a function might have changed: arrays, lists, and the keys of dicts."""
    everything = {**{f"argument {i}": value for i, value in enumerate(args)}, **named}
    kept = {name: [*value] if isinstance(value, dict) else value for name, value in everything.items()}
    return {name: value for name, value in kept.items() if isinstance(value, np.ndarray | list)}


def _given(own: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Write the arguments by name, if they are values; long values by kind and size."""
    given = inspect.signature(own).bind(*args, **named).arguments
    return ", ".join(f"{name}={text}" for name, value in given.items() if (text := _said(value)))


def _said(value: Any) -> str:
    if isinstance(value, np.ndarray):
        text = " ".join(np.array2string(value, separator=", ").split())
        return text if value.size <= SHORT else f"{value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"dict with keys {[*value]}"
    if value is None or isinstance(value, int | float):
        return repr(value)
    if not isinstance(value, str | list | tuple):
        return ""
    text = repr(value)
    return text if len(text) <= LINE else f"{type(value).__name__} of {len(value)}"


def _rank(frame: FrameType | None) -> str:
    """Name the calling rank: the nearest caller that has a rank, and perhaps a peer; empty if none has."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("xdeepserve."):
        for value in frame.f_locals.values():
            for each in (value, getattr(value, "side", None)):
                rank, peer = getattr(each, "rank", None), getattr(each, "peer", None)
                if type(rank) is int:
                    return f", rank {rank}" + (f", peer {peer}" if type(peer) is int else "")
        frame = frame.f_back
    return ""
