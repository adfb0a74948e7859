"""The memory pool's bench: Table 1, Figure 23's text, traces in public formats, LRU and the optimum."""

import json
from pathlib import Path

import pytest

from xdeepserve.bench.papers import context_caching, ems, locality
from xdeepserve.bench.papers.request_traces import generated, hits_of_belady, hits_of_lru
from xdeepserve.bench.report import Row
from xdeepserve.cli import main
from xdeepserve.errors import InputError, XDeepServeError
from xdeepserve.platform.traces import TracedRequest


def test_table_1_within_a_percent() -> None:
    rows = {row.name: row for row in ems.table_1()}
    assert all(row.published is not None for row in rows.values())
    assert all(abs(row.error_pct or 0) < 1 for row in rows.values())
    assert rows["cm.t1/cold/ems"].kind == "predicted"


@pytest.fixture(scope="module")
def over_ub() -> dict[str, Row]:
    return {row.name: row for row in context_caching.figure_23(("ub",))}


def test_the_text_of_figure_23_is_predicted(over_ub: dict[str, Row]) -> None:
    """From runs with the pool, and nothing fitted: with half of a prompt reused within a third."""
    some = [row for row in over_ub.values() if row.published is not None]
    assert len(some) == 7
    assert {row.kind for row in some} == {"predicted"}
    assert abs(over_ub["cm.cc.ttft/none"].error_pct or 0.0) < 10
    half = ("cm.cc.ttft/reuse=50%", "cm.cc.ttft/less/reuse=50%", "cm.cc.tput/12.5%->50%")
    assert all(abs(over_ub[name].error_pct or 0.0) < 34 for name in half)


def test_a_curve_of_figure_23_begins_without_a_pool(over_ub: dict[str, Row], tmp_path: Path) -> None:
    ((percents, times),) = context_caching.curves([*over_ub.values()]).values()
    assert percents == [0, 12.5, 50, 90]
    assert times[0] == over_ub["cm.cc.ttft/none"].value
    assert times == sorted(times, reverse=True)
    pytest.importorskip("matplotlib")
    ems.plot([*over_ub.values()], tmp_path / "ems.png")
    assert (tmp_path / "ems.png").stat().st_size > 1000


@pytest.mark.campaign
def test_ub_beats_vpc_at_every_rate_of_reuse() -> None:
    rows = context_caching.figure_23()
    curves = context_caching.curves(rows)
    assert all(ub < vpc for ub, vpc in zip(curves["ub"][1][1:], curves["vpc"][1][1:], strict=True))
    gain = next(row for row in rows if row.name == "cm.cc.tput/UB over VPC")
    assert gain.verdict == "kept"


@pytest.mark.campaign
def test_few_layers_tell_what_all_take() -> None:
    """The time of all layers, against a run of them all."""
    assert context_caching.ttft_ms(0.5, "ub") == pytest.approx(
        context_caching.run_batch(0.5, "ub", 61), rel=0.01
    )


def test_blocks_that_do_not_come_from_the_pool_are_noticed() -> None:
    prompts = [[number] * 4096 for number in range(2)]
    with pytest.raises(XDeepServeError, match="0 tokens came from the pool, expected 128 a prompt"):
        context_caching.ttfts_ms(context_caching.deployment(None, ""), prompts, 4, blocks=1)


def test_a_pool_has_more_than_caches_of_single_tes() -> None:
    rows = {row.name: row.value for row in locality.rows()}
    hits = [rows[f"locality/{way}/cached"] for way in locality.WAYS]
    assert hits[1] < hits[0] < hits[2]  # by load alone, where the prefix is, in the pool


def requests(*blocks: str) -> list[TracedRequest]:
    return [TracedRequest(at, 512 * len(each), 1, tuple(map(ord, each))) for at, each in enumerate(blocks)]


def test_lru_and_the_optimum_on_a_trace_by_hand() -> None:
    trace = requests("ab", "c", "ab", "d", "ab", "c")
    assert list(hits_of_lru(trace, 2)) == [0, 0, 1, 0, 1, 0]
    assert list(hits_of_belady(trace, 2)) == [0, 0, 2, 0, 2, 0]
    assert list(hits_of_lru(trace, 9)) == [0, 0, 2, 0, 2, 1]


def test_volumes_have_what_is_in_dram_too() -> None:
    """So what tiers have together is what volumes have: eight blocks over DRAM of one, not nine."""
    for blocks, percent in (("abcdefgh", 50.0), ("abcdefghi", 0.0)):
        rows = list(ems.hit_rates(requests(*blocks, *blocks), 512))
        assert rows[1].name == "ems/hits/512 tokens of DRAM/lru, volumes of 8x"
        assert rows[1].value == percent


@pytest.mark.parametrize("seed", range(5))
def test_nobody_beats_who_knows_the_future(seed: int) -> None:
    trace = generated(seed, num_chats=40)
    assert trace == generated(seed, num_chats=40)
    before = 0
    for capacity in (8, 32, 128, 512):
        lru, best = sum(hits_of_lru(trace, capacity)), sum(hits_of_belady(trace, capacity))
        assert before <= lru <= best
        before = lru


def test_hit_rates_of_a_trace_are_by_its_own_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other, name in ((context_caching, "figure_23"), (locality, "rows")):
        monkeypatch.setattr(other, name, list)
    path = tmp_path / "trace.jsonl"
    for block in (16, 512):
        prompts = [
            {"timestamp": at, "input_length": 20 * block, "output_length": 2, "hash_ids": [*range(20)]}
            for at in (0, 9000)
        ]
        path.write_text("\n".join(map(json.dumps, prompts)))
        assert main(["bench", "ems", "--requests", str(path), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        hits = {row["name"]: row["value"] for row in rows if row["name"].startswith("ems/hits/")}
        # Of all blocks of both prompts: five, or all twenty of the second one.
        name = f"ems/hits/{5 * block} tokens of DRAM/lru"
        assert (hits[name], hits[f"{name}, volumes of 8x"]) == (12.5, 50)


def test_hit_rates_need_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 0, "output_length": 2, "hash_ids": [1]}')
    with pytest.raises(
        InputError, match="no request has tokens and hash ids; formats with them are bailian, moon"
    ):
        ems.all_rows(path)
