"""Rows of a benchmark, and the published values that stand beside them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from operator import ge, gt, le, lt
from typing import Any, Literal

import msgspec

from xdeepserve.bench.meanings import MEANINGS
from xdeepserve.errors import InputError

Kind = Literal["measured", "calibrated", "predicted"]


Verdict = Literal["kept", "broken"]
LIMITS: dict[str, Callable[[float, float], bool]] = {"<": lt, ">": gt, "<=": le, ">=": ge}


class Published(msgspec.Struct, frozen=True):
    """A value published in a paper: a number, a bound, or a range of numbers.

    bound       "less than" (<), "more than" (>) and "at least" (>=) have no error. "Up to" (<=) is also the
                paper's largest number, against which our largest has an error. "About" (~) is only printed
    low, high   ends of a range; `value` is then the end that the row stands for, if any
    """

    unit: str
    source: str
    value: float = math.nan
    bound: Literal["<", ">", "<=", ">=", "~", ""] = ""
    low: float = math.nan
    high: float = math.nan

    @property
    def is_range(self) -> bool:
        """Whether the paper gives the two ends of a range."""
        return not math.isnan(self.low)

    @property
    def is_limit(self) -> bool:
        """Whether the paper says only on which side of a number the value is, so that there is no error."""
        return self.bound in ("<", ">", ">=")

    @property
    def text(self) -> str:
        """Published value as tables print it: with its bound, or both ends of a range."""
        return f"{self.low:g} to {self.high:g}" if self.is_range else f"{self.bound}{self.value:g}"

    def nearest(self, value: float) -> float:
        """Return the published number with which a value is compared: of a range without a `value`, the
        nearest number."""
        return min(max(value, self.low), self.high) if math.isnan(self.value) else self.value

    def verdict(self, value: float) -> Verdict | None:
        """Judge whether a value is within the paper's bound or range; None if the paper gives neither."""
        if self.is_range:
            is_kept = self.low <= value <= self.high
        elif self.bound in LIMITS:
            is_kept = LIMITS[self.bound](value, self.value)
        else:
            return None
        return "kept" if is_kept else "broken"


@functools.cache
def published() -> dict[str, Published]:
    """Read the published values by row name, which begins with the value's id: the paper, a dot, the
    subject."""
    text = resources.files(__package__).joinpath("published.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Published])


class Row(msgspec.Struct, frozen=True):
    """A row of a benchmark: a value and its origin.

    A value is measured or counted on this implementation (measured); computed in virtual time with parameters
    that were fitted to this very value (calibrated); or with parameters fitted to other values (predicted).
    The form of the models was chosen with all published values in view, so a prediction here is not a blind
    one.

    A name may end in "/simulated=..." or "/fit=...": the same value found another way. `note` is printed
    beside the row for people.
    """

    name: str
    value: float
    unit: str
    kind: Kind
    note: str = ""

    @property
    def published(self) -> Published | None:
        """Published value of the row, if any; a simulated row has that of the row that its name begins
        with."""
        return published().get(self.name.split("/simulated=")[0].split("/fit=")[0])

    @property
    def error_pct(self) -> float | None:
        """Relative error (value - published) / published, in percent; 0 inside a range."""
        if self.published is None:
            return None
        theirs = self.published.nearest(self.value)
        return 100 * (self.value - theirs) / theirs

    @property
    def has_error(self) -> bool:
        """Whether a paper publishes a number or a range, and not only a limit."""
        return self.published is not None and not self.published.is_limit

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on the paper's bound or range; None without one."""
        return None if self.published is None else self.published.verdict(self.value)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as `--json` prints it. Keys after `kind` exist only where a paper publishes the
        value: the number that is compared, the error, and, of bounds and ranges, these and the verdict."""
        result: dict[str, Any] = {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "kind": self.kind,
        }
        if self.published is not None and self.error_pct is not None:
            result["published"] = self.published.nearest(self.value)
            result["error_pct"] = round(self.error_pct, 2)
            if self.published.is_range:
                result["range"] = [self.published.low, self.published.high]
            if self.published.bound:
                result["bound"] = self.published.bound
            if self.verdict is not None:
                result["verdict"] = self.verdict
        return result

    @property
    def compared(self) -> str:
        """Error and verdict, as tables print them."""
        error = f"{self.error_pct:+z6.1f} %" if self.has_error else ""
        return f"{error:>8}  {self.verdict or '':6}"


def tell_rows(rows: Sequence[Row], is_full: bool, is_json: bool) -> None:
    """Print the rows of a suite: for programs, or a summary, with every row if `is_full`."""
    if is_json:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}))
        return
    print_summary(rows)
    if is_full:
        print()
        print_rows(rows)
    else:
        print("\n--full prints every row, --json all of them for programs")


def print_summary(rows: Sequence[Row]) -> None:
    """Print groups of rows: meaning, number of rows, and errors against published values."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_of(row.name), []).append(row)
    for group, some in groups.items():
        errors = [abs(row.error_pct or 0.0) for row in some if row.has_error]
        count = f"{len(some)} row{'s' if len(some) > 1 else ''}"
        if errors:
            mean, largest = sum(errors) / len(errors), max(errors)
            count += f", off the published by {mean:.1f} % on average, {largest:.1f} % at most"
        print(f"{group}: {count}")
        print(f"    {MEANINGS.get(group, 'See the rows.')}")
        if len(some) == 1:
            print(f"    {some[0].value:.2f} {some[0].unit}  {some[0].note}".rstrip())
        elif group.endswith("/gain"):
            for row in some:
                print(f"    {row.value:.2f} {row.unit}  {row.name.removeprefix(f'{group}/')}")


def group_of(name: str) -> str:
    """Find the longest group of MEANINGS that a row's name begins with, else the name up to its first
    slash."""
    known = [group for group in MEANINGS if f"{name}/".startswith(f"{group}/")]
    return max(known, key=len, default=name.split("/")[0])


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table for each kind, with mean and maximum of the errors by id, and verdicts on bounds."""
    width = max((len(row.name) for row in rows), default=0)
    for kind in ("calibrated", "predicted", "measured"):
        some = [row for row in rows if row.kind == kind]
        if not some:
            continue
        print(f"{kind + ':':{width}}      value unit       published    error")
        for row in some:
            line = f"  {row.name:{width}} {row.value:10.2f} {row.unit:5}"
            if row.published is not None:
                line += f"{row.published.text:>16} {row.compared}"
            print(f"{line}  {row.note}".rstrip())
        for group, errors in _errors(some).items():
            mean, largest = sum(errors) / len(errors), max(errors)
            print(f"  |error| of {group} ({len(errors)} rows): mean {mean:.1f} %, largest {largest:.1f} %")
        print()


def _errors(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Collect absolute errors in percent by the ids that the rows' names begin with; limits have none."""
    result: dict[str, list[float]] = {}
    for row in rows:
        if row.has_error:
            result.setdefault(row.name.split("/")[0], []).append(abs(row.error_pct or 0.0))
    return result


# Matplotlib, which only `--plot` needs.


def pyplot() -> Any:
    """Return matplotlib's pyplot, without a window. Raises InputError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
