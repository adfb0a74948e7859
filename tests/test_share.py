"""`--share N` leaves of each test one case in N: a campaign that ends soon and still is of all kinds.
`--for-s S` ends it in time. `thin(n)` leaves to `make test` one in n, to the campaign the others, and
`long_tests.txt` names those that take long."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import long_tests
from tests.samples import ROOT


@pytest.mark.parametrize(("share", "count"), [("1", 60), ("8", 8), ("60", 1), ("0", 0)])
def test_share(share: str, count: int) -> None:
    args = ["tests/engine/test_faults.py", "-k", "whenever", "--co", "-q", "-m", "campaign", "--share", share]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == (0 if count else 4), found.stdout
    if count:
        assert f"tests/engine/test_faults.py: {count}" in found.stdout
    else:
        assert "--share is 1 or more, not 0" in found.stderr + found.stdout


def test_time_is_up() -> None:
    arguments = ["-p", "no:cacheprovider", "-n", "0", f"{__file__}::test_share", "--for-s", "0"]
    command = [sys.executable, "-m", "pytest", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout[:5]) == (0, "ssss "), found.stdout


@pytest.mark.thin(3)
@pytest.mark.parametrize("number", range(9))
def test_thinned(number: int, pytestconfig: pytest.Config) -> None:
    assert (number in (0, 5, 7)) == ("not campaign" in pytestconfig.getoption("-m"))


def test_what_is_left_of_a_thinned_test_is_of_the_campaign() -> None:
    arguments = ["-p", "no:cacheprovider", f"{__file__}::test_thinned", "--co", "-m", "campaign"]
    command = [sys.executable, "-m", "pytest", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "6/9 tests collected" in found.stdout


def report(case: str, seconds: float, *marks: str) -> pytest.TestReport:
    keywords = dict.fromkeys(marks, 1)
    return pytest.TestReport(case, ("", 0, ""), keywords, "passed", None, "call", duration=seconds)


def test_what_takes_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_tests, "FILE", tmp_path / "long.txt")
    few, many, all_long = "a.py::few", "a.py::many", "b.py::all_long"
    took = {few: 2.0, "a.py::short": 0.2, f"{many}[0]": 1.0, f"{many}[1]": 0.1}
    took |= {f"{all_long}[0]": 3.0, f"{all_long}[1]": 2.0, "b.py::one[0]": 3.0, "b.py::one[1]": 1.0}
    reports = [report(case, seconds) for case, seconds in took.items()]
    long_tests.write([*reports, report("b.py::promise", 9.0, "always")])
    assert long_tests.FILE.read_text().split() == [few, f"{many}[0]", all_long, "b.py::one[0]"]


def test_long_tests_exist() -> None:
    names = long_tests.FILE.read_text().splitlines()
    assert names == sorted(set(names))
    for name in names:
        file, test, *_ = name.partition("[")[0].split("::")
        begins = re.compile(rf"^(?:(?:async )?def |class )?{test}\b", re.MULTILINE)
        assert begins.search((ROOT / file).read_text()), f"{name}: see tests/long_tests.py"


def test_who_asks_for_a_file_gets_its_long_tests() -> None:
    arguments = ["-p", "no:cacheprovider", "tests/test_verify.py", "--co"]
    command = [sys.executable, "-m", "pytest", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    (name,) = [each for each in long_tests.FILE.read_text().splitlines() if "test_rows_that_evict_do" in each]
    assert name in found.stdout
