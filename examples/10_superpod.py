"""Walkthrough 10: a SuperPod.

The paper serves DeepSeek with 768 dies: 3 domains of 160 attention dies, and 288 expert dies, 256 with a
routed expert each and 32 with a copy of the shared one (xDeepServe 5.2, 7.1). The deployment is here, too,
for a model with all 61 layers and 256 experts of DeepSeek-R1, of tiny width.

This script runs 48 dies, a sixteenth of each kind, for one step, follows one token through its last layer in
the memories, to the experts and back, and compares all answers with those of one die. All times but those
marked "wall" are virtual.

48 dies run as tasks, with kernels as `make demo` compiles them, in a minute or two; if it has run, they are
there. All 768 run in lockstep, so that a laptop can do a step of them in seconds: kernels go over all dies'
memories at once, and leave the bytes that a task for each die would leave. Lockstep has kernels of its own,
which compile for some minutes more, once.

    python examples/10_superpod.py          # 48 dies
    python examples/10_superpod.py 768      # all; takes a minute and 4 GB, and to compile
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.exchange.layout import HEADER_DTYPE
from xdeepserve.comm.exchange.rows import weighted_sum
from xdeepserve.comm.wire import FIELD_DTYPE, Blocks
from xdeepserve.engine.description import team
from xdeepserve.jit.bf16 import from_bf16
from xdeepserve.llm import digest

SCALES = {48: (10, 16, 2), 768: (160, 256, 32)}  # attention dies in each domain, routed, shared
ONE = ["max_model_len=32"]
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def pod(dies: int) -> list[str]:
    attention, routed, shared = SCALES[dies]
    sizes = [f"attention.dies={attention}", f"experts.routed_dies={routed}", f"experts.shared_dies={shared}"]
    limits = ["max_model_len=32", "cache.num_blocks=4", "scheduler.max_num_seqs=2"]
    return [
        "attention.domains=3",
        *sizes,
        *limits,
        "scheduler.max_num_batched_tokens=8",
        f"lockstep={str(dies > 48).lower()}",
    ]


def found(llm: LLM, die: int, area: str, blocks: Blocks, part: str, dtype: Any) -> tuple[int, Any]:
    """A region of a die's memory: the byte at which it begins, and its rows or fields, as far as they go."""
    memory = llm.engine.plan.pod.memories[die]
    region = getattr(memory, area).regions[blocks.region(part)]
    nbytes = FIELD_DTYPE.itemsize if part == "fields" else blocks.row_nbytes
    raw = memory.view(region, np.uint8, (region.nbytes // nbytes, nbytes))
    return region.offset, raw[:, : np.dtype(dtype).itemsize].copy().view(dtype)[:, 0]


def told(who: str, field: Any) -> None:
    """What a field says."""
    event, pointer, rows = field.tolist()
    print(f"  the field {who}: event {event}, pointer {pointer}, {rows} row{'s' * (rows > 1)}")


def follow(llm: LLM) -> None:
    """What the last A2E and E2A of the first microbatch of the first domain have left in the memories."""
    (plan,) = llm.engine.plan.tes
    layout = plan.wiring.a2e[0][0]
    group, exchange = layout.sides.experts, layout.experts
    die, hub = plan.dies[0], layout.sides.trampoline(0)
    trampoline = group.dies[hub]

    at, tokens = found(llm, die, "managed", layout.tokens, "blocks", layout.token_dtype)
    token, experts = tokens[0], tokens[0]["topk_idx"].tolist()
    print(f"\nA2E: attention die {die} holds a token at byte {at}, INT8 {token['payload'][:6].tolist()} ...")
    print(f"  for experts {experts[:-1]}, and expert {experts[-1]}, a copy of the shared one")
    _, fields = found(llm, trampoline, "metadata", layout.tokens, "fields", FIELD_DTYPE)
    told(f"at die {trampoline}, its trampoline", fields[0])

    # Its first expert that does not live on the trampoline itself.
    slot = next((k for k, expert in enumerate(experts) if group.expert_rank[expert] != hub), 0)
    rank = group.expert_rank[experts[slot]]
    home = group.dies[rank]
    _, fields = found(llm, home, "metadata", exchange.dispatch, "fields", FIELD_DTYPE)
    row = np.dtype([("header", HEADER_DTYPE), ("payload", np.int8, (layout.hidden,))])
    _, copies = found(llm, home, "app", exchange.dispatch, "rows", row)
    here = int(fields["num_tokens"][:hub].sum())  # behind those of the trampolines before its own
    copy = copies[here]
    print(f"A2E': its copy at die {home}, where expert {experts[slot]} lives, is row {here}")
    told(f"at die {home}, of the trampoline", fields[hub])
    print(f"  for expert {copy['header']['expert_idx']}, slot {copy['header']['slot']}; ", end="")
    print(f"the same INT8: {np.array_equal(copy['payload'], token['payload'])}")

    answer = np.dtype([("payload", "<u2", (layout.hidden,))])
    _, fields = found(llm, trampoline, "metadata", exchange.combine, "fields", FIELD_DTYPE)
    at, answers = found(llm, home, "managed", exchange.combine, "blocks", answer)
    mine = answers["payload"][(fields["pointer"][rank] - at) // exchange.combine_row]
    print(f"E2A: the answer at byte {fields['pointer'][rank]} of die {home}, ", end="")
    print(f"BF16 {[round(x, 4) for x in from_bf16(mine[:4]).tolist()]} ...")
    told(f"at die {trampoline}, of die {home}", fields[rank])
    # The trampoline has the answers in the order of its rows: by die, and for a die by slot.
    _, pulled = found(llm, trampoline, "app", exchange.combine, "rows", answer)
    order = np.argsort([group.expert_rank[expert] for expert in experts], kind="stable")
    slots = np.empty((len(experts), layout.hidden), np.float32)
    slots[order] = from_bf16(pulled["payload"][: len(experts)])
    print(f"  one of {len(experts)} answers that the trampoline has pulled; ", end="")
    print(f"the same BF16: {np.array_equal(slots[slot], from_bf16(mine))}")

    at, sums = found(llm, trampoline, "managed", layout.answers, "blocks", layout.answer_dtype)
    total = sums["payload"][0]
    print(f"E2A': the sum at byte {at} of the trampoline, ", end="")
    print(f"float32 {[round(x, 4) for x in total[:4].tolist()]} ...")
    again = weighted_sum(slots[None], token["topk_weights"][None])[0]
    print(f"  the {len(experts)} answers by the gate's weights, slot by slot: {np.array_equal(again, total)}")
    _, fields = found(llm, die, "metadata", layout.answers, "fields", FIELD_DTYPE)
    _, sums = found(llm, die, "app", layout.answers, "rows", layout.answer_dtype)
    told(f"at attention die {die}", fields[0])
    print(f"  which has pulled the same float32: {np.array_equal(sums['payload'][0], total)}")


def main() -> None:
    dies = int(sys.argv[1]) if len(sys.argv) > 1 else 48
    if dies not in SCALES:
        raise SystemExit(f"choose one of {', '.join(map(str, SCALES))} dies")
    attention = 3 * SCALES[dies][0]
    prompts = [[5 + i % 20] for i in range(2 * attention)]  # of one token, so that a step is as in decode

    # Each wait says every few seconds how long it has lasted.
    minutes = "a minute or two (none after `make demo`)" if dies == 48 else "some minutes"
    print(f"The first run compiles kernels for {minutes}, later ones find them.", flush=True)
    with LLM("tiny-r1", "monolithic", overrides=ONE) as one:
        expected = [digest([each]) for each in one.generate(prompts[:20], PARAMS, keep_logits=True)]

    with LLM("tiny-r1", "moe-attention", overrides=pod(dies)) as llm:
        (plan,) = llm.engine.plan.tes
        print(team(plan))
        exchanges = plan.config.num_moe_layers * 3 * 2
        fields = exchanges * 2 * (len(plan.expert_dies) ** 2 + attention // 3)
        print(f"a step: {exchanges} A2E and as many E2A, {fields:,} fields")
        clock = llm.engine.plan.pod.clock
        start, start_ns = time.perf_counter(), clock.now
        outputs = llm.generate(prompts, PARAMS, keep_logits=True)
        wall, virtual = time.perf_counter() - start, clock.now - start_ns
        follow(llm)
        alike = sum(digest([each]) == expected[i % 20] for i, each in enumerate(outputs))
        print(f"\n{len(prompts)} requests, one step: {virtual / 1e6:.1f} ms")
        print(f"({wall:.1f} s wall on this computer)")
        print(f"the bits of one die: {alike} of {len(prompts)}")
        if alike != len(prompts):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
