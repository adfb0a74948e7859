"""`xdeepserve learn`: the working folder, and a learner's code that does anything at all."""

import re
from pathlib import Path

import pytest

from xdeepserve.cli import main
from xdeepserve.learn.course import exercise_of
from xdeepserve.learn.trial_process import check_apart

OWN = "from xdeepserve.comm.p2p.layout import last_chunks\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, and both streams."""
    try:
        code = main(["learn", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_learners_way(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "list")
    assert code == 0
    assert out.splitlines()[0].split("  ")[1] == "A ring's tail pointer"
    assert not list(here.iterdir()), "a list leaves nothing behind"

    code, out, _ = told(capsys, "start", "1")
    assert (code, sorted(path.name for path in Path("learn").iterdir())) == (
        0,
        ["01_ring_tail.md", "01_ring_tail.py"],
    )
    assert "xdeepserve learn check 1" in out
    assert told(capsys, "start", "1")[0] == 0, "nothing is lost by it"
    assert "started" in told(capsys, "list")[1].splitlines()[0]

    code, out, _ = told(capsys, "check")
    assert code == 1
    assert "not written yet (01_ring_tail.py, line 13 in last_chunks)" in out
    assert "given" not in out

    assert "exercise 1, hint 1 of 3: Of n cores" in told(capsys, "hint")[1]
    assert "hint 2 of 3: A chunk ID" in told(capsys, "hint", "1")[1]
    assert "hint 3 of 3" in told(capsys, "hint")[1]
    assert "hint 3 of 3" in told(capsys, "hint")[1]

    mine = Path("learn/01_ring_tail.py")
    mine.write_text(OWN)
    code, _, err = told(capsys, "start", "1")
    assert (code, len(err.splitlines())) == (2, 1)
    assert mine.read_text() == OWN

    code, out, _ = told(capsys, "check")
    assert code == 0
    assert "passed, 24 calls, every bit equal" in out
    assert told(capsys, "list")[1].splitlines()[0].endswith("solved")
    mine.write_text(f"{OWN}own = last_chunks\ndef last_chunks(*args):\n    return own(*args)[:1]\n")
    code, out, _ = told(capsys, "check", "1")
    assert out.splitlines()[2:] == ["  it was given base=0, first=0, stop=3, num_cores=3"]
    mine.write_text(OWN + "# tidied\n")
    assert told(capsys, "list")[1].splitlines()[0].endswith("changed since")


@pytest.mark.parametrize(
    "arguments",
    [
        ("start",),
        ("start", "0"),
        ("start", "99"),
        ("check", "1"),
        ("check",),
        ("hint",),
        ("list", "1"),
        ("begin",),
        ("check", "one"),
        ("list", "--dir", "file"),
    ],
)
def test_bad_use_is_one_line(
    arguments: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    code, out, err = told(capsys, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize("text", [b"[1", b'{"ring_tail": {"num_hints": -7}}', b'{"ring_tail": 1}', b"\xff"])
def test_progress_that_cannot_be_read(text: bytes, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("learn").mkdir()
    Path("learn/progress.json").write_bytes(text)
    for action in (("list",), ("hint", "1")):
        code, _, err = told(capsys, *action)
        assert (code, len(err.splitlines())) == (2, 1)
        assert "progress.json" in err


def test_a_file_that_is_no_text_stays_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("learn").mkdir()
    Path("learn/01_ring_tail.py").write_bytes(b"\xff\xfe")
    code, _, err = told(capsys, "start", "1")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "has been changed, and stays as it is" in err
    assert Path("learn/01_ring_tail.py").read_bytes() == b"\xff\xfe"


def test_hints_come_to_an_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [told(capsys, "hint", "1")[1] for _ in range(4)]
    assert "hint 3 of 3: " in said[2]
    assert said[3] == said[2].replace("hint 3 of 3", "hint 3 of 3, there are no more")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "--help")
    assert code == 0
    assert "check [N]" in out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    while True:\n        pass\n",
            r"01_ring_tail.py, line [23] in last_chunks: no end after 1 s in one call",
        ),
        ("    return last_chunks(base, first, stop, num_cores)\n", "line 2 in last_chunks: RecursionError"),
        ("    return 1 // 0\n", "line 2 in last_chunks: ZeroDivisionError"),
        ("    raise SystemExit(0)\n", "line 2 in last_chunks: SystemExit: 0"),
        ("    raise KeyboardInterrupt\n", "line 2 in last_chunks: KeyboardInterrupt"),
        ("    import os; os._exit(0)\n", "01_ring_tail.py: call 1 of last_chunks ended .* with status 0"),
        (
            "    import ctypes; ctypes.string_at(0)\n",
            r"line 2 in last_chunks: call 1 of last_chunks ended .* by SIGSEGV \(11\)",
        ),
        ("    return [\n", "01_ring_tail.py, line 2: SyntaxError"),
        ("    \0\n", "01_ring_tail.py: SyntaxError: source code string cannot contain null bytes"),
        ("    return ()\n", r"fields: expected a list, yours is \(\)"),
        ("    return None\n", r"rank 0, peer 1: fields: expected a list, yours is None"),
    ],
)
def test_whatever_a_learner_writes(body: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "01_ring_tail.py"
    path.write_text(f"def last_chunks(base, first, stop, num_cores):\n{body}")
    verdict = check_apart(exercise_of(1), path, call_s=1)
    assert not verdict.is_passed
    assert re.search(message, verdict.text), verdict.text
    assert "\n" not in verdict.text


def test_a_file_that_does_not_end_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "01_ring_tail.py"
    path.write_text("import time\nwhile True:\n    time.sleep(1)\n")
    text = check_apart(exercise_of(1), path, call_s=1).text
    assert text.startswith("01_ring_tail.py, line 3 in <module>: no end")


def test_a_file_without_the_function(tmp_path: Path) -> None:
    path = tmp_path / "01_ring_tail.py"
    path.write_text("")
    assert check_apart(exercise_of(1), path).text == "01_ring_tail.py has no function last_chunks"
