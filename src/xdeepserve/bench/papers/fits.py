"""`xdeepserve bench papers --fits`: the fitted numbers, and each table as predicted without using it.

A *fit* is a set of numbers and the tables that depend on them; the numbers were fitted to some of these
tables. With a table left out, the numbers are fitted to the others, by least squares of the errors'
logarithms, within a factor of RANGE of today's values. The table is then a prediction. If no other table
depends on the numbers, the table's rows are left out one at a time, which is weaker evidence. The form of the
formulas was chosen with all tables in view, and is never left out.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.bench.papers import comm, expert_skew, paper_rows, pipelines, superpod
from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.report import Row
from xdeepserve.comm.cost import CommCost
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import LayerCost
from xdeepserve.progress import working

Numbers: TypeAlias = Mapping[str, float]
Table: TypeAlias = Callable[[Numbers], Iterable[Row]]
Vector: TypeAlias = npt.NDArray[np.float64]
RANGE = 4.0
STEPS = 60
AGAIN = ("cm.t4/throughput/", "cm.mtp.layer/increase")  # what other rows say in another unit
COMM_RATIO = "comm_ratio"
OF_BENCHMARKS = {  # which no run uses
    COMM_RATIO: Param(
        superpod.COMM_RATIO_DBRX, "ratio", "fitted: MS 7.4, DBRX: time to move over time to compute"
    ),
    "expert_skew": expert_skew.EXPONENT,
}


READ_OFF = frozenset(  # from one value
    {"storage_bandwidth", "pool_load", COMM_RATIO, "expert_skew"}
)


class FittedNumbers(NamedTuple):
    """Fitted numbers, and the tables that depend on them as functions of the numbers."""

    numbers: Numbers
    tables: Mapping[str, Table]


class WithoutTable(msgspec.Struct, frozen=True):
    """Errors of a table, in percent, for a fit that does not use the table, or its rows one at a time."""

    fit: str
    table: str
    rows: int
    how: Literal["table", "row by row"]
    fitted_median: float  # with today's numbers
    fitted_largest: float
    median: float
    largest: float
    numbers: dict[str, float]  # found without the table
    at_bounds: tuple[str, ...]  # of these, what the rest of the tables does not tell


def of_spec(*names: str) -> dict[str, float]:
    """Return numbers of the parameter table (hw/spec.py) by name."""
    return {name: getattr(Spec(), name).value for name in names}


def spec_with(numbers: Numbers) -> Spec:
    """Make the parameter table with some other numbers."""
    spec = Spec()
    changed = {name: msgspec.structs.replace(getattr(spec, name), value=numbers[name]) for name in numbers}
    return msgspec.structs.replace(spec, **changed)


def _decode(rows: Callable[[LayerCost], Iterable[Row]], prefix: str) -> Table:
    def table(numbers: Numbers) -> list[Row]:
        spec = spec_with(numbers)
        cost = LayerCost(resolve_model(MODEL).config, spec, CommCost(spec, way="push"))
        return [row for row in rows(cost) if row.name.startswith(prefix) and not row.name.startswith(AGAIN)]

    return table


def _third_microbatch(model: str) -> Table:
    return lambda numbers: superpod.third_microbatch(model, numbers[COMM_RATIO])


def _utilisations(numbers: Numbers) -> list[Row]:
    """Compute the utilisations of CM Table 9. Its bandwidths are the same values in another unit, so they are
    left out."""
    return [row for row in paper_rows.gemms(spec_with(numbers)) if row.name.startswith("cm.t9/utilisation/")]


def all_fits() -> dict[str, FittedNumbers]:
    """Return all fits, named by their subjects."""
    return {
        "a decoder layer": FittedNumbers(
            of_spec("small_kernels", "barrier_stretch"),
            {
                "CM Table 4": _decode(superpod.formulas, "cm.t4/"),
                "CM 4.2.3, streams": _decode(superpod.formulas, "cm.streams/"),
                "CM Figure 20b, a layer": _decode(superpod.formulas, "cm.mtp.layer/"),
                "CM Figure 20a, microbatches": _decode(pipelines.gains_by_formula, "cm.mb.decode/"),
                "CM 5.4.2, MTP": _decode(paper_rows.gains_by_drafts, "cm.mtp.gain/"),
            },
        ),
        "dispatch and combine": FittedNumbers(
            of_spec("core_meeting", "exchange_copy"),
            {
                "CM Table 6": lambda numbers: comm.exchanges(CommCost(spec_with(numbers), way="push")),
                "XDS 3.3, A2E and E2A": lambda numbers: comm.a2e(CommCost(spec_with(numbers))),
            },
        ),
        "a grouped GEMM": FittedNumbers(
            of_spec("tile_efficiency", "tile_overhead", "kernel_overhead"),
            {"CM Table 9": _utilisations},
        ),
        "ping-pong": FittedNumbers(
            {COMM_RATIO: superpod.COMM_RATIO_DBRX},
            {f"MS 7.4, {model}": _third_microbatch(model) for model in superpod.MEGASCALE},
        ),
    }


# ---- fitting --------------------------------------------------------------------------------------------


def fitted(start: Numbers, tables: Sequence[Callable[[Numbers], Iterable[Row]]]) -> dict[str, float]:
    """Fit the numbers to tables: least squares of the logarithms of ours over theirs, within RANGE of
    `start`. The steps are Levenberg's and Marquardt's in logarithms, deterministic."""
    names, middle = [*start], np.log(np.array([*start.values()]))
    low, high = middle - math.log(RANGE), middle + math.log(RANGE)

    def residuals(at: Vector) -> Vector:
        return np.array([_off(row) for table in tables for row in table(_named(names, at))])

    at, damping = middle, 1e-3
    now = residuals(at)
    for _ in range(STEPS):
        small = 1e-4
        slopes = [(residuals(at + small * unit) - now) / small for unit in np.eye(len(names))]
        jacobian = np.stack(slopes, axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
        tried = at + bounded_step(damped, slope, low - at, high - at)
        found = residuals(tried)
        if found @ found < now @ now:
            is_small = float(np.abs(tried - at).max()) < 1e-7
            at, now, damping = tried, found, damping / 5
            if is_small:
                break
        elif (damping := damping * 5) > 1e9:
            break
    return dict(_named(names, at))


def bounded_step(normal: Vector, slope: Vector, low: Vector, high: Vector) -> Vector:
    """Find the step to the minimum of a quadratic within bounds. A number that would leave its range stays at
    the bound, and the others are found again."""
    step = np.zeros_like(slope)
    free = np.ones(len(slope), bool)
    while free.any():
        rest = slope[free] + normal[np.ix_(free, ~free)] @ step[~free]
        step[free] = np.linalg.solve(normal[np.ix_(free, free)], -rest)
        out = free & ((step < low) | (step > high))
        if not out.any():
            break
        step[out] = np.clip(step, low, high)[out]
        free &= ~out
    return step


def _named(names: Sequence[str], at: Vector) -> Numbers:
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def _off(row: Row) -> float:
    """Compute the logarithm of our value over the published one."""
    theirs = row.published
    assert theirs is not None
    return math.log(row.value / theirs.nearest(row.value))


def _errors(rows: Iterable[Row]) -> list[float]:
    return [abs(row.error_pct or 0.0) for row in rows]


# ---- leaving out ----------------------------------------------------------------------------------------


def all_left_out() -> Iterator[WithoutTable]:
    """Yield the errors of every table of every fit without the table, as they are computed."""
    for name, fit in all_fits().items():
        for table in fit.tables:
            yield _without(name, fit, table)


def _without(name: str, fit: FittedNumbers, table: str) -> WithoutTable:
    today = _errors(fit.tables[table](fit.numbers))
    rows, numbers = _left_out(fit, table)
    errors = _errors(rows)
    bounds = [key for key, value in numbers.items() if abs(math.log(value / fit.numbers[key])) > 1.38]
    return WithoutTable(
        name,
        table,
        len(today),
        "table" if len(fit.tables) > 1 else "row by row",
        statistics.median(today),
        max(today),
        statistics.median(errors),
        max(errors),
        numbers,
        tuple(bounds),
    )


def _left_out(fit: FittedNumbers, table: str) -> tuple[list[Row], dict[str, float]]:
    """Predict a table's rows from the other tables, and return the numbers that these give. Rows of an only
    table are predicted one at a time from each other, without common numbers."""
    rows, others = fit.tables[table], [each for key, each in fit.tables.items() if key != table]
    if others:
        numbers = fitted(fit.numbers, others)
        return [*rows(numbers)], numbers
    count = len([*rows(fit.numbers)])
    return [[*rows(fitted(fit.numbers, [_but(rows, at)]))][at] for at in range(count)], {}


def left_out_rows(paper: str) -> Iterator[Row]:
    """Yield the calibrated rows of a paper's tables as predictions from the other tables of their fits."""
    for fit in all_fits().values():
        for table, rows in fit.tables.items():
            names = {row.name for row in rows(fit.numbers) if row.kind == "calibrated"}
            if not any(name.startswith(f"{paper}.") for name in names):
                continue
            for row in _left_out(fit, table)[0]:
                if row.name in names:
                    yield msgspec.structs.replace(row, name=f"{row.name}/fit=others", kind="predicted")


def _but(rows: Table, number: int) -> Table:
    return lambda numbers: [row for at, row in enumerate(rows(numbers)) if at != number]


# ---- what is printed --------------------------------------------------------------------------------------


def fitted_parameters() -> dict[str, Param]:
    """Return all numbers fitted to published values, by name."""
    spec = Spec()
    params = {name: getattr(spec, name) for name in spec.__struct_fields__}
    found = {name: param for name, param in params.items() if "fitted" in param.source}
    return found | OF_BENCHMARKS


def tell(is_json: bool) -> None:
    """Leave out each table, and print the fitted numbers and the errors of the tables."""
    found = []
    with working("bench papers --fits") as status:
        for one in all_left_out():
            found.append(one)
            status.detail = f"{one.fit}, {one.table}"
    if is_json:
        print(as_json(found))
    else:
        print_fits(found)


def print_fits(found: Sequence[WithoutTable]) -> None:
    """Print two tables: the fitted numbers, and the errors with tables left out."""
    params = fitted_parameters()
    groups = {
        "are fitted to several published values": [name for name in params if name not in READ_OFF],
        "are read off one value each, which they say again": [name for name in params if name in READ_OFF],
    }
    for says, names in groups.items():
        print(f"{len(names)} numbers {says}:")
        for name in names:
            text = f"  {name:18} {params[name].value:>10.4g} {params[name].unit:6} {params[name].source}"
            print(textwrap.fill(text, 100, subsequent_indent=38 * " "))
    print("\nEach table as it is, and as it would be had it not been used. Errors in percent:")
    print(f"  {'':20} {'':28} {'':4}  {'fitted':>14}  {'left out':>14}")
    print(f"  {'of':20} {'table':28} rows  median largest  median largest")
    for one in found:
        print(
            f"  {one.fit:20} {one.table:28} {one.rows:4}  {one.fitted_median:6.1f} {one.fitted_largest:7.1f}"
            f"  {one.median:6.1f} {one.largest:7.1f}{'  row by row' if one.how != 'table' else ''}"
        )
        if one.at_bounds:
            print(f"  {'':20} the others do not tell {', '.join(one.at_bounds)}")


def as_json(found: Sequence[WithoutTable]) -> str:
    """Return the fits as JSON for programs."""
    table: dict[str, Any] = {
        "parameters": {name: msgspec.to_builtins(param) for name, param in fitted_parameters().items()},
        "left_out": msgspec.to_builtins(list(found)),
    }
    return json.dumps(table)
