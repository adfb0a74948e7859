"""`bench recovery`: a gentler stage costs less."""

import functools
from itertools import pairwise

import numpy as np
import pytest

from xdeepserve.bench.papers import recovery

SCALED_DOWN = functools.cache(recovery.scaled_down)


@pytest.fixture(autouse=True)
def _lost_ranks_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "scaled_down", SCALED_DOWN)


def test_a_gentler_stage_costs_less() -> None:
    rows = {row.name.removeprefix("recovery/"): row.value for row in recovery.all_rows()}
    ways = ("none", "glitch/stage=3", "glitch/stage=2", "lost/stage=2")
    assert rows["lost/stage=2/failover/last_token_later"] == rows["lost/stage=2/last_token_later"]
    later_ms = [rows[f"{way}/last_token_later"] for way in (*ways, "lost/stage=1")]
    assert later_ms[0] == 0
    assert all(before < after for before, after in pairwise(later_ms))
    assert [name for name in rows if name.endswith("/rollback")] == ["glitch/stage=3/rollback"]
    assert 0 < rows["glitch/stage=3/rollback"] < 100
    half = recovery.SLICES // 2
    for way in ways:
        values = [rows[f"{way}/tokens_per_s/slice={number}"] for number in range(recovery.SHOWN)]
        quiet = [rows[f"none/tokens_per_s/slice={number}"] for number in range(recovery.SHOWN)]
        assert values[:half] == quiet[:half]
        behind = np.cumsum(quiet) - np.cumsum(values)  # a step again is less than a slice: it may show later
        assert behind.min() > -1e-6
        assert (behind.max() > 1) == (way != "none")


def test_the_fewer_dies_are_left_the_longer_their_weights_take() -> None:
    found = [recovery.scaled_down(num_lost) for num_lost in recovery.RANKS_LOST]
    assert [num_dies for _, num_dies in found] == [32 - num_lost for num_lost in recovery.RANKS_LOST]
    times = [ns for ns, _ in found]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 1e9
