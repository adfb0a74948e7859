"""The command line. Exit codes: 0 done, 1 a check failed, 2 bad usage or input (one line on stderr)."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from xdeepserve import __version__
from xdeepserve.errors import InputError, XDeepServeError

if TYPE_CHECKING:
    from xdeepserve.engine.build import Progress


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line. `lists_settings`: its help ends with what --set changes."""

    lists_settings = False

    def format_help(self) -> str:
        if self.lists_settings:
            from xdeepserve.engine.deploy.settings import help_text

            self.epilog = "settings (--set key=value, any number of times):\n" + help_text()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class AppendPrompt(argparse.Action):
    """Collects --prompt and --prompt-ids in the order in which they were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        prompts = [*(getattr(namespace, "prompts", None) or []), values]
        namespace.prompts = prompts


def token_ids(text: str) -> list[int]:
    """'1,2,3' -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of token ids like 1,2,3") from None


def build_parser() -> Parser:
    """All commands and their options."""
    parser = Parser(
        prog="xdeepserve",
        description="The CloudMatrix384 serving stack on a laptop, bit for bit.",
        epilog="Start with: xdeepserve demo",
    )
    parser.add_argument("--version", action="version", version=f"xdeepserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=Parser)

    def command(name: str, text: str) -> Parser:
        sub: Parser = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        return sub

    def model_options(sub: Parser, deployment: str) -> None:
        sub.lists_settings = True
        sub.add_argument(
            "--model",
            default="tiny",
            metavar="M",
            help="a preset (tiny, tiny-random, tiny-r1) or a Hugging Face checkpoint directory; default tiny",
        )
        sub.add_argument(
            "--deployment",
            default=deployment,
            metavar="D",
            help="monolithic, colocated, pd, moe-attention, transformerless, superpod, or a .toml file; "
            f"default {deployment}",
        )
        sub.add_argument("--precision", default="int8", choices=("int8", "fp32"), help="default int8")
        sub.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change a setting of the deployment",
        )

    command("demo", "serve a few prompts on a small virtual pod and prove every bit against the reference")

    sub = command("generate", "complete prompts")
    model_options(sub, "monolithic")
    sub.add_argument("--prompt", action=AppendPrompt, metavar="TEXT", help="a prompt; may be repeated")
    sub.add_argument(
        "--prompt-ids",
        action=AppendPrompt,
        type=token_ids,
        metavar="1,2,3",
        help="a prompt as token ids; may be repeated",
    )
    sub.add_argument("--max-tokens", type=int, default=16, metavar="N", help="new tokens at most; default 16")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    sub.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; default 1 (off)"
    )
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0 (off)")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers; default 0")
    sub.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    sub.add_argument("--mtp", type=int, metavar="K", help="drafts per step from the MTP layers; same tokens")
    sub.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline in virtual time (Perfetto)"
    )
    sub.add_argument(
        "--trace-dies",
        type=int,
        default=16,
        metavar="N",
        help="in the timeline, show N dies of each role: of a TE, of a DP domain, of routed experts, of "
        "shared ones; default 16, 0 shows all (of a superpod's step: 80 MB, not 10)",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object with a digest of all bits")

    sub = command("serve", "run the OpenAI-compatible endpoint")
    model_options(sub, "monolithic")
    sub.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    sub.add_argument("--port", type=int, default=8000, help="default 8000; 0 picks a free one")

    sub = command("verify", "print the bit-exactness matrix; exit 1 on any difference")
    sub.add_argument("--model", default="tiny", metavar="M", help="as for generate; default tiny")
    sub.add_argument(
        "--deployments", default="all", metavar="all|a,b", help="deployments to check; default all"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("quantize", "write a checkpoint in INT8 (compressed-tensors, W8A8)")
    sub.add_argument("source", metavar="SRC", help="a preset or a Hugging Face directory: F32, BF16 or FP8")
    sub.add_argument("destination", type=Path, metavar="DST", help="the directory to make")
    sub.add_argument(
        "--method",
        default="smoothquant+gptq",
        metavar="METHOD",
        help="rtn, smoothquant, gptq, smoothquant+gptq or cloudmatrix; default smoothquant+gptq",
    )
    sub.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text to calibrate with, paragraph by paragraph; default: the package's own",
    )
    sub.add_argument(
        "--samples", type=int, default=64, metavar="N", help="calibration texts to begin with; default 64"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("eval", "measure perplexity, agreement and task scores on held-out text, per recipe")
    sub.add_argument("--model", default="tiny", metavar="M", help="as for generate; default tiny")
    sub.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="DIR",
        help="a quantised checkpoint of the same model to compare, in int8; may be repeated",
    )
    sub.add_argument(
        "--methods", metavar="M,M|all", help="quantise the model by these methods, too, and compare"
    )
    sub.add_argument(
        "--precision", default="fp32,int8", metavar="P,P", help="recipes of the model; default fp32,int8"
    )
    sub.add_argument("--domains", metavar="D,D", help="default stories,arithmetic,recall,tools,code")
    sub.add_argument("--samples", type=int, default=40, metavar="N", help="per domain; default 40")
    sub.add_argument("--deployment", default="monolithic", metavar="D", help="default monolithic")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("bench", "measure or model, and show what the papers publish beside it")
    sub.add_argument(
        "suite",
        choices=("comm", "superpod", "engine", "kernels", "decode", "startup"),
        help="in virtual time: comm (communication), superpod (DeepSeek-R1 on up to 768 dies), engine "
        "(scheduling, MTP and launching against their baselines); in wall time on this computer: kernels, "
        "decode, startup",
    )
    sub.add_argument("--model", metavar="M", help="of decode and startup, as for generate; default tiny")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw it as well (needs matplotlib)")
    sub.add_argument("--ranks", action="store_true", help="wall time of 32 to 768 ranks instead (needs 4 GB)")
    sub.add_argument(
        "--steps",
        action="store_true",
        help="of superpod: instead, wall time and memory of a decode step of the 61-layer tiny-r1 on 48 to "
        "768 dies, every bit checked (minutes; needs 4 GB)",
    )
    sub.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of superpod: write the timeline of an iteration on 768 dies (Perfetto), 16 of each role",
    )

    sub = command("golden", "write or check golden vectors of the communication protocols")
    sub.add_argument("action", choices=("write", "check"), help="record to DIR, or compare what is there")
    sub.add_argument("directory", type=Path, metavar="DIR")
    sub.add_argument("--case", action="append", dest="cases", metavar="NAME", help="only this; repeatable")

    sub = command("describe", "show what would be built: dies, roles, memory, experts")
    model_options(sub, "monolithic")

    sub = command("settings", "list what --set changes: key, meaning, type, default")
    sub.add_argument("key", nargs="?", metavar="KEY", help="only this one, or those of this section")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = build_parser().parse_args(argv)
    commands = {
        "demo": run_demo,
        "generate": run_generate,
        "serve": run_serve,
        "verify": run_verify,
        "quantize": run_quantize,
        "eval": run_eval,
        "bench": run_bench,
        "golden": run_golden,
        "describe": run_describe,
        "settings": run_settings,
    }
    try:
        code = commands[args.command](args)
        sys.stdout.flush()
        return code
    except InputError as error:
        return _complain(args.command, error, 2)
    except XDeepServeError as error:
        return _complain(args.command, error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(args.command, error, 1)


def _complain(command: str, error: Exception, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"xdeepserve {command}: error: {line}", file=sys.stderr)
    return code


def run_demo(args: argparse.Namespace) -> int:
    """A small pod, a handful of prompts, every bit proved; 1 if one differs."""
    from xdeepserve.demo import demo

    return 0 if demo() else 1


def run_generate(args: argparse.Namespace) -> int:
    """Complete prompts, as text or token ids; prints text or one JSON object."""
    from xdeepserve.engine.dp.sampling_params import SamplingParams

    prompts = getattr(args, "prompts", None) or []
    if not prompts:
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
        _check_writable(args.trace)
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
        outputs = llm.generate(prompts, params, keep_logits=args.json)
        if args.trace is not None:
            llm.write_trace(args.trace)
        virtual_ms = llm.virtual_ns / 1e6
    if args.json:
        rows = [
            {
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": choice.token_ids,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
            }
            for output in outputs
            for choice in output.outputs
        ]
        result = {
            "model": args.model,
            "deployment": args.deployment,
            "precision": args.precision,
            "outputs": rows,
            "digest": digest(outputs),
        }
        print(json.dumps(result))
        return 0
    for output in outputs:
        choice = output.outputs[0]
        print(f"prompt     {output.prompt if output.prompt is not None else output.prompt_token_ids}")
        print(f"text       {choice.text!r}")
        print(f"token ids  {','.join(map(str, choice.token_ids))}")
        print(f"finished   {choice.finish_reason}\n")
    print(
        f"{sum(len(o.outputs[0].token_ids) for o in outputs)} tokens in {virtual_ms:.2f} ms of virtual time"
    )
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """The OpenAI-compatible endpoint, until a signal."""
    from xdeepserve.api.server import bind, run_server
    from xdeepserve.llm import build_engine

    bind(args.host, args.port).close()  # a port in use is said before a large model is loaded
    engine = build_engine(args.model, args.deployment, args.precision, overrides=args.overrides, warm_up=True)
    with working(f"Loading {args.model}") as progress:
        engine.load(progress)
    run_server(lambda: engine, args.host, args.port)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """The bit-exactness matrix; 1 if any row differs."""
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.verify import left_out, print_matrix, verify

    names = None if args.deployments == "all" else args.deployments.split(",")
    checkpoint = resolve_model(args.model)
    without = [each for each in left_out(checkpoint.config) if names is None or each.deployment in names]
    with working("Verifying") as progress:
        rows = verify(checkpoint, names, progress)
    is_exact = all(row.is_equal for row in rows)
    if args.json:
        print(
            json.dumps(
                {
                    "model": args.model,
                    "bit_exact": is_exact,
                    "rows": [row.as_dict() for row in rows],
                    "left_out": [each.as_dict() for each in without],
                }
            )
        )
    else:
        print_matrix(args.model, rows, without)
    return 0 if is_exact else 1


def run_quantize(args: argparse.Namespace) -> int:
    """Write an INT8 checkpoint."""
    from xdeepserve.quantize import run

    return run(args)


def run_eval(args: argparse.Namespace) -> int:
    """Perplexity, agreement and task scores of each recipe."""
    from xdeepserve.evals.command import run

    with working(f"Evaluating {args.model}") as progress:
        return run(args, progress)


def run_bench(args: argparse.Namespace) -> int:
    """Rows of one suite. InputError for options of another one."""
    from xdeepserve.bench import comm
    from xdeepserve.bench.rows import print_rows

    if args.suite != "comm" and (args.ranks or args.plot is not None):
        raise InputError(f"--ranks and --plot belong to bench comm, not to bench {args.suite}")
    if args.plot is not None:
        if args.ranks:
            raise InputError("--plot draws virtual time, and --ranks measures wall time: choose one")
        _check_writable(args.plot, "--plot")
        comm.pyplot()  # before half a minute of work
    if args.model is not None and args.suite not in ("decode", "startup"):
        raise InputError(f"--model belongs to bench decode and bench startup, not to bench {args.suite}")
    if args.steps and args.suite != "superpod":
        raise InputError(f"--steps belongs to bench superpod, not to bench {args.suite}")
    if args.trace is not None:
        if args.suite != "superpod" or args.steps:
            raise InputError("--trace belongs to bench superpod without --steps")
        _check_writable(args.trace)
    name = "ranks" if args.ranks else "steps" if args.steps else args.suite
    suite = importlib.import_module(f"xdeepserve.bench.{name}")
    compiles = name in ("kernels", "decode", "startup", "steps")
    with working(f"bench {name}", COMPILES if compiles else "less than a minute or two"):
        if args.suite in ("decode", "startup"):
            rows = suite.all_rows(args.model or "tiny")
        else:
            rows = suite.all_rows(args.trace) if name == "superpod" else suite.all_rows()
    if args.plot is not None:
        comm.plot(rows, args.plot)
    if args.json:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}))
    else:
        print_rows(rows)
    return 0


def run_golden(args: argparse.Namespace) -> int:
    """Write golden vectors, or check a directory of them; 1 if one differs."""
    from xdeepserve.golden import vectors

    if args.action == "write":
        names = vectors.write(args.directory, args.cases)
        print(f"{len(names)} cases in {args.directory}: {', '.join(names)}")
        return 0
    names, differences = vectors.check(args.directory, args.cases)
    different = {difference.case for difference in differences}
    for name in names:
        if name not in different:
            print(f"{name}: equal")
    for difference in differences:
        print(difference)
    return 1 if differences else 0


def run_describe(args: argparse.Namespace) -> int:
    """What would be built, without building it."""
    from xdeepserve.describe import describe
    from xdeepserve.llm import build_engine

    engine = build_engine(args.model, args.deployment, args.precision, overrides=args.overrides)
    print(describe(engine.plan))
    return 0


def run_settings(args: argparse.Namespace) -> int:
    """What --set changes."""
    from xdeepserve.engine.deploy.settings import help_text

    print(help_text(args.key))
    return 0


def _check_writable(path: Path, option: str = "--trace") -> None:
    """Refuse a file that cannot be written, before the work is done."""
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK) or path.is_dir():
        raise InputError(f"{option} {path}: cannot be written")


COMPILES = "the first run also compiles the kernels"


@contextlib.contextmanager
def working(text: str, note: str = COMPILES) -> Iterator[Progress]:
    """A status line on the terminal's stderr while work goes on; silent where stderr is no terminal.

    `note` says what to expect.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{text} ({note}) ...") as status:
        yield lambda done, total: status.update(f"{text}: {100 * done // max(total, 1)} % ...")


if __name__ == "__main__":
    warnings.simplefilter("default")
    sys.exit(main())
