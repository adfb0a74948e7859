"""Each mechanism of the timing model changes the rows that it is about, and no others."""

from __future__ import annotations

import json

import pytest

from xdeepserve.bench import ablations, interference
from xdeepserve.cli import main


@pytest.mark.parametrize("mechanism", ablations.MECHANISMS, ids=lambda each: each.name)
def test_a_mechanism_changes_its_rows_and_no_others(mechanism: ablations.Mechanism) -> None:
    whole = ablations.groups(ablations.whole())
    changed = {
        group
        for group, rows in ablations.groups(mechanism.off()).items()
        if [row.value for row in rows] != [row.value for row in whole[group]]
    }
    assert changed == mechanism.groups


def test_every_group_is_some_mechanisms() -> None:
    whole = ablations.groups(ablations.whole())
    assert frozenset().union(*(each.groups for each in ablations.MECHANISMS)) == set(whole)
    assert all(whole.values())


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "papers", "--ablations", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ablations"]
    assert {one["mechanism"] for one in found} == {each.name for each in ablations.MECHANISMS}
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
