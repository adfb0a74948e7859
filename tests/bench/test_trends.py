"""What the papers say in words holds here, or it is said why not."""

import json
from collections import Counter

import pytest

from xdeepserve.bench.papers import trends
from xdeepserve.bench.papers.every_value import PAPERS, paper_of
from xdeepserve.bench.papers.said_in_papers import TRENDS, Trend, Values
from xdeepserve.cli import main

SLOW = (
    "engine",
    "loading",
    "pool",
    "experts",
    "microbatches",
    "heat map",
    "online",
    "policies",
    "services",
    "loss",
)  # minutes in all


def test_there_are_many_each_once_and_each_of_a_paper() -> None:
    assert len(TRENDS) >= 25
    assert max(Counter(trend.id for trend in TRENDS).values()) == 1
    assert {paper_of(trend.id) for trend in TRENDS} <= set(PAPERS)
    assert {trend.rows for trend in TRENDS} == set(trends.ROWS)
    assert sum(bool(trend.why) for trend in TRENDS) == 10


def check(trend: Trend) -> None:
    """It holds, unless it says why not; then it does not, or what it says is out of date."""
    found = trends.answer(trend)
    assert found.holds == (not trend.why), found
    assert found.why == trend.why


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "trend", [trend for trend in TRENDS if trend.rows not in SLOW], ids=lambda trend: trend.id
)
def test_it_holds_or_says_why_not(trend: Trend) -> None:
    check(trend)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "trend", [trend for trend in TRENDS if trend.rows in SLOW], ids=lambda trend: trend.id
)
def test_it_holds_in_the_engine_too(trend: Trend) -> None:
    check(trend)


def test_values_are_compared_in_order() -> None:
    values = Values({"a=1": 1.0, "a=2": 2.0, "a=3": 2.0})
    assert values.grows("a={}", (1, 2))
    assert not values.grows("a={}", (1, 2, 3))
    assert values.falls("a={}", (2, 1))
    assert not values.falls("a={}", (1, 2))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "papers", "--trends", "--paper", "ms"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "5 of 5 hold"
    assert main(["bench", "papers", "--trends", "--paper", "ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["trends"]
    assert [one["holds"] for one in found] == [True] * 5
    assert main(["bench", "papers", "--trends", "--full"]) == 2
    assert "--trends has no numbers" in capsys.readouterr().err
    assert main(["bench", "papers", "--trends", "--paper", "no"]) == 2
    assert "--paper must be one of" in capsys.readouterr().err
    assert main(["bench", "engine", "--trends"]) == 2
    assert "--trends belongs to bench papers" in capsys.readouterr().err
