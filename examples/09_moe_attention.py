"""Walkthrough 9: MoE and attention apart.

Attention dies keep the KV cache and compute attention; expert dies hold experts and nothing else, and run
three kernels that never return to the host (xDeepServe 5.2). Attention dies form DP domains, which the
experts serve in turn, and each domain cuts a step in two microbatches, so that attention of one overlaps
the experts of the other.

This script shows who holds what, the timeline of one step on one attention die and one expert die, and that
the bits are those of a single die; then what the paper only imagines (5.3): no barriers, so that a die that
is late holds up nobody but itself. All times are virtual.

With a file it writes the timeline there, and says where to look for the paper's Figures 10 and 19.

    python examples/09_moe_attention.py [FILE]
"""

from __future__ import annotations

import sys

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.description import team
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND
from xdeepserve.hw.gantt import in_terminal, steps_of
from xdeepserve.hw.trace import TraceSpan
from xdeepserve.llm import digest

POD = ["attention.domains=2", "attention.dies=2", "experts.routed_dies=4"]
PROMPTS = [[i, i + 1, i + 2] for i in range(8)]
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
LONGER = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


KERNELS = ("AIC", "AIV", "XCCL")  # kernels, and steps of A2E and E2A
STREAMS = (RECEIVE, COMPUTE, SEND)  # the three persistent kernels of an expert die
LOOK = """
Open {file} at https://ui.perfetto.dev. A process is a die, called by its role; a thread is a stream
or an engine.
  Figure 19, experts     "experts 0 (routed)": A2E receive, MoE and E2A send, each item named by domain and
                         microbatch: one domain at a time, domain 0, domain 1, then the other microbatch
  Figure 19, attention   "domain 0 / attention die 0": AIC has MLAProlog, MLA, OProj; a click on one tells its
                         layer, microbatch and domain: one microbatch computes while the other is away
  two-stage routing      arrows A2E to the trampoline and E2A' back; its "steps" lanes have A2E', E2A between
  Figure 10              AIC, AIV and XCCL of an attention die, layer by layer; "last field" arrows come from
                         who held up a barrier"""


def timeline(spans: list[TraceSpan], node: int, lanes: tuple[str, ...], start: int, stop: int) -> None:
    """What a die does between two moments, one line for each run of equal names in one layer."""
    lines: list[tuple[tuple[str, str, str], int, int]] = []
    for span in sorted((s for s in spans if s.node == node), key=lambda s: (s.start_ns, s.end_ns)):
        if span.lane not in lanes or not start <= span.start_ns < stop or span.start_ns == span.end_ns:
            continue
        args = span.args or {}
        places = [key for key in ("layer", "microbatch") if key in args and key not in span.name]
        where = " ".join(f"{key} {args[key]}" for key in places)
        key = span.lane, where, span.name
        if lines and lines[-1][0] == key:
            lines[-1] = (key, lines[-1][1], span.end_ns)
        else:
            lines.append((key, span.start_ns, span.end_ns))
    for (lane, where, name), begin, end in lines:
        times = f"{(begin - start) / 1000:8.1f} .. {(end - start) / 1000:8.1f} us"
        print(f"  {times}  {lane:<11} {where} {name}")


def main() -> None:
    with LLM("tiny-random", "monolithic") as one:
        expected = digest(one.generate(PROMPTS, PARAMS, keep_logits=True))
    with LLM("tiny-random", "moe-attention", overrides=POD, trace=True) as llm:
        (plan,) = llm.engine.plan.tes
        print(team(plan))
        for die, mem in plan.all_memories:
            role = "attention" if die in plan.dies else "experts"
            held = str(list(mem.experts)) if len(mem.experts) else "the shared one"
            held = held if role == "experts" else "with a DP group"
            print(f"  die {die} ({llm.engine.plan.pod.topology.name(die)}): {role} {held}")
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        spans = llm.engine.plan.pod.trace.spans
        starts = sorted(s.start_ns for s in spans if s.node == plan.dies[0] and s.name == "Embed")
        layer = sorted(s.start_ns for s in spans if s.node == plan.dies[0] and s.name == "MLAProlog")
        begin = next(t for t in layer if t >= starts[-1])
        after = [t for t in layer if t > begin]
        print("\n--- the first two layers of the last step on attention die 0: two microbatches in turn")
        timeline(spans, plan.dies[0], KERNELS, begin, after[3] if len(after) > 3 else begin + 300_000)
        print("\n--- meanwhile on the first expert die: domains and microbatches in a fixed order")
        timeline(spans, plan.expert_dies[0], STREAMS, begin, after[3] if len(after) > 3 else begin + 300_000)
        print("\n--- that step on all dies: 0 and 1 are microbatches, · waits for another die")
        trace = llm.engine.plan.pod.trace
        print(*in_terminal(trace, *steps_of(trace)[-1], width=100, colour=False), sep="\n")
        if len(sys.argv) > 1:
            llm.write_trace(sys.argv[1])
            print(LOOK.format(file=sys.argv[1]))
        flags = llm.engine.je.tes[0].expert_programs[0].mem
        memory = llm.engine.plan.pod.memory(plan.expert_dies[0])
        print(
            f"\nflags of that die: {flags.received.read(memory)} received, "
            f"{flags.computed.read(memory)} computed, {flags.sent.read(memory)} sent "
            "\n  = 3 steps x 3 layers x 2 microbatches x 2 domains"
        )
    print(f"the same tokens and logits as on one die: {digest(outputs) == expected}")

    print("\n--- without barriers: tokens flow, and the experts serve whoever has come")
    digests = set()
    for launches, is_pinned in (("in time", "true"), ("late at random", "false")):
        for mode in ("dataflow=false", "dataflow=true"):
            settings = [*POD, mode, f"execution.pin_cores={is_pinned}"]
            with LLM("tiny-random", "moe-attention", overrides=settings) as llm:
                outputs = llm.generate(PROMPTS, LONGER, keep_logits=True)
            digests.add(digest(outputs))
            ends = [output.metrics.last_token_ns or 0 for output in outputs if output.metrics is not None]
            mean_ms = sum(ends) / len(ends) / 1e6
            print(f"  launches {launches:<15} {mode:<15} a request takes {mean_ms:6.1f} ms")
    print(f"  all digests the same: {len(digests) == 1}")


if __name__ == "__main__":
    main()
