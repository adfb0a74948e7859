"""Virtual times and the order of events are those of the kept histories (tests/times.py)."""

from __future__ import annotations

import pytest

from tests import times
from tests.times import HISTORIES, LINES, Line


@pytest.mark.thin(3)
@pytest.mark.always
@pytest.mark.parametrize("name", HISTORIES)
def test_times_are_kept(name: str) -> None:
    lines = times.tell(HISTORIES[name])
    if times.digests(lines) != times.kept_digests()[name]:
        parting = times.first_parting(times.kept_lines(name), lines)
        pytest.fail(f"{parting}If that is meant: python -m tests.times --write {name}")


def test_nothing_else_is_kept() -> None:
    assert list(times.kept_digests()) == list(HISTORIES)
    assert {file.stem for file in LINES.iterdir()} == set(HISTORIES)


def test_kept_lines_are_those_of_the_digests() -> None:
    for name, kept in times.kept_digests().items():
        assert times.digests(times.kept_lines(name)) == kept, name


def test_the_histories_show_what_they_are_for() -> None:
    told = {
        line.words.split()[0]
        for each in HISTORIES
        for line in times.kept_lines(each)
        if "told" in line.numbers
    }
    assert told >= {
        *("Assigned", "Given", "StepEnded", "Ended"),
        *("Booked", "Preempted", "MovedOut", "TEChanged", "FailoverEnded", "Mended"),
        *(
            "LastChunkLaunched",
            "LayerEnded",
            "Registered",
            "TransferBegan",
            "TransferEnded",
            "Released",
            "Withdrawn",
        ),
        *("ServerHeard", "ServerMoved", "ClientLost"),
        *("DiesLost", "DiesTested", "ReplicasChanged"),
    }


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (["1 0 a\tx", "2 0 b\ty", "4 0 c\tz"], "times part at line 3"),
        (["1 0 a\tx", "2 0 b\tother", "3 0 c\tz"], "words part at line 2"),
        (["1 0 a\tx", "2 0 b\tother", "4 0 c\tz"], "times part at line 3"),  # numbers come before words
        (["1 0 a\tx", "2 0 b\ty"], "times part at line 3"),
        (["1 0 a\tx", "2 0 b\ty", "3 0 c\tz"], ""),
    ],
)
def test_the_first_line_that_parts(now: list[str], said: str) -> None:
    kept = ["1 0 a\tx", "2 0 b\ty", "3 0 c\tz"]

    def lines(texts: list[str]) -> list[Line]:
        return [Line(*text.split("\t")) for text in texts]

    assert times.first_parting(lines(kept), lines(now)).startswith(said)
