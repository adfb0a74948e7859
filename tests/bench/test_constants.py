"""Which rows depend on which constants is found by changing these, and never typed in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from xdeepserve.bench.papers import constants, every_value
from xdeepserve.bench.report import Row, published
from xdeepserve.cli import main
from xdeepserve.hw.spec import Spec


@pytest.fixture(scope="module")
def found() -> dict[str, constants.Moves]:
    return {one.name: one for one in constants.all_moves([constants.formulas])}


def test_rows_move_with_what_they_are_made_of(found: dict[str, constants.Moves]) -> None:
    def moves(name: str) -> set[str]:
        return {*found[name].moves_pct}

    fitted = {"tile_efficiency", "tile_overhead", "kernel_overhead"}
    assert moves("cm.t9/utilisation/groups=4/M=2048/K=4096") == fitted | {"int8_peak", "aic_cores"}
    assert moves("cm.obs") == {"storage_bandwidth"}
    assert found["cm.obs"].moves_pct["storage_bandwidth"] == pytest.approx(100 / 1.2 - 100)
    assert {"exchange_copy", "core_meeting"} <= moves("cm.t6/dispatch/ep=64")
    assert {"core_meeting", "attention_cores"} <= moves("xds.a2e")
    assert {"small_kernels", "barrier_stretch", "hbm_bandwidth"} <= moves("cm.t4/batch=8")
    assert "scheduler_gap" in moves("xds.mtp.latency")
    assert "barrier_stretch" in moves("cm.t2/default EPLB") & moves("cm.mb.prefill/prompt=1024")
    assert moves("ms.pp.m23/DBRX") == {"comm_ratio"}


def test_every_row_of_a_formula_is_there(found: dict[str, constants.Moves]) -> None:
    """All that is predicted or calibrated from the parameter table, but for what is simulated for seconds."""
    simulated = (
        "cm.t1/",
        "cm.cc.",
        "xds.dec288",
        "xds.disagg",
        "xds.prod",
        "xds.headline",
        "xds.ep.share25",
        "eaas.",
    )
    again = {name for names in every_value.ALSO.values() for name in names}
    free = (
        "cm.msg",
        "cm.buffers",
        "cm.fig24",
        "cm.t10",
        "xds.meta",
        "xds.hw",
        "xds.int8",
        "xds.eplb.skew",
        "ds.",
        "ms.",
    )
    missing = {*published()} - {*found} - again
    assert {name for name in missing if not name.startswith((*simulated, *free))} == set()
    assert all(one.moves_pct for one in found.values())


def test_effects_of_the_host_are_assumed_by_name_and_move_nothing(found: dict[str, constants.Moves]) -> None:
    lines = constants.host_effects()
    assert [line.split(" = ")[0] for line in lines] == [
        "host_sampling",
        "preemption",
        "guard_checks",
        "gc_pause",
    ]
    assert "preemption = 20 ms, of 5 % of launches: assumed" in lines[1]
    assert "gc_pause = 100 ms, once in 256 steps: assumed" in lines[3]
    assert all(": assumed: " in line for line in lines)
    moving = {name for one in found.values() for name in one.moves_pct}
    assert moving.isdisjoint(constants.HOST)


def test_long_work_is_shared_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = constants.all_moves([few, two])
    monkeypatch.setattr(constants, "LONG_S", -1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert constants.all_moves([few, two]) == alone
    assert [one.moves_pct.keys() for one in alone] == [{"gate"}, set(), {"small_kernels"}]


def test_counts_stay_whole() -> None:
    values = {name: constants.raised(param) for name, param in constants.constants().items()}
    assert values["aic_cores"] == 29
    assert values["attention_cores"] == 5
    assert values["ring_slot"] == 32 * round(8192 * 1.2 / 32)
    assert values["hbm_bandwidth"] == pytest.approx(1.2 * Spec().hbm_bandwidth.value)
    assert set(values) == {*Spec.__struct_fields__, *constants.OF_ROWS}


def few(given: constants.Constants) -> Iterator[Row]:
    gate = given.spec.gate.value
    yield Row("cm.streams/stream0", 600 + 1e6 * gate, "us", "calibrated")
    yield Row("cm.obs", 5.3, "min", "calibrated")
    yield Row("unpublished", gate, "s", "predicted")


def two(given: constants.Constants) -> Iterable[Row]:
    return [Row("xds.dec288.iter", 95 * given.spec.small_kernels.value, "ms", "predicted")]


def test_rows_are_computed_again_for_what_is_read_and_nothing_else(found: dict[str, constants.Moves]) -> None:
    """Also if what is read is read through a copy, or by a method; and no move is missed by it."""
    asked: list[float] = []

    def rows_of(given: constants.Constants) -> Iterator[Row]:
        asked.append(given.spec.gate.value)
        copied = msgspec.structs.replace(given.spec, gate=given.spec.gate)
        ns = copied.hbm_ns(1000.0) + 1e9 * copied.gate.value
        yield Row("cm.obs", ns, "min", "calibrated")
        yield Row("ms.pp.m23/DBRX", given.of_rows("comm_ratio"), "x", "calibrated")

    said: list[str] = []
    one, other = constants.all_moves([rows_of], said.append)
    assert {*one.moves_pct} == {"gate", "hbm_bandwidth", "hbm_efficiency"}
    assert {*other.moves_pct} == {"comm_ratio"}
    assert len(asked) == 1 + 4
    assert said[0] == "part 1 of 1 as it is"
    assert said[1:] == [f"{name}, less than a minute left" for name in constants.constants() if name in
                        {*one.moves_pct, *other.moves_pct}]  # fmt: skip
    reads = constants.base(constants.formulas).reads
    unread = {
        name: constants.raised(param) for name, param in constants.constants().items() if name not in reads
    }
    rows = {row.name: row.value for row in constants.formulas(constants.numbers(unread))}
    assert all(rows[name] == each.value for name, each in found.items())


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "formulas", few)
    monkeypatch.setattr(constants, "SIMULATIONS", {"xds": (two,)})
    assert main(["bench", "papers", "--constants"]) == 0
    out = capsys.readouterr().out
    assert "  cm.streams/stream0: 610.00 us, calibrated\n      gate +0.3\n" in out
    assert "  cm.obs: 5.30 min, calibrated\n      no constant moves it\n" in out
    assert "unpublished" not in out
    assert "xds.dec288" not in out
    assert "guard_checks = 5 ms" in out
    assert main(["bench", "papers", "--constants", "--full", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == ["cm.streams/stream0", "cm.obs", "xds.dec288.iter"]
    assert told["rows"][0]["moves_pct"] == {"gate": pytest.approx(100 * 2 / 610)}
    assert told["constants"]["gate"]["raised"] == pytest.approx(12e-6)
    assert told["constants"]["preemption"]["is_assumed_host"]
    assert told["host"] == constants.host_effects()
    assert main(["bench", "papers", "--constants", "--fits"]) == 2
    assert "--fits and --constants are two tables: choose one" in capsys.readouterr().err


def test_rows_of_one_paper(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked(given: constants.Constants) -> Iterator[Row]:
        raise AssertionError("a simulation of another paper")

    def told(*args: str) -> list[str]:
        assert main(["bench", "papers", "--constants", "--json", "--paper", *args]) == 0
        return [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]

    monkeypatch.setattr(constants, "formulas", few)
    monkeypatch.setattr(constants, "SIMULATIONS", {"cm": (unasked,), "xds": (two,)})
    assert told("cm") == ["cm.streams/stream0", "cm.obs"]
    assert told("xds", "--full") == ["xds.dec288.iter"]
    for paper, reason in (
        ("xds", "--constants has rows of cm, and none of --paper xds"),
        ("xd", "--paper must be one of xds, cm, ds, eaas, ms, found 'xd'"),
    ):
        assert main(["bench", "papers", "--constants", "--paper", paper]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.campaign
def test_what_is_simulated_moves_too() -> None:
    """The scheduler's gap is in no iteration, and in each time per token."""
    before, after = (
        {
            row.name: row.value
            for parts in constants.SIMULATIONS.values()
            for part in parts
            for row in part(constants.numbers(changed))
        }
        for changed in ({}, {"scheduler_gap": 4e-3})
    )
    assert after["xds.dec288.iter"] == before["xds.dec288.iter"]
    assert after["xds.dec288.iter/tpot"] == pytest.approx(before["xds.dec288.iter/tpot"] + 2 / 1.9)
    assert after["xds.disagg.perf/forward"] == pytest.approx(before["xds.disagg.perf/forward"] + 2)
