"""Walkthrough 7: multi-token prediction.

DeepSeek-V3 has more layers than the main model's: MTP layers, of which the first guesses the token after the
next one, the second the token after that. The guesses, drafts, go into the next step as rows of their own.
The main model, which computes those rows anyway, says what it would have sampled there: as far as that is the
drafts, the step has made so many tokens more. The rest is forgotten. Either way every token is the main
model's own: MTP changes the number of steps and nothing else.

The five steps of the loop (xDeepServe 4.6): MTP forward, sample the drafts, main model forward over token and
drafts, sample its outputs, accept the longest prefix that agrees.

DeepSeek published one MTP layer. A second draft can come from it too, used again on its own output, or from a
second layer trained for it. Tokens per step are 1 + p1 with one draft and 1 + p1 + p1 p2 with two.

    python examples/07_mtp.py
"""

from __future__ import annotations

from xdeepserve import LLM, SamplingParams
from xdeepserve.bench.papers import acceptance, engine
from xdeepserve.corpus import chat
from xdeepserve.engine.dp.events import Event, StepEnded
from xdeepserve.llm import digest

PROMPT = chat.render("What is 47 + 25?")
WAYS = {
    "no drafts": [],
    "one draft": ["mtp=1"],
    "two, one layer used twice": ["mtp=2", "mtp_reuse=true"],
    "two, a layer for each": ["mtp=2"],
}


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=32, temperature=temperature, seed=1, ignore_eos=True)


def title(text: str) -> None:
    print(f"\n--- {text}")


def watch(llm: LLM) -> None:
    """Print what each step offered, what the main model said, and what was accepted."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    text = tokenizer

    def words(token_ids: tuple[int, ...]) -> str:
        return " ".join(repr(text.decode([token_id], skip_special_tokens=False)) for token_id in token_ids)

    def see(event: Event | StepEnded) -> None:
        for share in event.shares if isinstance(event, StepEnded) else ():
            offered, said = words(share.drafts), words(share.token_ids)
            count = f"{share.num_accepted} of {len(share.drafts)} accepted" if share.drafts else "prompt"
            print(f"  drafts {offered:<24} main model {said:<34} {count}")

    llm.engine.observe(see)


def show_steps() -> None:
    title("Every step with two drafts, of one layer used twice")
    with LLM("tiny", overrides=["mtp=2", "mtp_reuse=true"]) as llm:
        watch(llm)
        llm.generate(PROMPT, params(0.0))


def show_equal() -> None:
    for temperature in (0.0, 1.0):
        title(f"32 tokens at temperature {temperature:g}")
        expected = ""
        for name, overrides in WAYS.items():
            with LLM("tiny", overrides=overrides) as llm:
                value = digest(llm.generate(PROMPT, params(temperature), keep_logits=True))
                steps, stats = llm.engine.je.tes[0].step_idx, llm.engine.stats()
            expected = expected or value
            fate = ", ".join(f"{a}/{d}" for a, d in zip(stats.num_accepted, stats.num_drafted, strict=True))
            print(f"  {name:<27}{steps:3d} steps  accepted {fate or '-':<13} same bits: {value == expected}")


def show_acceptance() -> None:
    title("Held-out prompts: acceptance by position, and tokens per step")
    print(f"  {'':<27}{'p1':>6}{'p2':>6}  tokens per step  1 + p1 (+ p1 p2)")
    for name, overrides in WAYS.items():
        if not overrides:
            continue
        found = acceptance.measure(tuple(overrides), num_prompts=3)
        columns = "".join(f"{p:6.2f}" for p in found.acceptance)
        print(f"  {name:<27}{columns:<12}{found.tokens_per_step:17.2f}{found.expected:18.2f}")


def show_launching() -> None:
    title("Who launches the drafts' graphs: DeepSeek-R1, virtual time, no arithmetic (CloudMatrix 4.2.4)")
    rows = {row.name.removeprefix("engine/mtp/"): row.value for row in engine.mtp(num_requests=8)}
    for what, name in (
        ("naive: the host, when it has seen the step's tokens", "naive/tpot"),
        ("pipelined: all launched ahead, sampling on the die", "pipelined/tpot"),
        ("pipelined, two drafts", "pipelined/k=2/tpot"),
    ):
        print(f"  {what:<52}{rows[name]:8.2f} ms per token")


def main() -> None:
    show_steps()
    show_equal()
    show_acceptance()
    show_launching()


if __name__ == "__main__":
    main()
