"""`xdeepserve generate`: complete prompts, given as text or as token ids."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdeepserve.cli.options import Parser, add_deployment, check_writable, working
from xdeepserve.errors import InputError

if TYPE_CHECKING:
    from xdeepserve.llm import RequestOutput


class AppendPrompt(argparse.Action):
    """Collects --prompt and --prompt-ids in the order in which they were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.prompts = [*namespace.prompts, values]


def token_ids(text: str) -> list[int]:
    """'1,2,3' -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of token ids like 1,2,3") from None


def add_options(parser: Parser) -> None:
    """Model and deployment, prompts, sampling, drafts, the timeline."""
    add_deployment(parser)
    parser.set_defaults(prompts=[])
    option = parser.add_argument
    option("--prompt", action=AppendPrompt, metavar="TEXT", help="a prompt; may be repeated")
    option(
        "--prompt-ids",
        action=AppendPrompt,
        type=token_ids,
        metavar="1,2,3",
        help="a prompt as token ids; may be repeated",
    )
    option("--max-tokens", type=int, default=16, metavar="N", help="new tokens at most; default 16")
    option("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    option("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; default 1 (off)")
    option("--top-k", type=int, default=0, metavar="K", help="default 0 (off)")
    option("--seed", type=int, default=0, metavar="S", help="of the random numbers; default 0")
    option("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    option("--mtp", type=int, metavar="K", help="drafts per step from the MTP layers; same tokens")
    option("--trace", type=Path, metavar="FILE", help="write the timeline in virtual time (Perfetto)")
    option(
        "--trace-dies",
        type=int,
        default=16,
        metavar="N",
        help="in the timeline, show N dies of each role: of a TE, of a DP domain, of routed experts, of "
        "shared ones; default 16, 0 shows all (of a superpod's step: 80 MB, not 10)",
    )
    option("--json", action="store_true", help="print one JSON object with a digest of all bits")


def run(args: argparse.Namespace) -> int:
    """Complete the prompts; print text, or one JSON object."""
    from xdeepserve.engine.dp.sampling_params import SamplingParams

    if not args.prompts:
        raise InputError("no prompt: give --prompt TEXT or --prompt-ids 1,2,3")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    if args.trace is not None:
        check_writable(args.trace, "--trace")
    overrides = args.overrides + ([] if args.mtp is None else [f"mtp={args.mtp}"])
    from xdeepserve.llm import LLM, digest

    with (
        working(f"Loading {args.model}") as progress,
        LLM(
            args.model,
            args.deployment,
            args.precision,
            overrides=overrides,
            trace=args.trace is not None,
            trace_dies=args.trace_dies,
            progress=progress,
        ) as llm,
    ):
        outputs = llm.generate(args.prompts, params, keep_logits=args.json)
        if args.trace is not None:
            llm.write_trace(args.trace)
        virtual_ms = llm.virtual_ns / 1e6
    if args.json:
        asked = {"model": args.model, "deployment": args.deployment, "precision": args.precision}
        print(json.dumps({**asked, "outputs": _as_dicts(outputs), "digest": digest(outputs)}))
    else:
        _print(outputs, virtual_ms)
    return 0


def _as_dicts(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    return [
        {
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": choice.token_ids,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
        }
        for output in outputs
        for choice in output.outputs
    ]


def _print(outputs: Sequence[RequestOutput], virtual_ms: float) -> None:
    for output in outputs:
        choice = output.outputs[0]
        print(f"prompt     {output.prompt if output.prompt is not None else output.prompt_token_ids}")
        print(f"text       {choice.text!r}")
        print(f"token ids  {','.join(map(str, choice.token_ids))}")
        print(f"finished   {choice.finish_reason}\n")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_tokens} tokens in {virtual_ms:.2f} ms of virtual time")
