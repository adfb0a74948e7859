"""Which tests take so long that they are left to `make long`: `long_tests.txt` has their names, one a line.

    python -m pytest -n 2 --find-long

writes it anew, from what each test takes here when its kernels have been compiled before: everything over
LONG_S, except that of a test whose cases are all long the quickest one stays, up to REST_S. What is marked
`always` stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".txt")
LONG_S = 0.4
REST_S = 1.5


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark those that are named."""
    named = set(FILE.read_text().splitlines())
    for item in items:
        if named & {item.nodeid, test_of(item.nodeid)} and not item.get_closest_marker("campaign"):
            item.add_marker(pytest.mark.long)


def test_of(nodeid: str) -> str:
    """A case's test."""
    return nodeid.partition("[")[0]


test_of.__test__ = False  # type: ignore[attr-defined]


def write(reports: Iterable[pytest.TestReport]) -> None:
    """Name the long ones of those that were run. reports: of each its setup, its call and its teardown."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for report in reports:
        if "always" not in report.keywords:
            seconds[test_of(report.nodeid)][report.nodeid] += report.duration
    names = []
    for test, cases in seconds.items():
        long = [case for case, each in cases.items() if each > LONG_S]
        quickest = min(cases, key=cases.__getitem__)
        if len(long) == len(cases) > 1 and cases[quickest] <= REST_S:
            long.remove(quickest)
        names += [test] if len(long) == len(cases) else long
    FILE.write_text("".join(f"{name}\n" for name in sorted(names)))
