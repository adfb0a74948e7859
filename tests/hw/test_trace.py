"""The trace file is what Perfetto and chrome://tracing accept."""

import itertools
import json
from pathlib import Path

import pytest

from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.trace import Trace


def test_off_records_nothing() -> None:
    trace = Trace(is_on=False)
    trace.span(0, "AIC", "k", 0, 1)
    trace.flow("f", 0, "AIC", 0, 1, "AIC", 1)
    assert (trace.spans, trace.flows) == ([], [])


def make_trace() -> Trace:
    trace = Trace()
    trace.node_names = {0: "s00.c0.d0", 1: "s00.c0.d1"}
    trace.span(1, "MTE3", "post", 2000, 3500, {"bytes": 32})
    trace.span(0, "AIC", "attention", 0, 1500)
    trace.span(0, "AIC", "gate", 1000, 1200)
    trace.span(0, "AIC", "experts", 1500, 4001)
    trace.flow("count", 1, "MTE3", 3000, 0, "AIC", 4000)
    return trace


def test_file_holds_names_slices_and_arrows(tmp_path: Path) -> None:
    make_trace().write(tmp_path / "x.trace.json")
    document = json.loads((tmp_path / "x.trace.json").read_text())
    assert document["displayTimeUnit"] == "ns"
    events = document["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    # Two overlapping kernels cannot share a thread.
    assert names == {(0, 1): "AIC", (0, 2): "AIC (2)", (1, 1): "MTE3"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "s00.c0.d0", 1: "s00.c0.d1"}
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (0, 1, "attention", 0, 1.5),
        (0, 2, "gate", 1.0, 0.2),
        (0, 1, "experts", 1.5, 2.501),
        (1, 1, "post", 2.0, 1.5),
    ]
    start, end = (next(e for e in events if e["ph"] == ph) for ph in "sf")
    assert (start["id"], start["cat"], start["name"]) == (end["id"], end["cat"], end["name"])
    assert end["bp"] == "e"
    for arrow, inside in ((start, "post"), (end, "experts")):
        home = next(e for e in events if e["name"] == inside)
        assert (arrow["pid"], arrow["tid"]) == (home["pid"], home["tid"])
        assert home["ts"] <= arrow["ts"] <= home["ts"] + home["dur"]


def test_slices_of_a_thread_never_overlap() -> None:
    trace = Trace()
    for i in range(40):
        trace.span(0, "AIV", f"k{i}", i * 7 % 23, i * 7 % 23 + i % 9)
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in trace.events():
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, lanes.values())) == 40
    for spans in lanes.values():
        assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(spans))


def test_digest_tells_runs_apart() -> None:
    other = make_trace()
    assert make_trace().digest() == other.digest()
    other.span(0, "AIC", "more", 5000, 5001)
    assert make_trace().digest() != other.digest()


@pytest.mark.parametrize("engine", ["mte", "dma", "urma"])
async def test_engines_draw_themselves(engine: str) -> None:
    pod = Pod(trace=Trace())
    for node in (0, 1):
        pod.plan(node).app.alloc("data", 64)
    pod.materialise()
    copy = getattr(pod.dies[0], engine).copy
    await pod.dies[0].spawn(copy([Copy(Address(0, 0), Address(1, 0), 64)], name="kv"))
    lanes = ["MTE2", "MTE3"] if engine == "mte" else [engine.upper()]
    assert [(s.node, s.lane, s.name) for s in pod.trace.spans] == [(0, lane, "kv") for lane in lanes]
    assert pod.trace.spans[-1].end_ns == pod.clock.now
