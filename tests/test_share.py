"""`--share N` leaves of each test one case in N: a campaign that ends soon and still is of all kinds.
`--for-s S` ends it in time. `thin(n)` leaves to `make test` one in n, to the campaign the others."""

import subprocess
import sys

import pytest

from tests.test_docs import ROOT


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
    assert (number in (0, 5, 7)) == (pytestconfig.getoption("-m") == "not campaign")


def test_what_is_left_of_a_thinned_test_is_of_the_campaign() -> None:
    arguments = ["-p", "no:cacheprovider", f"{__file__}::test_thinned", "--co", "-m", "campaign"]
    command = [sys.executable, "-m", "pytest", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "6/9 tests collected" in found.stdout
