"""Requests of public traces: arrivals, lengths and blocks of prompts, in one reader for all formats.

`FORMATS` is the table of formats. A file's columns, and the size of the blocks that its hash ids stand for,
decide which one it is. Times are shifted so that the first request comes at 0, and rows are sorted by time.

Equal numbers of blocks are equal blocks after equal blocks, whatever a file's hash ids stand for: an id that
comes after different ids gets another number.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import itertools
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from xdeepserve.errors import InputError, meant
from xdeepserve.reading import GET_LFS, LFS_POINTER, Document, shown, unreadable

Unit = Literal["s", "ms", "us", "ns"]
NS: Mapping[Unit, int] = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
SPELLINGS: Mapping[str, Unit] = {
    "s": "s", "sec": "s", "secs": "s", "seconds": "s", "ms": "ms", "msec": "ms", "millis": "ms",
    "milliseconds": "ms", "us": "us", "usec": "us", "micros": "us", "microseconds": "us", "ns": "ns",
    "nanos": "ns", "nanoseconds": "ns",
}  # fmt: skip


class TraceFormat(NamedTuple):
    """Format of a trace: its columns by their possible names, and what its numbers stand for.

    `unit` is the unit of times that are numbers, and `block` the tokens that a hash id stands for. Without
    them, both are found by the numbers themselves. `marks` are further columns, of this format alone.
    """

    name: str
    whose: str
    form: Literal["JSON", "CSV"]
    time: Sequence[str]
    prompt: Sequence[str]
    output: Sequence[str]
    ids: Sequence[str] = ()
    unit: Unit | None = None
    block: int | None = None
    marks: Sequence[str] = ()


TIMES = (
    "timestamp", "time", "arrival_time", "arrived_at", "arrival_timestamp", "arrival", "arrival_ts", "ts",
    "timestamp_start_unix", "start_time", "request_time", "created_at", "created",
)  # fmt: skip
PROMPTS = (
    "input_length", "input_tokens", "num_input_tokens", "input_token_count", "input_len", "isl",
    "prompt_tokens", "num_prompt_tokens", "prompt_token_count", "prompt_length", "prompt_len", "prompt_size",
    "prefill_tokens", "num_prefill_tokens", "context_tokens", "request_tokens",
)  # fmt: skip
OUTPUTS = (
    "output_length", "output_tokens", "num_output_tokens", "output_token_count", "output_len", "osl",
    "completion_tokens", "num_completion_tokens", "completion_token_count", "completion_length",
    "decode_tokens", "num_decode_tokens", "generated_tokens", "response_tokens", "response_length",
    "token_size", "max_tokens",
)  # fmt: skip
IDS = ("hash_ids", "block_hash_ids", "block_hashes", "block_ids")

# The first row whose columns a file has is its format.
FORMATS = (
    TraceFormat(
        "bailian", "Qwen-Bailian's", "JSON", ["timestamp"], ["input_length"],
        ["output_length"], ["hash_ids"], "s", 16, ["chat_id"],
    ),
    TraceFormat(
        "mooncake", "Mooncake's", "JSON", ["timestamp"], ["input_length"], ["output_length"],
        ["hash_ids"], "ms", 512,
    ),
    TraceFormat(
        "azure", "Azure's, 2023 and 2024", "CSV", ["TIMESTAMP"], ["ContextTokens"],
        ["GeneratedTokens"], unit="s",
    ),
    TraceFormat(
        "burstgpt", "BurstGPT's", "CSV", ["Timestamp"], ["Request tokens"], ["Response tokens"], unit="s"
    ),
    TraceFormat(
        "vidur", "vidur's", "CSV", ["arrived_at"], ["num_prefill_tokens"], ["num_decode_tokens"],
        ["block_hash_ids"], "s",
    ),
    TraceFormat(
        "splitwise", "SplitwiseSim's", "CSV", ["arrival_timestamp"], ["prompt_size"], ["token_size"], unit="s"
    ),
    TraceFormat("jsonl", "other JSON lines, by names of fields", "JSON", TIMES, PROMPTS, OUTPUTS, IDS),
    TraceFormat("csv", "other CSV, by names of columns", "CSV", TIMES, PROMPTS, OUTPUTS, IDS),
)  # fmt: skip
BY_NAME = {each.name: each for each in FORMATS}
PLAIN = {each.form: each for each in FORMATS}  # the last of each form takes what no other one does

DEFAULT_BLOCK = 16  # tokens, where no prompt shares anything
SHOWN_NAMES = 4  # of those that a column may have, in a refusal
MOST_TOKENS = 10**9  # of a prompt, or of an answer
EPOCH = 1e9  # seconds since 1970: September 2001
DENSE = 10  # numbers from a request to the next: if there are fewer, they are seconds and not milliseconds
MOST_A_SECOND, LONGEST_GAP_S = 200, 100  # requests, and seconds between two: beyond them the unit is doubted
LONGEST_S = 10 * 365 * 86_400  # of a trace
LATEST = 1e19  # in ns since 1970
MICROSECOND = timedelta(microseconds=1)
SINCE_1970 = datetime(1970, 1, 1, tzinfo=UTC)


class TracedRequest(NamedTuple):
    """A request of a trace: its time, lengths and blocks, and the line of the file that it stands on."""

    at_ns: int
    input_length: int  # tokens, as is the next
    output_length: int
    blocks: tuple[int, ...]  # of the prompt; without them nobody is known to share its beginning
    line: int = 0

    def said(self, number: int) -> str:
        """Name the request in a refusal: by its line, or by its number where there is no file."""
        return f"line {self.line} of the trace" if self.line else f"request {number} of the trace"


class RequestTrace(NamedTuple):
    """Requests in order of time, the tokens of a block, the format in words, and what had to be mended."""

    requests: list[TracedRequest]
    block: int
    form: str
    notes: Sequence[str] = ()


class _TraceRow(NamedTuple):
    line: int
    time: float  # in the file's unit; of a date, microseconds since 1970
    is_date: bool
    prompt: int  # tokens, as is the next
    output: int
    blocks: tuple[int, ...]


def trace_format(name: str) -> TraceFormat:
    """Find a format by its name. Raises InputError for an unknown one."""
    if name not in BY_NAME:
        raise InputError(
            f"unknown trace format '{name}'{meant(name, BY_NAME)}: known are {', '.join(BY_NAME)}"
        )
    return BY_NAME[name]


def described() -> str:
    """Name all formats, for the help of commands."""
    return ", ".join(f"{each.name} ({each.whose})" for each in FORMATS)


def read_trace(path: Path, name: str | None = None) -> RequestTrace:
    """Read every request of a file; without the name of a format, it is found. Raises InputError, with line
    and column, for an invalid request."""
    asked = None if name is None else trace_format(name)
    broken: tuple[type[Exception], ...] = ()
    try:
        opener, broken = _opener(path)
        with opener(path, "rt", newline="", encoding="utf-8-sig") as file:
            table = _table(path, file)
            form, columns = _format(path, table, asked)
            notes = _others(path, table, columns)
            rows = list(_rows(path, table, columns, form.ids))
    except broken as error:
        raise InputError(f"{path}: cannot be unpacked: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {unreadable(error)}") from None
    if not rows:
        raise InputError(f"{path}: no requests in it")
    block = _block_size(path, rows, form.block)
    if asked is None and form.block and block != form.block and not form.marks:
        form = PLAIN[form.form]  # columns of a format with blocks, without its blocks
    trace = _trace(path, form, columns["time"], rows, block)
    return trace._replace(notes=[*notes, *trace.notes])


# ---- files -------------------------------------------------------------------------------------------------


# Kinds of compressed files by their first bytes, with an opener and the errors of broken files.
_PACKED: Sequence[tuple[bytes, Callable[..., Any], tuple[type[Exception], ...]]] = (
    (b"\x1f\x8b", gzip.open, (gzip.BadGzipFile, EOFError, zlib.error)),
    (b"BZh", bz2.open, (OSError, EOFError)),
    (b"\xfd7zXZ\0", lzma.open, (lzma.LZMAError, EOFError)),
)
_NO_TEXT = {
    b"PK\x03\x04": "a zip archive: unpack the trace from it",
    LFS_POINTER.encode(): GET_LFS,
    b"PAR1": "a Parquet file: write it as CSV or JSON lines, such as with pandas' `to_csv`",
}


def _opener(path: Path) -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """Choose the opener of a text by its first bytes, since it may be compressed. Also return the errors of
    the opener for broken files."""
    with path.open("rb") as file:
        magic = file.read(len(LFS_POINTER))
    for begin, opener, errors in _PACKED:
        if magic.startswith(begin):
            return opener, errors
    for begin, hint in _NO_TEXT.items():
        if magic.startswith(begin):
            raise InputError(f"{path}: {hint}")
    if not magic.startswith(b"\x28\xb5\x2f\xfd"):
        return open, ()
    for name in ("compression.zstd", "zstandard"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        return library.open, (library.ZstdError, EOFError)
    raise InputError(
        f"{path}: compressed with zstd, which needs a library: `pip install zstandard`, or unpack the file: "
        f"`zstd -d {path}`"
    )


class _Table(NamedTuple):
    """A file's columns, and its records, each with its line."""

    form: Literal["JSON", "CSV"]
    line: int  # of the names
    names: Sequence[str]
    records: Iterator[tuple[int, Mapping[str, Any]]]


def _table(path: Path, file: Iterable[str]) -> _Table:
    """Find the columns of a file: the names in its first line, or the fields of its first object."""
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    number, first = next(lines, (0, ""))
    if not first:
        raise InputError(f"{path}: no requests in it")
    if first.lstrip()[0] == "[":
        raise InputError(
            f"{path}, line {number}: must be a JSON object, one a line, found a list; `jq -c '.[]'` makes "
            "lines of it"
        )
    if first.lstrip()[0] == "{":
        top = _object(path, number, first)
        names = json.loads(first, parse_int=str, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
        rest = ((number, _object(path, number, line)) for number, line in lines)
        return _Table("JSON", number, names, itertools.chain([(number, top)], rest))
    delimiter = max(",;\t|", key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    return _Table("CSV", number, names, _csv_records(path, names, lines, delimiter))


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        found = Document(line, path, "JSON", first=number).raw  # refused in our words
    if isinstance(found, dict):
        return found
    raise InputError(f"{path}, line {number}: must be a JSON object, one a line, found {shown(found)}")


def _csv_records(
    path: Path, names: Sequence[str], lines: Iterator[tuple[int, str]], delimiter: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    last = 0

    def texts() -> Iterator[str]:
        nonlocal last
        for number, line in lines:
            last = number
            yield line

    try:
        for row in csv.reader(texts(), delimiter=delimiter, skipinitialspace=True):
            if len(row) < len(names):
                raise InputError(
                    f"{path}, line {last}: {len(row)} fields, where the line of names has {len(names)}"
                )
            yield last, dict(zip(names, row, strict=False))
    except csv.Error as error:
        raise InputError(f"{path}, line {last}: not a row of CSV: {error}") from None


# ---- columns -----------------------------------------------------------------------------------------------

NEEDED = {"time": "arrival times", "prompt": "tokens of prompts", "output": "tokens of answers"}


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _stem(name: str) -> tuple[str, Unit | None]:
    """Split a column's name into its plain name and the unit that it ends with, if it does."""
    stem, _, last = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_").rpartition("_")
    unit = SPELLINGS.get(last) if stem else None
    return _plain(name if unit is None else stem), unit


def _columns(form: TraceFormat, names: Sequence[str]) -> dict[str, str]:
    """Find the columns of a format in a file, by the first of their possible names that the file has."""
    spelled = {plain: name for name in reversed(names) for plain in (_stem(name)[0], _plain(name))}
    found = {}
    for part in (*NEEDED, "ids"):
        known = map(_plain, getattr(form, part))
        if (column := next((spelled[each] for each in known if each in spelled), None)) is not None:
            found[part] = column
    return found


def _format(path: Path, table: _Table, asked: TraceFormat | None) -> tuple[TraceFormat, dict[str, str]]:
    """Find the first format whose columns the file has. Raises InputError that names a column it lacks."""
    where = f"{path}, line {table.line}"
    some = [each for each in FORMATS if each.form == table.form]
    if asked is not None and asked.form != table.form:
        raise InputError(
            f"{where}: must be {asked.form}, as in the format {asked.name}, found {table.form}; leave the "
            f"format out, or use one of {', '.join(each.name for each in some)}"
        )
    for form in some if asked is None else [asked]:
        columns = _columns(form, table.names)
        if columns.keys() >= NEEDED.keys() and (asked or set(form.marks) <= set(table.names)):
            return form, columns
    form = asked or max(some, key=lambda each: len(_columns(each, table.names)))
    columns = _columns(form, table.names)
    form = form if asked or columns else PLAIN[table.form]
    part = next(part for part in NEEDED if part not in columns)
    known, others = getattr(form, part)[:SHOWN_NAMES], " or the like" if form in PLAIN.values() else ""
    hint = (
        "; the first line must name the columns"
        if table.form == "CSV" and any(map(NUMBER.fullmatch, table.names))
        else ""
    )
    raise InputError(
        f"{where}: no column with {NEEDED[part]}: must be {', '.join(known)}{others}, found "
        f"{', '.join(map(shown, table.names))}{hint}"
    )


def _others(path: Path, table: _Table, columns: Mapping[str, str]) -> list[str]:
    """Name the columns that could also be meant. Raises InputError for a name that two columns have."""
    notes = []
    for part, column in columns.items():
        if table.names.count(column) > 1:
            raise InputError(
                f"{path}, line {table.line}: {table.names.count(column)} columns are called {column}: rename "
                "those that are not meant"
            )
        known = {_plain(name) for name in getattr(PLAIN[table.form], part)}
        others = [name for name in table.names if name != column and known & {_plain(name), _stem(name)[0]}]
        if others:
            notes.append(f"{column} is read, and {', '.join(others)} is not; rename it to change that")
    return notes


# ---- rows --------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"[+-]?[0-9]{1,25}(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


def _rows(path: Path, table: _Table, columns: Mapping[str, str], ids: Sequence[str]) -> Iterator[_TraceRow]:
    """Read the rows of a table. Any request may lack hash ids, and the first one has the names of columns."""
    numbers: dict[tuple[int, int | str], int] = {}  # of a block and the id after it
    is_text = table.form == "CSV"
    of_time, of_prompt, of_output = (columns[part] for part in NEEDED)
    for line, record in table.records:
        try:
            time, is_date = _time(of_time, record, is_text)
            prompt, output = (_tokens(each, record, is_text) for each in (of_prompt, of_output))
            number, blocks = -1, []
            of_ids = columns.get("ids") or next((name for name in ids if name in record), "")
            for each in _ids(of_ids, record):
                number = numbers.setdefault((number, each), len(numbers))
                blocks.append(number)
        except ValueError as wrong:
            raise InputError(f"{path}, line {line}: {wrong}") from None
        yield _TraceRow(line, time, is_date, prompt, output, tuple(blocks) if prompt else ())


def _value(column: str, record: Mapping[str, Any], what: str) -> Any:
    if column not in record:
        raise ValueError(f"{column} is missing: {what}")
    return record[column]


def _number(value: object, is_text: bool = False) -> float | None:
    """Read a number, in CSV from a text; without a fraction it is a whole number, however it is written."""
    if is_text and isinstance(value, str) and NUMBER.fullmatch(text := value.strip()):
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def _tokens(column: str, record: Mapping[str, Any], is_text: bool) -> int:
    what = "a whole number, 0 or more"
    number = _number(value := _value(column, record, what), is_text)
    if not isinstance(number, int) or number < 0:
        raise _refusal(column, what, value, is_text)
    if number > MOST_TOKENS:
        raise _refusal(column, f"{MOST_TOKENS:,} at most", value, is_text)
    return number


def _time(column: str, record: Mapping[str, Any], is_text: bool) -> tuple[float, bool]:
    """Read a time: a number, or a date, in microseconds since 1970."""
    what = f"a number from 0 to {LATEST:g}, or a date and a time like 2023-11-16 18:17:03.97"
    number = _number(value := _value(column, record, what), is_text)
    if number is not None and 0 <= number <= LATEST:
        return number, False
    is_number = not isinstance(value, str) or NUMBER.fullmatch(value.strip())
    try:
        at = datetime.fromisoformat("" if is_number else value.strip())
    except ValueError:
        raise _refusal(column, what, value, is_text) from None
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - SINCE_1970) // MICROSECOND, True


def _refusal(column: str, what: str, value: object, is_text: bool) -> ValueError:
    is_quoted = not is_text and isinstance(value, str) and NUMBER.fullmatch(value)
    hint = " (write it without quotes)" if is_quoted else ""
    return ValueError(f"{column} must be {what}, found {shown(value)}{hint}")


def _ids(column: str, record: Mapping[str, Any]) -> Sequence[int | str]:
    """Read the hash ids of a prompt: a list, or a text of them in CSV. There may be no such column."""
    value = record.get(column) if column else None
    if isinstance(value, str):
        value = re.findall(r"[^\s\[\]|,;'\"]+", value)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"{column} must be a list of whole numbers or texts, found {shown(value)}")
    ids = []
    for place, each in enumerate(value):
        found = each if isinstance(each, str) else _number(each)
        if not isinstance(found, int | str):
            raise ValueError(f"{column}[{place}] must be a whole number or a text, found {shown(each)}")
        ids.append(found)
    return ids


# ---- what numbers stand for --------------------------------------------------------------------------------


def _block_size(path: Path, rows: Sequence[_TraceRow], own: int | None) -> int | None:
    """Find how many tokens a hash id stands for, by the number of ids for each prompt; None without ids.

    If several sizes fit, it is that of the format, or else the roundest in binary. Raises InputError for
    numbers of ids that fit no size.
    """
    some = [row for row in rows if row.blocks]
    if not some:
        return None
    sizes: list[int] = []
    refusal = ""
    for has_rest in (True, False):
        low, high = 1, MOST_TOKENS
        for row in some:
            least, most = _sizes(row.prompt, len(row.blocks), has_rest)
            if max(low, least) > min(high, most):
                refusal = refusal or (
                    f"{path}, line {row.line}: there must be a hash id for each {low} to {high} tokens, "
                    f"as before, found {len(row.blocks)} for {row.prompt}"
                )
                break
            low, high = max(low, least), min(high, most)
        else:
            if own is not None and low <= own <= high:
                return own
            sizes.append(max(range(low, min(high, 2 * low) + 1), key=_roundness))
    if not sizes:
        raise InputError(refusal)
    return max(sizes, key=_roundness)


def _roundness(size: int) -> int:
    return size & -size


def _sizes(length: int, count: int, has_rest: bool) -> tuple[int, int]:
    """Return the least and the most tokens of a block, if a prompt has so many ids.

    `has_rest`: the last id stands for what is left after whole blocks; otherwise that has no id.
    """
    if has_rest:
        return -(-length // count), (length - 1) // (count - 1) if count > 1 else MOST_TOKENS
    return length // (count + 1) + 1, length // count


def _trace(
    path: Path, form: TraceFormat, column: str, rows: Sequence[_TraceRow], block: int | None
) -> RequestTrace:
    """Make the requests of all rows: sorted, and the first at 0. Raises InputError for times that are not of
    one trace."""
    begin, end = (choose(rows, key=lambda row: row.time) for choose in (min, max))
    if (other := next((row for row in rows if row.is_date != rows[0].is_date), None)) is not None:
        kinds = ("a number", "a date and a time")
        raise InputError(
            f"{path}, line {other.line}: {column} must be {kinds[rows[0].is_date]}, as on line "
            f"{rows[0].line}, found {kinds[other.is_date]}"
        )
    named: Unit | None = "us" if begin.is_date else _stem(column)[1]
    gap = (end.time - begin.time) / max(1, len(rows) - 1)
    fraction = next((row for row in rows if row.time != int(row.time)), None)
    is_doubtful = form.unit == "ms" and fraction is not None  # a format with whole ms has none
    unit = named or _unit(begin.time, gap, None if is_doubtful else form.unit)
    if (seconds := (end.time - begin.time) * NS[unit] / 1e9) > LONGEST_S:
        raise InputError(
            f"{path}, line {end.line}: {column} must be within ten years of all others, found "
            f"{seconds / 365 / 86_400:,.0f} years after line {begin.line}"
        )
    requests = [
        TracedRequest(round((row.time - begin.time) * NS[unit]), row.prompt, row.output, row.blocks, row.line)
        for row in rows
    ]
    notes = []
    if begin.time and not begin.is_date:
        notes.append(f"times begin at {begin.time:,} {unit}: shifted to 0")
    if named is None and begin.time < EPOCH:
        say_it = f"call it {column}_s or {column}_ms to say it"
        if is_doubtful and fraction is not None:
            notes.append(
                f"{column} has a fraction on line {fraction.line} ({fraction.time:g}), unlike {form.whose} "
                f"milliseconds: taken for {unit}, by its spacing; {say_it}"
            )
        elif form.unit is None:
            notes.append(f"{column} is in {unit}, by its spacing; {say_it}")
        elif (rate := _strange_rate(gap * NS[unit] / 1e9)) and len(rows) > 1:
            notes.append(f"{column} is in {unit}, as in {form.whose} format: {rate}; {say_it}")
    if empty := [row for row in rows if not (row.prompt and row.output)]:
        first, others = empty[0], f", and so have {len(empty) - 1} more" if len(empty) > 1 else ""
        notes.append(
            f"line {first.line} has {first.prompt} + {first.output} tokens{others}: one token stands for "
            "none; leave out requests that failed"
        )
    if late := sum(one.at_ns > two.at_ns for one, two in itertools.pairwise(requests)):
        notes.append(f"rows are not in order of time in {late} place{'s' if late > 1 else ''}: sorted")
        requests.sort(key=lambda request: request.at_ns)
    if block is not None and block != form.block:
        notes.append(f"a hash id stands for {block} tokens, by the number of them")
    blocks = "no hash ids" if block is None else f"{block} tokens a hash id"
    times = "dates" if begin.is_date else f"times in {unit}"
    return RequestTrace(requests, block or DEFAULT_BLOCK, f"{form.name}: {times}, {blocks}", notes)


def _strange_rate(gap_s: float) -> str:
    """Say how requests follow each other if they would not with the times of most traces; else empty."""
    if gap_s < 1 / MOST_A_SECOND:
        return f"{1 / gap_s:,.0f} requests a second" if gap_s else ""
    return f"{gap_s:,.0f} s from a request to the next" if gap_s > LONGEST_GAP_S else ""


def _unit(least: float, gap: float, own: Unit | None) -> Unit:
    """Find the unit of times by their magnitude, if they count from 1970; else it is that of the format, or
    found by the mean gap between requests."""
    if least >= EPOCH:
        units: Sequence[Unit] = ("s", "ms", "us", "ns")
        return units[min(3, int(math.log10(least / EPOCH)) // 3)]
    return own or ("s" if gap < DENSE else "ms")


# ---- what is done with them --------------------------------------------------------------------------------


def at_rate(requests: Sequence[TracedRequest], times: float) -> list[TracedRequest]:
    """Return the requests with arrivals `times` times as fast."""
    return [request._replace(at_ns=round(request.at_ns / times)) for request in requests]


def check_positions(requests: Sequence[TracedRequest], positions: int, model: str) -> None:
    """Raise InputError for requests of a file that are longer than a model's positions. Generated lengths
    have no such bound."""
    long = [each for each in requests if each.line and each.input_length + each.output_length > positions]
    if long:
        first, others = long[0], f", and so have {len(long) - 1} more" if len(long) > 1 else ""
        raise InputError(
            f"{first.said(0)} has {first.input_length} + {first.output_length} tokens{others}; {model} has "
            f"{positions} positions: leave such requests out, or take another --model"
        )
