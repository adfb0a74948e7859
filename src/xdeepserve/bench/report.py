"""Rows of a benchmark, and the published values that stand beside them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, Literal

import msgspec

from xdeepserve.bench.meanings import MEANINGS
from xdeepserve.errors import InputError

Kind = Literal["measured", "calibrated", "predicted"]


class Published(msgspec.Struct, frozen=True):
    """A value published in a paper.

    With a `bound` the paper says only "less than" (<) or "more than" (>), or gives a round number (~).
    """

    value: float
    unit: str
    source: str
    bound: Literal["<", ">", "~", ""] = ""

    @property
    def is_limit(self) -> bool:
        """Whether the paper says only "less than" or "more than", so that there is no error."""
        return self.bound in ("<", ">")

    def is_kept(self, value: float) -> bool:
        """Whether a value keeps the paper's limit; always True without a limit."""
        return not self.is_limit or (value < self.value) == (self.bound == "<")


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
        """Relative error (value - published) / published, in percent."""
        theirs = self.published
        return None if theirs is None else 100 * (self.value - theirs.value) / theirs.value

    def as_dict(self) -> dict[str, Any]:
        """Return the row as `--json` prints it; the last two keys exist only where a paper publishes the
        value."""
        result: dict[str, Any] = {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "kind": self.kind,
        }
        if self.published is not None and self.error_pct is not None:
            result["published"] = self.published.value
            result["error_pct"] = round(self.error_pct, 2)
        return result


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
        errors = [abs(row.error_pct) for row in some if row.error_pct is not None and not _bound(row)]
        count = f"{len(some)} row{'s' if len(some) > 1 else ''}"
        if errors:
            mean, largest = sum(errors) / len(errors), max(errors)
            count += f", off the published by {mean:.1f} % on average, {largest:.1f} % at most"
        print(f"{group}: {count}")
        print(f"    {MEANINGS.get(group, 'See the rows.')}")
        if len(some) == 1:
            print(f"    {some[0].value:.2f} {some[0].unit}  {some[0].note}".rstrip())


def group_of(name: str) -> str:
    """Find the longest group of MEANINGS that a row's name begins with, else the name up to its first
    slash."""
    known = [group for group in MEANINGS if f"{name}/".startswith(f"{group}/")]
    return max(known, key=len, default=name.split("/")[0])


def _bound(row: Row) -> bool:
    return row.published is not None and row.published.is_limit


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table for each kind, with mean and maximum of the errors by id, and whether bounds are kept."""
    width = max((len(row.name) for row in rows), default=0)
    for kind in ("calibrated", "predicted", "measured"):
        some = [row for row in rows if row.kind == kind]
        if not some:
            continue
        print(f"{kind + ':':{width}}      value unit   published   error")
        for row in some:
            line = f"  {row.name:{width}} {row.value:10.2f} {row.unit:5}"
            theirs = row.published
            if theirs is not None:
                line += f"{theirs.bound:>4}{theirs.value:8g}"
                line += f" {row.error_pct:+z6.1f} %" if not theirs.is_limit else f"  {_kept(row, theirs)}"
            print(f"{line}  {row.note}".rstrip())
        for group, errors in _errors(some).items():
            mean, largest = sum(errors) / len(errors), max(errors)
            print(f"  |error| of {group} ({len(errors)} rows): mean {mean:.1f} %, largest {largest:.1f} %")
        print()


def _errors(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Collect absolute errors in percent by the ids that the rows' names begin with; bounds have none."""
    result: dict[str, list[float]] = {}
    for row in rows:
        if row.published is not None and row.error_pct is not None and not _bound(row):
            result.setdefault(row.name.split("/")[0], []).append(abs(row.error_pct))
    return result


def _kept(row: Row, theirs: Published) -> str:
    return "kept" if theirs.is_kept(row.value) else "NOT KEPT"


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
