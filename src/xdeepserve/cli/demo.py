"""`xdeepserve demo`: a small pod serves a few prompts, and every bit is checked."""

from __future__ import annotations

import argparse
import textwrap
import time
from typing import TYPE_CHECKING, Any

from xdeepserve.cli.options import Parser
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.llm import RequestOutput
    from xdeepserve.model.reference import Reference
    from xdeepserve.model.tokenizer import Tokenizer

DEPLOYMENT = "transformerless"
MAX_TOKENS = 160
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
            "required": ["city", "day"],
        },
    },
}


def add_options(parser: Parser) -> None:
    """Add the options: serve a page instead of running once, and its port."""
    parser.add_argument(
        "--page", action="store_true", help="serve a pod and a page to watch it on, until Ctrl-C, instead"
    )
    parser.add_argument("--port", type=int, default=8000, help="of the page; default 8000; 0: a free one")


def serve_page(args: argparse.Namespace) -> int:
    """Serve the demo's pod with a page, where dies may be broken: spare dies take their place."""
    from xdeepserve.cli import serve

    parser = Parser(prog="xdeepserve demo --page")
    serve.add_options(parser)
    pod = ["--deployment", DEPLOYMENT, "--set", "recovery.failover=true", "--admin"]
    served = parser.parse_args([*pod, "--port", str(args.port)])
    served.command = args.command
    print("Open the address below in a browser, and ask for a story; click a die to look into it.")
    return serve.run(served)


def print_answers(questions: list[str], answers: list[str]) -> None:
    """Print the questions, each with the model's answer."""
    for question, answer in zip(questions, answers, strict=True):
        print(f"\n  > {question}")
        for line in answer.strip().splitlines():
            print(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    "))


def run(args: argparse.Namespace) -> int:
    """Serve the prompts and print the report; return 1 if one bit differs."""
    if args.page:
        return serve_page(args)
    from xdeepserve.engine.description import team
    from xdeepserve.engine.dp.sampling_params import SamplingParams
    from xdeepserve.llm import LLM, digest
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.model.reference import Reference
    from xdeepserve.model.tokenizer import load_tokenizer, require_tokenizer

    started = time.perf_counter()
    checkpoint = resolve_model("tiny")
    config = checkpoint.config
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    prompts = shown_and_read(require_tokenizer(load_tokenizer(checkpoint.directory), "tiny", "chats"))
    texts = [text for _, text in prompts]
    print(
        f"model `tiny`: DeepSeek-V3 in miniature ({config.num_hidden_layers} layers, MLA, "
        f"{config.n_routed_experts} routed experts in {config.n_group} groups, 1 shared, MTP), INT8,\n"
        "trained on stories, sums, lines of code and tool calls: it can do these, and nothing else.\n"
        "Building a transformerless pod (the first run compiles the kernels) ...",
        flush=True,
    )
    with (
        working("demo", runs_int8=True) as status,
        LLM(checkpoint, DEPLOYMENT, "int8", overrides=["mtp=1"]) as llm,
    ):
        for te in llm.engine.plan.tes:
            print(f"  {team(te)}", flush=True)
        outputs = llm.generate(texts, params, keep_logits=True)
        num_kernels = len(status.kernels)
        virtual_ms = llm.virtual_ns / 1e6
        steps = " and ".join(f"{te.step_idx} {te.sizes.place.role}" for te in llm.engine.je.tes)
    print_answers([shown for shown, _ in prompts], [output.outputs[0].text for output in outputs])
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{num_tokens} tokens in {steps} steps, {virtual_ms:.2f} ms of virtual time on the pod.")

    print("Checking against one die, and against the NumPy reference ...", flush=True)
    with working("demo, on one die"), LLM(checkpoint, "monolithic", "int8") as llm:
        alone = llm.generate(texts, params, keep_logits=True)
    reference = Reference(checkpoint, "int8")
    rows = {
        DEPLOYMENT: digest(outputs),
        "monolithic, 1 die": digest(alone),
    }
    for name, value in rows.items():
        print(f"  {name:<20} {value}")
    with working("demo, by the NumPy reference"):
        is_exact = len(set(rows.values())) == 1 and all(agrees(reference, output) for output in outputs)
    num_logits = num_tokens * config.vocab_size
    print(
        f"  {'NumPy reference':<20} {'the same' if is_exact else 'DIFFERENT'}: {num_logits:,} logits compared"
    )
    compiled = ", kernels compiled" if num_kernels else ""
    seconds = time.perf_counter() - started
    print(f"\nbit-exact: {'yes' if is_exact else 'NO'}   ({seconds:.1f} s in all{compiled})")
    print(
        "\nNext: xdeepserve demo --page shows this pod at work; xdeepserve docs tour: an afternoon with it."
    )
    return 0 if is_exact else 1


def shown_and_read(tokenizer: Tokenizer) -> list[tuple[str, str | list[int]]]:
    """List each prompt as people read it, and as the model does.

    None of the sums and functions was in the model's training text.
    """
    story = "Tell me a story about a fox called Mia."
    weather = "What is the weather in Paris tomorrow?"
    function = "Write a function scale(x) that returns x times 14."

    def chat(text: str, *tools: dict[str, Any]) -> list[int]:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}], tools=tools or None)

    return [
        ("Once upon a time", "Once upon a time"),
        *((text, chat(text)) for text in (story, "What is 47 + 49?", "What is 53 - 26?", function)),
        (f"(tool get_weather) {weather}", chat(weather, WEATHER)),
    ]


def agrees(reference: Reference, output: RequestOutput) -> bool:
    """Whether the reference, given prompt and answer, computes the same logits and greedy tokens."""
    import numpy as np

    choice, prompt = output.outputs[0], output.prompt_token_ids
    logits = reference.logits([*prompt, *choice.token_ids[:-1]])[len(prompt) - 1 :]
    greedy = logits.argmax(axis=-1).tolist()
    return greedy == choice.token_ids and choice.logits is not None and np.array_equal(logits, choice.logits)
