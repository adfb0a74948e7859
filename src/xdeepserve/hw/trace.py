"""What happened when, for Perfetto: spans on (node, lane) and arrows between them.

In the file a process is a die or host and a thread is one of its lanes (AIC, AIV, MTE2, MTE3, DMA, URMA ...).
Open it at https://ui.perfetto.dev or chrome://tracing. The format is Chrome's "Trace Event Format", as JSON.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that a lane of a node did in [start_ns, end_ns)."""

    node: int
    lane: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] | None = None


class Flow(NamedTuple):
    """An arrow from a moment within one span to a moment within another."""

    name: str
    node: int
    lane: str
    at_ns: int
    to_node: int
    to_lane: str
    to_ns: int


class Trace:
    """Collects spans and flows. When off, `span` and `flow` return at once; see `is_on`."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.spans: list[Span] = []
        self.flows: list[Flow] = []
        self.node_names: dict[int, str] = {}

    def span(
        self, node: int, lane: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        if self.is_on:
            self.spans.append(Span(node, lane, name, start_ns, end_ns, args))

    def flow(
        self, name: str, node: int, lane: str, at_ns: int, to_node: int, to_lane: str, to_ns: int
    ) -> None:
        if self.is_on:
            self.flows.append(Flow(name, node, lane, at_ns, to_node, to_lane, to_ns))

    def digest(self) -> str:
        """sha256 of everything recorded: equal for equal runs."""
        return hashlib.sha256(repr((self.spans, self.flows)).encode()).hexdigest()

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: names first, then spans by start, then flows. Times in microseconds."""
        threads: dict[tuple[int, str, int], int] = {}
        rows, row_of = _rows(self.spans)
        for node, lane, row in rows:
            threads[node, lane, row] = 1 + sum(other[0] == node for other in threads)
        events: list[dict[str, Any]] = []
        for node in sorted({key[0] for key in threads}):
            name = self.node_names.get(node, f"node {node}")
            events.append({"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": name}})
            events.append(
                {"ph": "M", "name": "process_sort_index", "pid": node, "tid": 0, "args": {"sort_index": node}}
            )
        for (node, lane, row), tid in threads.items():
            label = lane if row == 0 else f"{lane} ({row + 1})"
            events.append(
                {"ph": "M", "name": "thread_name", "pid": node, "tid": tid, "args": {"name": label}}
            )
        for index in sorted(range(len(self.spans)), key=lambda i: (self.spans[i].start_ns, i)):
            span = self.spans[index]
            event = {"ph": "X", "cat": span.lane, "name": span.name, "pid": span.node}
            event |= {"tid": threads[span.node, span.lane, row_of[index]], "ts": span.start_ns / 1000}
            event |= {"dur": (span.end_ns - span.start_ns) / 1000, "args": span.args or {}}
            events.append(event)
        for number, flow in enumerate(self.flows):
            start, end = threads.get((flow.node, flow.lane, 0)), threads.get((flow.to_node, flow.to_lane, 0))
            if start is None or end is None:
                continue  # an arrow without a span at both ends cannot be drawn
            common = {"cat": "flow", "name": flow.name, "id": number}
            events.append({"ph": "s", "pid": flow.node, "tid": start, "ts": flow.at_ns / 1000} | common)
            events.append(
                {"ph": "f", "bp": "e", "pid": flow.to_node, "tid": end, "ts": flow.to_ns / 1000} | common
            )
        return events

    def write(self, path: str | Path) -> None:
        """Write a file that Perfetto and chrome://tracing open."""
        document = {"displayTimeUnit": "ns", "traceEvents": self.events()}
        Path(path).write_text(json.dumps(document, separators=(",", ":")))


def _rows(spans: list[Span]) -> tuple[list[tuple[int, str, int]], list[int]]:
    """Spread spans of one lane that overlap over several rows, since spans of one thread must not.

    Returns the rows in use, sorted by node, then by first use, and each span's row number within its lane.
    """
    ends: dict[tuple[int, str], list[int]] = {}
    row_of = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start_ns, i)):
        span = spans[index]
        lane = ends.setdefault((span.node, span.lane), [])
        row = next((row for row, end in enumerate(lane) if end <= span.start_ns), len(lane))
        if row == len(lane):
            lane.append(0)
        lane[row] = span.end_ns
        row_of[index] = row
    rows = [(node, lane, row) for (node, lane), used in ends.items() for row in range(len(used))]
    return sorted(rows, key=lambda row: row[0]), row_of
