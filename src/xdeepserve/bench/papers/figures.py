"""The papers' figures for `papers --plot`: our values as lines, numbers from the papers' text as points.

Curves that the papers only draw have no points. All our values are formulas or short simulations; only Figure
23 takes longer than seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from xdeepserve.bench.papers import comm, context_caching, paper_rows, pipelines, sizes, superpod
from xdeepserve.bench.report import published, pyplot
from xdeepserve.comm.cost import OPS, CommCost
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.performance import Times
from xdeepserve.prices.formula import EP320, PROMPT, LayerCost, Load

Series: TypeAlias = dict[str, tuple[Sequence[Any], Sequence[float]]]
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128)  # of an NPU
STAGES = ("MLAProlog", "MLA", "OProj", "gate, dispatch", "experts", "combine", "all")
BATCH_OF_STAGES = 96  # of an NPU (CM Figures 20b, 22b)


class Figure(NamedTuple):
    """A figure: our curves by label, and the paper's points by label, as far as its text has numbers."""

    title: str
    x: str
    y: str
    ours: Series
    theirs: Series
    is_log: bool = False


def _said(*names: str) -> list[float]:
    return [published()[name].value for name in names]


def send_receive() -> Figure:
    """Make xDeepServe's Figure 5: send and receive."""
    sizes = [nbytes for nbytes in comm.MESSAGES if nbytes >= 4096]
    ours: Series = {
        f"{cores} AIV cores": (sizes, [comm.simulate_send(nbytes, cores) / 1000 for nbytes in sizes])
        for cores in (2, 48)
    }
    below: Series = {"2 cores, less than": ([1 << 20], _said("xds.p2p.small"))}
    return Figure("xDeepServe, Figure 5: send and receive", "bytes", "us", ours, below, True)


def crossing() -> Figure:
    """Make xDeepServe's Figure 6: the crossing of dispatch and combine."""
    cost, batches = CommCost(), (1, 4, 8, 16, 32, 48, 64, 96, 128)
    ours: Series = {
        op: (batches, [cost.exchange_ns(op, paper_rows.FIGURE_6_EP, b, sizes.TOP_K) / 1000 for b in batches])
        for op in OPS
    }
    (at,) = _said("xds.ep.crossover")
    level = cost.exchange_ns("combine", paper_rows.FIGURE_6_EP, at, sizes.TOP_K) / 1000
    theirs: Series = {"they cross": ([at], [level])}
    return Figure("xDeepServe, Figure 6: EP128", "tokens of a die", "us", ours, theirs)


def table_6() -> Figure:
    """Make a figure of CloudMatrix's Table 6: dispatch and combine."""
    cost, groups = CommCost(way="push"), sizes.EP_SIZES
    ours: Series = {
        op: (
            groups,
            [cost.exchange_ns(op, ep, paper_rows.TABLE_6_BATCH, sizes.TOP_K) / 1000 for ep in groups],
        )
        for op in OPS
    }
    theirs: Series = {op: (groups, _said(*(f"cm.t6/{op}/ep={ep}" for ep in groups))) for op in OPS}
    return Figure("CloudMatrix, Table 6", "ranks", "us", ours, theirs, True)


def _cost() -> LayerCost:
    return LayerCost(resolve_model(sizes.MODEL).config)


def _load(batch: float, rows: int) -> Load:
    return Load(requests=batch / sizes.DIES_PER_CHIP, rows=rows, context=pipelines.CM_CONTEXT)


def microbatches() -> Figure:
    """Make CloudMatrix's Figure 20a: decode with two microbatches."""
    cost = _cost()

    def throughput(batch: int, is_piped: bool) -> float:
        splits = (pipelines.CM_SPLIT,)
        ns = cost.iteration_ns(_load(batch, 2), EP320, microbatches=is_piped, splits=splits)
        return batch * (1 + pipelines.CM_TIMING.acceptance) / ns * 1e9

    ours: Series = {
        label: (BATCHES, [throughput(batch, is_piped) for batch in BATCHES])
        for label, is_piped in (("two microbatches", True), ("one", False))
    }
    at = pipelines.CM_BATCHES
    gains = _said(*(f"cm.mb.decode/batch={batch}" for batch in at))
    points = [gain * throughput(batch, False) for gain, batch in zip(gains, at, strict=True)]
    theirs: Series = {"their gain on our one": (at, points)}
    return Figure("CloudMatrix, Figure 20a: decode", "batch of an NPU", "tokens/s", ours, theirs)


def stages(cost: LayerCost, rows: int, is_piped: bool) -> list[float]:
    """Compute the times of STAGES [us]; with two streams, those of a microbatch, and a layer of both."""
    load = _load(BATCH_OF_STAGES, rows)
    if not is_piped:
        parts = [*cost.stream0_parts_ns(load), *cost.stream1_parts_ns(load, EP320)]
        return [ns / 1000 for ns in (*parts, sum(parts))]
    half = msgspec.structs.replace(load, requests=load.requests / 2)
    cores = pipelines.CM_SPLIT
    parts = cost.stream0_parts_ns(half, cores)
    parts += cost.stream1_parts_ns(half, EP320, cost.spec.num_cores("aic") - cores)
    return [ns / 1000 for ns in (*parts, cost.microbatched_ns(load, EP320, (cores,)))]


def layer_of_microbatches() -> Figure:
    """Make CloudMatrix's Figure 20b: a layer with two microbatches."""
    cost, (less,) = _cost(), _said("cm.mb.decode.layer")
    one, two = (stages(cost, 2, is_piped) for is_piped in (False, True))
    ours: Series = {"one microbatch": (STAGES, one), "each of two": (STAGES, two)}
    theirs: Series = {"their share of our one": (STAGES[-1:], [one[-1] * (1 - less / 100)])}
    return Figure("CloudMatrix, Figure 20b: a layer, batch 96", "", "us", ours, theirs)


def prefill() -> Figure:
    """Make CloudMatrix's Figure 21a: prefill with two microbatches."""
    rows, lengths = {row.name: row.value for row in paper_rows.prefill_by_length()}, paper_rows.PROMPTS
    ours: Series = {
        f"{way} microbatch{'es' if way == 'two' else ''}": (
            lengths,
            [rows[f"prefill/{way}/prompt={length}"] for length in lengths],
        )
        for way in ("two", "one")
    }
    theirs: Series = {"Table 2": ([PROMPT], _said("cm.t2/perfect EPLB"))}
    return Figure("CloudMatrix, Figure 21a: prefill", "tokens of a prompt", "tokens/s", ours, theirs)


def drafts() -> Figure:
    """Make CloudMatrix's Figure 22a: the gain of MTP."""
    cost = _cost()
    gains = [
        (1 + pipelines.CM_TIMING.acceptance)
        * cost.iteration_ns(_load(batch, 1), EP320)
        / cost.iteration_ns(_load(batch, 2), EP320)
        for batch in BATCHES
    ]
    ends = (BATCHES[0], BATCHES[-1])
    theirs: Series = {"most, least": (ends, _said(*(f"cm.mtp.gain/batch={batch}" for batch in ends)))}
    return Figure("CloudMatrix, Figure 22a: MTP", "batch of an NPU", "x", {"gain": (BATCHES, gains)}, theirs)


def layer_of_drafts() -> Figure:
    """Make CloudMatrix's Figure 22b: a layer with MTP."""
    cost, names = _cost(), ("with", "without")
    ours: Series = {
        f"{name} a draft": (STAGES, stages(cost, rows, True))
        for name, rows in zip(names, (2, 1), strict=True)
    }
    theirs: Series = {name: (STAGES[-1:], _said(f"cm.mtp.layer/{name}")) for name in names}
    return Figure("CloudMatrix, Figure 22b: a layer, batch 96", "", "us", ours, theirs)


def reuse() -> Figure:
    """Make CloudMatrix's Figure 23b: the first token with reused prompts."""
    found = context_caching.curves(context_caching.figure_23())
    ours: Series = {f"over {plane.upper()}": curve for plane, curve in found.items()}
    base = found["ub"][1][0]
    points = [base - less for less in _said("cm.cc.ttft/reuse=50%", "cm.cc.ttft/reuse=90%")]
    theirs: Series = {"over UB": ([50, 90], points)}
    return Figure("CloudMatrix, Figure 23b: first token", "% of a prompt reused", "ms", ours, theirs)


def ping_pong() -> Figure:
    """Make MegaScale-Infer's Figure 14: throughput by microbatches."""
    numbers, ours, theirs = (1, 2, 3, 4), Series(), Series()
    for model, size in superpod.MEGASCALE.items():
        times = Times(1, 1, superpod.COMM_RATIO_DBRX * size / superpod.MEGASCALE["DBRX"])
        ours[model] = numbers, [times.throughput(m) / times.throughput(1) for m in numbers]
        second, third = _said("ms.pp.m12", f"ms.pp.m23/{model}")
        theirs[model] = (2, 3), [second, second * third]
    return Figure("MegaScale-Infer, Figure 14", "microbatches", "x of one", ours, theirs)


FIGURES: dict[str, tuple[Callable[[], Figure], ...]] = {
    "xds": (send_receive, crossing),
    "cm": (
        table_6,
        microbatches,
        layer_of_microbatches,
        prefill,
        drafts,
        layer_of_drafts,
        reuse,
    ),
    "ms": (ping_pong,),
}


def draw(axes: Any, figure: Figure) -> None:
    """Draw a figure on matplotlib's axes."""
    colours: dict[str, Any] = {}
    for label, (xs, ys) in figure.ours.items():
        (line,) = axes.plot(xs, ys, "o-" if isinstance(xs[0], str) else "-", markersize=3, label=label)
        colours[label] = line.get_color()
    for label, (xs, ys) in figure.theirs.items():
        axes.plot(xs, ys, "D", color=colours.get(label, "black"), label=f"{label} (paper)", markersize=5)
    axes.set_title(figure.title, fontsize=9)
    axes.set_xlabel(figure.x, fontsize=8)
    axes.set_ylabel(figure.y, fontsize=8)
    axes.tick_params(labelsize=7)
    if figure.is_log:
        axes.set_xscale("log", base=2)
    if not figure.x:
        axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize=6)


def plot(papers: Iterable[str], path: Path) -> None:
    """Draw all figures of some papers on a page, if they have any. Raises InputError without matplotlib."""
    plt = pyplot()
    found = [make() for paper in papers for make in FIGURES.get(paper, ())]
    if not found:
        return
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    page, grid = plt.subplots(lines, columns, figsize=(4.2 * columns, 3 * lines), squeeze=False)
    for axes, figure in zip(grid.flat, found, strict=False):
        draw(axes, figure)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    page.tight_layout()
    page.savefig(path)
