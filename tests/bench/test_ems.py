"""The memory pool's bench: Table 1, Figure 23's text, traces in public formats, LRU and the optimum."""

import json
from pathlib import Path

import pytest

from xdeepserve.bench.papers import ems
from xdeepserve.bench.papers.request_traces import generated, hits_of_belady, hits_of_lru
from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.platform.traces import TracedRequest


def test_table_1_within_a_percent() -> None:
    rows = {row.name: row for row in ems.table_1()}
    assert all(row.published is not None for row in rows.values())
    assert all(abs(row.error_pct or 0) < 1 for row in rows.values())
    assert rows["cm.t1/cold/ems"].kind == "predicted"


def test_the_text_of_figure_23_within_nine_percent() -> None:
    """By one number that is fitted to it; the time without reuse is that of Table 2's prefill."""
    *fitted, over_vpc = [row for row in ems.figure_23() if row.name.startswith("cm.")]
    assert len(fitted) == 4
    assert all(row.kind == "calibrated" and abs(row.error_pct or 100) < 9 for row in fitted)
    assert over_vpc.kind == "predicted"
    assert 1 < over_vpc.value < 1.52  # as on a card that nothing slows
    assert all(ems.reuse(share / 10).vpc_ms > ems.reuse(share / 10).ub_ms for share in range(1, 10))


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_picture_of_figure_23(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ems.plot(ems.figure_23(), tmp_path / "ems.png")
    assert (tmp_path / "ems.png").stat().st_size > 1000
