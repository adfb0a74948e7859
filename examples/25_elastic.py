"""Walkthrough 25: TEs of a running engine come and go, from none, and every token stays.

Three requests come one after the other, then nothing for a second, then a burst of twenty. The AutoScaler
looks each 2 ms of virtual time: it lets the only TE go when there is nothing to do, and a request that
finds no TE waits for the first one, which is pre-warmed: dies with their memory, without weights. The burst
has it call more. One of them is lost on the way, and its requests go on from the tokens that there are.
What a start costs is set to milliseconds here; by the costs that are assumed of DeepServe's it takes
50 s, and 0.2 s for a pre-warmed TE. Times are virtual.

    python examples/25_elastic.py
"""

from __future__ import annotations

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Assigned, DiesLost, Observed, TEChanged, TEsWanted
from xdeepserve.engine.serving import elastic
from xdeepserve.hw.spec import Param
from xdeepserve.llm import digest

SCALE = (
    *("scale.least=0", "scale.most=4", "scale.warm=2", "scale.every_s=0.002", "scale.up_s=0.002"),
    *("scale.calm_s=0.004", "scale.down_s=0.05", "scheduler.max_num_seqs=2", "max_model_len=96"),
)
PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=5, ignore_eos=True)
PROMPTS = [[3 * i + j for j in range(16 + i)] for i in range(23)]
ARRIVALS_S = [0.0, 0.002, 0.004, *(1 + 0.002 * i for i in range(20))]
LOST_S = 1.045
COSTS = elastic.StartCosts(
    pod=Param(0.02, "s", "of this walkthrough"),
    warm_pod=Param(0.0005, "s", "of this walkthrough"),
    start=Param(0.02, "s", "of this walkthrough"),
    warm_te=Param(0.0005, "s", "of this walkthrough"),
    tensors=Param(0.0, "s", "of this walkthrough"),
    link=Param(0.0, "s", "of this walkthrough"),
    push=Param(0.0, "s", "of this walkthrough"),
)


def main() -> None:
    elastic.COSTS = COSTS  # type: ignore[misc]
    with LLM("tiny", "monolithic", overrides=["max_model_len=96"]) as llm:
        expected = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
    print(f"one die: {expected}\n")
    with LLM("tiny", "monolithic", overrides=[*SCALE, "health.suspect_s=0.001", "health.lost_s=0.01"]) as llm:
        pod, num_given = llm.engine.plan.pod, dict[str, int]()

        def see(event: Observed) -> None:
            if isinstance(event, Assigned):
                num_given[event.te] = num_given.get(event.te, 0) + 1
            elif isinstance(event, TEChanged | TEsWanted | DiesLost):
                print(f"{pod.clock.now / 1e6:9.3f} ms  {event.said}")

        async def lose() -> None:
            te = max(llm.engine.tes(), key=lambda te: te.num_sequences)
            pod.break_die(te.dies[0])

        llm.engine.observe(see)
        pod.clock.at(round(1e9 * LOST_S), lose)
        arrivals = [round(1e9 * seconds) for seconds in ARRIVALS_S]
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, arrivals_ns=arrivals)
    print(f"\nrequests given to: {', '.join(f'{te}: {count}' for te, count in num_given.items())}")
    waits = [output.metrics.ttft_ns / 1e6 for output in outputs if output.metrics and output.metrics.ttft_ns]
    print(f"the first request of the burst waits {waits[3]:.2f} ms for a TE and its first token")
    print(f"all digests the same: {digest(outputs) == expected}")


if __name__ == "__main__":
    main()
