"""Walkthrough 10: a SuperPod.

The paper serves DeepSeek with 768 dies: 3 domains of 160 attention dies, and 288 expert dies, 256 with a
routed expert each and 32 with a copy of the shared one (xDeepServe 5.2, 7.1). The deployment is here, too,
for a model with all 61 layers and 256 experts of DeepSeek-R1, of tiny width. So that a laptop can do a step
of it in seconds, the dies run in lockstep: kernels go over all dies' memories at once, and leave the bytes
that a task for each die would leave.

This script runs 48 dies, a sixteenth of each kind, follows one token through one layer in the memories, and
compares all answers with those of one die. All times but those marked "wall" are virtual.

    python examples/10_superpod.py          # 48 dies
    python examples/10_superpod.py 768      # all; takes a minute and 4 GB
"""

from __future__ import annotations

import contextlib
import sys
import time

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.cli.status import working
from xdeepserve.comm.exchange.layout import HEADER_DTYPE
from xdeepserve.comm.wire import FIELD_DTYPE
from xdeepserve.engine.description import team
from xdeepserve.llm import digest

SCALES = {48: (10, 16, 2), 768: (160, 256, 32)}  # attention dies in each domain, routed, shared
ONE = ["max_model_len=32"]
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def pod(dies: int) -> list[str]:
    attention, routed, shared = SCALES[dies]
    sizes = [f"attention.dies={attention}", f"experts.routed_dies={routed}", f"experts.shared_dies={shared}"]
    limits = ["max_model_len=32", "cache.num_blocks=4", "scheduler.max_num_seqs=2"]
    return ["attention.domains=3", *sizes, *limits, "scheduler.max_num_batched_tokens=8", "lockstep=true"]


def follow(llm: LLM) -> None:
    """What the last A2E of the first microbatch of the first domain has left in the memories."""
    (plan,) = llm.engine.plan.tes
    space, layout = llm.engine.plan.pod.memories, plan.net.a2e[0][0]
    die = plan.dies[0]
    region = space[die].managed.regions[layout.tokens.region("blocks")]
    token = space[die].view(region, layout.token_dtype, 1)[0]
    experts = token["topk_idx"].tolist()
    print(f"\nattention die {die} holds a token at {region.offset}, for experts {experts[:-1]}")
    print(f"  and {experts[-1]}, a copy of the shared one; INT8 {token['payload'][:6].tolist()} ...")

    trampoline = layout.sides.experts.dies[layout.sides.trampoline(0)]
    fields = space[trampoline].metadata.regions[layout.tokens.region("fields")]
    field = space[trampoline].view(fields, FIELD_DTYPE, 1)[0]
    print(f"its field at die {trampoline}, its trampoline: event {field['event_id']},")
    print(f"  pointer {field['pointer']}, {field['num_tokens']} token")

    rank = layout.sides.experts.expert_rank[experts[0]]
    home = layout.sides.experts.dies[rank]
    rows = space[home].app.regions[layout.experts.dispatch.region("rows")]
    raw = space[home].view(rows, np.uint8, (layout.experts.dispatch.max_rows, layout.experts.dispatch_row))
    header = raw[:, : HEADER_DTYPE.itemsize].copy().view(HEADER_DTYPE)[:, 0]
    here = [i for i in range(len(raw)) if header["expert_idx"][i] == experts[0]]
    same = [i for i in here if np.array_equal(raw[i, 16:22].view(np.int8), token["payload"][:6])]
    print(f"its copy at die {home}, where expert {experts[0]} lives: row {same[0]} of {len(here)}")


def main() -> None:
    dies = int(sys.argv[1]) if len(sys.argv) > 1 else 48
    if dies not in SCALES:
        raise SystemExit(f"choose one of {', '.join(map(str, SCALES))} dies")
    attention = 3 * SCALES[dies][0]
    prompts = [[5 + i % 20, 9] for i in range(2 * attention)]

    # Each wait says every few seconds how long it has lasted; the first run compiles kernels, once.
    with working("one die, to compare with"), LLM("tiny-r1", "monolithic", overrides=ONE) as one:
        expected = [digest([each]) for each in one.generate(prompts[:20], PARAMS, keep_logits=True)]

    with contextlib.ExitStack() as stack:
        with working(f"building {dies} dies"):
            llm = stack.enter_context(LLM("tiny-r1", "moe-attention", overrides=pod(dies)))
        (plan,) = llm.engine.plan.tes
        print(team(plan))
        exchanges = plan.config.num_moe_layers * 3 * 2
        fields = exchanges * 2 * (len(plan.expert_dies) ** 2 + attention // 3)
        print(f"a step: {exchanges} A2E and as many E2A, {fields:,} fields")
        clock = llm.engine.plan.pod.clock
        with working("serving, to warm up"):
            llm.generate(prompts, PARAMS)
        start, start_ns = time.perf_counter(), clock.now
        with working("serving, to measure"):
            outputs = llm.generate(prompts, PARAMS, keep_logits=True)
        wall, virtual = time.perf_counter() - start, clock.now - start_ns
        follow(llm)
        alike = sum(digest([each]) == expected[i % 20] for i, each in enumerate(outputs))
        steps = PARAMS.max_tokens
        print(f"\n{len(prompts)} requests, {steps} steps: {virtual / steps / 1e6:.1f} ms a step")
        print(f"({wall / steps:.1f} s wall on this computer)")
        print(f"the bits of one die: {alike} of {len(prompts)}")
        if alike != len(prompts):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
