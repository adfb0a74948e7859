"""Walkthrough 7: multi-token prediction.

DeepSeek-V3 has one more layer, MTP, which guesses the token after the next one. The guess, a draft, goes into
the next step as a row of its own. The main model, which computes that row anyway, says what it would have
sampled there: if it is the draft, the step has made two tokens. If not, the draft is forgotten. Either way
every token is the main model's own: MTP changes the number of steps and nothing else.

The five steps of the loop (xDeepServe 4.6): MTP forward, sample the draft, main model forward over token and
draft, sample its outputs, accept the longest prefix that agrees.

    python examples/07_mtp.py
"""

from __future__ import annotations

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.step import SeqResult, Step
from xdeepserve.llm import digest

PROMPT = [5, 6, 7]


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=temperature, seed=1, ignore_eos=True)


def watch(group: DPGroup) -> None:
    """Print what each step offered, what the main model said, and what was accepted."""
    finish_step = group.scheduler.finish_step

    def watched(step: Step, results: list[SeqResult]) -> None:
        for share, result in zip(step.shares, results, strict=True):
            said = [row.token_id for row in result.rows]
            draft = share.seq.drafts[0] if share.num_drafts else None
            verdict = "" if draft is None else "accepted" if result.num_accepted else "rejected"
            print(f"  draft {draft!s:>5}  main model {said!s:<12} {verdict:<9} next draft {result.drafts}")
        finish_step(step, results)

    group.scheduler.finish_step = watched  # type: ignore[method-assign]


def main() -> None:
    for temperature in (0.0, 1.0):
        print(f"--- temperature {temperature:g}")
        with LLM("tiny", "monolithic") as plain:
            expected = digest(plain.generate(PROMPT, params(temperature), keep_logits=True))
            steps_without = plain.engine.je.tes[0].step_idx
        with LLM("tiny", "monolithic", overrides=["mtp=1"]) as llm:
            if temperature == 0.0:
                watch(llm.engine.groups[0])
            outputs = llm.generate(PROMPT, params(temperature), keep_logits=True)
            stats, steps = llm.engine.stats(), llm.engine.je.tes[0].step_idx
        offered, accepted = sum(stats.num_drafted), sum(stats.num_accepted)
        print(
            f"24 tokens in {steps} steps instead of {steps_without}: {accepted} of {offered} drafts accepted"
        )
        per_step = 23 / (steps - 1)
        print(
            f"tokens per step after the first: {per_step:.2f}; 1 + acceptance: {1 + accepted / offered:.2f}"
        )
        print(f"the same tokens and logits as without MTP: {digest(outputs) == expected}")


if __name__ == "__main__":
    main()
