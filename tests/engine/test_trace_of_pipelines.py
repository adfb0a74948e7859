"""What the figures of the papers show can be read off a trace: who works on which microbatch, and when."""

import itertools
import json
from pathlib import Path

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND
from xdeepserve.hw.trace import Flow, TraceSpan
from xdeepserve.model.presets import TinyCheckpoint

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
DOMAINS, MICROBATCHES = 2, 2
PROMPTS = [[i + 3] * 40 for i in range(8)]


@pytest.fixture(scope="module")
def disaggregated(tiny: TinyCheckpoint) -> tuple[list[TraceSpan], list[Flow], list[int]]:
    """Spans, arrows and expert dies of a pod of two domains with two microbatches each."""
    with LLM(tiny, "moe-attention", "int8", overrides=["max_model_len=64"], trace=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        trace = llm.engine.plan.pod.trace
        return trace.spans, trace.flows, list(llm.engine.plan.tes[0].expert_dies)


def place(span: TraceSpan) -> tuple[int, int, int]:
    assert span.args is not None
    return span.args["layer"], span.args["microbatch"], span.args["domain"]


def test_experts_serve_one_domain_after_the_other_then_the_next_microbatch(
    disaggregated: tuple[list[TraceSpan], list[Flow], list[int]], tiny: TinyCheckpoint
) -> None:
    """XDS Figure 19: domain 0 mb 0, domain 1 mb 0, domain 0 mb 1, domain 1 mb 1, then the next layer."""
    spans, _, expert_dies = disaggregated
    layers = [i for i in range(tiny.config.num_hidden_layers) if tiny.config.is_moe(i)]
    one_step = list(itertools.product(layers, range(MICROBATCHES), range(DOMAINS)))
    for die in expert_dies:
        for lane in (RECEIVE, SEND):
            served = [place(span) for span in spans if (span.node, span.lane) == (die, lane)]
            assert len(served) >= len(one_step) * 4
            assert served == list(itertools.islice(itertools.cycle(one_step), len(served)))


def test_three_streams_of_an_expert_die_overlap_on_different_items(
    disaggregated: tuple[list[TraceSpan], list[Flow], list[int]],
) -> None:
    spans, _, expert_dies = disaggregated
    die = expert_dies[0]
    for lane in (RECEIVE, COMPUTE, SEND):
        own = [span for span in spans if (span.node, span.lane) == (die, lane)]
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(own))
    mine = [span for span in spans if span.node == die]
    received = [span for span in mine if span.lane == RECEIVE]
    sent = [span for span in mine if span.lane == SEND]
    pairs = [(a, b) for a in received for b in sent if overlap(a, b)]
    assert pairs
    assert all(place(a) != place(b) for a, b in pairs)


def test_attention_of_a_microbatch_overlaps_the_experts_of_the_other() -> None:
    """At full size, where kernels are longer than what they wait for."""
    with LLM("deepseek-r1", "moe-attention", timing_only=True, trace=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        spans, expert_die = llm.engine.plan.pod.trace.spans, llm.engine.plan.tes[0].expert_dies[0]
    kernels = ("MLAProlog", "MLA", "OProj")
    attention = [span for span in spans if span.node == 0 and span.name in kernels]
    experts = [span for span in spans if (span.node, span.lane) == (expert_die, COMPUTE)]
    own = [span for span in experts if place(span)[2] == 0]
    met = {
        (a.args["microbatch"], b.args["microbatch"])
        for a in attention
        for b in own
        if overlap(a, b) and a.args is not None and b.args is not None
    }
    assert met == {(0, 1), (1, 0)}


def overlap(a: TraceSpan, b: TraceSpan) -> bool:
    return a.start_ns < b.end_ns and b.start_ns < a.end_ns


def test_arrows_lead_from_attention_to_expert_dies_and_back(
    disaggregated: tuple[list[TraceSpan], list[Flow], list[int]],
) -> None:
    _, flows, expert_dies = disaggregated
    to_experts = {flow.node for flow in flows if flow.to_node in expert_dies} - set(expert_dies)
    from_experts = {flow.to_node for flow in flows if flow.node in expert_dies} - set(expert_dies)
    assert to_experts
    assert from_experts == to_experts


def test_stages_of_a_layer_follow_each_other(tiny: TinyCheckpoint) -> None:
    """XDS Figure 10, on every die, with arrows from die to die at dispatch."""
    stages = ["MLAProlog", "MLA", "OProj", "Gate", "Experts", "SharedExpert"]
    with LLM(tiny, "colocated", "int8", overrides=["dies=4", "max_model_len=64"], trace=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        trace = llm.engine.plan.pod.trace
    for die in range(4):
        layer = [
            span
            for span in trace.spans
            if span.node == die and (span.args or {}).get("layer") == 2 and span.name in stages
        ]
        assert [span.name for span in layer[: len(stages)]] == stages
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(layer[: len(stages)]))
    assert {(flow.node, flow.to_node) for flow in trace.flows if flow.name.startswith("dispatch")}


def test_the_transfer_of_a_request_is_an_arrow_from_prefill_to_decode(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    """XDS Figure 17: blocks stay registered at prefill (3 to 8) until decode has received them (6 to 8)."""
    overrides = ["prefill.dies=1", "decode.dies=1", "max_model_len=64"]
    with LLM(tiny, "pd", "int8", overrides=overrides, trace=True) as llm:
        llm.generate(PROMPTS, GREEDY)
        trace, (prefill, decode) = llm.engine.plan.pod.trace, llm.engine.plan.tes
        trace.write(tmp_path / "pd.json")
    offers = {s.name: s for s in trace.spans if s.lane == "DistFlow" and s.node == prefill.dies[0]}
    receives = {s.name: s for s in trace.spans if s.lane == "DistFlow" and s.node == decode.dies[0]}
    assert len(offers) == len(receives) == len(PROMPTS)
    arrows = [flow for flow in trace.flows if flow.lane == "DistFlow"]
    assert len(arrows) == len(PROMPTS)
    for index in range(len(PROMPTS)):
        offer, receive = offers[f"3-8 request {index}"], receives[f"6-8 request {index}"]
        assert offer.start_ns <= receive.start_ns < receive.end_ns <= offer.end_ns
    events = json.loads((tmp_path / "pd.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "s" and event["name"].startswith("KV") for event in events) == len(PROMPTS)
