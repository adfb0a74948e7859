"""Small soaks; `tools/soak.py` has the large one. Right answers or explicit errors, nothing left behind."""

from __future__ import annotations

import random

import pytest
from tools.soak import HANG_UP, KINDS, PODS, Asked, questions, soak


@pytest.fixture(scope="module")
def asked() -> Asked:
    return questions(random.Random(3))


async def check(name: str, count: int, asked: Asked) -> None:
    report = await soak(count, 3, PODS[name], asked)
    assert report.problems == []
    assert report.outcomes["right"] > count / 3
    assert report.outcomes["refused with 400"] > 0
    assert report.outcomes["left"] > 0
    assert report.outcomes["hung up"] > 0
    assert sum(n for outcome, n in report.outcomes.items() if not outcome.startswith("(")) == count


async def test_a_small_soak(asked: Asked) -> None:
    await check("colocated", 60, asked)
    assert sum(KINDS.values()) == 100
    assert sum(HANG_UP.values()) > 33


@pytest.mark.campaign
@pytest.mark.parametrize("name", PODS)
async def test_a_soak_of_each_pod(name: str, asked: Asked) -> None:
    await check(name, 400, asked)
