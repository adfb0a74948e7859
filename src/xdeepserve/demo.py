"""The main job, no arguments: a small pod serves a few prompts, and every bit is checked."""

from __future__ import annotations

import textwrap
import time

import numpy as np

from xdeepserve.corpus import chat
from xdeepserve.corpus.tools import TOOLS
from xdeepserve.describe import team
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.llm import LLM, RequestOutput, digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference

DEPLOYMENT = "transformerless"
WEATHER = TOOLS[0][0]
# What is shown, and what the model reads. Neither the sums nor the function were in its training text.
PROMPTS = (
    ("Once upon a time", "Once upon a time"),
    ("Tell me a story about a fox called Mia.", chat.render("Tell me a story about a fox called Mia.")),
    ("What is 47 + 49?", chat.render("What is 47 + 49?")),
    ("What is 53 - 26?", chat.render("What is 53 - 26?")),
    (
        "Write a function scale(x) that returns x times 14.",
        chat.render("Write a function scale(x) that returns x times 14."),
    ),
    (
        "(tool get_weather) What is the weather in Paris tomorrow?",
        chat.render("What is the weather in Paris tomorrow?", tools=[WEATHER]),
    ),
)
MAX_TOKENS = 160


def demo() -> bool:
    """Print the report; whether every bit agreed."""
    started = time.perf_counter()
    checkpoint = resolve_model("tiny")
    config = checkpoint.config
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    texts = [text for _, text in PROMPTS]
    print(
        f"model `tiny`: DeepSeek-V3 in miniature ({config.num_hidden_layers} layers, MLA, "
        f"{config.n_routed_experts} routed experts in {config.n_group} groups, 1 shared, MTP), INT8,\n"
        "trained on stories, sums, lines of code and tool calls: it can do these, and nothing else.\n"
        "Building a transformerless pod (the first run compiles the kernels) ...",
        flush=True,
    )
    with LLM(checkpoint, DEPLOYMENT, "int8", overrides=["mtp=1"]) as llm:
        for te in llm.engine.plan.tes:
            print(f"  {team(te)}")
        outputs = llm.generate(texts, params, keep_logits=True)
        virtual_ms = llm.virtual_ns / 1e6
        steps = " and ".join(f"{te.step_idx} {te.sizes.role}" for te in llm.engine.je.tes)
    for (shown, _), output in zip(PROMPTS, outputs, strict=True):
        print(f"\n  > {shown}")
        for line in output.outputs[0].text.strip().splitlines():
            print(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    "))
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{num_tokens} tokens in {steps} steps, {virtual_ms:.2f} ms of virtual time on the pod.")

    print("Checking against one die, and against the NumPy reference ...", flush=True)
    with LLM(checkpoint, "monolithic", "int8") as llm:
        alone = llm.generate(texts, params, keep_logits=True)
    reference = Reference(checkpoint, "int8")
    rows = {
        DEPLOYMENT: digest(outputs),
        "monolithic, 1 die": digest(alone),
    }
    for name, value in rows.items():
        print(f"  {name:<20} {value}")
    is_exact = len(set(rows.values())) == 1 and all(agrees(reference, output) for output in outputs)
    num_logits = num_tokens * config.vocab_size
    print(
        f"  {'NumPy reference':<20} {'the same' if is_exact else 'DIFFERENT'}: {num_logits:,} logits compared"
    )
    print(f"\nbit-exact: {'yes' if is_exact else 'NO'}   ({time.perf_counter() - started:.1f} s in all)")
    return is_exact


def agrees(reference: Reference, output: RequestOutput) -> bool:
    """Whether the reference, given prompt and answer, has the same logits and greedy tokens."""
    choice, prompt = output.outputs[0], output.prompt_token_ids
    logits = reference.logits([*prompt, *choice.token_ids[:-1]])[len(prompt) - 1 :]
    greedy = logits.argmax(axis=-1).tolist()
    return greedy == choice.token_ids and choice.logits is not None and np.array_equal(logits, choice.logits)
