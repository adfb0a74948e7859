"""Walkthrough 15: a pod that changes while it serves.

Task executors (TEs) come and go: one joins under load, its weights copied from die to die; another is removed
at the end of a step, and what it was at goes on elsewhere from the same tokens; one drains; a second model
moves in beside the first. Dies that nobody holds are free, and what lay in their memory is scribbled over.

All the while the same 16 prompts are served, and their digest stays what one die alone makes of them: a run
is judged by its bits. All times are virtual.

    python examples/15_living_pod.py
"""

from __future__ import annotations

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp import events
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import digest

POD = ["dies=4", "max_model_len=128", "experts.redundant_slots=1", "experts.balance_interval=0.004"]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(16)]


def title(text: str) -> None:
    print(f"\n--- {text}")


def show(engine: Engine, note: str) -> None:
    """Who holds the first 16 dies, a letter each, and what each TE is at."""
    letters = {te.name: "ABCDEFGH"[i] for i, te in enumerate(engine.tes())}
    of_die = {die: letters[te.name] for te in engine.tes() for die in te.dies}
    dies = "".join(of_die.get(die, "x" if die in engine.plan.pod.lost else ".") for die in range(16))
    tes = ", ".join(
        f"{letters[te.name]} = {te.name} ({te.life}, {te.num_sequences} sequences)" for te in engine.tes()
    )
    print(f"  {engine.plan.pod.clock.now / 1e6:8.3f} ms  [{dies}]  {note}\n               {tes}")


async def change(engine: Engine) -> None:
    """One TE for another, and back, while 16 prompts are served."""
    clock = engine.plan.pod.clock
    await clock.sleep(3_000_000)
    show(engine, "under load")

    start = clock.now
    name = await engine.add_te(source="peer")
    weights = sum(mem.weight_nbytes for _, mem in engine.plan.tes[-1].all_memories)
    took = (clock.now - start) / 1e3
    show(engine, f"{name} has joined: {weights / 1e6:.1f} MB from its peer, a dummy request: {took:.0f} us")

    moved: list[int] = []
    engine.observe(lambda event: moved.append(event.seq_id) if isinstance(event, events.MovedOut) else None)
    old = engine.plan.pod.memory(0)
    await engine.remove("te")
    show(engine, f"te has been removed: {len(moved)} sequences go on elsewhere")
    (left,) = np.unique(np.frombuffer(old.buffer, np.uint8))
    print(f"               die 0 held {len(old):,} bytes; now each of them reads {left:#x}: they are gone")

    start = clock.now
    name = await engine.add_te(source="storage")
    show(engine, f"{name} has joined, from storage: {(clock.now - start) / 1e6:.1f} ms")


def main() -> None:
    """Everything in turn."""
    with LLM("tiny", "monolithic", overrides=["max_model_len=128"]) as one_die:
        expected = digest(one_die.generate(PROMPTS, PARAMS, keep_logits=True))
    print(f"one die makes {expected}")

    with LLM("tiny", "colocated", overrides=POD) as llm:
        title("one TE of four dies; a dot is a free die of the SuperPod")
        show(llm.engine, "at rest")

        title("TEs come and go while 16 prompts are served")
        made = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True, meanwhile=change))
        print(f"  the pod made  {made}: {'equal' if made == expected else 'DIFFERENT'}")

        title("experts move as well: replicas of hot ones, on whichever TE serves")
        made = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
        stats = llm.engine.stats()
        print(f"  {stats.num_reconfigurations} reconfigurations so far, with those of TEs that are gone")
        print(f"  the pod made  {made}: {'equal' if made == expected else 'DIFFERENT'}")

        title("one drains: it takes nothing new, and leaves when it has nothing left")
        llm.drain("te 1")
        show(llm.engine, "te 1 is gone")
        try:
            llm.drain("te 2")
        except Exception as error:
            print(f"  {type(error).__name__}: {error}")

        title("a second model on the same pod and clock")
        with LLM("tiny-r1", "monolithic", overrides=["max_model_len=64"], beside=llm) as second:
            holders = second.engine.plan.pod.holders
            for who in sorted(set(holders.values())):
                print(f"  {who}: dies {[die for die in sorted(holders) if holders[die] == who]}")
            (output,) = second.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
            print(f"  tiny-r1 says {output.outputs[0].token_ids}")
            made = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
            print(f"  the pod made  {made}: {'equal' if made == expected else 'DIFFERENT'}")
        show(llm.engine, "the second model has left")


if __name__ == "__main__":
    main()
