"""What is fitted to what the papers publish, and what the rest of them says of each table."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest

from tests.samples import check_all
from xdeepserve.bench.papers import every_value, fits
from xdeepserve.bench.report import Row
from xdeepserve.cli import main
from xdeepserve.hw.spec import Spec


def test_the_numbers_that_made_a_table_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a table that other numbers would have printed, exactly these."""
    fit = fits.all_fits()["dispatch and combine"]
    others = {"core_meeting": 20e-6, "exchange_copy": 150e-9}
    made = {row.name: row.value for row in fit.tables["CM Table 6"](others)}

    def scaled(numbers: fits.Numbers) -> Iterable[Row]:
        for row in fit.tables["CM Table 6"](numbers):
            assert row.published is not None
            yield Row(row.name, row.value / made[row.name] * row.published.value, row.unit, row.kind)

    found = fits.fitted(fit.numbers, [scaled])
    assert found == pytest.approx(others, rel=1e-4)


def test_a_number_that_no_table_tells_stays_within_its_range() -> None:
    fit = fits.all_fits()["dispatch and combine"]
    (row,) = [row for row in fit.tables["CM Table 6"](fit.numbers) if row.name == "cm.t6/dispatch/ep=8"]
    found = fits.fitted(fit.numbers, [lambda numbers: [row]])  # whatever the numbers are
    assert found == pytest.approx(fit.numbers)


def test_all_that_is_fitted_is_listed_and_the_decode_rows_say_as_much_without_each_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What programs get, what is printed, and what the page shows of that, from fits that are made once."""
    found = list(fits.all_left_out())
    monkeypatch.setattr(fits, "all_left_out", lambda: iter(found))
    assert main(["bench", "papers", "--fits", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {*told["parameters"]} - {*fits.OF_BENCHMARKS} == {
        name for name in Spec.__struct_fields__ if "fitted" in getattr(Spec(), name).source
    }
    of_fits = {name for fit in fits.all_fits().values() for name in fit.numbers}
    assert of_fits <= {*told["parameters"]}
    left_out = told["left_out"]
    assert len(left_out) == sum(len(fit.tables) for fit in fits.all_fits().values())
    # Table 6 is of operators that push, and without it only two times of operators that pull are left.
    # Table 4's batch of 8 is a fifth off with all tables, too: a layer and heads take longer than its step.
    medians = {"CM Table 6": 10, "CM 4.2.3, streams": 9}
    assert all(one["median"] < medians.get(one["table"], 8) for one in left_out)
    assert all(one["largest"] < (25 if one["table"] == "CM Table 4" else 15) for one in left_out)
    assert len(told["parameters"]) == 12
    assert {*told["parameters"]} - of_fits | {fits.COMM_RATIO} > fits.READ_OFF
    assert main(["bench", "papers", "--fits"]) == 0
    out = capsys.readouterr().out
    assert "8 numbers are fitted to several" in out
    assert "4 numbers are read off one" in out
    assert "CM Table 6" in out
    check_all("xdeepserve bench papers --fits", out)


def test_a_number_at_its_bound_leaves_the_others_free() -> None:
    """The least of a quadratic within bounds, by hand: x + y = 3 with x at most 1, and y dearer."""
    normal, slope = np.array([[2.0, 1.0], [1.0, 1.0]]), np.array([-5.0, -3.0])  # least at (2, 1)
    low, high = np.array([-9.0, -9.0]), np.array([1.0, 9.0])
    assert fits.bounded_step(normal, slope, low, high) == pytest.approx([1.0, 2.0])
    assert fits.bounded_step(normal, slope, low, high + 9) == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize("other", [["--trends"], ["--full"], ["--paper", "cm"], ["--paper", ""]])
def test_what_does_not_go_with_it(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "papers", "--fits", *other]) == 2
    assert f"{other[0]} does not go with it" in capsys.readouterr().err
    assert main(["bench", "papers", "--fits", "--ablations"]) == 2
    assert "choose one" in capsys.readouterr().err


def test_what_is_left_out_of_a_fit_is_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table that the numbers were fitted to, from the rest; their errors are those of --fits."""
    some = {name: fits.all_fits()[name] for name in ("a grouped GEMM", "ping-pong")}
    monkeypatch.setattr(fits, "all_fits", lambda: some)
    errors = {one.table: one.largest for one in fits.all_left_out()}
    gemms, ping_pong = (list(fits.left_out_rows(paper)) for paper in ("cm", "ms"))
    assert [row.name for row in ping_pong] == ["ms.pp.m23/DBRX/fit=others"]  # no other one was fitted to
    assert len(gemms) == 3
    assert {every_value.how(row) for row in (*gemms, *ping_pong)} == {every_value.LEFT_OUT}
    (one,) = ping_pong
    assert abs(one.error_pct or 0.0) == pytest.approx(errors["MS 7.4, DBRX"])
    # A table's error is the largest of all its rows, of which three were fitted.
    assert 0 < max(abs(row.error_pct or 0.0) for row in gemms) <= errors["CM Table 9"]
