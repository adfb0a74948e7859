"""`xdeepserve bench papers --constants`: which published rows depend on which constants, and how much.

Each constant of the parameter table (`hw/spec.py`), and each number that only benchmarks use, is raised by a
fifth, alone, with all else as it is, and the rows for which it is read are computed again. All others cannot
change. The rows come from formulas; with `--full` also from simulations of the pods of xDeepServe 7.1, of
CloudMatrix's Table 1 and of its Figure 23, which take long, and stderr says how long.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeAlias

import msgspec

from xdeepserve.bench.papers import ablations, context_caching, ems, expert_skew, paper_rows, superpod
from xdeepserve.bench.papers.every_value import check_paper, how, paper_of
from xdeepserve.bench.papers.fits import OF_BENCHMARKS, spec_with
from xdeepserve.bench.report import Row
from xdeepserve.engine.te.host import GC_PERIOD, PREEMPTION_RATE
from xdeepserve.errors import InputError
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.progress import working

RAISE = 1.2
COUNTED = {"cores": 1, "launches": 1, "slots": 1, "B": 32}  # units of whole numbers, and what they divide by
# Effects of the host (xDeepServe 4.4), which no paper measures by itself: pinning, PTA caching, GC.
HOST = ("preemption", "guard_checks", "gc_pause", "host_sampling")
OF_ROWS = ("comm_ratio",)  # numbers of benchmarks that rows are made with
LONG_S = 60  # of work that is not left to one core
LEAST = 0.1  # percent: smaller moves are not printed


class Moves(msgspec.Struct, frozen=True):
    """Row of a paper, and by how many percent it moves with each constant that is a fifth higher."""

    name: str
    value: float
    unit: str
    how: str
    moves_pct: dict[str, float]


def constants() -> dict[str, Param]:
    """Return the constants by name: all of the parameter table, and those of benchmarks alone. `expert_skew`
    is left out, which follows from a published number."""
    of_spec = {name: getattr(Spec(), name) for name in Spec.__struct_fields__}
    return of_spec | {name: OF_BENCHMARKS[name] for name in OF_ROWS}


def raised(param: Param) -> float:
    """Return a constant's value, a fifth higher; of a count, the nearest one that can be."""
    value, step = RAISE * param.value, COUNTED.get(param.unit)
    return value if step is None else step * round(value / step)


class Constants(NamedTuple):
    """Constants from which rows are computed: the parameter table, and those of benchmarks alone."""

    spec: Spec
    of_rows: Callable[[str], float]


def numbers(changed: Mapping[str, float]) -> Constants:
    """Return all constants, some of them with other values."""
    of_rows = {name: changed.get(name, OF_BENCHMARKS[name].value) for name in OF_ROWS}
    spec = spec_with({name: value for name, value in changed.items() if name not in OF_ROWS})
    return Constants(spec, of_rows.__getitem__)


def watched(reads: set[str]) -> Constants:
    """Return all constants unchanged; `reads` gets the name of each one that is read."""
    fields = frozenset(Spec.__struct_fields__)

    class Watched(Spec, frozen=True, eq=False):  # equal to no other one, so no cache has read for it before
        """Parameter table that notes which parameters are read."""

        def __post_init__(self) -> None:
            """Check nothing: checks would read every parameter."""

        def __getattribute__(self, name: str) -> Any:
            if name in fields:
                reads.add(name)
            return super().__getattribute__(name)

    plain = numbers({})

    def of_rows(name: str) -> float:
        reads.add(name)
        return plain.of_rows(name)

    return Constants(Watched(**msgspec.structs.asdict(plain.spec)), of_rows)


RowsOf: TypeAlias = Callable[[Constants], Iterable[Row]]


def formulas(given: Constants) -> Iterator[Row]:
    """Compute all rows that come from formulas or short simulations."""
    machine = ablations.Formulas.with_spec(given.spec)
    groups = ablations.groups(machine)
    for rows in (groups[name] for name in groups if name not in ablations.PREFILL):
        yield from rows
    yield from paper_rows.bandwidths(machine.push)
    yield from paper_rows.prefill(machine.prefill)
    yield from expert_skew.perfect_eplb(machine.prefill)
    yield from paper_rows.storage(machine.spec)
    for model in superpod.MEGASCALE:
        yield from superpod.third_microbatch(model, given.of_rows("comm_ratio"))


def table_1(given: Constants) -> list[Row]:
    """Simulate how models are loaded (CM Table 1)."""
    return ems.table_1(given.spec)


def figure_23(given: Constants) -> list[Row]:
    """Simulate prefill with the memory pool (CM Figure 23)."""
    return context_caching.figure_23(spec=given.spec)


def colocated(given: Constants) -> list[Row]:
    """Simulate the 288 dies of XDS 7.1."""
    return superpod.colocated(given.spec)


def disaggregated(given: Constants) -> list[Row]:
    """Simulate the 768 dies of XDS 7.1."""
    return superpod.disaggregated(spec=given.spec)


SIMULATIONS: dict[str, tuple[RowsOf, ...]] = {  # by paper
    "cm": (table_1, figure_23),
    "xds": (colocated, disaggregated),
}


class Base(NamedTuple):
    """Rows with all constants as they are, the constants that were read for them, and how long it took."""

    rows_of: RowsOf
    rows: dict[str, Row]
    reads: tuple[str, ...]
    seconds: float


def base(rows_of: RowsOf) -> Base:
    """Compute rows, and find the constants on which they can depend: no other one is read for them."""
    reads: set[str] = set()
    begin = time.monotonic()
    rows = {row.name: row for row in rows_of(watched(reads)) if row.published is not None}
    return Base(rows_of, rows, tuple(filter(reads.__contains__, constants())), time.monotonic() - begin)


def again(rows_of: RowsOf, constant: str) -> dict[str, float]:
    """Compute rows with a constant that is a fifth higher; return their values by name."""
    changed = numbers({constant: raised(constants()[constant])})
    return {row.name: row.value for row in rows_of(changed)}


def all_moves(parts: Sequence[RowsOf], tell: Callable[[str], None] = lambda text: None) -> list[Moves]:
    """Compute how rows move with each constant that is read for them, long work on all cores; `tell` hears
    how far it is."""
    bases = []
    for number, rows_of in enumerate(parts, 1):
        tell(f"part {number} of {len(parts)} as it is")
        bases.append(base(rows_of))
    todo = [(each, constant) for each in bases for constant in each.reads]
    left = sum(each.seconds for each, _ in todo)
    count = min(len(todo), os.cpu_count() or 1) if left > LONG_S else 1
    moves: dict[str, dict[str, float]] = {name: {} for each in bases for name in each.rows}
    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterable[dict[str, float]]] = map
        if count > 1:
            run = stack.enter_context(ProcessPoolExecutor(count, get_context("spawn"))).map
        values = iter(run(again, [each.rows_of for each, _ in todo], [constant for _, constant in todo]))
        for each, constant in todo:
            tell(f"{constant}, {_minutes(left / count)} left")
            left -= each.seconds
            for name, value in next(values).items():
                if name in each.rows and value != (before := each.rows[name].value):
                    moves[name][constant] = 100 * (value / before - 1)
    rows = [row for each in bases for row in each.rows.values()]
    return [Moves(row.name, row.value, row.unit, how(row), moves[row.name]) for row in rows]


def _minutes(seconds: float) -> str:
    """Say how long some work will take, by how long one part of it has taken."""
    return f"about {seconds / 60:.0f} min" if seconds > 60 else "less than a minute"


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


def tell(is_json: bool, is_full: bool = False, paper: str | None = None) -> None:
    """Raise each constant, and print how the rows of a paper, or of all, move; if `is_full`, simulated ones,
    too. Raises InputError for a paper that is unknown or has no such rows."""
    check_paper(paper)
    simulated = [part for key in SIMULATIONS if paper in (None, key) for part in SIMULATIONS[key]]
    parts = (formulas, *(simulated if is_full else ()))
    with working("bench papers --constants") as status:
        every = all_moves(parts, functools.partial(setattr, status, "detail"))
    found = [one for one in every if paper in (None, paper_of(one.name))]
    if not found:
        papers = ", ".join(sorted({paper_of(one.name) for one in every}))
        raise InputError(f"--constants has rows of {papers}, and none of --paper {paper}")
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
    print("Effects of the host are assumed; rows of bench engine and prices of steps depend on them:")
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
