"""Walkthrough 13: replicas of hot experts, which move while tokens are served.

A workload of one kind has its favourite experts (`12_experts.py`), and all dies of an exchange wait for the
one that holds the hottest. EPLB (xDeepServe 4.5) counts tokens per expert, chooses experts to replicate and
dies to hold the replicas, loads them into redundant slots in four phases, and lets tokens rotate over them.

This script serves sums on a pod of eight dies and shows each part with what lies in the dies' memories; then
that the dies are evener, and that no bit differs from a single die's. All times are virtual.

    python examples/13_eplb.py
"""

from __future__ import annotations

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.balance.eplb import Counts, hottest_die, place, select
from xdeepserve.engine.die.replicas import NOTHING
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.evals.samples import examined
from xdeepserve.llm import digest

POD = ["dies=8", "experts.redundant_slots=1", "experts.balance_interval=0.008", "max_model_len=768"]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [examined("arithmetic", i).prompt for i in range(24)]
FIRST, SECOND = PROMPTS[:12], PROMPTS[12:]
LAYER = 0  # of those with experts
STEPS = " ▁▂▃▄▅▆▇█"


def title(text: str) -> None:
    print(f"\n--- {text}")


def bars(load: np.ndarray) -> str:
    """A block each; the scale ends at three times the mean."""
    share = np.minimum(load / load.mean() / 3, 1)
    return "".join(STEPS[round(float(value) * (len(STEPS) - 1))] for value in share)


def rows_by_die(plan: TEPlan) -> np.ndarray:
    """[dies, layers]: token copies that have come to each die's experts so far."""
    return np.array([mem.redundant.num_rows for mem in plan.memories if mem.redundant is not None])


def show_choice(counts: Counts, plan: TEPlan) -> None:
    """What select and place make of one layer's load [E, T], by hand."""
    primary = [die for die, held in enumerate(plan.sizes.experts.experts_of) for _ in held]
    chosen = select(counts, 8, 8)
    print(f"  select: {chosen}, an expert again if its share is still the hottest")
    placed = place(counts, chosen, primary, [1] * 8)
    for die, held in enumerate(placed):
        own = list(plan.sizes.experts.experts_of[die])
        print(f"  place:  die {die}, experts {own}, replica of {held or 'none'}")
    before, after = hottest_die(counts, primary, [[]] * 8), hottest_die(counts, primary, placed)
    mean = counts.sum() / 8
    print(
        f"  the hottest die would have had {after / mean:.2f} times the mean instead of {before / mean:.2f}"
    )


def show_phases(llm: LLM) -> None:
    """The first reconfiguration, and the steps that run meanwhile."""
    spans = llm.engine.plan.pod.trace.spans
    phases = [span for span in spans if span.lane == "EPLB"]
    steps = sorted(span.start_ns for span in spans if span.node == 0 and span.name == "Embed")
    loads = [span for span in spans if span.name == "replicas"]
    for span in phases[: next(i for i, s in enumerate(phases) if s.name.startswith("4")) + 1]:
        if span.start_ns == span.end_ns:
            continue  # no older step was running
        during = sum(span.start_ns <= start < span.end_ns for start in steps)
        print(
            f"  {span.start_ns / 1e6:7.3f} .. {span.end_ns / 1e6:7.3f} ms  phase {span.name:<38}"
            f"{during} step(s) begin"
        )
    print(f"  {len(loads)} copies of the DMA engines in all reconfigurations")


def show_map(llm: LLM, plan: TEPlan) -> None:
    """Where the tokens of the most replicated expert go, as die 0's memory has it."""
    mem, config = plan.memories[0], plan.config
    shape = config.num_moe_layers, config.n_routed_experts
    logcnt = mem.workspace.take("logcnt", *shape)[LAYER]
    log2phy = mem.workspace.take("log2phy", *shape, len(plan.dies))[LAYER]
    expert = int(logcnt.argmax())
    slots = log2phy[expert, : logcnt[expert]].tolist()
    homes = [
        next(die for die, held in enumerate(plan.sizes.experts.slots_of) if slot in held) for slot in slots
    ]
    print(f"  expert {expert} has {logcnt[expert]} replicas: physical {slots}, on dies {homes}")
    rotated = [slots[row % len(slots)] for row in range(8)]
    print(f"  die 0's rows 0 to 7 that chose it go to {rotated}")
    copy = plan.memories[homes[1]].redundant
    home = plan.memories[homes[0]]
    assert copy is not None
    assert home.redundant is not None
    place = expert - home.experts.start - len(home.experts)  # the primary, counted from the slots on
    memories = llm.engine.plan.pod.memories
    pairs = zip(copy.pieces(LAYER, 0), home.redundant.pieces(LAYER, place), strict=True)
    is_equal = all(memories.read(a, n) == memories.read(b, n) for (a, n), (b, _) in pairs)
    print(f"  its copy on die {homes[1]} is the primary byte for byte: {is_equal}")


def main() -> None:
    with LLM("tiny", "monolithic", overrides=["max_model_len=768"]) as one:
        expected = [digest(one.generate(part, PARAMS, keep_logits=True)) for part in (FIRST, SECOND)]

    with LLM("tiny", "colocated", overrides=POD, trace=True) as llm:
        (plan,) = llm.engine.plan.tes
        te = llm.engine.je.tes[0]
        assert te.reconfiguration is not None
        title("Step 1: every die counts the tokens of each expert")
        made = [digest(llm.generate(FIRST, PARAMS, keep_logits=True))]
        shape = plan.config.num_moe_layers, plan.config.n_routed_experts
        reported = [mem.workspace.take("reported_load", *shape).astype(np.int64) for mem in plan.memories]
        counts: Counts = np.sum(reported, axis=0)[LAYER][:, None]
        print(f"  the last time slice, layer {te.reconfiguration.layers[LAYER]}: |{bars(counts[:, 0])}|")
        print(f"  hottest expert: {counts.argmax()}, {counts.max() / counts.mean():.2f} times the mean")

        title("Step 2: which experts get replicas, and where")
        show_choice(counts, plan)

        title("Step 3: the first reconfiguration, in four phases; steps go on")
        show_phases(llm)
        changed = sum(e != NOTHING for row in te.reconfiguration.holdings for held in row for e in held)
        print(f"  replicas in use now: {changed}, in {shape[0]} layers on 8 dies")

        title("Step 4: tokens rotate over the replicas")
        show_map(llm, plan)

        before = rows_by_die(plan)
        made.append(digest(llm.generate(SECOND, PARAMS, keep_logits=True)))
        with_replicas = rows_by_die(plan) - before
        num_done = te.reconfiguration.num_done

    with LLM("tiny", "colocated", overrides=[*POD, "experts.balance_interval=0"]) as llm:
        llm.generate(SECOND, PARAMS)
        without = rows_by_die(llm.engine.plan.tes[0])

    title("rows that came to each die, while the pod served prompts that it had not seen")
    for name, rows in (("without replicas", without), ("with replicas", with_replicas)):
        ratios = rows.max(axis=0) / rows.mean(axis=0)
        print(f"  {name:<17} hottest over mean, by layer: " + "  ".join(f"{ratio:.2f}" for ratio in ratios))
    is_evener = with_replicas.max(axis=0).sum() < without.max(axis=0).sum()
    print(f"  the hottest dies of all layers together have less to do: {is_evener}")
    print(f"  {num_done} reconfigurations; the same tokens and logits as on one die: {made == expected}")


if __name__ == "__main__":
    main()
