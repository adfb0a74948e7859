"""`xdeepserve bench papers --trends`: the papers' statements in words, and whether they hold here.

Statements say which is faster, which grows with which, and where a gain is largest. Each trend
(`said_in_papers.py`) is a question to the rows of the other benchmarks, and needs no published number. Some
concern rows to which numbers were fitted, and hold partly for that reason. A trend that does not hold gives
the reason.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from xdeepserve.bench.papers import (
    carriers,
    comm,
    context_caching,
    deepserve,
    eaas_full_size,
    ems,
    engine,
    expert_skew,
    heatmap,
    interference,
    locality,
    paper_rows,
    pipelines,
    plan,
    prefill_parallelism,
    schedule,
    superpod,
)
from xdeepserve.bench.papers.every_value import PAPERS, check_paper, paper_of
from xdeepserve.bench.papers.said_in_papers import TRENDS, Trend, Values
from xdeepserve.bench.report import Row
from xdeepserve.progress import working

Source: TypeAlias = Callable[[], Iterable[Row]]
ROWS: dict[str, Source] = {
    "p2p": comm.send_receive,
    "a2e": lambda: comm.trampolines((4, 48)),
    "carriers": carriers.rows,
    "messages": comm.buffers,
    "interference": interference.rows,
    "pull and push": comm.pull_push,
    "crossing": paper_rows.crossover,
    "exchanges": lambda: (*comm.exchanges(), *paper_rows.bandwidths()),
    "GEMMs": paper_rows.gemms,
    "decode": lambda: (
        *superpod.cloudmatrix(),
        *paper_rows.gains_by_drafts(),
        *paper_rows.latency_by_drafts(),
    ),
    "microbatches": pipelines.gains,
    "ping-pong": pipelines.ping_pong,
    "MegaScale": lambda: (*superpod.megascale(), *plan.table_3()),
    "pool": context_caching.figure_23,
    "locality": locality.rows,
    "all-to-alls": comm.all_to_alls,
    "parallelism": prefill_parallelism.rows,
    "loading": ems.table_1,
    "engine": engine.all_rows,
    "experts": engine.balancing,
    "skew": expert_skew.rows,
    "prompts": paper_rows.prefill_by_length,
    "heat map": lambda: heatmap.squares(heatmap.here()),
    "online": heatmap.online,
    "policies": schedule.claims,
    "host": deepserve.asynchronous,
    "starts": deepserve.starts,
    "services": eaas_full_size.scaling,
    "loss": eaas_full_size.loss,
}


class Answer(msgspec.Struct, frozen=True):
    """Answer to a trend: whether it holds, and why not."""

    id: str
    paper: str
    where: str
    said: str
    holds: bool
    why: str


@functools.cache
def values(key: str) -> Values:
    """Compute the rows of a source by name, once."""
    return Values({row.name: row.value for row in ROWS[key]()})


def answer(trend: Trend) -> Answer:
    """Check whether a trend holds."""
    holds, paper = trend.holds(values(trend.rows)), PAPERS[paper_of(trend.id)]
    return Answer(trend.id, paper, trend.where, trend.said, holds, "" if holds else trend.why)


def all_answers(paper: str | None = None) -> Iterator[Answer]:
    """Yield the answers to the trends of one paper, or of all."""
    return (answer(trend) for trend in TRENDS if paper in (None, paper_of(trend.id)))


def count(paper: str | None = None) -> int:
    """Count the trends of a paper, or of all."""
    return sum(paper in (None, paper_of(trend.id)) for trend in TRENDS)


def tell(is_json: bool, paper: str | None = None) -> None:
    """Answer the trends of one paper, or of all, and print the answers. Raises InputError for an unknown
    paper."""
    check_paper(paper)
    found = []
    with working("bench papers --trends") as status:
        for one in all_answers(paper):
            found.append(one)
            status.detail = f"{len(found)} of {count(paper)}"
    print_answers(found, "json" if is_json else "text")


def print_answers(found: Sequence[Answer], form: Literal["text", "json"]) -> None:
    """Print a line for each answer, with the reasons of those that do not hold."""
    if form == "json":
        print(json.dumps({"trends": msgspec.to_builtins(found)}))
        return
    for one in found:
        says = "holds" if one.holds else "does not hold"
        print(f"{says:14} {one.said} ({one.paper} {one.where})")
        if one.why:
            print(textwrap.fill(one.why, 100, initial_indent=" " * 15, subsequent_indent=" " * 15))
    print(f"{sum(one.holds for one in found)} of {len(found)} hold")
