"""A check in a process of its own: what the learner's function does to it is its own affair.

A call that does not come back ends the process at its time limit, which leaves behind where it was; a process
that does not end by itself is ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.learn.course import exercise_of
from xdeepserve.learn.exercise import Exercise
from xdeepserve.learn.stand_in import NotYetError
from xdeepserve.learn.trial import try_file

CALL_S = 20.0  # of wall time, for one call of the learner's function
WHOLE_S = 900.0  # for all of a check: kernels may have to be compiled first
FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


class Verdict(msgspec.Struct):
    """What has come of a check: calls that were equal if it is passed, else one line."""

    num_calls: int = 0
    text: str = ""

    @property
    def is_passed(self) -> bool:
        """All bits are equal."""
        return not self.text


def check_apart(exercise: Exercise, path: Path, call_s: float = CALL_S, whole_s: float = WHOLE_S) -> Verdict:
    """Check `path` in a process of its own; what the learner prints is printed. XDeepServeError if that
    process ends by a fault of the package's own."""
    with tempfile.TemporaryDirectory(prefix="xdeepserve-learn-") as folder:
        verdict, stuck = Path(folder, "verdict"), Path(folder, "stuck")
        arguments = [str(exercise.number), str(path), str(verdict), str(stuck), str(call_s)]
        command = [sys.executable, "-m", "xdeepserve.learn.trial_process", *arguments]
        try:
            done = subprocess.run(command, timeout=whole_s, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return Verdict(text=f"{path.name}: the check was ended after {whole_s:g} s")
        if verdict.exists():
            return msgspec.json.decode(verdict.read_bytes(), type=Verdict)
        if frames := FRAME.findall(stuck.read_text() if stuck.exists() else ""):
            return Verdict(text=f"{_where(path, frames)}: no end after {call_s:g} s in one call")
        last = [*done.stderr.strip().splitlines(), "nothing said"][-1 if not done.stderr.strip() else -2]
        raise XDeepServeError(f"exercise {exercise.number}: the check ended with {done.returncode}: {last}")


def _where(path: Path, frames: list[tuple[str, str, str]]) -> str:
    """The innermost of the learner's own lines."""
    for file, line, function in frames:
        if Path(file) == path:
            return f"{path.name}, line {line} in {function}"
    return path.name


def main(arguments: list[str]) -> None:
    """The process: leaves a verdict, or, if a call does not end, where it is."""
    number, path, verdict, stuck, call_s = arguments
    with open(stuck, "w") as file:

        @contextlib.contextmanager
        def guard() -> Iterator[None]:
            faulthandler.dump_traceback_later(float(call_s), exit=True, file=file)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()

        try:
            found = Verdict(try_file(exercise_of(int(number)), Path(path), guard))
        except NotYetError as error:
            found = Verdict(text=str(error))
    Path(verdict).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
