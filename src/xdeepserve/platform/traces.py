"""Requests of public traces: times, lengths and blocks of prompts.

mooncake   Mooncake's traces: a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
           `hash_ids`, one for each 512 tokens of the prompt
bailian    Qwen-Bailian's anonymised usage traces: the same with `timestamp` in seconds, 16 tokens a block,
           and `chat_id`, `parent_chat_id`, `turn` and `type`, which are not needed here
azure      Azure's LLM inference traces of 2023 and 2024: a CSV file with the columns `TIMESTAMP` (date and
           time), `ContextTokens` and `GeneratedTokens`; who shares a prefix with whom is not told

Equal numbers are equal blocks after equal blocks, in either format that has them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from xdeepserve.errors import InputError, meant
from xdeepserve.reading import read_line, unreadable

TraceFormat = Literal["mooncake", "bailian", "azure"]
BLOCK_TOKENS: dict[TraceFormat, int] = {"mooncake": 512, "bailian": 16, "azure": 16}
NS: dict[TraceFormat, float] = {"mooncake": 1e6, "bailian": 1e9}  # of the unit of timestamps
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # of Azure's
MICROSECOND = timedelta(microseconds=1)


class TracedRequest(NamedTuple):
    """A request of a trace: its time, lengths and blocks."""

    at_ns: int
    input_length: int  # tokens, as is the next
    output_length: int
    blocks: tuple[int, ...]  # of the prompt; without them nobody is known to share its beginning


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class _Line(msgspec.Struct, frozen=True):
    """A line of a JSON trace: a request."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...]


def trace_format(name: str) -> TraceFormat:
    """Check the name of a trace format. Raises InputError for an unknown one."""
    for known in get_args(TraceFormat):
        if name == known:
            return known
    names = get_args(TraceFormat)
    raise InputError(f"unknown trace format '{name}'{meant(name, names)}: known are {', '.join(names)}")


def read_trace(path: Path, form: TraceFormat) -> list[TracedRequest]:
    """Read every request of a file. Raises InputError, with line and field, for an invalid request, and for
    times that run backwards."""
    requests: list[TracedRequest] = []
    last = 0  # the line of the latest request
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = _azure(path, file) if form == "azure" else _json(path, file, form)
            for number, request in lines:
                if requests and request.at_ns < requests[-1].at_ns:
                    field = COLUMNS[0] if form == "azure" else "timestamp"
                    earlier = (requests[-1].at_ns - request.at_ns) / 1e9
                    raise InputError(
                        f"{path}, line {number}: {field} runs backwards: {earlier:g} s before line {last}"
                    )
                requests.append(request)
                last = number
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {unreadable(error)}") from None
    if not requests:
        raise InputError(f"{path}: no requests in it")
    if form != "azure" and not any(request.blocks and request.input_length for request in requests):
        raise InputError(f"{path}: no request in it has tokens and hash_ids")
    if form != "azure":
        _check_blocks(path, form, requests)
    return requests


def _check_blocks(path: Path, form: TraceFormat, requests: Sequence[TracedRequest]) -> None:
    """Raise InputError for a file with the fields of this format, but the hash_ids of another format."""
    some = [request for request in requests if request.blocks]
    found = sum(len(request.blocks) for request in some)
    off = {
        name: abs(found - sum(-(-request.input_length // BLOCK_TOKENS[name]) for request in some))
        for name in NS
    }
    if off[nearest := min(off, key=lambda name: off[name])] < off[form]:
        raise InputError(
            f"{path}: {found} hash_ids are not one for each {BLOCK_TOKENS[form]} tokens, as in the format "
            f"{form}: is it {nearest}?"
        )


def _json(path: Path, lines: Iterator[str], form: TraceFormat) -> Iterator[tuple[int, TracedRequest]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _request(path, number, line, form)


def _request(path: Path, number: int, line: str, form: TraceFormat) -> TracedRequest:
    if not line.lstrip().startswith("{"):
        others = " or ".join(name for name in get_args(TraceFormat) if name != form)
        where = f"{path}, line {number}"
        raise InputError(f"{where}: not a JSON object, as in the format {form} (is it {others}?)")
    said = read_line(line.encode(), _Line, path, number)
    return TracedRequest(
        round(said.timestamp * NS[form]), said.input_length, said.output_length, said.hash_ids
    )


def _azure(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, TracedRequest]]:
    rows = _rows(path, lines)
    header = next((row for _, row in rows), [])
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise InputError(f"{path}, line 1: not a trace in the format azure: no column {missing[0]}")
    columns = [header.index(name) for name in COLUMNS]
    first: datetime | None = None
    for number, row in rows:
        if not row:
            continue
        where = f"{path}, line {number}"
        if len(row) <= max(columns):
            raise InputError(f"{where}: {len(row)} fields, where the header has {len(header)}")
        text, *lengths = (row[column].strip() for column in columns)
        at = _date(where, text)
        first = first or at
        numbers = [_whole(where, *each) for each in zip(COLUMNS[1:], lengths, strict=True)]
        at_ns = 1000 * ((at - first) // MICROSECOND)
        yield number, TracedRequest(at_ns, numbers[0], numbers[1], ())


def _rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of CSV, each with the number of its last line."""
    rows = csv.reader(lines)
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.line_num}: not a row of CSV: {error}") from None


def _date(where: str, text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"{where}: TIMESTAMP is a date and a time like 2023-11-16 18:17:03.97, found {text!r}"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _whole(where: str, field: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 18):
        raise InputError(f"{where}: {field} is a whole number, 0 or more, found {text!r}")
    return int(text)


def at_rate(requests: Sequence[TracedRequest], times: float) -> list[TracedRequest]:
    """Return the requests with arrivals `times` times as fast."""
    return [request._replace(at_ns=round(request.at_ns / times)) for request in requests]
