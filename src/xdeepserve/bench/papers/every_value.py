"""`xdeepserve bench papers`: every published value, with ours beside it, or the reason why there is none.

`paper_values.json` has everything that the five papers publish, by id. An id has rows, from the other
benchmarks' formulas and simulations, or a reason for having none. It is *given* to the model, so nothing is
predicted; it is *built*, and tests check it; it is *theirs*, a property of other hardware, software or data;
or it is *missing* here.
"""

from __future__ import annotations

import functools
import json
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from xdeepserve.bench.papers import (
    allocation,
    comm,
    context_caching,
    deepserve,
    eaas_full_size,
    ems,
    expert_skew,
    figures,
    fits,
    paper_rows,
    pipelines,
    plan,
    production,
    superpod,
)
from xdeepserve.bench.report import Row, pyplot
from xdeepserve.errors import InputError

PAPERS = {
    "xds": "xDeepServe",
    "cm": "CloudMatrix-Infer",
    "ds": "DeepServe",
    "eaas": "Expert-as-a-Service",
    "ms": "MegaScale-Infer",
}
SOURCES: dict[str, tuple[Callable[[], Iterable[Row]], ...]] = {
    "xds": (
        comm.send_receive,
        paper_rows.fields_and_pairs,
        paper_rows.crossover,
        comm.a2e,
        paper_rows.latency_by_drafts,
        paper_rows.parameters,
        expert_skew.rows,
        superpod.colocated,
        superpod.disaggregated,
        production.rows,
    ),
    "cm": (
        comm.buffers,
        comm.exchanges,
        paper_rows.bandwidths,
        paper_rows.gemms,
        paper_rows.ports,
        superpod.cloudmatrix,
        pipelines.gains,
        paper_rows.microbatches,
        paper_rows.gains_by_drafts,
        paper_rows.prefill,
        expert_skew.perfect_eplb,
        paper_rows.storage,
        ems.table_1,
        context_caching.figure_23,
        allocation.rows,
        functools.partial(fits.left_out_rows, "cm"),
    ),
    "ds": (deepserve.rows, deepserve.routes),
    "eaas": (eaas_full_size.saving, eaas_full_size.loss, eaas_full_size.double_batching),
    "ms": (
        plan.table_3,
        plan.identities,
        plan.dbrx,
        superpod.megascale,
        functools.partial(fits.left_out_rows, "ms"),
    ),
}
ALSO = {  # the same value, published under another id
    "xds.a2e": ("xds.dispatch_sub200",),
    "xds.dec288.comm": ("xds.ep.share25",),
    "xds.disagg.perf/tpot": ("xds.headline/tpot",),
    "xds.disagg.perf/tput": ("xds.headline/throughput",),
    "cm.t4/batch=128": ("cm.t4/slo=50/batch=128",),
    "cm.t4/batch=112": ("cm.t4/slo=50/batch=112",),
    "cm.t4/batch=96": ("cm.t3/tpot", "cm.t4/slo=50/batch=96", "cm.headline/tpot"),
    "cm.t4/batch=24": ("cm.t4/slo=30/batch=24",),
    "cm.t4/batch=8": ("cm.t4/slo=15/batch=8", "cm.headline/tpot at 15 ms"),
    "cm.t4/throughput/batch=96": ("cm.t3/throughput", "cm.headline/decode"),
    "cm.t4/throughput/batch=8": ("cm.headline/decode at 15 ms",),
    "cm.t2/perfect EPLB": ("cm.headline/prefill",),
}
ARITHMETIC = (
    *("xds.hw.pairs", "cm.t10/", "ms.t3/", "ms.ridge", "ms.moe_util", "ms.m2n.size"),
    *("ds.dram/", "cm.t1/cold/", "cm.t1/dram/", "cm.t1/hit/", "cm.t1/switch/local-dram", "cm.t1/switch/ems"),
)
RESTATED = (  # what another row says, divided once more: no evidence of its own
    *("cm.t4/throughput/", "cm.t4/slo", "cm.t6/bandwidth/", "cm.t9/bandwidth/", "cm.mb.prefill.layer"),
    *(
        "cm.cc.ttft/reuse=",
        "cm.mtp.layer/increase",
        "cm.t3/",
        "cm.headline/",
        "xds.headline/",
        "xds.dispatch_sub200",
        "ds.heat.stable/uncertain",
    ),
    *("xds.dec288.iter/tpot", "xds.dec288.tput", "xds.disagg.perf/tpot", "xds.disagg.perf/tput"),
)
ELSEWHERE = ("eaas.",)  # of Hopper GPUs over RoCE, at contexts beyond planner.sweep.PUBLISHED
UNSAID = (  # published without the load, the share of cached prefixes, the traces
    *("xds.prod.perf/ttft", "ds.heat.stable/", "ds.pdaware.rps/"),
)
PREDICTED_UNSAID = "predicted, conditions not published"
PREDICTED, PREDICTED_ELSEWHERE = "predicted", "predicted, other hardware"
LEFT_OUT = "predicted, left out of the fit"
OTHER_WAYS = {
    "/simulated=": ", simulated",
    "/fit=others": ", left out of the fit",
}
WITHIN = 15  # percent: rows that are further off say why
HEADLINES = {
    "xds.headline/throughput": "of a chip (decode of DeepSeek-R1 on 768 dies)",
    "xds.headline/tpot": "per output token",
}
COMPARED = {"xds", "cm", "ds", "eaas", "ms"}  # papers with rows
WORDS = (
    "measured: counted on this implementation. calibrated: a parameter was fitted to this value. predicted: "
    "none was. arithmetic: follows from other published values. said again: another row's value in another "
    "unit, no evidence of its own. left out of the fit: predicted from numbers that were fitted without its "
    "table. other hardware: not the dies that are billed. conditions not published: ours are chosen, and the "
    "paper's may differ. ~: about. <=: up to, the largest number of the paper, against our largest. kept, "
    "broken: whether a bound or a range holds.",
)
MEANS = {
    "given": "given to the model, which predicts nothing of it",
    "built": "built, with tests or trends, or bounds of the size that they name",
    "theirs": "of other hardware, software or data, or without a number",
    "missing": "not here",
}


class PaperValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value published in a paper, and where. `why` says why there is no row, or why a row is far off."""

    where: str
    what: str
    how: Literal["rows", "given", "built", "theirs", "missing"] = "rows"
    why: str = ""


@functools.cache
def paper_values() -> dict[str, PaperValue]:
    """Read all published values by id, in the papers' order."""
    text = resources.files(__package__).joinpath("paper_values.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, PaperValue])


def paper_of(name: str) -> str:
    """Return the paper of an id or of a row, as a key of PAPERS."""
    return name.split(".")[0]


def id_of(row: Row) -> str:
    """Find the longest id at the beginning of a row's name."""
    return max((id for id in paper_values() if f"{row.name}/".startswith(f"{id}/")), key=len)


def check_paper(paper: str | None) -> None:
    """Raise InputError if a paper is given and unknown."""
    if paper is not None and paper not in PAPERS:
        raise InputError(f"--paper must be one of {', '.join(PAPERS)}, found {paper!r}")


def all_rows(paper: str | None = None) -> Iterator[Row]:
    """Yield rows with a published value, as they are computed. Raises InputError for an unknown paper."""
    check_paper(paper)
    for key in PAPERS if paper is None else (paper,):
        for row in (row for source in SOURCES.get(key, ()) for row in source()):
            if row.published is None:
                continue
            yield row
            for name in ALSO.get(row.name, ()):
                yield Row(name, row.value, row.unit, row.kind)


def tell_rows(rows: Sequence[Row], paper: str | None, is_full: bool, is_json: bool) -> None:
    """Print the rows of a paper, or of all: for programs, or as `print_summary` does."""
    if is_json:
        print(json.dumps(as_json(rows, paper)))
    else:
        print_summary(rows, paper, is_full)


# ---- what is printed ---------------------------------------------------------------------------------------


def how(row: Row) -> str:
    """Describe the origin of a row: calibrated, predicted, measured, or arithmetic with other published
    values. The text also says if it comes from another fit, a simulation or other hardware, was
    published without its conditions, or repeats another row."""
    if row.name.startswith(ARITHMETIC):
        return "arithmetic"
    if row.name.startswith(ELSEWHERE):
        return PREDICTED_ELSEWHERE
    if row.name.startswith(UNSAID):
        return PREDICTED_UNSAID
    way = "".join(means for part, means in OTHER_WAYS.items() if part in row.name)
    return row.kind + way + (", said again" if row.name.startswith(RESTATED) else "")


def errors(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Collect absolute errors in percent by the rows' origin. Bounds have none, and no value counts twice."""
    found: dict[str, list[float]] = {}
    twice = set(chain.from_iterable(ALSO.values()))
    for row in rows:
        if row.name not in twice and row.has_error:
            found.setdefault(how(row), []).append(abs(row.error_pct or 0.0))
    return found


def print_summary(rows: Sequence[Row], paper: str | None = None, is_full: bool = False) -> None:
    """Print a table for each paper, and the errors of its rows. Ids without rows, and rows found in several
    ways, are printed only if `is_full`."""
    for key in PAPERS if paper is None else (paper,):
        mine = [row for row in rows if paper_of(row.name) == key]
        _print_counts(key)
        _print_rows([row for row in mine if is_full or not any(part in row.name for part in OTHER_WAYS)])
        if is_full:
            _print_others(key)
        print()
    if rows:
        print("Errors, in percent of the published value:")
    by_kind = errors(rows)
    if {PREDICTED, PREDICTED_ELSEWHERE} <= by_kind.keys():
        by_kind["predicted, with other hardware"] = by_kind[PREDICTED] + by_kind[PREDICTED_ELSEWHERE]
    for kind, found in sorted(by_kind.items()):
        print(
            f"  {kind + ':':46} {len(found):3} values, median {statistics.median(found):4.1f}, "
            f"{_share_within(found):4.0%} within {WITHIN}, largest {max(found):.1f}"
        )
    for line in (*WORDS[: len(WORDS) if rows else 0], *in_a_sentence(rows)):
        print(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False))


def in_a_sentence(rows: Sequence[Row]) -> list[str]:
    """Describe the errors of all papers' predictions in a sentence, with two headline figures; nothing for a
    selection of papers."""
    by_kind, by_name = errors(rows), {row.name: row for row in rows}
    if not HEADLINES.keys() <= by_name.keys() or {*map(paper_of, by_name)} != COMPARED:
        return []
    found, elsewhere = by_kind[PREDICTED], by_kind[PREDICTED_ELSEWHERE]
    figures = [
        f"{row.value:,.4g} {row.unit} {what} where the paper has {row.published.value:,g}"
        for name, what in HEADLINES.items()
        if (row := by_name[name]).published is not None
    ]
    return [
        "",
        f"{len(found)} independent predictions, to none of which a parameter was fitted, are off by "
        f"{statistics.median(found):.1f} % in the median, {100 * _share_within(found):.0f} % of them by at "
        f"most {WITHIN} %. xDeepServe's headline figures, which follow from one of them, come out as "
        f"{' and '.join(figures)}. {len(elsewhere)} more, measured on other hardware "
        f"(Expert-as-a-Service), are off by {' and '.join(f'{error:.0f}' for error in elsewhere)} %."
        + _left_out_in_words(by_kind.get(LEFT_OUT, [])),
    ]


def _left_out_in_words(found: Sequence[float]) -> str:
    if not found:
        return ""
    return (
        f" {len(found)} values that parameters were fitted to, each predicted from the other tables, are off "
        f"by {statistics.median(found):.1f} % in the median, {max(found):.0f} % at most."
    )


def _share_within(errors_pct: Sequence[float]) -> float:
    return sum(error <= WITHIN for error in errors_pct) / len(errors_pct)


def _print_counts(key: str) -> None:
    counts = Counter[str](value.how for id, value in paper_values().items() if paper_of(id) == key)
    parts = [f"{counts['rows']} with values of ours"]
    parts += [f"{counts[how]} {means}" for how, means in MEANS.items() if counts[how]]
    text = f"{PAPERS[key]} publishes {counts.total()} things: {'; '.join(parts)}."
    print(textwrap.fill(text, 100, subsequent_indent="  "))


def legend(id: str) -> str:
    """Describe an id in words: its paper, section, table or figure, and the value in a few words."""
    value = paper_values()[id]
    return f"{PAPERS[paper_of(id)]} {value.where}: {value.what}"


def _print_rows(rows: Sequence[Row]) -> None:
    """Print rows by id, each id under a line that describes its rows, and with the reason if one is far
    off."""
    width = max((len(row.name) for row in rows), default=0)
    if rows:
        print(f"    {'':{width}}    published       ours          error")
    by_id: dict[str, list[Row]] = {}
    for row in rows:
        by_id.setdefault(id_of(row), []).append(row)
    for id, some in by_id.items():
        print(textwrap.fill(legend(id), 100, initial_indent="  ", subsequent_indent="      "))
        for row in some:
            assert row.published is not None
            line = f"{row.published.text:>13} {row.value:10.2f} {row.unit:5} {row.compared}  {how(row)}"
            print(f"    {row.name:{width}} {line}")
        if why := paper_values()[id].why:
            print(textwrap.fill(why, 100, initial_indent="      ", subsequent_indent="      "))


def _print_others(key: str) -> None:
    """Print the ids of a paper that have no rows, with the reasons."""
    for id, value in paper_values().items():
        if paper_of(id) == key and value.how != "rows":
            why = f"{id}: {value.what} ({value.where}): {value.how}; {value.why}"
            print(textwrap.fill(why, 100, initial_indent="  ", subsequent_indent="      "))


def is_far(row: Row) -> bool:
    """Whether a row breaks a bound or a range, or is so far off that its id must say why."""
    return row.verdict == "broken" or (row.has_error and abs(row.error_pct or 0.0) > WITHIN)


def _why(row: Row) -> str:
    return paper_values()[id_of(row)].why


def as_json(rows: Sequence[Row], paper: str | None = None) -> dict[str, Any]:
    """Return rows, errors by origin, and every id, as JSON for programs."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(id_of(row), []).append(row.name)
    return {
        "rows": [
            {**row.as_dict(), "how": how(row)} | ({"why": _why(row)} if is_far(row) else {}) for row in rows
        ],
        "errors_pct": {
            kind: {
                "values": len(found),
                "median": statistics.median(found),
                "within_15": _share_within(found),
                "largest": max(found),
            }
            for kind, found in errors(rows).items()
        },
        "ids": [
            {"id": id, "paper": PAPERS[paper_of(id)], **msgspec.to_builtins(value), "rows": names.get(id, [])}
            for id, value in paper_values().items()
            if paper in (None, paper_of(id))
        ],
    }


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw ours over theirs, a point for each value, by paper and origin; draw the papers' figures in a
    second file, FILE-figures."""
    figures.plot(dict.fromkeys(paper_of(row.name) for row in rows), path.with_stem(f"{path.stem}-figures"))
    plt = pyplot()
    some = [row for row in rows if row.has_error]
    figure, axes = plt.subplots(figsize=(8, 0.16 * len(some) + 1))
    colours = {"calibrated": "tab:grey", PREDICTED: "tab:blue", "measured": "tab:green"}
    colours |= {"arithmetic": "lightgrey", "said again": "lightblue", "other hardware": "tab:orange"}
    colours["conditions not published"] = "tab:red"
    last = [how(row).split(", ")[-1] for row in some]
    for kind, colour in colours.items():
        points = [(row.error_pct, -at) for at, row in enumerate(some) if last[at] == kind]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=kind, markersize=4)
    axes.axvspan(-WITHIN, WITHIN, color="tab:blue", alpha=0.08)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.margins(y=0.01)
    axes.set_yticks([-place for place in range(len(some))], [row.name for row in some], fontsize=5)
    axes.set_xlabel("off the published value, percent")
    axes.legend(loc="upper right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
