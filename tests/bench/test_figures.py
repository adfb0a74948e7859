"""The papers' figures, redrawn."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path

import pytest

from xdeepserve.bench.papers import every_value, figures
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import LayerCost

ALL = [
    pytest.param(make, id=make.__name__, marks=[pytest.mark.campaign] if make is figures.reuse else [])
    for make in chain.from_iterable(figures.FIGURES.values())
]


@pytest.mark.parametrize("make", ALL)
def test_a_figure_has_lines_of_ours_and_points_of_theirs_near_them(make: object) -> None:
    assert callable(make)
    figure = make()
    for xs, ys in (*figure.ours.values(), *figure.theirs.values()):
        assert len(xs) == len(ys) > 0
        assert all(math.isfinite(y) and y > 0 for y in ys)
    assert figure.theirs
    for xs, ys in figure.theirs.values():
        for x, y in zip(xs, ys, strict=True):
            ours = [line[1][[*line[0]].index(x)] for line in figure.ours.values() if x in line[0]]
            assert not ours or min(abs(math.log(our / y)) for our in ours) < math.log(1.25), (x, y, ours)


def test_stages_add_up() -> None:
    cost = LayerCost(resolve_model("deepseek-r1").config)
    one, two = (figures.stages(cost, 2, is_piped) for is_piped in (False, True))
    assert len(one) == len(two) == len(figures.STAGES)
    assert one[-1] == pytest.approx(sum(one[:-1]))
    assert two[-1] == pytest.approx(2 * max(sum(two[:3]), sum(two[3:-1])), rel=0.01)
    assert two[-1] < one[-1]


def test_they_are_of_papers_and_drawn(tmp_path: Path) -> None:
    assert set(figures.FIGURES) <= set(every_value.PAPERS)
    pytest.importorskip("matplotlib")
    figures.plot(["ds"], tmp_path / "none.svg")
    assert not [*tmp_path.iterdir()]
    figures.plot(["ms"], tmp_path / "ms.svg")
    assert "<svg" in (tmp_path / "ms.svg").read_text()
