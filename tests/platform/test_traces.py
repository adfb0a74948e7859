"""Public formats, what is refused of them, and the generator's statistics."""

import json
from pathlib import Path

import numpy as np
import pytest

from xdeepserve.errors import InputError
from xdeepserve.platform.made_traffic import MadeTraffic, made, parsed
from xdeepserve.platform.traces import TracedRequest, TraceFormat, at_rate, read_trace, trace_format

MOONCAKE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2366]}
BAILIAN = {"timestamp": 61.114, "input_length": 521, "output_length": 132, "hash_ids": [*range(33)]}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azures_traces_of_both_years(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(HEADER + "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n")
    assert read_trace(path, "azure") == [
        TracedRequest(0, 374, 44, ()),
        TracedRequest(52_000_000, 396, 109, ()),
    ]
    path.write_text(HEADER + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n")
    assert [request.at_ns for request in read_trace(path, "azure")] == [0, 990_070_000]


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("azure", "when,ContextTokens\n", "line 1: not a trace in the format azure: no column TIMESTAMP"),
        ("azure", HEADER + "yesterday,1,2\n", "line 2: TIMESTAMP is a date and a time like .*'yesterday'"),
        ("azure", HEADER + "2024-05-10 00:00:00,-1,2\n", "line 2: ContextTokens is a whole number.*'-1'"),
        ("azure", HEADER + "2024-05-10 00:00:00,1\n", "line 2: 2 fields, where the header has 3"),
        ("azure", HEADER, "no requests in it"),
        (
            "azure",
            HEADER + f"2024-05-10 00:00:00,{'1' * 140_000},2",
            "line 2: not a row of CSV: field larger",
        ),
        (
            "azure",
            HEADER + "2024-05-10 00:00:01,1,2\n\n2024-05-10 00:00:00,1,2\n",
            "line 4: TIMESTAMP runs backwards: 1 s before line 2",
        ),
        (
            "mooncake",
            f"{json.dumps(MOONCAKE)}\n{json.dumps(MOONCAKE | {'timestamp': 27481})}",
            "line 2: timestamp runs backwards: 0.001 s before line 1",
        ),
        ("mooncake", json.dumps(BAILIAN), "33 hash_ids are not one for each 512 tokens.*: is it bailian?"),
        ("bailian", json.dumps(MOONCAKE), "3 hash_ids are not one for each 16 tokens.*: is it mooncake?"),
        (
            "bailian",
            json.dumps({name: value for name, value in MOONCAKE.items() if name != "output_length"}),
            "line 1: output_length is missing: a whole number, 0 or more",
        ),
    ],
)
def test_what_is_no_trace_is_refused_by_line_and_field(
    tmp_path: Path, form: TraceFormat, text: str, reason: str
) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        read_trace(path, form)


def test_what_is_a_trace_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    few = MOONCAKE | {"hash_ids": []}
    short = MOONCAKE | {"input_length": 3, "hash_ids": [1]}
    path.write_text("\n".join(json.dumps(each) for each in (few, short, MOONCAKE)))
    assert [len(each.blocks) for each in read_trace(path, "mooncake")] == [0, 1, 3]
    path.write_text("\n".join(json.dumps(each) for each in (BAILIAN, BAILIAN | {"hash_ids": []})))
    assert [len(each.blocks) for each in read_trace(path, "bailian")] == [33, 0]
    path.write_text(HEADER + "2023-11-16 18:17:03.97,374,44\n", encoding="utf-8-sig")
    assert len(read_trace(path, "azure")) == 1


def test_a_format_by_its_name() -> None:
    assert trace_format("azure") == "azure"
    with pytest.raises(InputError, match=r"unknown trace format 'azur' \(did you mean azure\?\)"):
        trace_format("azur")


def test_a_trace_twice_as_fast() -> None:
    assert at_rate([TracedRequest(10, 1, 1, ())], 2)[0].at_ns == 5


def test_generated_requests_have_the_statistics_that_are_set() -> None:
    traffic = MadeTraffic(requests=6000, seconds=600, prompt=4000, output=300, seed=3)
    trace = made(traffic)
    assert trace == made(traffic)
    assert trace != made(MadeTraffic(requests=6000, seconds=600, prompt=4000, output=300, seed=4))
    assert len(trace) == 6000
    assert [r.at_ns for r in trace] == sorted(r.at_ns for r in trace)
    assert np.mean([r.input_length for r in trace]) == pytest.approx(4000, rel=0.01)
    assert np.mean([r.output_length for r in trace]) == pytest.approx(300, rel=0.05)
    for request in trace:
        assert len(request.blocks) == -(-request.input_length // traffic.block)


def shared(trace: list[TracedRequest]) -> float:
    """The share of blocks that an earlier request had."""
    seen: set[int] = set()
    num_shared = 0
    for request in trace:
        num_shared += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return num_shared / sum(len(request.blocks) for request in trace)


def test_longer_chats_share_more_and_strangers_nothing() -> None:
    strangers = made(MadeTraffic(requests=500, turns=1, systems=0))
    assert shared(strangers) == 0
    assert (
        0
        < shared(made(MadeTraffic(requests=500, turns=2)))
        < shared(made(MadeTraffic(requests=500, turns=6)))
    )


def test_equal_blocks_come_after_equal_blocks() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in made(MadeTraffic(requests=800, turns=4)):
        for number, block in enumerate(request.blocks):
            assert before.setdefault(block, request.blocks[:number]) == request.blocks[:number]


def test_bursts_and_a_swing_of_the_rate() -> None:
    def gaps(burst: float) -> float:
        at = np.array([r.at_ns for r in made(MadeTraffic(requests=3000, turns=1, burst=burst))], float)
        return float(np.diff(at).std() / np.diff(at).mean())

    assert gaps(0) < 0.01
    assert gaps(1) == pytest.approx(1, abs=0.15)
    assert gaps(3) > 2
    at = np.array([r.at_ns for r in made(MadeTraffic(requests=4000, turns=1, swing=0.8, seconds=100))]) / 1e9
    middle = np.mean((at > 25) & (at < 75))
    assert middle == pytest.approx(0.5 + 0.8 / np.pi, abs=0.04)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("made:promt=3", r"'promt=3' is no setting \(did you mean prompt\?\)"),
        ("made:prompt", "'prompt' is no setting"),
        ("made:prompt=x", "prompt must be a whole number, found 'x'"),
        ("made:prompt=3,prompt=4", "prompt is given twice"),
        ("made:requests=0,burst=-1", r"requests must lie in \[1, .* found 0; burst must lie"),
    ],
)
def test_settings_of_the_generator_are_checked(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parsed(text)


def test_settings_of_the_generator() -> None:
    assert parsed("made:") == MadeTraffic()
    assert parsed("made:requests=7,burst=2.5") == MadeTraffic(requests=7, burst=2.5)
