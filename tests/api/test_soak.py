"""A small soak; `tools/soak.py` is the large one. Right answers or explicit errors, nothing left behind."""

from __future__ import annotations

from tools.soak import KINDS, soak


async def test_a_small_soak() -> None:
    report = await soak(60, seed=3)
    assert report.problems == []
    assert report.outcomes["right"] > 20
    assert report.outcomes["refused with 400"] > 0
    assert report.outcomes["left"] > 0
    assert report.outcomes["hung up"] > 0
    assert sum(n for outcome, n in report.outcomes.items() if not outcome.startswith("(")) == 60
    assert sum(KINDS.values()) == 100
