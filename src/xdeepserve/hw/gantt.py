"""A timeline as rows of bars, for the terminal (`generate --timeline`) and for the pictures in `docs/`.

A row is a die's lane, or several lanes of it that never overlap much: kernels and exchanges. A bar is a run
of work on one microbatch. Bars of steps that wait for a peer's field are told apart from work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xdeepserve.hw.trace import Trace, TraceSpan

WORK, WAIT, BLANK = "#", "·", " "
COLOURS = ("\x1b[38;5;33m", "\x1b[38;5;208m", "\x1b[38;5;70m", "\x1b[38;5;170m")  # of microbatches 0 to 3
PLAIN, DIM, RESET = "\x1b[38;5;250m", "\x1b[38;5;240m", "\x1b[0m"
LANES = {  # what a row is called, and the lanes that it is made of, in the order of rows
    "attention": ("stream 0: attention",),
    "experts": ("stream 1: experts",),
    "AIC": ("AIC",),
    "AIV": ("AIV",),
    "exchange": ("XCCL", "XCCL microbatch 0", "XCCL microbatch 1"),
    "receive": ("A2E receive: steps",),
    "send": ("E2A send: steps",),
    "KV": ("KV transfer", "DistFlow"),
}


class Bar(NamedTuple):
    """Work or a wait of a row in [start_ns, end_ns). `microbatch` is None where there is only one."""

    start_ns: int
    end_ns: int
    name: str
    microbatch: int | None
    is_wait: bool


class GanttRow(NamedTuple):
    """Bars of a die on some of its lanes, with the die's number and the name of the row's kind."""

    node: int
    label: str
    bars: list[Bar]


def is_wait(span: TraceSpan) -> bool:
    """Whether a span is a step waiting for a peer's field, rather than moving bytes."""
    return bool(span.args and span.args.get("waits"))


def gantt(trace: Trace, start_ns: int, end_ns: int) -> list[GanttRow]:
    """Return rows of all dies active between two moments, in the order of the trace's processes."""
    kinds = {lane: label for label, lanes in LANES.items() for lane in lanes}
    found: dict[tuple[int, str], list[TraceSpan]] = {}
    for span in trace.spans:
        label = kinds.get(span.lane)
        if label is not None and span.start_ns < end_ns and span.end_ns > max(start_ns, span.start_ns):
            found.setdefault((span.node, label), []).append(span)
    order = {label: place for place, label in enumerate(LANES)}
    rows = sorted(found, key=lambda row: (trace.node_orders.get(row[0], row[0]), row[0], order[row[1]]))
    return [GanttRow(node, label, list(_bars(found[node, label]))) for node, label in rows]


def _bars(spans: Sequence[TraceSpan]) -> Iterator[Bar]:
    for span in sorted(spans, key=lambda each: (each.start_ns, each.end_ns, each.name)):
        microbatch = (span.args or {}).get("microbatch")
        yield Bar(span.start_ns, span.end_ns, span.name, microbatch, is_wait(span))


def steps_of(trace: Trace) -> list[tuple[int, int]]:
    """List [start, end) of each step of the pod (virtual ns), from its first embedding to the next one."""
    starts = sorted({span.start_ns for span in trace.spans if span.name == "Embed"})
    last = max((span.end_ns for span in trace.spans), default=0)
    return list(zip(starts, [*starts[1:], last], strict=True))


def in_terminal(trace: Trace, start_ns: int, end_ns: int, width: int = 100, colour: bool = True) -> list[str]:
    """Draw the rows as lines of at most `width` characters; each character stands for an equal share of the
    time.

    Without colour the character is the microbatch's number, or `#`; `·` waits for a peer.
    """
    rows = gantt(trace, start_ns, end_ns)
    names = {row.node: trace.node_names.get(row.node, f"die {row.node}") for row in rows}
    margin = min(40, max((len(f"{names[row.node]}  {row.label}") for row in rows), default=0) + 1)
    cells = width - margin
    lines = [f"{'':{margin}}{start_ns / 1000:.1f} us{f'{end_ns / 1000:.1f} us':>{cells - 12}}"[:width]]
    for row in rows:
        head = f"{names[row.node]}  {row.label}"
        lines.append(f"{head[-margin + 1 :]:{margin}}" + _cells(row.bars, start_ns, end_ns, cells, colour))
    return lines


def _cells(bars: Sequence[Bar], start_ns: int, end_ns: int, cells: int, colour: bool) -> str:
    """Draw a bar per cell: the one that lasts longest within it; work goes before waiting."""
    best: list[tuple[int, int, Bar] | None] = [None] * cells
    step = max((end_ns - start_ns) / cells, 1.0)
    for bar in bars:
        first = max(int((bar.start_ns - start_ns) / step), 0)
        last = min(int((bar.end_ns - 1 - start_ns) / step), cells - 1)
        for cell in range(first, last + 1):
            left = start_ns + cell * step
            lasts = int(min(bar.end_ns, left + step) - max(bar.start_ns, left))
            seen = best[cell]
            if seen is None or (int(not bar.is_wait), lasts) > seen[:2]:
                best[cell] = (int(not bar.is_wait), lasts, bar)
    return "".join(_cell(each[2] if each else None, colour) for each in best).rstrip()


def _cell(bar: Bar | None, colour: bool) -> str:
    if bar is None:
        return BLANK
    if bar.is_wait:
        return f"{DIM}{WAIT}{RESET}" if colour else WAIT
    if not colour:
        return WORK if bar.microbatch is None else str(bar.microbatch)
    shade = PLAIN if bar.microbatch is None else COLOURS[bar.microbatch % len(COLOURS)]
    return f"{shade}█{RESET}"
