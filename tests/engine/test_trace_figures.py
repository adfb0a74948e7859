"""The trace file, in every way of running: who is who, what each span belongs to, arrows from span to span,
and the shapes of xDeepServe's Figures 10, 17 and 19."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.bench.papers import superpod
from xdeepserve.engine.deploy.policies import DECODE
from xdeepserve.engine.job.journey import MARK_NS, STEPS
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND, STREAMS
from xdeepserve.errors import RequestError
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import TinyCheckpoint, resolve_model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = [[i + 3] * 40 for i in range(8)]
BY_LAYER = ("transfer=layer", "mtp=1")
PAIR = ("prefill.dies=2", "decode.dies=2")
MODES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "moe-attention": ("moe-attention", (), False),
    "moe-attention lockstep": ("moe-attention", ("lockstep=true", "mtp=1"), False),
    "moe-attention dataflow": ("moe-attention", ("dataflow=true",), False),
    "moe-attention timing": ("moe-attention", (), True),
    "pd": ("pd", PAIR, False),
    "pd by layer": ("pd", (*PAIR, *BY_LAYER), False),
    "pd tp": ("pd", ("prefill.dies=4", "prefill.tp=4", "prefill.tp_mode=sp-tp-sp", "decode.dies=2"), False),
    "pd 910b": ("pd", (*PAIR, "prefill.hardware=910b"), False),
    "pd microbatches": ("pd", (*PAIR, "pipeline.microbatches=2"), False),
    "pd timing": ("pd", (*PAIR, "pipeline.microbatches=2"), True),
    "transformerless": ("transformerless", (), False),
    "transformerless lockstep": ("transformerless", ("lockstep=true",), False),
    "transformerless timing": ("transformerless", (), True),
    "colocated lockstep": ("colocated", ("dies=4", "lockstep=true"), False),
}
APART = [mode for mode in MODES if MODES[mode][0] in ("moe-attention", "transformerless")]
IN_ORDER = [mode for mode in APART if "dataflow" not in mode]
TWO_TES = [mode for mode in MODES if MODES[mode][0] in ("pd", "transformerless")]
OUTSIDE_LAYERS = {"Embed", "Norm", "Sample", "Draft", "DraftState", "DraftRows", "MTPInput"}


class Slice(NamedTuple):
    """A span of a file, with the names of its process and its thread."""

    process: str
    lane: str
    name: str
    start: int  # ns
    end: int
    args: dict[str, Any]


class File:
    """What a viewer makes of a trace."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text())["traceEvents"]
        meta = [event for event in events if event["ph"] == "M"]
        self.processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
        order = {e["pid"]: e["args"]["sort_index"] for e in meta if e["name"] == "process_sort_index"}
        self.in_order = [self.processes[pid] for pid in sorted(self.processes, key=order.__getitem__)]
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in meta if e["name"] == "thread_name"}
        self.slices: list[Slice] = []
        self._by_thread: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                key = event["pid"], event["tid"]
                start = round(event["ts"] * 1000)
                end = start + round(event["dur"] * 1000)
                process, lane = self.processes[event["pid"]], threads[key].split(" (")[0]
                one = Slice(process, lane, event["name"], start, end, event["args"])
                self.slices.append(one)
                self._by_thread[key].append(one)
        arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event["ph"] in "stf":
                arrows[event["id"]].append(event)
        self.arrows = [(points[0]["name"], [*map(self._slice_of, points)]) for points in arrows.values()]
        for points in arrows.values():
            assert [e["ph"] for e in points] == ["s", *"t" * (len(points) - 2), "f"]
            assert len({(e["name"], e["cat"]) for e in points}) == 1

    def _slice_of(self, event: dict[str, Any]) -> Slice:
        """The one that a viewer binds an arrow's end to: it lasts at that moment."""
        thread = self._by_thread[event["pid"], event["tid"]]
        (found,) = [one for one in thread if one.start <= round(event["ts"] * 1000) < one.end]
        return found


def small_r1() -> Checkpoint:
    """DeepSeek-R1 in full width, with 6 layers: three dense, three of experts."""
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=6)
    return model


class Files(dict[str, File]):
    """The file of a mode, made when it is asked for. A trace changes neither bits nor virtual times."""

    def __init__(self, tiny: TinyCheckpoint, directory: Path) -> None:
        super().__init__()
        self._tiny, self._directory = tiny, directory

    def __missing__(self, mode: str) -> File:
        deployment, settings, is_timing = MODES[mode]
        seen = []
        for is_on in (False, True):
            model = small_r1() if is_timing else self._tiny
            overrides = ["max_model_len=64", *settings]
            with LLM(model, deployment, overrides=overrides, trace=is_on, timing_only=is_timing) as llm:
                # At full size prefill is slow: let each die have two sequences at a time, one a microbatch.
                params = SamplingParams(max_tokens=12, ignore_eos=True) if is_timing else GREEDY
                outputs = llm.generate(PROMPTS, params, keep_logits=not is_timing)
                llm.engine.check_integrity()
                trace = llm.engine.plan.pod.trace
                seen.append((None if is_timing else digest(outputs), llm.virtual_ns))
                if is_on:
                    path = self._directory / f"{mode}.json"
                    llm.write_trace(path)
                    self[mode] = File(path)
                    # Every arrow is drawn: none lacks the span that it should begin or end in.
                    assert len(self[mode].arrows) == len(trace.flows) + len(trace.chains)
                else:
                    assert not trace.spans
                    assert not trace.flows
                    assert not trace.chains
        assert seen[0] == seen[1], mode
        return self[mode]


@pytest.fixture(scope="module")
def files(tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tiny, tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize("mode", MODES)
def test_dies_are_named_and_ordered_by_role(files: Files, mode: str) -> None:
    deployment = MODES[mode][0]
    names = files[mode].in_order
    dies = [name for name in names if not name.startswith(("job executor", "TE-shell"))]
    if deployment == "transformerless":
        assert names[:3] == ["job executor", "TE-shell of prefill 0", "TE-shell of decode 0"]
    apart = [
        *(f"domain {d} / attention die {i}" for d in range(2) for i in range(2)),
        *(f"experts {i} (routed)" for i in range(4)),
        "shared expert die 0",
    ]
    expected = {
        "moe-attention": apart,
        "transformerless": [f"decode 0 / {name}" for name in apart]
        + [f"prefill 0 die {i}" for i in range(4)],
        "pd": [*(f"decode 0 die {i}" for i in range(2)), *(f"prefill 0 die {i}" for i in range(4))],
        "colocated": [f"die {i}" for i in range(4)],
    }[deployment]
    assert [name for name in expected if name in dies] == dies
    assert len(dies) >= len(expected) - 2 * (deployment == "pd")


@pytest.mark.parametrize("mode", MODES)
def test_every_kernel_says_what_it_belongs_to(files: Files, mode: str) -> None:
    kernels = [
        one for one in files[mode].slices if one.lane in ("AIC", "AIV", "XCCL", RECEIVE, COMPUTE, SEND)
    ]
    assert kernels
    for one in kernels:
        if one.name in OUTSIDE_LAYERS:
            wanted: set[str] = set()
        else:
            wanted = {"layer"}
            if "experts" in one.process or "expert die" in one.process or "attention" in one.process:
                wanted |= {"microbatch"}
            if "microbatches" in mode or mode == "pd timing":
                wanted |= {"microbatch"}
        if "attention" in one.process or ("layer" in wanted and "expert" in one.process):
            wanted |= {"domain"}
        assert wanted <= one.args.keys(), one


@pytest.mark.parametrize("mode", MODES)
def test_arrows_lead_from_die_to_die(files: Files, mode: str) -> None:
    """From every attention die to experts and back; between dies that dispatch and combine."""
    pairs = {
        (points[0].process, points[-1].process)
        for name, points in files[mode].arrows
        if not name.startswith("request")
    }
    assert pairs
    assert all(a != b for a, b in pairs)
    assert all(a.start <= b.end for _, points in files[mode].arrows for a, b in itertools.pairwise(points))
    attention = {name for name in files[mode].processes.values() if "attention" in name}
    assert attention == {a for a, b in pairs if "attention" in a and "expert" in b}
    assert attention == {b for a, b in pairs if "attention" in b and "expert" in a}


def items(file: File, process: str, lane: str) -> list[tuple[int, int, int]]:
    """Layer, microbatch and domain of what a stream does, one after the other."""
    own = [one for one in file.slices if (one.process, one.lane) == (process, lane)]
    assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    assert {one.name for one in own} <= {f"domain {d} microbatch {m}" for d in range(2) for m in range(2)}
    return [(one.args["layer"], one.args["microbatch"], one.args["domain"]) for one in own]


@pytest.mark.parametrize("mode", IN_ORDER)
def test_figure_19_one_domain_at_a_time_at_the_experts(files: Files, mode: str) -> None:
    """Domain 0 mb 0, domain 1 mb 0, domain 0 mb 1, domain 1 mb 1, then the next layer, on all streams."""
    file = files[mode]
    experts = [name for name in file.in_order if "expert" in name]
    assert len(experts) >= 5
    for process in experts:
        received, sent = items(file, process, RECEIVE), items(file, process, SEND)
        assert received == sent
        assert len(received) % 4 == 0
        for i in range(0, len(received), 4):
            layer = received[i][0]
            assert received[i : i + 4] == [(layer, m, d) for m in range(2) for d in range(2)]
        computed = iter(received)
        assert all(item in computed for item in items(file, process, COMPUTE))  # in that order, none made up


@pytest.mark.parametrize("mode", APART)
def test_figure_19_microbatches_and_domains_overlap(files: Files, mode: str) -> None:
    """While experts have one microbatch, a domain's attention has the other; so have other domains."""
    file, kernel_names = files[mode], ("MLAProlog", "MLA", "OProj", "Gate", "Residual")
    kernels = [one for one in file.slices if "attention" in one.process and one.name in kernel_names]
    if "timing" in mode:  # at full size attention lasts longer than the experts' kernels
        served = [one for one in file.slices if one.lane == COMPUTE]
    else:
        served = [one for one in file.slices if one.lane in (RECEIVE, COMPUTE, SEND)]
    met = set()
    by_start = sorted(kernels, key=lambda one: one.start)
    for one in served:
        for other in by_start:
            if other.start >= one.end:
                break
            if other.end > one.start and not isinstance(one.args["domain"], list):
                same = one.args["domain"] == other.args["domain"]
                met.add((same, one.args["microbatch"], other.args["microbatch"]))
    assert {(True, 0, 1), (True, 1, 0)} <= met
    assert any(not same for same, *_ in met)


@pytest.mark.parametrize("mode", IN_ORDER)
def test_two_stages_by_trampolines(files: Files, mode: str) -> None:
    """A2E goes out to an expert die, E2A' comes back from the same; A2E' and E2A are among expert dies."""
    file = files[mode]
    outward = {(a.process, b.process) for name, (a, b) in self_contained(file) if name == "A2E"}
    back = {(b.process, a.process) for name, (a, b) in self_contained(file) if name == "E2A'"}
    assert outward == back
    assert len(outward) == len({attention for attention, _ in outward}) == 4  # a trampoline for each
    for name, (a, b) in self_contained(file):
        if name == "A2E":
            assert (a.args["layer"], a.args["microbatch"]) == (b.args["layer"], b.args["microbatch"])
            assert a.args["domain"] == b.args["domain"]
    if not MODES[mode][2] and "lockstep" not in mode:
        steps = {one.name for one in file.slices if "experts" in one.process}
        assert {"A2E 6-7", "A2E' 6-7", "E2A 6-7", "E2A' 4"} <= steps


def self_contained(file: File) -> list[tuple[str, tuple[Slice, Slice]]]:
    """Arrows of two ends."""
    return [(name, (points[0], points[1])) for name, points in file.arrows if len(points) == 2]


@pytest.mark.parametrize("mode", TWO_TES)
def test_figure_17_eight_steps_of_each_request(files: Files, mode: str) -> None:
    file = files[mode]
    chains = {name: points for name, points in file.arrows if name.startswith("request")}
    assert set(chains) == {f"request {i}" for i in range(len(PROMPTS))}
    for name, points in chains.items():
        assert {one.args["request"] for one in points} == {int(name.split()[1])}
        assert all(one.name.startswith(f"{one.args['step']} {STEPS[one.args['step']]}") for one in points)
        numbers = [one.args["step"] for one in points]
        steps = [number for number, _ in itertools.groupby(numbers)]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
        assert numbers.count(8) == 2  # both sides learn of it
        assert all(a.start <= b.start for a, b in itertools.pairwise(points))
        where = {number: one.process for number, one in zip(numbers, points, strict=True)}
        assert where[1] == where[4] == "job executor"
        assert (where[2], where[5]) == ("TE-shell of prefill 0", "TE-shell of decode 0")
        assert where[3].startswith("prefill 0 die")
        assert where[6] == where[7]
        assert where[6].startswith("decode 0")


@pytest.mark.parametrize(
    ("policy", "waiting"), [(name, 6 if name == "round-robin" else 5) for name in DECODE.rows]
)
def test_figure_17_with_several_tes_and_full_decode(
    tiny: TinyCheckpoint, tmp_path: Path, policy: str, waiting: int
) -> None:
    """Who waits for blocks does so at the TE-shell, or where groups are taken in turn at the group."""
    tight = [
        "cache.num_blocks=7",
        "prefill.count=2",
        "decode.count=2",
        "prefill.dies=1",
        "decode.dies=1",
        "max_model_len=112",
    ]
    with LLM(tiny, "pd", overrides=[*tight, f"scheduler.decode={policy}"], trace=True) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        llm.generate([[i] * 60 for i in range(12)], params)
        llm.engine.check_integrity()
        llm.write_trace(tmp_path / "trace.json")
    file = File(tmp_path / "trace.json")
    chains = [points for name, points in file.arrows if name.startswith("request")]
    pairs = set()
    for points in chains:
        by_step = {one.args["step"]: one for one in points}
        assert sorted(by_step) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [one.args["step"] for one in points[:7]] == [1, 2, 3, 4, 5, 6, 7]
        assert by_step[6].end <= by_step[7].start
        pairs.add((by_step[3].process, by_step[7].process))
    assert len(pairs) >= 2
    assert sum(name.startswith("KV of request") for name, _ in file.arrows) == len(chains) == 12
    waits = sorted(points[waiting - 1].end - points[waiting - 1].start for points in chains)
    assert waits[0] == MARK_NS
    assert waits[-1] > 1000 * MARK_NS


@pytest.mark.parametrize("mode", TWO_TES)
def test_figure_17_an_arrow_for_each_part(files: Files, tiny: TinyCheckpoint, mode: str) -> None:
    """From the registration at prefill (3 to 8) to the bytes that decode moves (7)."""
    arrows: dict[str, list[int]] = defaultdict(list)
    for name, (source, target) in self_contained(files[mode]):
        if name.startswith("KV of request"):
            assert source.name == f"3-8 request {name.split()[-1]}"
            assert source.process.startswith("prefill 0")
            assert target.process.startswith("decode 0")
            assert (target.args["step"], target.args["request"]) == (7, int(name.split()[-1]))
            arrows[name].append(target.args["parts"])
    assert len(arrows) == len(PROMPTS)
    num_parts = tiny.config.num_hidden_layers + 1 if mode == "pd by layer" else 1
    for parts in arrows.values():
        assert len(parts) == num_parts
        assert {part for move in parts for part in move} == set(range(num_parts))


def test_figure_10_stages_of_a_layer_on_colocated_dies(files: Files) -> None:
    """Attention, gate, dispatch, experts, combine; the barriers end at the same time everywhere."""
    file = files["colocated lockstep"]
    stages = ["MLAProlog", "MLA", "OProj", "Gate", "dispatch", "Experts", "combine", "SharedExpert"]
    ends = set()
    for die in range(4):
        own = [one for one in file.slices if one.process == f"die {die}" and one.args.get("layer") == 2]
        own.sort(key=lambda one: one.start)
        assert [one.name for one in own[:8]] == stages
        assert all(a.end <= b.start for a, b in itertools.pairwise(own[:8]))
        ends.add(own[4].end)
    assert len(ends) == 1


@pytest.mark.parametrize("mode", ["pd microbatches", "pd timing"])
def test_streams_of_microbatches_that_share_a_die(files: Files, mode: str) -> None:
    """Decode: two streams of cores. Prefill: AIC, AIV and the DMA engine, two microbatches."""
    lanes = defaultdict(set)
    for one in files[mode].slices:
        lanes[one.process].add(one.lane)
    assert {*STREAMS, "AIC"} <= lanes["decode 0 die 0"]
    assert {"microbatch 0", "microbatch 1", "AIC", "SDMA"} <= lanes["prefill 0 die 0"]


def test_a_decode_iteration_of_the_benchmark_shows_figure_19(tmp_path: Path) -> None:
    """As `xdeepserve bench superpod --trace` has it, with fewer dies."""
    path, requests = tmp_path / "trace.json", 96
    deployment = superpod.disaggregated_deployment(3, 2, 8, 1, requests)
    taken = [superpod.simulate(deployment, requests, trace) for trace in (False, path)]
    assert taken[0] == msgspec.structs.replace(taken[1], drafts_ns=0.0)
    assert 0 < taken[1].drafts_ns < taken[1].iteration_ns
    file = File(path)
    received = [one for one in file.slices if (one.process, one.lane) == ("experts 0 (routed)", RECEIVE)]
    assert [one.name for one in received[:6]] == [
        f"domain {d} microbatch {m}" for m in range(2) for d in range(3)
    ]
    attention = [one for one in file.slices if one.process == "domain 0 / attention die 0"]
    assert {one.args["microbatch"] for one in attention if one.name == "MLA"} == {0, 1}
    assert {a.process for name, (a, _) in self_contained(file) if name == "A2E"} == {
        f"domain {d} / attention die {i}" for d in range(3) for i in range(2)
    }


def test_a_trace_shows_some_dies_of_each_role(tmp_path: Path) -> None:
    """Their spans and the arrows between them, and nothing of others."""
    settings = ["attention.dies=4", "experts.routed_dies=5", "lockstep=true", "max_model_len=64"]
    with LLM("tiny-random", "moe-attention", overrides=settings, trace=True, trace_dies=2) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.write_trace(tmp_path / "trace.json")
    file = File(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"nodes left out": 2 * 2 + 3}
    first, *names = file.in_order
    assert first == "job executor (7 of 14 dies shown)"
    dies = [name for name in names if "die" in name or "experts" in name]
    assert dies == [
        *(f"domain {d} / attention die {i}" for d in range(2) for i in range(2)),
        *(f"experts {i} (routed)" for i in range(2)),
        "shared expert die 0",
    ]
    assert {name for name, _ in file.arrows if not name.startswith("request")} == {"A2E", "E2A'"}
    with pytest.raises(RequestError, match=r"^trace_dies must be 0 \(all\) or more, found -1$"):
        LLM("tiny-random", trace=True, trace_dies=-1)


@pytest.mark.parametrize("hardware", ["cm384", "910b"])
def test_a_trace_leaves_dies_of_either_hardware_out(tmp_path: Path, hardware: str) -> None:
    """A 910B has one die where a package of CloudMatrix has two, so its numbers go up by two."""
    settings = ["prefill.dies=4", "prefill.tp=1", "decode.dies=4", f"prefill.hardware={hardware}"]
    with LLM("tiny-random", "pd", overrides=settings, trace=True, trace_dies=2) as llm:
        llm.generate(PROMPTS, GREEDY)
        llm.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"nodes left out": 2 + 2}
    shown = [name for name in File(tmp_path / "trace.json").in_order if " die " in name]
    assert shown == ["decode 0 die 0", "decode 0 die 1", "prefill 0 die 0", "prefill 0 die 1"]
