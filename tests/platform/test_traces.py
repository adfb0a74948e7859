"""Public formats, found by themselves; what is mended and what is refused; and the generator's statistics."""

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.made_traffic import MadeTraffic, made, parsed
from xdeepserve.platform.traces import (
    FORMATS,
    TracedRequest,
    at_rate,
    check_positions,
    described,
    read_trace,
    trace_format,
)
from xdeepserve.prices import step_price

DOCS = Path(__file__).parents[2] / "docs"
Row = tuple[int, int, int]  # milliseconds, tokens of a prompt, tokens of its answer
ROWS: Sequence[Row] = ((0, 1000, 12), (250, 1030, 1), (1250, 40, 7), (4000, 2010, 30))


def ids(number: int, length: int, block: int) -> list[int]:
    """Ids of a prompt whose first block everybody has."""
    return [7, *range(1000 * number, 1000 * number + -(-length // block) - 1)]


def lines(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


def table(names: str, rows: Sequence[Sequence[object]], delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([names.split(","), *rows])
    return text.getvalue()


def mooncake(rows: Sequence[Row] = ROWS, block: int = 512, unit: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"timestamp": at * unit, "input_length": prompt, "output_length": output,
         "hash_ids": ids(number, prompt, block)}
        for number, (at, prompt, output) in enumerate(rows, 1)
    ]  # fmt: skip


def bailian(rows: Sequence[Row] = ROWS) -> list[dict[str, Any]]:
    more = {"parent_chat_id": -1, "type": "text", "turn": 1}
    return [{"chat_id": n, **more, **each} for n, each in enumerate(mooncake(rows, 16, 1e-3))]


def azure(day: str, zone: str) -> str:
    names = "TIMESTAMP,ContextTokens,GeneratedTokens"
    return table(
        names, [(f"{day} 07:00:{at / 1000 + 1:09.6f}{zone}", prompt, out) for at, prompt, out in ROWS]
    )


SHAPES: dict[str, tuple[str, str]] = {
    "mooncake": ("mooncake", lines(mooncake())),
    "bailian": ("bailian", lines(bailian())),
    "azure 2023": ("azure", azure("2023-11-16", "0")),
    "azure 2024": ("azure", azure("2024-05-12", "+00:00")),
    "burstgpt 1": (
        "burstgpt",
        table(
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            [(at / 1000, "GPT-4", prompt, out, prompt + out, "API log") for at, prompt, out in ROWS],
        ),
    ),
    "burstgpt 3": (
        "burstgpt",
        table(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            [
                (20_000_000 + at / 1000, "a-b", 3, "ChatGPT", prompt, out, prompt + out, "Conversation log")
                for at, prompt, out in ROWS
            ],
        ),
    ),
    "vidur": (
        "vidur",
        table(
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            [(at / 1000, prompt, out) for at, prompt, out in ROWS],
        ),
    ),
    "splitwise": (
        "splitwise",
        table(
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
            [(n, 2, 0, row[0] / 1000, 1, *row[1:]) for n, row in enumerate(ROWS)],
        ),
    ),
    "jsonl": (
        "jsonl",
        lines(
            [{"arrival_time": at / 1e3, "prompt_tokens": p, "completion_tokens": out} for at, p, out in ROWS]
        ),
    ),
    "csv": ("csv", table("id,time_ms,input_tokens,output_tokens", [(1, *row) for row in ROWS])),
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str | bytes], Path]:
    def written(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


Written = Callable[[str | bytes], Path]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_format_is_found_by_itself(file: Written, shape: str) -> None:
    name, text = SHAPES[shape]
    path = file(text)
    for found in (read_trace(path), read_trace(path, name)):
        assert found.form.split(":")[0] == name
        assert [each[:3] for each in found.requests] == [(10**6 * at, p, out) for at, p, out in ROWS]
        first = 1 if text.startswith("{") else 2
        assert [each.line for each in found.requests] == list(range(first, first + len(ROWS)))
        assert found.block == {"mooncake": 512}.get(name, 16)
        has_ids = name in ("mooncake", "bailian")
        assert [len(each.blocks) for each in found.requests] == [
            -(-prompt // found.block) if has_ids else 0 for _, prompt, _ in ROWS
        ]
    assert read_trace(file(gzip.compress(text.encode()))) == read_trace(file(text))


def test_each_format_has_a_shape_and_a_row_in_help_and_documents() -> None:
    assert {name for name, _ in SHAPES.values()} == {each.name for each in FORMATS}
    page = (DOCS / "platform.md").read_text()
    for each in FORMATS:
        assert f"{each.name} ({each.whose})" in described()
        assert f"\n| `{each.name}` |" in page


CLUSTER = 'model = "tiny"\npolicy = "load"\n[[te]]\ndies = 2\nmtp = 0\ncount = 2\n'


def test_slices_of_all_formats_are_replayed(
    file: Written,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time only and, at a sixteenth of the lengths, with tokens."""
    price = functools.cache(lambda model, deployment: step_price.priced(resolve_model(model), deployment))
    monkeypatch.setattr("xdeepserve.platform.cluster.priced", lambda _, each, progress: price("tiny", each))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    for name, text in SHAPES.values():
        path = file(text)
        assert main(["replay", str(path), "--cluster", str(cluster), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["format"].startswith(f"{name}: ")
        assert found["num_requests"] == len(ROWS)
        assert found["seconds"] > 4
    for name in ("mooncake", "azure 2023"):
        given = [str(file(SHAPES[name][1])), "--deployment", "monolithic", "--shrink", "16", "--json"]
        assert main(["replay", *given, "--model", "tiny-random"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["num_requests"] == len(ROWS)
        assert (found["hit_rate"] > 0) == (name == "mooncake")


# ---- compressed files --------------------------------------------------------------------------------------


def test_zstd_needs_a_library(file: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    magic = b"\x28\xb5\x2f\xfd"
    path = file(magic + b"rest")
    for absent in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(InputError, match=r"compressed with zstd.*`pip install zstandard`.*`zstd -d .*trace`"):
        read_trace(path)

    def unpacked(opened: Path, mode: str, **how: str) -> io.TextIOWrapper:
        assert (opened, mode) == (path, "rt")
        return io.TextIOWrapper(io.BytesIO(SHAPES["vidur"][1].encode()), **how)

    library = SimpleNamespace(open=unpacked, ZstdError=ArithmeticError)
    monkeypatch.setitem(sys.modules, "zstandard", library)
    assert len(read_trace(path).requests) == len(ROWS)

    def broken(*args: object, **how: str) -> None:
        raise ArithmeticError("no frame")

    library.open = broken
    with pytest.raises(InputError, match="trace: cannot be unpacked: no frame"):
        read_trace(path)


def test_a_file_that_is_cut_off_is_refused(file: Written) -> None:
    packed = gzip.compress(SHAPES["mooncake"][1].encode() * 50)
    with pytest.raises(InputError, match="trace: cannot be unpacked: Compressed file ended"):
        read_trace(file(packed[: len(packed) // 2]))
    for pack in (bz2.compress, lzma.compress):
        packed = pack(SHAPES["mooncake"][1].encode() * 50)
        with pytest.raises(InputError, match="trace: cannot be unpacked: Compressed file ended"):
            read_trace(file(packed[: len(packed) // 2]))
        with pytest.raises(InputError, match="trace: cannot be unpacked: "):
            read_trace(file(packed[:20] + b"no such block" + packed[20:]))
    with pytest.raises(InputError, match="trace: not a text in UTF-8"):
        read_trace(file(b"\xff\xfe\n"))


def test_requests_without_tokens_are_said(file: Written) -> None:
    rows = "2024-05-10,0,3\n2024-05-10,7,0\n2024-05-10,7,3\n"
    assert arrivals(file(HEADER + rows))[1] == (
        "line 2 has 0 + 3 tokens, and so have 1 more: one token stands for none; "
        "leave out requests that failed"
    )


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_trace_may_be_compressed(file: Written, pack: Callable[[bytes], bytes]) -> None:
    text = SHAPES["mooncake"][1]
    assert read_trace(file(pack(text.encode()))) == read_trace(file(text))


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (b"PK\x03\x04", "a zip archive: unpack the trace"),
        (b"PAR1", "a Parquet file: write it as CSV"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, not the file itself"),
    ],
)
def test_files_of_other_kinds_say_what_to_do(file: Written, begin: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=f"trace: {reason}"):
        read_trace(file(begin + b"\xff\xfe\n"))


# ---- what is mended, and said ------------------------------------------------------------------------------


def arrivals(path: Path, name: str | None = None) -> tuple[list[int], str]:
    found = read_trace(path, name)
    return [each.at_ns // 10**6 for each in found.requests], "; ".join(found.notes)


AT = [at for at, *_ in ROWS]


@pytest.mark.parametrize(("unit", "scale"), [("s", 1e-3), ("ms", 1), ("us", 1e3), ("ns", 1e6)])
def test_times_since_1970_are_shifted_whatever_their_unit(file: Written, unit: str, scale: float) -> None:
    begin = round(1_750_000_000_000 * scale)
    for text, name in (
        (lines([each | {"timestamp": begin + at * scale} for each, at in zip(mooncake(), AT, strict=True)]),
         "mooncake"),
        (lines([each | {"timestamp": begin + at * scale} for each, at in zip(bailian(), AT, strict=True)]),
         "bailian"),
        (table("Timestamp,Request tokens,Response tokens", [(f"{begin + at * scale:.3f}", p, out)
                                                            for at, p, out in ROWS]), "burstgpt"),
        (table("ts,isl,osl", [(begin + int(at * scale) if scale >= 1 else begin + at * scale, p, out)
                              for at, p, out in ROWS]), "csv"),
    ):  # fmt: skip
        found = read_trace(file(text))
        assert found.form.startswith(f"{name}: times in {unit}, ")
        assert [round(each.at_ns / 1e6) for each in found.requests] == AT
        (note,) = found.notes
        assert note == f"times begin at {begin:,} {unit}: shifted to 0"


def test_a_slice_that_begins_late_begins_at_0(file: Written) -> None:
    late = [each | {"timestamp": each["timestamp"] + 2_000_000} for each in mooncake()]
    assert arrivals(file(lines(late))) == (AT, "times begin at 2,000,000 ms: shifted to 0")
    # A slice from two weeks on could as well be times since 1970, unless the column says its unit.
    weeks = lines([each | {"timestamp": each["timestamp"] + 1_300_000_000} for each in mooncake()])
    assert arrivals(file(weeks))[0] == [1000 * at for at in AT]
    assert arrivals(file(weeks.replace("timestamp", "timestamp_ms")))[0] == AT


@pytest.mark.parametrize(
    ("name", "scale", "unit"), [("timestamp", 1, "ms"), ("timestamp", 1e-3, "s"), ("time", 1, "ms")]
)
def test_without_a_unit_the_spacing_decides_and_that_is_said(
    file: Written, name: str, scale: float, unit: str
) -> None:
    text = lines([{name: at * scale, "input_length": p, "output_length": out} for at, p, out in ROWS])
    assert arrivals(file(text)) == (
        AT,
        f"{name} is in {unit}, by its spacing; call it {name}_s or {name}_ms to say it",
    )
    assert arrivals(file(text.replace(name, f"{name}_s")))[0] == [round(1000 * at * scale) for at in AT]


@pytest.mark.parametrize(
    ("at", "unit", "said"),
    [
        ((0, 1.5, 3.25, 4), "s", "has a fraction on line 2 (1.5)"),
        ((0, 0.2, 0.4, 0.6), "s", "has a fraction on line 2 (0.2)"),
        ((0, 1.5, 3000, 6000), "ms", "has a fraction on line 2 (1.5)"),
        ((0, 250.25, 1250, 4000), "ms", "has a fraction on line 2 (250.25)"),
        ((0, 1, 2, 3), "ms", "as in Mooncake's format: 1,000 requests a second"),
        ((0, 0, 0, 0), "ms", None),
        ((0, 250, 1250, 4000), "ms", None),
    ],
)
def test_a_doubtful_unit_of_mooncakes_times_is_found_by_spacing_or_said(
    file: Written, at: Sequence[float], unit: str, said: str | None
) -> None:
    """Mooncake's own times are whole milliseconds; people write seconds under its names."""
    rows = [each | {"timestamp": when} for each, when in zip(mooncake(), at, strict=True)]
    found = read_trace(file(lines(rows)))
    assert found.form == f"mooncake: times in {unit}, 512 tokens a hash id"
    assert [each.at_ns for each in found.requests] == [
        round(when * {"s": 10**9, "ms": 10**6}[unit]) for when in at
    ]
    assert len(found.notes) == (said is not None)
    assert all(said in note and "call it timestamp_s or timestamp_ms" in note for note in found.notes if said)
    named = lines(rows).replace('"timestamp"', '"timestamp_ms"')
    assert arrivals(file(named)) == ([int(when) for when in at], "")


def test_milliseconds_where_a_format_has_seconds_are_doubted(file: Written) -> None:
    rows = [each | {"timestamp": 1000 * each["timestamp"]} for each in bailian()]
    (note,) = read_trace(file(lines(rows))).notes
    assert note.startswith(
        "timestamp is in s, as in Qwen-Bailian's format: 1,333 s from a request to the next"
    )


@pytest.mark.parametrize(
    ("column", "scale"),
    [("time_s", 1e-3), ("Time (ms)", 1), ("arrival_us", 1e3), ("ts-ns", 1e6), ("created.seconds", 1e-3)],
)
def test_a_column_may_say_its_unit(file: Written, column: str, scale: float) -> None:
    text = table(f"{column},prompt_len,output_len", [(at * scale, p, out) for at, p, out in ROWS])
    assert arrivals(file(text)) == (AT, "")


def test_rows_out_of_order_are_sorted_and_that_is_said_once(file: Written) -> None:
    one, two, three, four = mooncake()
    found = read_trace(file(lines([two, one, four, three])))
    assert [each.line for each in found.requests] == [2, 1, 4, 3]
    assert [each.at_ns // 10**6 for each in found.requests] == AT
    assert found.notes == ["rows are not in order of time in 2 places: sorted"]
    twins = [one | {"output_length": n} for n in range(9)]
    assert [each.output_length for each in read_trace(file(lines(twins))).requests] == list(range(9))


def test_spellings_of_tables(file: Written) -> None:
    text = "TIMESTAMP, ContextTokens, GeneratedTokens\r\n2023-11-16 18:17:03.97, 374.0, 44\r\n"
    for each in (text, text.replace(",", ";"), text.replace(", ", "\t"), "\ufeff" + text, "\n\n" + text):
        (request,) = read_trace(file(each)).requests
        assert request[:3] == (0, 374, 44)
    indexed = (
        ",TIMESTAMP,ContextTokens,GeneratedTokens\n0,2023-11-16 18:17:03,5,6\n1,2023-11-16T18:17:04Z,7,8\n"
    )
    assert [each[:3] for each in read_trace(file(indexed)).requests] == [(0, 5, 6), (10**9, 7, 8)]
    epoch = "TIMESTAMP,ContextTokens,GeneratedTokens\n1700158623.5,5,6\n1700158624.5,7,8\n"
    assert [each.at_ns for each in read_trace(file(epoch)).requests] == [0, 10**9]


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("input_length", "prompt_tokens"),
        ("input_length", "Input Length"),
        ("output_length", "completion_tokens"),
        ("timestamp", "start_time_ms"),
        ("hash_ids", "block_ids"),
    ],
)
def test_columns_that_could_also_be_meant_are_named(file: Written, column: str, other: str) -> None:
    note = f"{column} is read, and {other} is not; rename it to change that"
    plain = read_trace(file(lines(mooncake())))
    found = read_trace(file(lines([each | {other: 50} for each in mooncake()])))
    assert found == plain._replace(notes=[note, *plain.notes])
    table = "timestamp,input_length,output_length,hash_ids,kind,kind\n0,1000,2,[5],a,b\n"
    assert note not in read_trace(file(table)).notes
    assert note in read_trace(file(table.replace("kind", other, 1))).notes


def test_whole_numbers_with_a_point_and_dates_in_json(file: Written) -> None:
    floats = [
        each | {"input_length": float(each["input_length"]), "output_length": 3.0} for each in mooncake()
    ]
    assert [each.input_length for each in read_trace(file(lines(floats))).requests] == [p for _, p, _ in ROWS]
    dates = [each | {"timestamp": f"2025-04-18T12:00:{n:02d}Z"} for n, each in enumerate(mooncake())]
    found = read_trace(file(lines(dates)))
    assert found.form == "mooncake: dates, 512 tokens a hash id"
    assert [each.at_ns for each in found.requests] == [0, 10**9, 2 * 10**9, 3 * 10**9]


# ---- hash ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 16, 48, 64, 128, 256, 512, 1024])
def test_hash_ids_stand_for_the_blocks_of_their_trace(file: Written, block: int) -> None:
    rows = [(1000 * n, 20 * block + 3 + 5 * n, 9) for n in range(12)]
    found = read_trace(file(lines(mooncake(rows, block))))
    assert found.block == block
    assert found.form.startswith("mooncake" if block == 512 else "jsonl")
    said = [f"a hash id stands for {block} tokens, by the number of them"]
    assert [note for note in found.notes if "hash id" in note] == ([] if block == 512 else said)
    # The last tokens of a prompt may have no id.
    whole = [each | {"hash_ids": each["hash_ids"][: each["input_length"] // block]}
             for each in mooncake(rows, block)]  # fmt: skip
    assert read_trace(file(lines(whole))).block == block
    # A format that is asked for has its unit of time, and its block size only if it fits.
    assert read_trace(file(lines(mooncake(rows, block))), "bailian").block == block


@given(
    block=st.sampled_from([8, 16, 32, 64, 128, 256, 512]),
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=8),
)
def test_the_block_size_of_any_trace(
    tmp_path_factory: pytest.TempPathFactory, block: int, lengths: list[int]
) -> None:
    """A size that fits every count of ids; its own one, if there are prompts of enough blocks to tell."""
    path = tmp_path_factory.mktemp("blocks") / "trace.jsonl"
    path.write_text(lines(mooncake([(n, length, 1) for n, length in enumerate(lengths)], block)))
    found = read_trace(path).block
    assert all(-(-length // found) == -(-length // block) for length in lengths)
    if max(lengths) > 4 * block:
        assert found == block


def test_an_id_after_different_ids_is_another_block(
    file: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"timestamp": 20_000 * n, "input_length": 512, "output_length": 3, "hash_ids": [n, n + 1]}
        for n in range(1, 6)
    ]
    text = lines([each | {"hash_ids": [*each["hash_ids"]]} for each in rows]).replace("512", "1024")
    found = read_trace(file(text))
    blocks = [block for each in found.requests for block in each.blocks]
    assert len(set(blocks)) == len(blocks) == 10
    twice = lines([{"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [7, 7, 7, 7]}] * 2)
    first, second = read_trace(file(twice)).requests
    assert first.blocks == second.blocks
    assert len(set(first.blocks)) == 4
    # Time only and with tokens, nothing is found; and in both something where ids have the same before them.
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    for content, finds in ((text, False), (lines(mooncake([(9000 * n, 1000, 2) for n in range(5)])), True)):
        for way in (["--cluster", str(cluster)], ["--deployment", "monolithic", "--model", "tiny-random"]):
            assert main(["replay", str(file(content)), *way, "--json"]) == 0
            assert (json.loads(capsys.readouterr().out)["hit_rate"] > 0) == finds


def test_ids_of_64_bits_and_ids_that_are_texts(file: Written) -> None:
    big = 2**64 - 1
    kinds: list[Callable[[int], object]] = [
        lambda n: big - n, lambda n: f"{n:032x}", lambda n: 2**70 + n, float
    ]  # fmt: skip
    for kind in kinds:
        rows = [each | {"hash_ids": [kind(n) for n in each["hash_ids"]]} for each in mooncake()]
        assert read_trace(file(lines(rows))).requests == read_trace(file(lines(mooncake()))).requests
    rows_of_text = [(at, p, out, "|".join(map(str, ids(n, p, 64)))) for n, (at, p, out) in enumerate(ROWS)]
    names = "arrived_at,num_prefill_tokens,num_decode_tokens,block_hash_ids"
    found = read_trace(file(table(names, rows_of_text)))
    assert (found.block, found.requests[0].blocks[0]) == (64, found.requests[3].blocks[0])
    quoted = [(at, p, out, json.dumps(ids(n, p, 64))) for n, (at, p, out) in enumerate(ROWS)]
    assert read_trace(file(table(names, quoted))).requests == found.requests


def test_prompts_without_ids_share_nothing(file: Written) -> None:
    some = mooncake()
    del some[1]["hash_ids"]
    some[2]["hash_ids"] = []
    some[3] |= {"input_length": 0, "hash_ids": [9]}
    for order, counts in ((some, [2, 0, 0, 0]), (some[1:] + some[:1], [2, 0, 0, 0])):
        assert [len(each.blocks) for each in read_trace(file(lines(order))).requests] == counts


# ---- what is refused ---------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ONE = mooncake()[0]


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in ONE.items() if name != field}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (None, "when,ContextTokens\n", "line 1: no column with arrival times: must be TIMESTAMP, found"),
        ("azure", "when\n", "line 1: no column with arrival times: must be TIMESTAMP, found 'when'"),
        ("azure", lines([ONE]), "line 1: must be CSV, as in the format azure, found JSON; leave"),
        ("bailian", HEADER, "line 1: must be JSON, as in the format bailian, found CSV; .*azure, burstgpt"),
        (None, "when,what\n", "line 1: no column with arrival times: must be timestamp, .* or the like"),
        (None, lines([ONE | {"input_length": "5"}]), r"line 1: input_length must be .*'5' \(write it"),
        (None, lines([ONE | {"timestamp": "5"}]), r"line 1: timestamp must be .*'5' \(write it without"),
        (None, HEADER + "yesterday,1,2\n", "line 2: TIMESTAMP must be a number .*found 'yesterday'"),
        (None, HEADER + "2024-05-10,-1,2\n", "line 2: ContextTokens must be a whole number.* found '-1'"),
        (None, HEADER + "2024-05-10,,2\n", "line 2: ContextTokens must be a whole number.* found ''"),
        (None, HEADER + "2024-05-10,1,2.5\n", "line 2: GeneratedTokens must be a whole .*found '2.5'"),
        (None, HEADER + "2024-05-10,1\n", "line 2: 2 fields, where the line of names has 3"),
        (None, HEADER + "2024-05-10,1,2\n7,1,2\n", "line 3: TIMESTAMP must be a date .*as on line 2"),
        (None, HEADER, "trace: no requests in it"),
        (None, "\n \n", "trace: no requests in it"),
        (None, HEADER + f"2024-05-10,{'1' * 140_000},2", "line 2: not a row of CSV: field larger"),
        (None, lines([ONE, ONE | {"timestamp": -3}]), "line 2: timestamp must be a number from 0 .*found -3"),
        (None, lines([ONE | {"timestamp": True}]), "line 1: timestamp must be a number .*found true"),
        (None, lines([ONE | {"timestamp": 1e300}]), "line 1: timestamp must be a number from 0 to 1e"),
        (None, json.dumps(ONE).replace("0.0", "NaN"), "line 1: not valid JSON: NaN is no number"),
        (None, lines([ONE | {"input_length": 2**60}]), "line 1: input_length must be .*found 1152921504606"),
        (None, lines([ONE, without("timestamp")]), "line 2: timestamp is missing: a number"),
        (None, lines([without("output_length")]), "line 1: no column with tokens of answers: must be"),
        (None, lines([ONE | {"hash_ids": [1.5, 2]}]), r"line 1: hash_ids\[0\] must be a whole .*found 1.5"),
        (None, lines([ONE | {"hash_ids": [1, None]}]), r"line 1: hash_ids\[1\] must be .*found null"),
        (None, lines([ONE | {"hash_ids": 3}]), "line 1: hash_ids must be a list .*found 3"),
        (None, "{", "line 1, column 2: not valid JSON"),
        *(
            (name, text, f"line 1: 2 columns are called {column}: rename those that are not meant")
            for name, column, text in (
                (None, "input_length", "timestamp,input_length,output_length,input_length\n0,1,2,3\n"),
                ("azure", "TIMESTAMP", f"TIMESTAMP, {HEADER}2024-05-10,2024-05-11,1,2\n"),
                (None, "output_length", lines([ONE]).replace("{", '{"output_length": 5, ')),
                (None, "hash_ids", lines([ONE]).replace("{", '{"hash_ids": [], ')),
            )
        ),
        (None, lines([ONE]) + "7\n", "line 2: must be a JSON object, one a line, found 7"),
        (None, "[\n" + lines([ONE]), r"line 1: must be a JSON .* found a list; `jq -c '.\[\]'` makes"),
        (None, "2024-05-10,1,2\n", "found '2024-05-10', '1', '2'; the first line must name the columns"),
        (None, json.dumps(mooncake()), r"line 1: must be a JSON .* found a list; `jq -c '.\[\]'` makes"),
        (None, lines([ONE, ONE | {"timestamp": 1.7e12}]), "line 2: timestamp must be within ten years"),
        (
            None,
            lines(mooncake([(0, 10, 1), (1, 15, 1)], 10) + mooncake([(2, 20, 1)], 20)),
            "line 3: there must be a hash id for each 10 to 14 tokens, as before, found 1 for 20",
        ),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_by_line_and_column(
    file: Written, name: str | None, text: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as error:
        read_trace(file(text), name)
    assert "\n" not in str(error.value)


def test_prompts_beyond_a_models_positions_are_refused_by_line(
    file: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(lines(mooncake([(0, 100, 5), (9, 1900, 200), (5, 2000, 90)])))
    with pytest.raises(InputError, match=r"^line 3 .* 2000 \+ 90 tokens, and so have 1 more; m has 2048 pos"):
        check_positions(read_trace(path).requests, 2048, "m")
    check_positions(read_trace(path).requests, 2100, "m")
    check_positions([TracedRequest(0, 5000, 1, ())], 2048, "m")  # generated
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    for way, reason in (
        (
            ["--cluster", str(cluster)],
            "line 3 of the trace has 2000 + 90 tokens, and so have 1 more; tiny has",
        ),
        (
            ["--deployment", "monolithic"],
            "line 2 of the trace has 1900 + 200 tokens, and the pod's context 2048",
        ),
    ):
        assert main(["replay", str(path), *way]) == 2
        assert reason in capsys.readouterr().err
    assert main(["replay", str(path), "--cluster", str(cluster), "--first", "1"]) == 0


def test_a_format_by_its_name() -> None:
    assert trace_format("azure").name == "azure"
    with pytest.raises(
        InputError, match=r"unknown trace format 'azur' \(did you mean azure\?\): known are bai"
    ):
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
