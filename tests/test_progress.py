"""Long work shows where it stands: a fake clock, work within work, an LLM's calls, a cold start."""

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from xdeepserve import LLM, SamplingParams, compile_ahead, progress
from xdeepserve.errors import InputError

Capture = pytest.CaptureFixture[str]


def num_threads() -> int:
    return sum(thread.name == "progress" for thread in threading.enumerate())


@pytest.fixture
def is_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown at once, and often."""
    monkeypatch.setattr(progress, "AFTER_S", 0.001)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)


@pytest.fixture
def shown_until(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[[float], list[str]]:
    """A function: the lines that work shows which ends after so many seconds, by a clock of its own."""
    seconds = 0.0
    monkeypatch.setattr(progress, "now", lambda: seconds)

    def shown(ends: float) -> list[str]:
        def wait(pause: float) -> bool:
            nonlocal seconds
            seconds += pause
            return seconds > ends

        progress.show_lines(wait)
        return capsys.readouterr().err.splitlines()

    return shown


def test_nothing_is_shown_in_the_first_two_seconds(shown_until) -> None:
    with progress.working("Loading", is_quiet=True):  # no thread: the test calls what it would run
        assert shown_until(1.9) == []


def test_a_line_after_two_seconds_and_then_every_five(shown_until) -> None:
    with progress.working("Loading", is_quiet=True) as work:
        work.progress(1, 4)
        assert shown_until(13) == [f"Loading: 25 % ... {seconds} s" for seconds in (2, 7, 12)]


def test_kernels_are_named_while_they_are_compiled_and_counted_after(shown_until) -> None:
    with progress.working("Loading", is_quiet=True) as work:
        work.kernels += ["gemm", "mla"]
        work.is_compiling = True
        assert shown_until(3) == ["Loading, compiling kernels, once (2: mla) ... 2 s"]
        work.is_compiling = False
        assert work.line() == "Loading, kernels compiled: 2 ... 7 s"


def test_work_that_has_just_begun_is_not_shown_by_the_thread_of_other_work(shown_until) -> None:
    first = progress.working("Loading", is_quiet=True)
    first.__enter__()
    shown_until(100)
    with progress.working("Generating"):
        first.__exit__(None, None, None)
        assert shown_until(1) == []


def test_inner_work_is_shown_in_the_outer_ones_line() -> None:
    with progress.working("demo") as outer:
        with progress.working("Loading tiny") as inner:
            inner.progress(1, 2)
            assert num_threads() == 1
            assert outer.line() == "demo: loading tiny, 50 % ... 0 s"
            outer.detail = "row 3"
            assert outer.line() == "demo: row 3 ... 0 s"
        outer.detail = ""
        assert outer.line() == "demo ... 0 s"
    assert num_threads() == 0


@pytest.mark.usefixtures("is_hasty")
def test_quiet_work_silences_what_is_within(capsys: Capture) -> None:
    with progress.working("replay", is_quiet=True), progress.working("Loading"):
        threading.Event().wait(0.05)
    assert capsys.readouterr().err == ""


def test_no_thread_is_left_when_work_fails() -> None:
    threads = []

    def fail() -> None:
        threads.append(num_threads())
        raise InputError("no")

    with pytest.raises(InputError), progress.working("Loading"):
        fail()
    assert (threads, num_threads()) == ([1], 0)


@pytest.mark.usefixtures("is_hasty")
def test_a_terminal_has_one_line_that_changes(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.working("Loading") as work:
        work.detail = "25 % [of it]"
        while "25 % [of it]" not in sys.stderr.getvalue():  # type: ignore[attr-defined]
            threading.Event().wait(0.01)
        print("the answer")
    assert "Loading: 25 % [of it] ... 0 s" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "the answer\n"  # stdout is no terminal


def test_numba_says_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[None] = []
    monkeypatch.setattr(compile_ahead, "begin", lambda: begun.append(None))
    lines = []

    def look(x):
        raise NotImplementedError

    @numba.extending.overload(look)  # while `half` is compiled
    def looking(x):
        lines.append(work.line())
        return lambda x: x

    @numba.njit
    def half(x):
        return look(x) / 2

    with progress.working("Loading", is_quiet=True) as work:
        assert half(3) == 1.5
    assert "compiling kernels, once (1: half)" in lines[0]
    assert not work.is_compiling
    assert begun == []
    with progress.working("Loading", is_quiet=True, runs_int8=True):
        numba.njit(lambda x: x + 1)(1)
    assert begun == [None]


# ---- an LLM -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("is_hasty")
def test_an_llm_says_what_it_is_doing(capsys: Capture) -> None:
    with LLM("tiny-random") as llm:
        assert re.search(
            r"^Loading tiny-random: \d+ % .*\.\.\. \d+ s$", capsys.readouterr().err, re.MULTILINE
        )
        llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        lines = capsys.readouterr().err.splitlines()
        counts = [int(found[1]) for line in lines if (found := re.search(r": (\d+) tokens?", line))]
        assert all(line.startswith("Generating with tiny-random") for line in lines)
        assert counts == sorted(counts)
        assert 1 < counts[-1] <= 40
        said = ""
        for _ in range(50):  # one call may end before a line is due
            llm.logits(list(range(1, 100)))
            said += capsys.readouterr().err
        assert re.search(r"^Computing logits with tiny-random ... \d+ s$", said, re.MULTILINE)
    assert num_threads() == 0


@pytest.mark.usefixtures("is_hasty")
@pytest.mark.parametrize("is_function", [False, True])
def test_an_llm_can_be_quiet(capsys: Capture, is_function: bool) -> None:
    calls: list[tuple[int, int]] = []
    quiet = (lambda done, total: calls.append((done, total))) if is_function else False
    with LLM("tiny-random", progress=quiet) as llm:
        llm.generate([[1, 2]])
    assert capsys.readouterr().err == ""
    assert not is_function or calls[-1][0] == calls[-1][1] > 0


def test_arguments_of_another_type_are_refused() -> None:
    with pytest.raises(InputError, match=r"timing_only is True, False or a TimingConfig, found 'x'"):
        LLM("tiny-random", timing_only="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"progress is True, False or a function of .*, found 3"):
        LLM("tiny-random", progress=3)  # type: ignore[arg-type]


def test_a_cold_start_says_what_it_compiles_after_two_seconds(tmp_path: Path) -> None:
    program = "from xdeepserve import LLM; LLM('tiny-random').generate([[1, 2]])"
    caches = {"NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | caches, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
        finally:
            process.kill()
    assert re.match(r"\w.* tiny-random: .*compiling kernels, once \(\d+: \w+\) \.\.\. [23] s$", line)
