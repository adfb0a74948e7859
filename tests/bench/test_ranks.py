"""The wall time benchmark moves and compares real bytes."""

import json

import numpy as np
import pytest

from xdeepserve import cli
from xdeepserve.bench.wall import ranks
from xdeepserve.errors import XDeepServeError


def test_small_groups_are_timed_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "EXCHANGES", ((9, 3),))
    monkeypatch.setattr(ranks, "A2ES", ((5, 8, 2), (10, 8, 1)))
    assert cli.main(["bench", "comm", "--ranks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == [
        f"ranks/{group}/{part}"
        for group in (
            "exchange/ep=9/tokens=3",
            "a2e/attention=5/experts=8/tokens=2",
            "a2e/attention=10/experts=8/tokens=1",
        )
        for part in ("allocate", "run")
    ]
    assert {row["kind"] for row in rows} == {"measured"}


@pytest.mark.parametrize("run", [lambda: ranks.exchange(9, 3), lambda: ranks.a2e(5, 8, 2)])
def test_a_wrong_byte_is_found(run: object, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ranks.run_experts

    def wrong(received: ranks.TokenCopies) -> np.ndarray:
        out = right(received)
        out[:1, :1] *= np.float32(1.5)
        return out

    monkeypatch.setattr(ranks, "run_experts", wrong)
    with pytest.raises(XDeepServeError, match="returned other bytes"):
        run()  # type: ignore[operator]


def test_a_plot_of_wall_times_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "comm", "--ranks", "--plot", "x.png"]) == 2
    assert "choose one" in capsys.readouterr().err
