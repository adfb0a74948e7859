"""The memory pool's bench: Table 1, Figure 23's text, traces in public formats, LRU and the optimum."""

import json
from pathlib import Path

import pytest

from xdeepserve.bench import ems
from xdeepserve.bench.request_traces import generated, hits_of_belady, hits_of_lru
from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.platform.traces import TracedRequest, read_trace


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


MOONCAKE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2366]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 40,
    "output_length": 86,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090, 1091],
}


def test_public_formats_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mooncake, bailian = tmp_path / "mooncake.jsonl", tmp_path / "bailian.jsonl"
    early = MOONCAKE | {"timestamp": 0}
    mooncake.write_text("\n".join(map(json.dumps, (early, MOONCAKE))) + "\n")
    bailian.write_text(json.dumps(BAILIAN))
    assert read_trace(mooncake, "mooncake")[1] == TracedRequest(27_482_000_000, 1100, 52, (46, 47, 2366))
    assert read_trace(bailian, "bailian")[0].at_ns == 61_114_000_000
    assert main(["bench", "ems", "--requests", str(mooncake), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    hits = [row for row in rows if row["name"].startswith("ems/hits/")]
    assert hits
    assert max(row["value"] for row in hits) <= 50


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1, column 2: not valid JSON"),
        ("[]", "line 1: not a JSON object, as in the format mooncake .is it bailian or azure"),
        ('{"timestamp": 1}', "line 1: hash_ids is missing: a list"),
        (
            json.dumps(MOONCAKE | {"hash_ids": [1.5]}),
            r"line 1: hash_ids\[0\] must be a whole number, 0 or more, found 1.5",
        ),
        (
            json.dumps(MOONCAKE | {"timestamp": -1}),
            "line 1: timestamp must be a number from 0 to .*, found -1",
        ),
        ("", "no requests in it"),
        (json.dumps(MOONCAKE | {"hash_ids": []}), "no request in it has tokens and hash_ids"),
        (json.dumps(MOONCAKE | {"input_length": 0}), "no request in it has tokens and hash_ids"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(InputError, match=reason):
        read_trace(tmp_path / "bad.jsonl", "mooncake")
    with pytest.raises(InputError, match="none: No such file or directory"):
        read_trace(tmp_path / "none", "mooncake")


def test_a_picture_of_figure_23(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ems.plot(ems.figure_23(), tmp_path / "ems.png")
    assert (tmp_path / "ems.png").stat().st_size > 1000
