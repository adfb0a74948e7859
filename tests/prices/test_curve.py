"""Curves of times: lines between measured points, and two tables of the same step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.layouts import PodLayout, predict
from xdeepserve.prices.curve import Curve, measured
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.prices.step_price import StepCounts, priced


def test_a_curve_is_a_line_between_points() -> None:
    curve = Curve((1, 3, 5), (10, 30, 70))
    assert [curve(x) for x in (0, 1, 2, 3, 4, 5, 6)] == [10, 10, 20, 30, 50, 70, 90]
    assert curve.covers(5)
    assert not curve.covers(5.1)


@given(st.floats(0.1, 100), st.floats(0, 1000))
def test_least_squares_find_a_line_that_is_there(k: float, fixed: float) -> None:
    curve = Curve((1, 4, 9, 20), tuple(k * x + fixed for x in (1, 4, 9, 20)))
    assert curve.line() == pytest.approx((k, fixed), abs=1e-6)
    assert curve.misfit() == pytest.approx(0, abs=1e-9)


def test_each_point_is_run_once_and_told() -> None:
    ran, told = list[int](), list[tuple[int, int]]()

    def run(point: int) -> int:
        ran.append(point)
        return point * point

    assert measured((2, 3, 7), run, lambda done, total: told.append((done, total))) == {2: 4, 3: 9, 7: 49}
    assert (ran, told) == ([2, 3, 7], [(1, 3), (2, 3), (3, 3)])


@pytest.mark.parametrize("dies", [1, 4])
def test_a_step_by_its_stages_costs_what_a_step_by_its_counts_does(dies: int) -> None:
    """Stages are measured in a layer of decode and added up, steps with all layers and prompts."""
    profile = PodProfile(resolve_model("tiny"), Demand(40, 24))
    layout = PodLayout(kind="monolithic" if dies == 1 else "colocated", dies=dies)
    price = priced(profile.checkpoint, layout.deployment(profile.demand, 64))
    for rows in (4, 12, 48, 64):
        positions = rows * (profile.demand.context + 1)
        step = price(StepCounts(rows, rows * dies, positions, positions)) - price.gap
        assert predict(profile, layout, rows) == pytest.approx(step, rel=0.005)
