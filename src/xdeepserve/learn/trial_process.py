"""Run a check in a process of its own, so that the learner's function cannot harm the caller.

A call that does not return ends the process at its time limit and leaves behind the place where it was; so
does a call that crashes. The caller ends a process that does not end by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
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
    """Result of a check: the number of equal calls if it is passed, else a line that says why not.

    `given` has the arguments of the call that differs.
    """

    num_calls: int = 0
    text: str = ""
    given: str = ""

    @property
    def is_passed(self) -> bool:
        """Whether all bits are equal, so that the exercise is passed."""
        return not self.text


def check_apart(exercise: Exercise, path: Path, call_s: float = CALL_S, whole_s: float = WHOLE_S) -> Verdict:
    """Check `path` in a process of its own; what the learner prints is printed.

    XDeepServeError if the process ends by a fault of the package's own.
    """
    with tempfile.TemporaryDirectory(prefix="xdeepserve-learn-") as folder:
        verdict, stuck, within = (Path(folder, name) for name in ("verdict", "stuck", "within"))
        arguments = [str(exercise.number), *map(str, (path, verdict, stuck, within)), str(call_s)]
        command = [sys.executable, "-m", "xdeepserve.learn.trial_process", *arguments]
        try:
            done = subprocess.run(command, timeout=whole_s, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return Verdict(text=f"{path.name}: the check was ended after {whole_s:g} s")
        if verdict.exists():
            return msgspec.json.decode(verdict.read_bytes(), type=Verdict)
        said = stuck.read_text() if stuck.exists() else ""
        where = _where(path, FRAME.findall(said))
        if said.startswith("Timeout"):
            return Verdict(text=f"{where}: no end after {call_s:g} s in one call")
        if call := int(within.read_text() or 0) if within.exists() else 0:
            what = f"call {call - 1} of {exercise.name}" if call > 1 else "the file, when it was read,"
            return Verdict(text=f"{where}: {what} ended the whole process{_status(done.returncode)}")
        last = [*done.stderr.strip().splitlines(), "nothing said"][-1 if not done.stderr.strip() else -2]
        raise XDeepServeError(f"exercise {exercise.number}: the check ended with {done.returncode}: {last}")


def _where(path: Path, frames: list[tuple[str, str, str]]) -> str:
    """Find the innermost of the learner's own lines."""
    for file, line, function in frames:
        if Path(file) == path:
            return f"{path.name}, line {line} in {function}"
    return path.name


def _status(code: int) -> str:
    """Describe in words how a process has ended."""
    if code >= 0:
        return f" with status {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "signal"
    return f" by {name} ({-code})"


def main(arguments: list[str]) -> None:
    """Run the check and leave a verdict.

    Without a verdict, the process leaves the place where it was, and the number of the call.
    """
    number, path, verdict, stuck, within, call_s = arguments
    with open(stuck, "w") as file, open(within, "w") as crumb:
        faulthandler.enable(file, all_threads=False)
        num_calls = 0  # of the learner's code: the first one reads the file

        @contextlib.contextmanager
        def guard() -> Iterator[None]:
            nonlocal num_calls
            num_calls += 1
            os.pwrite(crumb.fileno(), b"%10d" % num_calls, 0)
            faulthandler.dump_traceback_later(float(call_s), exit=True, file=file)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()
                os.pwrite(crumb.fileno(), b"%10d" % 0, 0)

        try:
            found = Verdict(try_file(exercise_of(int(number)), Path(path), guard))
        except NotYetError as error:
            found = Verdict(text=str(error), given=error.given)
    Path(verdict).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
