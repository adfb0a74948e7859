"""Timeline of a run for Perfetto: spans on (node, lane) and arrows between them.

In the file a process is a die, a host or a part of the host's software, and a thread is one of its lanes
(AIC, AIV, MTE2, MTE3, XCCL ...). Open it at https://ui.perfetto.dev or chrome://tracing. The format is
Chrome's "Trace Event Format", as JSON.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

FIRST_SOFTWARE_NODE = 1_000_000  # beyond all dies and hosts

# A context belongs to one asyncio task, and virtual processes are tasks: so each has a place of its own.
_PLACE: ContextVar[dict[str, Any]] = ContextVar("place")
_NOWHERE: dict[str, Any] = {}


class TraceSpan(NamedTuple):
    """Activity of a node's lane in [start_ns, end_ns)."""

    node: int
    lane: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] | None = None


class Flow(NamedTuple):
    """An arrow from a moment within one span to a moment within another.

    `span` and `to_span` are the spans' names; needed only where a lane does several things at a time.
    """

    name: str
    node: int
    lane: str
    at_ns: int
    to_node: int
    to_lane: str
    to_ns: int
    span: str | None = None
    to_span: str | None = None


class Count(NamedTuple):
    """Value of a node's counter from a moment on."""

    node: int
    name: str
    at_ns: int
    value: float


class Moved(NamedTuple):
    """Bytes moved from a node to another, over a named network plane."""

    source: int
    target: int
    nbytes: int
    plane: str


class _End(NamedTuple):
    name: str
    node: int
    lane: str
    at_ns: int
    span: str | None


class Trace:
    """Collects spans and arrows. When off, every method returns at once; see `is_on`.

    Callers can name the nodes (`name_node`), order the lanes (`lane_order`), and leave nodes out (`hide`).
    """

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.spans: list[TraceSpan] = []
        self.flows: list[Flow] = []
        self.counts: list[Count] = []
        self.chains: dict[str, list[int]] = {}  # places in `spans`
        self.moved: list[Moved] = []  # by engines, in bytes; no part of the file
        self.node_names: dict[int, str] = {}
        self.node_orders: dict[int, int] = {}
        self.node_labels: dict[int, str] = {}
        self.lane_order: Sequence[str] = ()
        self.lane_labels: Mapping[str, str] = {}  # what the file calls a lane, if not so
        self._hidden: set[int] = set()
        self._departed: dict[Hashable, _End] = {}
        self._arrived: dict[Hashable, _End] = {}

    # ---- nodes --------------------------------------------------------------------------------------

    def name_node(self, node: int, name: str, order: int, label: str = "") -> None:
        """Name a node after the task done there; viewers show nodes by `order`. `label` says more about the
        node."""
        self.node_names[node], self.node_orders[node], self.node_labels[node] = name, order, label

    def add_node(self, name: str, order: int) -> int:
        """Add a node for a part of the host's software."""
        node = FIRST_SOFTWARE_NODE + sum(other >= FIRST_SOFTWARE_NODE for other in self.node_names)
        self.name_node(node, name, order)
        return node

    def hide(self, node: int) -> None:
        """Keep nothing about a node from now on."""
        self._hidden.add(node)

    def is_hidden(self, node: int) -> bool:
        return node in self._hidden

    def shows(self, node: int) -> bool:
        return self.is_on and node not in self._hidden

    def forget(self) -> None:
        """Forget everything recorded or hidden, before the next step is looked at."""
        for recorded in (self.spans, self.flows, self.counts, self.moved):
            recorded.clear()
        for by_key in (self.chains, self._departed, self._arrived):
            by_key.clear()
        self._hidden.clear()

    @property
    def left_out(self) -> str:
        """Note on how many of the dies are shown; empty if all are."""
        if not self._hidden:
            return ""
        dies = {node for node in self.node_names if node < FIRST_SOFTWARE_NODE} | self._hidden
        return f"{len(dies - self._hidden)} of {len(dies)} dies shown"

    # ---- where a process is -------------------------------------------------------------------------

    def at(self, **place: Any) -> None:
        """Set the place of the running process: its layer, microbatch, domain, or what else it is at."""
        if self.is_on:
            _PLACE.set(place)

    @property
    def place(self) -> dict[str, Any]:
        """Place of the running process: where the one was that started it, until it moves by `at`."""
        return _PLACE.get(_NOWHERE)

    # ---- what happens -------------------------------------------------------------------------------

    def span(
        self, node: int, lane: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        if self.is_on and node not in self._hidden:
            self.spans.append(TraceSpan(node, lane, name, start_ns, end_ns, args))

    def link(
        self,
        chain: str,
        node: int,
        lane: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: dict[str, Any] | None = None,
    ) -> None:
        """Record a span of a chain: arrows of the chain's name join its spans in the order of their
        starts."""
        if self.shows(node):
            self.chains.setdefault(chain, []).append(len(self.spans))
            self.spans.append(TraceSpan(node, lane, name, start_ns, end_ns, args))

    def count(self, node: int, name: str, at_ns: int, value: float) -> None:
        """Record a counter's value from a moment on; viewers draw it as a line."""
        if self.shows(node):
            self.counts.append(Count(node, name, at_ns, value))

    def move(self, source: int, target: int, nbytes: int, plane: str = "UB") -> None:
        """Record bytes moved from node to node; nothing if they stay on the same node."""
        if self.is_on and source != target:
            self.moved.append(Moved(source, target, nbytes, plane))

    def flow(
        self, name: str, node: int, lane: str, at_ns: int, to_node: int, to_lane: str, to_ns: int
    ) -> None:
        if self.shows(node) and self.shows(to_node):
            self.flows.append(Flow(name, node, lane, at_ns, to_node, to_lane, to_ns))

    def depart(
        self, key: Hashable, name: str, node: int, lane: str, at_ns: int, span: str | None = None
    ) -> None:
        """Record the start of an arrow; its end comes with `arrive` of the same `key`."""
        if self.shows(node):
            self._meet(key, _End(name, node, lane, at_ns, span), self._departed, self._arrived)

    def arrive(
        self, key: Hashable, name: str, node: int, lane: str, at_ns: int, span: str | None = None
    ) -> None:
        """Record the end of an arrow; `depart` of the same `key` may come earlier or later."""
        if self.shows(node):
            self._meet(key, _End(name, node, lane, at_ns, span), self._arrived, self._departed)

    def _meet(
        self, key: Hashable, end: _End, mine: dict[Hashable, _End], others: dict[Hashable, _End]
    ) -> None:
        other = others.pop(key, None)
        if other is None:
            mine[key] = end
            return
        source, target = (end, other) if mine is self._departed else (other, end)
        self.flows.append(Flow(source.name, *source[1:4], *target[1:4], source.span, target.span))

    def digest(self) -> str:
        """Return the sha256 of everything recorded: equal for equal runs."""
        return hashlib.sha256(repr((self.spans, self.flows, self.chains, self.counts)).encode()).hexdigest()

    # ---- the file -----------------------------------------------------------------------------------

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield Chrome trace events: names, then spans by start, counters, then arrows. Times are in
        microseconds.

        An arrow whose ends are not both within spans is left out, since it could not be drawn.
        """
        order = sorted(range(len(self.spans)), key=lambda i: (self.spans[i].start_ns, i))
        rows = _LaneRows(self.spans, order)
        threads = self._threads(rows)
        nodes = dict.fromkeys(node for node, _, _ in threads)
        top = min(nodes, key=lambda node: self.node_orders.get(node, node), default=None)
        for node in nodes:
            name, rank = self.node_names.get(node, f"node {node}"), self.node_orders.get(node, node)
            if node == top and self.left_out:
                name += f" ({self.left_out})"  # where one looks first
            yield _meta("process_name", node, 0, name=name)
            yield _meta("process_sort_index", node, 0, sort_index=rank)
            if self.node_labels.get(node):
                yield _meta("process_labels", node, 0, labels=self.node_labels[node])
        for (node, lane, row), tid in threads.items():
            label = self.lane_labels.get(lane, lane)
            yield _meta("thread_name", node, tid, name=label if row == 0 else f"{label} ({row + 1})")
            yield _meta("thread_sort_index", node, tid, sort_index=tid)
        for index in order:
            span = self.spans[index]
            yield {
                "ph": "X",
                "cat": span.lane,
                "name": span.name,
                "pid": span.node,
                "tid": threads[span.node, span.lane, rows.row_of[index]],
                "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": span.args or {},
            }
        for count in self.counts:
            yield {
                "ph": "C",
                "name": count.name,
                "pid": count.node,
                "ts": count.at_ns / 1000,
                "args": {count.name: count.value},
            }
        number = 0
        for flow in self.flows:
            start = rows.find(flow.node, flow.lane, flow.at_ns, flow.span)
            end = rows.find(flow.to_node, flow.to_lane, flow.to_ns, flow.to_span)
            if start is not None and end is not None:
                number += 1
                yield from self._arrow(
                    flow.name, number, [(start, flow.at_ns), (end, flow.to_ns)], threads, rows
                )
        for chain, members in self.chains.items():
            points = [
                (i, self.spans[i].start_ns) for i in sorted(members, key=lambda i: self.spans[i].start_ns)
            ]
            if len(points) > 1:
                number += 1
                yield from self._arrow(chain, number, points, threads, rows)

    def _threads(self, rows: _LaneRows) -> dict[tuple[int, str, int], int]:
        """Number threads from 1 within each node, by `lane_order`; other lanes follow in order of first
        use."""
        place = {lane: i for i, lane in enumerate(self.lane_order)}
        used = sorted(rows.lanes, key=lambda key: (key[0], place.get(key[1], len(place))))
        threads: dict[tuple[int, str, int], int] = {}
        next_tid: dict[int, int] = {}
        for node, lane in used:
            for row in range(len(rows.lanes[node, lane])):
                next_tid[node] = tid = next_tid.get(node, 0) + 1
                threads[node, lane, row] = tid
        return threads

    def _arrow(
        self,
        name: str,
        number: int,
        points: Sequence[tuple[int, int]],
        threads: dict[tuple[int, str, int], int],
        rows: _LaneRows,
    ) -> Iterator[dict[str, Any]]:
        """Yield an arrow's events from span to span: each point is a place in `spans` and a moment within
        it."""
        for i, (index, at_ns) in enumerate(points):
            span, phase = self.spans[index], "s" if i == 0 else "f" if i == len(points) - 1 else "t"
            event = {"ph": phase, "cat": "flow", "name": name, "id": number, "pid": span.node}
            event |= {"tid": threads[span.node, span.lane, rows.row_of[index]], "ts": at_ns / 1000}
            # By default an arrow's end belongs to the span after it.
            yield event | ({"bp": "e"} if phase == "f" else {})

    def write(self, path: str | Path) -> None:
        """Write a file for Perfetto and chrome://tracing. The file says how many nodes are left out."""
        other = {"nodes left out": len(self._hidden)}
        with Path(path).open("w") as file:
            file.write('{"displayTimeUnit":"ns","otherData":' + json.dumps(other) + ',"traceEvents":[')
            for number, event in enumerate(self.events()):
                file.write((",\n" if number else "\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")


def _meta(kind: str, node: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": node, "tid": tid, "args": args}


class _LaneRows:
    """Spreads overlapping spans of a lane over several rows, because spans of one thread must not overlap.

    row_of: by span, its row within its lane. lanes: by lane, in order of first use, the spans of each row.
    """

    def __init__(self, spans: Sequence[TraceSpan], order: Sequence[int]) -> None:
        self._spans = spans
        self.row_of = [0] * len(spans)
        self.lanes: dict[tuple[int, str], list[list[int]]] = {}
        self._starts: dict[tuple[int, str], list[list[int]]] = {}
        ends: dict[tuple[int, str], list[int]] = {}
        for index in order:
            span = spans[index]
            key = span.node, span.lane
            lane = ends.setdefault(key, [])
            row = next((row for row, end in enumerate(lane) if end <= span.start_ns), len(lane))
            if row == len(lane):
                lane.append(0)
                self.lanes.setdefault(key, []).append([])
                self._starts.setdefault(key, []).append([])
            lane[row] = span.end_ns
            self.row_of[index] = row
            self.lanes[key][row].append(index)
            self._starts[key][row].append(span.start_ns)

    def find(self, node: int, lane: str, at_ns: int, name: str | None) -> int | None:
        """Find the span of a lane that contains a moment, and has the given name, if any."""
        key = node, lane
        for row, starts in enumerate(self._starts.get(key, ())):
            place = bisect_right(starts, at_ns) - 1
            if place >= 0:
                index = self.lanes[key][row][place]
                span = self._spans[index]
                if at_ns < span.end_ns and name in (None, span.name):
                    return index
        return None
