"""`xdeepserve generate`: complete prompts, given as text or as token ids."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdeepserve import wings
from xdeepserve.cli.options import (
    Parser,
    add_deployment,
    add_faults,
    add_mtp,
    check_writable,
    faults_of,
    note,
    note_priced,
    note_rounding,
    note_settings,
    overrides_of,
)
from xdeepserve.errors import InputError, XDeepServeError

if TYPE_CHECKING:
    from xdeepserve.engine.serving.engine import Engine
    from xdeepserve.hw.trace import Trace
    from xdeepserve.llm import LLM, RequestOutput
    from xdeepserve.model.checkpoint import Checkpoint


TRACE_DIES = 16


class AppendPrompt(argparse.Action):
    """Argument action for collecting --prompt and --prompt-ids in the given order."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.prompts = [*namespace.prompts, values]


def token_ids(text: str) -> list[int]:
    """Parse token ids: '1,2,3' -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of token ids like 1,2,3") from None


def add_options(parser: Parser) -> None:
    """Add the options: model and deployment, prompts, sampling, drafts, the timeline."""
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
    option("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy (LLM, endpoint: 1)")
    option("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; default 1 (off)")
    option("--top-k", type=int, default=0, metavar="K", help="default 0 (off)")
    option("--seed", type=int, default=0, metavar="S", help="of the random numbers; default 0")
    option("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    add_mtp(parser)
    add_faults(parser)
    option("--trace", type=Path, metavar="FILE", help="write the timeline in virtual time (Perfetto)")
    option("--record", type=Path, metavar="FILE", help="write what the page draws, to be opened there")
    option(
        "--trace-dies",
        type=int,
        default=TRACE_DIES,
        metavar="N",
        help="in the timeline, show N dies of each role: of a TE, of a DP domain, of routed experts, of "
        "shared ones; default 16, 0 shows all (of a superpod's step: 80 MB, not 10)",
    )
    option(
        "--timeline",
        action="store_true",
        help="draw the last step: a line for each die and engine, a colour for each microbatch",
    )
    option(
        "--timing-only",
        action="store_true",
        help="take the time and compute nothing: token ids are dummies, and deepseek-r1 needs no weights",
    )
    option("--json", action="store_true", help="print one JSON object with a digest of all bits")


def run(args: argparse.Namespace) -> int:
    """Complete the prompts; print text, or a JSON object."""
    from xdeepserve.engine.dp.sampling_params import SamplingParams

    _check_options(args)
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    from xdeepserve.llm import LLM, digest

    checkpoint = _checkpoint(args)
    _check_context(args, checkpoint)
    with LLM(
        checkpoint,
        args.deployment,
        args.precision,
        overrides=overrides_of(args),
        trace=args.trace is not None or args.timeline,
        trace_dies=args.trace_dies,
        timing_only=args.timing_only,
        faults=faults_of(args),
    ) as llm:
        with recording(llm.engine, args.record):
            try:
                outputs = llm.generate(args.prompts, params, keep_logits=args.json)
            except XDeepServeError as error:
                _print_cut(args, llm, error)
                raise
        if args.trace is not None:
            llm.write_trace(args.trace)
        _note_all(args, llm, checkpoint)  # now that nothing was refused: an error is one line
        drawn = timeline(llm.engine.plan.pod.trace) if args.timeline else []
        virtual_ms, has_pool = llm.virtual_ns / 1e6, llm.engine.plan.pool_use is not None
    if args.json:
        _print_json(args, outputs, has_pool, digest=digest(outputs))
    else:
        if drawn:
            print("the last step, in virtual time:", *drawn, "", sep="\n")
        _print(outputs, virtual_ms, args.timing_only)
    return 0


def _print_cut(args: argparse.Namespace, llm: LLM, error: XDeepServeError) -> None:
    """Print the outputs so far of every prompt after an error has ended some; the error itself is printed
    last."""
    outputs: Sequence[RequestOutput] = error.outputs
    if args.json and outputs:
        has_pool = llm.engine.plan.pool_use is not None
        _print_json(args, outputs, has_pool, digest=None, error=" ".join(str(error).split()))
    elif outputs:
        _print(outputs, llm.virtual_ns / 1e6, args.timing_only)


def _print_json(
    args: argparse.Namespace, outputs: Sequence[RequestOutput], has_pool: bool, **more: str | None
) -> None:
    asked = {"model": args.model, "deployment": args.deployment, "precision": args.precision}
    print(json.dumps({**asked, "outputs": _as_dicts(outputs, has_pool), **more}))


def _check_options(args: argparse.Namespace) -> None:
    """Refuse contradictory options, and files that cannot be written, before anything is loaded."""
    if not args.prompts:
        raise InputError("no prompt: give --prompt TEXT or --prompt-ids 1,2,3")
    if args.timeline and args.json:
        raise InputError(
            "--json prints one object, and --timeline draws: choose one (--trace goes with both)"
        )
    if args.timing_only and args.json:
        raise InputError("--json prints a digest of all bits, and --timing-only computes none: choose one")
    if args.trace is not None:
        check_writable(args.trace, "--trace")
    if args.record is not None:
        if args.trace is not None or args.timeline:
            raise InputError("--record draws one step at a time, and --trace and --timeline all: choose one")
        check_writable(args.record, "--record")


def _checkpoint(args: argparse.Namespace) -> Checkpoint:
    """Resolve the model. Raises InputError if it lacks weights or a tokenizer that the options need."""
    from xdeepserve.model.presets import resolve_model

    checkpoint = resolve_model(args.model)
    if not args.timing_only and not checkpoint.has_weights:
        raise InputError(f"{args.model} is a configuration without weights: give --timing-only")
    is_text = any(isinstance(prompt, str) for prompt in args.prompts)
    if is_text and not (checkpoint.directory / "tokenizer.json").is_file():
        raise InputError(f"{args.model} has no tokenizer.json: give --prompt-ids, not --prompt")
    return checkpoint


def _check_context(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Refuse prompts without room in the context, as the endpoint does, before weights are loaded."""
    from xdeepserve.engine.deploy.refusals import context_of
    from xdeepserve.engine.deploy.resolve import resolve
    from xdeepserve.model.tokenizer import load_tokenizer, require_tokenizer

    limit = context_of(resolve(args.deployment, overrides_of(args)), checkpoint.config)
    is_text = any(isinstance(prompt, str) for prompt in args.prompts)
    tokenizer = load_tokenizer(checkpoint.directory) if is_text else None
    for number, prompt in enumerate(args.prompts, 1):
        is_text = isinstance(prompt, str)
        length = len(require_tokenizer(tokenizer, args.model).encode(prompt) if is_text else prompt)
        if length < limit < length + args.max_tokens:
            raise InputError(
                f"--max-tokens must be {limit - length} at most, found {args.max_tokens}: the model's "
                f"context holds {limit} tokens (max_model_len), and prompt {number} has {length} of them"
            )


def recording(engine: Engine, path: Path | None) -> contextlib.AbstractContextManager[None]:
    """Return a context for recording steps to a file, if there is one."""
    if path is None:
        return contextlib.nullcontext()
    record: contextlib.AbstractContextManager[None] = wings.part("recording")(engine, path)
    return record


def _note_all(args: argparse.Namespace, llm: LLM, checkpoint: Checkpoint) -> None:
    """Print notes on facts hidden by the answers alone."""
    from xdeepserve.engine.description import lack

    _note_idle(args)
    note_settings(args)
    if missing := lack(llm.engine.plan):
        note(args.command, f"{missing}: this takes the time of dies that hold it")
    if args.timing_only:
        note_priced(args)
    else:
        note_rounding(args, checkpoint)
    if args.trace is not None and llm.engine.plan.pod.trace.left_out:
        note(args.command, f"{args.trace}: {llm.engine.plan.pod.trace.left_out}")
    replaced = {te.name for te in llm.engine.health() if te.replaced_by is not None}
    for name, reason in llm.engine.lost.items():
        now = "another TE came in its place" if name in replaced else "others went on"
        note(args.command, f"TE {name} was lost, {now}: {reason}")


def _note_idle(args: argparse.Namespace) -> None:
    """Print a note on the given options that change nothing."""
    drawing = (("--top-p", args.top_p, 1.0), ("--top-k", args.top_k, 0), ("--seed", args.seed, 0))
    idle = [option for option, value, default in drawing if value != default]
    if args.temperature == 0 and idle:
        note(args.command, f"no effect at temperature 0, where nothing is drawn: {', '.join(idle)}")
    if args.trace_dies != TRACE_DIES and args.trace is None and not args.timeline:
        note(args.command, "no effect without --trace or --timeline: --trace-dies")


def timeline(trace: Trace) -> list[str]:
    """Draw the last step for the terminal, in its width; elsewhere in 100 columns without colour."""
    from xdeepserve.hw.gantt import in_terminal, steps_of

    steps = steps_of(trace)
    if not steps:
        raise XDeepServeError("no step is in the timeline")
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if is_terminal else 100
    lines = in_terminal(trace, *steps[-1], width=width, colour=is_terminal)
    legend = "a colour for each microbatch" if is_terminal else "0, 1: microbatches; #: a step that is whole"
    return [*lines, f"({legend}; ·: waits for another die{'; ' + trace.left_out if trace.left_out else ''})"]


def _as_dicts(outputs: Sequence[RequestOutput], has_pool: bool) -> list[dict[str, Any]]:
    """Convert outputs to dictionaries, a dictionary for each choice. With a memory pool they include the
    cached tokens of the prompt."""
    return [
        {
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": choice.token_ids,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            **({"cached_tokens": _num_cached(output)} if has_pool else {}),
        }
        for output in outputs
        for choice in output.outputs
    ]


def _num_cached(output: RequestOutput) -> int:
    return 0 if output.metrics is None else output.metrics.num_cached_tokens


def _print(outputs: Sequence[RequestOutput], virtual_ms: float, timing_only: bool) -> None:
    for output in [] if timing_only else outputs:
        choice = output.outputs[0]
        print(f"prompt     {output.prompt if output.prompt is not None else output.prompt_token_ids}")
        print(f"text       {choice.text!r}")
        print(f"token ids  {','.join(map(str, choice.token_ids))}")
        if _num_cached(output):
            print(f"cached     {_num_cached(output)} of {len(output.prompt_token_ids)} tokens of the prompt")
        print(f"finished   {choice.finish_reason}\n")
    if timing_only:
        for number, output in enumerate(outputs):
            print(f"request {number}: {_latencies(output)}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_tokens} token{'s' if num_tokens != 1 else ''} in {virtual_ms:.2f} ms of virtual time")


def _latencies(output: RequestOutput) -> str:
    metrics, tokens = output.metrics, len(output.outputs[0].token_ids)
    parts = [f"{len(output.prompt_token_ids)} prompt tokens, {tokens} new"]
    if metrics is not None and metrics.ttft_ns is not None:
        parts.append(f"TTFT {metrics.ttft_ns / 1e6:.2f} ms")
    if metrics is not None and metrics.tpot_ns is not None:
        parts.append(f"TPOT {metrics.tpot_ns / 1e6:.2f} ms")
    return ", ".join(parts)
