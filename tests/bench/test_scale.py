"""bench scale and bench pdc: what their rows say of each other, on prices that are made up."""

import re
from pathlib import Path

import msgspec
import pytest

from tests.platform.tools import LIMITS, PRICE
from xdeepserve.bench.papers import pdc, pool_servers, scale
from xdeepserve.bench.report import Row
from xdeepserve.cli import main
from xdeepserve.platform import cluster as cluster_module
from xdeepserve.platform.cluster import PricedKind
from xdeepserve.platform.fleet_words import KVTransfer
from xdeepserve.platform.made_traffic import MadeTraffic
from xdeepserve.platform.scale_up import HeldWeights, ScaleUp
from xdeepserve.platform.service_report import Bounds

UP = ScaleUp(HeldWeights(40 * 2**30, 670 * 10**9), 1e8, 32)


def test_remedies_in_the_papers_order() -> None:
    rows: dict[str, float] = {}
    for ways in scale.all_ways():
        up = msgspec.structs.replace(UP, ways=ways)
        rows |= {row.name: row.value for row in scale.of_ways(up)}
    last = {name: rows[f"scale/{name}/tes=64"] for name in map(scale.name_of, scale.all_ways())}
    assert next(iter(last)) == "cold"
    assert list(last)[-1] == "warm+dram+fork"
    assert last["warm+dram+fork"] == last["warm+fork"] == min(last.values()) < 10, "within seconds"
    assert last["warm+dram"] < last["warm"] < last["cold"] == max(last.values())
    assert last["dram+fork"] < last["dram"]
    for name, value in last.items():
        steps = [rows[each] for each in rows if each.startswith(f"scale/{name}/tes=64/")]
        assert sum(steps) == pytest.approx(value)
    starts = [rows[f"scale/dram/tes=64/{step}"] for step in ("TE-Pre-Load", "Scaler-Pre", "TE-Load")]
    assert max(starts) == starts[0], "DeepServe 6.1: the majority of startup time"


def test_a_fork_costs_its_source_time_and_is_drawn(tmp_path: Path) -> None:
    rows = list(scale.of_source(UP))
    alone, during, steps = (row.value for row in rows)
    assert alone < during < 2 * alone
    assert 1 < steps < 10
    pytest.importorskip("matplotlib")
    rows += [
        row for ways in scale.all_ways() for row in scale.of_ways(msgspec.structs.replace(UP, ways=ways))
    ]
    scale.plot(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 1000


def test_every_ratio_and_one_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PricedKind(PRICE, LIMITS, None, KVTransfer(block_ns=16e3), "prefill")
    kinds = [kind, msgspec.structs.replace(kind, role="decode")]
    monkeypatch.setattr(pdc, "priced_kinds", lambda cluster, block: kinds)
    monkeypatch.setattr(pdc, "scale_up_of", lambda *args: UP)
    monkeypatch.setattr(pdc, "SEEDS", 2)
    monkeypatch.setattr(pdc, "SECONDS", 40.0)
    monkeypatch.setattr(pdc, "SERVICE", Bounds(1, 50))
    traffic = {
        "long prompts": MadeTraffic(prompt=400, output=4),
        "long answers": MadeTraffic(prompt=20, output=200),
    }
    monkeypatch.setattr(pdc, "PHASES", traffic)
    monkeypatch.setattr(pdc, "pool_rows", list)
    found = list(pdc.all_rows())
    rows = {row.name: row.value for row in found}
    for row in found:
        if row.unit == "%":
            least, most = map(int, re.findall(r"(\d+) to (\d+) of 2 workloads", row.note)[0])
            assert row.value == pytest.approx((least + most) / 2, abs=1)
    assert rows["pdc/long prompts/best ratio"] > rows["pdc/long answers/best ratio"]
    fixed = [rows[f"pdc/fixed {count}:{pdc.TOTAL - count}"] for count in range(1, pdc.TOTAL)]
    assert rows["pdc/adaptive/knows"] > sorted(fixed)[len(fixed) // 2], "better than most, late as it is"
    assert rows["pdc/adaptive/changes"] >= 2
    assert all(0 <= value <= 100 for name, value in rows.items() if "fixed" in name)


def test_a_pool_that_follows_is_small_and_found_in(monkeypatch: pytest.MonkeyPatch) -> None:
    small = msgspec.structs.replace(pool_servers.POOL, server_gib=1, worth=1e-3, every_s=1, most=8)
    chats = MadeTraffic(requests=600, turns=6, systems=0, prompt=400, output=10, pause=4, block=LIMITS.block)
    strangers = MadeTraffic(requests=100, turns=1, systems=0, prompt=100, output=10, block=LIMITS.block)
    cluster = msgspec.structs.replace(pool_servers.CLUSTER, model="tiny")
    kind = PricedKind(PRICE, LIMITS, None, KVTransfer())
    monkeypatch.setattr(pool_servers, "priced_kinds", lambda cluster, block: [kind])
    monkeypatch.setattr(pool_servers, "PHASES", (strangers, chats, strangers))
    for name, value in {"SECONDS": 40.0, "FIXED": (1, 8), "CLUSTER": cluster, "POOL": small}.items():
        monkeypatch.setattr(pool_servers, name, value)
    monkeypatch.setattr(cluster_module, "position_nbytes", lambda model: 2**30 // (60 * LIMITS.block))
    rows = {row.name: row.value for row in pool_servers.pool_rows()}
    few, many, follows = (f"pdc/pool/{way}" for way in ("fixed 1", "fixed 8", "adaptive"))
    assert rows[f"{few}/cached"] < rows[f"{follows}/cached"] <= rows[f"{many}/cached"]
    assert rows[f"{few}/servers"] == 1 < rows[f"{follows}/servers"] < 8


def test_options_of_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pdc", "--plot", "x.png"]) == 2
    assert "not to bench pdc" in capsys.readouterr().err


def test_rows_have_meanings() -> None:
    from xdeepserve.bench.report import group_of

    names = [Row("scale/source/x", 1, "", "predicted"), Row("scale/cold", 1, "", "predicted")]
    assert [group_of(row.name) for row in names] == ["scale/source", "scale"]
