"""Draw a step from the pod's trace: what dies did in it, and for how long.

The trace is turned on when a step is wanted, and off when the first step that began later has ended. The
trace costs real time of this computer then, but no virtual time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from xdeepserve.engine.dp.events import Observed, StepEnded
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.hw.gantt import is_wait
from xdeepserve.hw.trace import TraceSpan
from xdeepserve.page.parts import DieRow, HeatPart, LoadPart, SpanRow, StepPart, TrafficPart

MAX_SPANS = 1500  # of a frame
MAX_PAIRS = 240
BUSY = ("AIC", "AIV")  # lanes of a die's cores; what is there does not overlap
HIDDEN = ("DP group", "requests", "steps", "EPLB")


class StepLook:
    """Catches a step of an engine by the pod's trace, which must have no other user."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._trace, self._clock = engine, engine.plan.pod.trace, engine.plan.pod.clock
        self._since_ns: int | None = None  # when the trace was turned on
        self.caught: StepEnded | None = None

    def want(self) -> None:
        """Catch the next step to begin."""
        self.drop()
        self._trace.is_on, self._since_ns = True, self._clock.now

    @property
    def wants(self) -> bool:
        return self._since_ns is not None and self.caught is None

    def drop(self) -> None:
        """Drop the caught step and want none."""
        self._trace.is_on, self._since_ns, self.caught = False, None, None
        self._trace.forget()

    def see(self, event: Observed) -> None:
        """Catch a step as soon as it has ended, if it began after `want`."""
        if isinstance(event, StepEnded) and self.wants and event.start_ns >= (self._since_ns or 0):
            self._trace.is_on, self.caught = False, event

    # ---- what was caught ----------------------------------------------------------------------------

    def parts(self, dies: Sequence[DieRow]) -> dict[str, StepPart | LoadPart | HeatPart | TrafficPart]:
        """Make the parts of the caught step, for the dies of the pod's part, and forget the step."""
        step = self.caught
        assert step is not None
        spans = [
            span
            for span in self._trace.spans
            if span.start_ns >= step.start_ns and span.start_ns < step.end_ns and span.end_ns > span.start_ns
        ]
        found: dict[str, StepPart | LoadPart | HeatPart | TrafficPart] = {
            "step": self._step_part(step, spans, dies),
            "load": _load_part(step, spans, dies),
            "heat": self._heat_part(spans, dies),
            "traffic": self._traffic_part(),
        }
        self.drop()
        return found

    def _step_part(self, step: StepEnded, spans: Iterable[TraceSpan], dies: Sequence[DieRow]) -> StepPart:
        spans = [span for span in spans if span.lane not in HIDDEN]
        layers = self._layers(spans, dies)
        of_die: dict[int, list[TraceSpan]] = defaultdict(list)
        for span in spans:
            if (span.args or {}).get("layer", layers.start) in layers:
                of_die[span.node].append(span)
        shown = shown_dies(dies, {die: len(found) for die, found in of_die.items()})
        lanes: dict[str, int] = {}
        names: dict[str, int] = {}
        rows = [
            _span_row(span, step.start_ns, lanes, names)
            for die in shown
            for span in sorted(of_die[die], key=lambda each: (each.start_ns, each.end_ns, each.lane))
        ]
        return StepPart(
            te=step.group.te,
            group=step.group.rank,
            step=step.step,
            start_ns=step.start_ns,
            end_ns=step.end_ns,
            num_rows=sum(share.num_tokens + len(share.drafts) for share in step.shares),
            num_shown=len(shown),
            num_dies=len(of_die),
            first_layer=layers.start,
            last_layer=layers.stop - 1,
            lanes=list(lanes),
            names=list(names),
            spans=rows,
        )

    def _layers(self, spans: Sequence[TraceSpan], dies: Sequence[DieRow]) -> range:
        """Choose the layers to draw: all, or as many around the first with experts as leave room for a few
        dies of each role."""
        config = self._engine.plan.config
        last = max([config.num_hidden_layers - 1, *((span.args or {}).get("layer", 0) for span in spans)])
        most = max(Counter(span.node for span in spans).values(), default=1)
        num_roles = len({(row.te, row.role, row.domain) for row in dies})
        num_shown = (last + 1) * MAX_SPANS // (most * 2 * num_roles)
        if num_shown > last or len(spans) <= MAX_SPANS:
            return range(last + 1)
        first = next((i for i in range(last + 1) if config.is_moe(i)), 0)
        first = max(0, first - 1)
        return range(first, min(last + 1, first + max(2, num_shown)))

    def _heat_part(self, spans: Sequence[TraceSpan], dies: Sequence[DieRow]) -> HeatPart:
        """Make the part of work by layer: rows by expert if kernels report them, else the time of dies with
        experts."""
        heat: dict[int, Counter[int]] = defaultdict(Counter)
        kernels = [span for span in spans if span.name == "Experts" and span.args and "layer" in span.args]
        plan = self._engine.plan
        by_rows = plan.timing is None and any("experts" in (span.args or {}) for span in kernels)
        for span in kernels:
            args = span.args or {}
            if not by_rows:
                heat[args["layer"]][span.node] += (span.end_ns - span.start_ns) // 1000
            for expert, count in args.get("experts", {}).items() if by_rows else ():
                heat[args["layer"]][expert] += count
        if by_rows:
            columns = sorted({i for row in dies if row.last_expert >= 0 for i in _held(row)})
        else:
            columns = sorted({die for counts in heat.values() for die in counts})
        layers = sorted(heat)
        values = [[heat[layer][column] for column in columns] for layer in layers]
        return HeatPart("rows" if by_rows else "us", layers, columns, values)

    def _traffic_part(self) -> TrafficPart:
        total: Counter[tuple[int, int, str]] = Counter()
        for source, target, nbytes, plane in self._trace.moved:
            total[source, target, plane] += nbytes
        most = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:MAX_PAIRS]
        pairs = [(source, target, nbytes, plane) for (source, target, plane), nbytes in most]
        return TrafficPart(pairs, len(total), sum(total.values()))


def _held(row: DieRow) -> range:
    return range(row.first_expert, row.last_expert + 1)


def shown_dies(dies: Sequence[DieRow], num_spans: dict[int, int]) -> list[int]:
    """Choose the dies to draw, within MAX_SPANS spans: in turn, one more die of every role."""
    by_role: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for row in dies:
        if num_spans.get(row.die):
            by_role[row.te, row.role, row.domain].append(row.die)
    shown: set[int] = set()
    left = MAX_SPANS
    for turn in range(max(map(len, by_role.values()), default=0)):
        for members in by_role.values():
            if turn < len(members):
                left -= num_spans[members[turn]]
                if left < 0 and shown:
                    return [row.die for row in dies if row.die in shown]
                shown.add(members[turn])
    return [row.die for row in dies if row.die in shown]


def _span_row(span: TraceSpan, start_ns: int, lanes: dict[str, int], names: dict[str, int]) -> SpanRow:
    args = span.args or {}
    return SpanRow(
        span.node,
        lanes.setdefault(span.lane, len(lanes)),
        names.setdefault(span.name, len(names)),
        span.start_ns - start_ns,
        span.end_ns - span.start_ns,
        args.get("layer", -1),
        args.get("microbatch", -1),
        args.get("domain", -1),
        int(is_wait(span)),
        args.get("bytes", -1),
    )


def _load_part(step: StepEnded, spans: Iterable[TraceSpan], dies: Sequence[DieRow]) -> LoadPart:
    busy: Counter[int] = Counter()
    waits: Counter[int] = Counter()
    for span in spans:
        if span.lane in BUSY:
            busy[span.node] += span.end_ns - span.start_ns
        elif is_wait(span):
            waits[span.node] += span.end_ns - span.start_ns
    whole = max(1, step.end_ns - step.start_ns)
    return LoadPart(
        [min(1000, 1000 * busy[row.die] // whole) for row in dies],
        [min(1000, 1000 * waits[row.die] // whole) for row in dies],
    )
