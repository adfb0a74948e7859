"""The benches of heat map and policies, on TEs of a made-up price: what is compared, and that it is a map."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from xdeepserve.bench.papers import heatmap, schedule
from xdeepserve.cli import main
from xdeepserve.engine.balance.heat_map import read_heat_map
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.platform.cluster import PricedKind
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import KVTransfer
from xdeepserve.platform.step_te import StepLimits
from xdeepserve.prices.curve import Curve
from xdeepserve.prices.step_price import AttentionPrice, StepPrice

ATTENTION = AttentionPrice(absorbed=40.0, plain=40.0, per_earlier=0.0, per_kv_token=30.0)
PRICE = StepPrice(4, Curve((1.0, 512.0), (1e6, 30e6)), Curve((1.0, 2048.0), (1e6, 9e6)), ATTENTION, 2e6)
LIMITS = StepLimits(64, 512, 100_000, 512)
KINDS = [
    PricedKind(PRICE, LIMITS, None, KVTransfer()),
    PricedKind(PRICE, LIMITS, (PRICE, LIMITS), KVTransfer(block_ns=4800.0)),
]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmap, "kinds", lambda: KINDS)
    monkeypatch.setattr(heatmap, "here", lambda: heatmap.measured(KINDS))
    for module in (heatmap, schedule):
        monkeypatch.setattr(module, "NUM_REQUESTS", 40)
    monkeypatch.setattr(heatmap, "PROMPTS", (256, 4096))
    monkeypatch.setattr(heatmap, "OUTPUTS", (32, 512))
    monkeypatch.setattr(schedule, "SAMPLED", 2)


def test_a_heat_map_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.json"
    assert main(["bench", "heatmap", "--map", str(path), "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    found = read_heat_map(path)
    assert found == heatmap.measured(KINDS)
    assert rows["heatmap/stable"] == pytest.approx(100 * found.stable)
    for rate, squares in zip(found.rates, found.gains, strict=True):
        value = rows[f"heatmap/rate={rate:g}/prompt=4096/output=32"]
        assert value == pytest.approx(100 * squares[1][0], abs=1e-3)
        assert -100 < value < 100


def test_every_policy_on_every_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On half of the command's seeds; the next test takes all of them for one policy."""
    monkeypatch.setattr(schedule, "SEEDS", schedule.SEEDS[::2])
    assert main(["bench", "schedule", "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["rows"]}
    for name in schedule.TRACES:
        for rate in schedule.RATES:
            at = f"schedule/{name}/rate={rate:g}"
            for policy in (*ROUTE.rows, "deepserve/knows"):
                assert rows[f"{at}/{policy}/latency"] > rows[f"{at}/{policy}/ttft"] > 0
            gain = rows[f"{at}/round-robin/latency"] / rows[f"{at}/pd-aware/latency"]
            assert rows[f"{at}/claim/pd-aware over round-robin"] == pytest.approx(gain, rel=1e-3)
            assert rows[f"{at}/deepserve/regret"] >= 0
            check_lengths(rows, at)
    for rate in schedule.RATES:
        check_lengths(rows, f"schedule/applications/rate={rate:g}")
    assert rows["schedule/chats/rate=2/prefix/hits"] > rows["schedule/chats/rate=2/round-robin/hits"]
    assert rows["schedule/long prompts/rate=2/prefix/hits"] == 0


def test_a_policy_is_tried_on_several_traces() -> None:
    heat, tes = heatmap.measured(KINDS), schedule.six(KINDS)
    works = [schedule.trace("chats", 2.0, seed) for seed in schedule.SEEDS]
    found = [schedule.PolicyResult.of(schedule.serve("load", work, tes, heat, 0.0)) for work in works]
    latencies = [each.latency for each in found]
    assert len(set(latencies)) == len(schedule.SEEDS)
    result = schedule.over_traces("load", "chats", 2.0, tes, heat)
    assert result.latency == pytest.approx(statistics.mean(latencies))
    assert result.spread == pytest.approx(statistics.stdev(latencies))
    assert result.hits == pytest.approx(statistics.mean(each.hits for each in found))


def check_lengths(rows: dict[str, float], at: str) -> None:
    assert all(rows[f"{at}/lengths/{way}/latency"] > 0 for way in ("none", "mean", "predicted", "told"))
    assert rows[f"{at}/lengths/error"] > 0
    assert 0 <= rows[f"{at}/lengths/bucket"] <= 100


def test_lengths_are_told_of_the_second_half_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, list[float]] = {}

    class Listening(Fleet):
        def __init__(self, tes: Any, policy: Any, heat: Any, predict: Any, stale_ns: int) -> None:
            super().__init__(tes, policy, heat, predict, stale_ns)
            told[len(told)] = [predict(each) for each in work]

    monkeypatch.setattr(schedule, "Fleet", Listening)
    work = schedule.generated(schedule.APPLICATIONS, 10.0)
    heat = heatmap.measured(KINDS)
    list(schedule.answer_lengths("x", work, schedule.six(KINDS), heat, 0))
    none, mean, predicted, true = told.values()
    half = len(work) // 2
    assert none == [0.0] * len(work)
    assert mean == [mean[0]] * len(work)
    assert mean[0] > 0
    assert predicted[:half] == true[:half] == mean[:half]
    assert true[half:] == [each.output_length for each in work[half:]]
    assert len(set(predicted[half:])) > 1
    assert predicted[half:] != true[half:]


def test_a_map_belongs_to_its_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schedule", "--map", "x"]) == 2
    assert "--map belongs to bench heatmap, not to bench schedule" in capsys.readouterr().err
