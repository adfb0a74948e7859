"""Each mechanism of the timing model changes the rows that it is about, and no others."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest

from xdeepserve.bench.papers import ablations, interference
from xdeepserve.bench.report import Row
from xdeepserve.cli import main


@pytest.mark.parametrize("mechanism", ablations.MECHANISMS, ids=lambda each: each.name)
def test_a_mechanism_changes_its_rows_and_no_others(mechanism: ablations.Mechanism) -> None:
    assert changed(ablations.groups, mechanism) == mechanism.groups - ablations.SIMULATED


@pytest.mark.campaign
@pytest.mark.parametrize("mechanism", ablations.MECHANISMS, ids=lambda each: each.name)
def test_and_what_is_simulated(mechanism: ablations.Mechanism) -> None:
    assert changed(ablations.simulated, mechanism) == mechanism.groups & ablations.SIMULATED


@functools.cache
def rows_of_all(rows_of: Callable[[ablations.Formulas], dict[str, list[Row]]]) -> dict[str, list[Row]]:
    """The rows with every mechanism: the same for each that is left out."""
    return rows_of(ablations.whole())


def changed(
    rows_of: Callable[[ablations.Formulas], dict[str, list[Row]]], mechanism: ablations.Mechanism
) -> set[str]:
    """Groups that are others without it."""
    whole = rows_of_all(rows_of)
    return {
        group
        for group, rows in rows_of(mechanism.off()).items()
        if [row.value for row in rows] != [row.value for row in whole[group]]
    }


def test_every_group_is_some_mechanisms() -> None:
    whole = ablations.groups(ablations.whole())
    assert frozenset().union(*(each.groups for each in ablations.MECHANISMS)) == {
        *whole,
        *ablations.SIMULATED,
    }
    assert all(whole.values())


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablations, "simulated", lambda machine: {})  # which take three minutes
    assert main(["bench", "papers", "--ablations", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ablations"]
    assert {one["mechanism"] for one in found} == {
        each.name for each in ablations.MECHANISMS if each.groups - ablations.SIMULATED
    }
    assert all(one["expected"] and one["percent"] for one in found)
    assert main(["bench", "papers", "--ablations"]) == 0
    out = capsys.readouterr().out
    assert "cores of an operator meet" in out
    assert "not as expected" not in out
    assert main(["bench", "papers", "--ablations", "--full"]) == 2


def test_kv_over_ub_delays_a_dispatch_and_kv_over_roce_does_not() -> None:
    """CM 4.3.3."""
    times = {row.name.split("/")[1]: row.value for row in interference.rows()}
    assert times["roce"] == times["none"] < times["ub"]
