"""`xdeepserve bench papers --constants`: which published rows depend on which constants, and how much.

Each constant of the parameter table (`hw/spec.py`), and each number that only benchmarks use, is raised by a
fifth, alone, with all else as it is, and every row that comes from a formula is computed again. With `--full`
so are the pods of xDeepServe 7.1, CloudMatrix's Table 1 and its Figure 23, which are simulated: an hour.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from xdeepserve.bench.papers import ablations, context_caching, ems, expert_skew, paper_rows, superpod
from xdeepserve.bench.papers.every_value import how
from xdeepserve.bench.papers.fits import OF_BENCHMARKS, spec_with
from xdeepserve.bench.report import Row
from xdeepserve.engine.te.host import GC_PERIOD, PREEMPTION_RATE
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.progress import working

RAISE = 1.2
COUNTED = {"cores": 1, "launches": 1, "slots": 1, "B": 32}  # units of whole numbers, and what they divide by
# Effects of the host (xDeepServe 4.4), which no paper measures by itself: pinning, PTA caching, GC.
HOST = ("preemption", "guard_checks", "gc_pause", "host_sampling")
OF_ROWS = ("comm_ratio",)  # numbers of benchmarks that rows are made with
LEAST = 0.1  # percent: smaller moves are not printed


class Moves(msgspec.Struct, frozen=True):
    """Row of a paper, and by how many percent it moves with each constant that is a fifth higher."""

    name: str
    value: float
    unit: str
    how: str
    moves_pct: dict[str, float]


def constants() -> dict[str, Param]:
    """Return the constants by name: all of the parameter table, and those of benchmarks alone."""
    of_spec = {name: getattr(Spec(), name) for name in Spec.__struct_fields__}
    return of_spec | {name: OF_BENCHMARKS[name] for name in OF_ROWS}


def raised(param: Param) -> float:
    """Return a constant's value, a fifth higher; of a count, the nearest one that can be."""
    value, step = RAISE * param.value, COUNTED.get(param.unit)
    return value if step is None else step * round(value / step)


def formulas(changed: Mapping[str, float]) -> Iterator[Row]:
    """Compute all rows that come from formulas or short simulations, with some constants changed."""
    numbers = {**{name: OF_BENCHMARKS[name].value for name in OF_ROWS}, **changed}
    machine = ablations.Formulas.with_spec(_spec(changed))
    groups = ablations.groups(machine)
    for rows in (groups[name] for name in groups if name not in ablations.PREFILL):
        yield from rows
    yield from paper_rows.bandwidths(machine.push)
    yield from paper_rows.prefill(machine.prefill)
    yield from expert_skew.perfect_eplb(machine.prefill)
    yield from paper_rows.storage(machine.spec)
    for model in superpod.MEGASCALE:
        yield from superpod.third_microbatch(model, numbers["comm_ratio"])


def simulations(changed: Mapping[str, float]) -> Iterator[Row]:
    """Simulate the pods of XDS 7.1, CM Table 1 and Figure 23, with some constants changed."""
    spec = _spec(changed)
    yield from superpod.colocated(spec)
    yield from superpod.disaggregated(spec=spec)
    yield from ems.table_1(spec)
    yield from context_caching.figure_23(spec=spec)


def _spec(changed: Mapping[str, float]) -> Spec:
    return spec_with({name: value for name, value in changed.items() if name not in OF_ROWS})


def all_moves(
    rows_of: Callable[[Mapping[str, float]], Iterable[Row]], tell: Callable[[str], None] = lambda name: None
) -> list[Moves]:
    """Compute how rows move with each constant; `tell` gets the name of the constant that is next."""
    before = {row.name: row for row in rows_of({}) if row.published is not None}
    moves: dict[str, dict[str, float]] = {name: {} for name in before}
    for constant, param in constants().items():
        tell(constant)
        for row in rows_of({constant: raised(param)}):
            if row.name in before and row.value != (base := before[row.name].value):
                moves[row.name][constant] = 100 * (row.value / base - 1)
    return [Moves(name, row.value, row.unit, how(row), moves[name]) for name, row in before.items()]


def host_effects() -> list[str]:
    """Describe the host's effects, all assumed, on which rows of `bench engine` depend and no published row
    does."""
    rates = {
        "preemption": f", of {100 * PREEMPTION_RATE:g} % of launches",
        "gc_pause": f", once in {GC_PERIOD} steps",
    }
    return [
        f"{name} = {1000 * param.value:g} ms{rates.get(name, '')}: {param.source}"
        for name, param in constants().items()
        if name in HOST
    ]


def tell(is_json: bool, is_full: bool = False) -> None:
    """Raise each constant, and print how rows move; if `is_full`, simulated ones, too."""
    found: list[Moves] = []
    with working("bench papers --constants") as status:
        for rows_of in (formulas, simulations)[: 1 + is_full]:
            found += all_moves(rows_of, functools.partial(setattr, status, "detail"))
    if is_json:
        print(as_json(found))
    else:
        print_moves(found)


def print_moves(found: Sequence[Moves]) -> None:
    """Print each row that says nothing again with the constants that move it, the largest move first, and
    the constants that move none."""
    print("By how many percent a row moves with a constant that is 20 % higher, all else as it is:")
    for one in found:
        if one.how.endswith("said again"):
            continue
        print(f"  {one.name}: {one.value:.2f} {one.unit}".rstrip() + f", {one.how}")
        ordered = sorted(one.moves_pct.items(), key=lambda move: -abs(move[1]))
        moves = [f"{name} {percent:+.1f}" for name, percent in ordered if abs(percent) >= LEAST]
        print(_indented(", ".join(moves) or "no constant moves it"))
    moving = {name for one in found for name in one.moves_pct}
    print("Constants that move none of these rows:")
    print(_indented(", ".join(name for name in constants() if name not in moving)))
    print("Effects of the host are assumed, and only rows of bench engine depend on them:")
    for line in host_effects():
        print(_indented(line))


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=6 * " ", subsequent_indent=8 * " ")


def as_json(found: Sequence[Moves]) -> str:
    """Return constants with their raised values, effects of the host, and rows with their moves, as JSON."""
    table: dict[str, Any] = {
        "constants": {
            name: {**msgspec.to_builtins(param), "raised": raised(param), "is_assumed_host": name in HOST}
            for name, param in constants().items()
        },
        "host": host_effects(),
        "rows": msgspec.to_builtins(list(found)),
    }
    return json.dumps(table)
