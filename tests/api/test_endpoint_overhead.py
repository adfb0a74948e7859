"""What `tools/endpoint_overhead.py` prints fits together."""

from __future__ import annotations

import re

import pytest
from tools.endpoint_overhead import summary

FAST_LATER = [(4400.0, 8000.0), (2000.0, 2500.0), (4419.0, 7014.0), (1000.0, 2529.0), (900.0, 1500.0)]


@pytest.mark.parametrize("pairs", [FAST_LATER, FAST_LATER[:4], [(5.0, 10.0)]])
def test_a_share_is_that_of_the_rates_beside_it(pairs: list[tuple[float, float]]) -> None:
    said = re.match(
        r"chunks/s: endpoint ([\d,]+), bare aiohttp ([\d,]+): ([\d.]+) of it", summary(pairs, "chunks")
    )
    assert said
    mine, theirs, share = (float(number.replace(",", "")) for number in said.groups())
    assert share == round(mine / theirs, 2)
    shares = sorted(one / other for one, other in pairs)
    assert share == round(shares[(len(pairs) - 1) // 2], 2)
