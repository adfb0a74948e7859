"""`xdeepserve plan`: from a model, a latency bound and hardware to a deployment."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from xdeepserve.cli.options import Parser, check_writable
from xdeepserve.cli.status import working
from xdeepserve.errors import InputError

POD = "cm384"
MAX_DIES = 768
SHOWN = 8


def add_options(parser: Parser) -> None:
    """Model, demand, bound, hardware, and the file that is written."""
    option = parser.add_argument
    option(
        "--model",
        required=True,
        metavar="M",
        help="as for generate, or deepseek-r1; with --hardware also mixtral-8x22b, dbrx, scaled-moe",
    )
    option(
        "--slo-ms",
        required=True,
        type=float,
        metavar="T",
        help="T_iter, a decode iteration, may take so long; TPOT, as sweep has it, is 2 ms more",
    )
    option("--dies", type=int, metavar="N", help=f"of a CloudMatrix384; default {MAX_DIES}, a SuperPod")
    option(
        "--hardware",
        metavar="A,B",
        help="devices for attention and experts (l20, h800, a800, h20, l40s, cm384, 910b): all pairs are "
        "compared by throughput per cost; default CloudMatrix384 dies, in deployments that run here",
    )
    option("--prompt", type=int, default=571, metavar="N", help="tokens; default 571, the median of MS 7.1")
    option("--output", type=int, default=159, metavar="N", help="tokens; default 159, the median of MS 7.1")
    option("--extrapolate", action="store_true", help="also plans with what was never timed, marked so")
    option("-o", dest="file", type=Path, metavar="FILE", help="write the best plan, for --deployment FILE")


def run(args: argparse.Namespace) -> int:
    """Print the best plans. Raises InputError for what cannot be planned."""
    if not 0 < args.slo_ms < math.inf:
        raise InputError(f"--slo-ms must be a number above 0, found {args.slo_ms:g}")
    for name in ("prompt", "output"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} must be at least 1, found {getattr(args, name)}")
    if args.dies is not None and not 1 <= args.dies <= MAX_DIES:
        nearest = 1 if args.dies < 1 else MAX_DIES
        raise InputError(f"--dies must be between 1 and {MAX_DIES}, found {args.dies}; try {nearest}")
    if args.file is not None:
        if args.file.suffix != ".toml":
            raise InputError(f"-o {args.file}: a deployment is a .toml file; try {args.file}.toml")
        check_writable(args.file, "-o")
    return _devices(args) if args.hardware not in (None, POD) else _pod(args)


def _devices(args: argparse.Namespace) -> int:
    """Pairs of devices, which are compared and not run."""
    from xdeepserve.hw.accelerators import accelerator
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.planner import explain
    from xdeepserve.planner.devices import pairings
    from xdeepserve.planner.fit import Demand
    from xdeepserve.planner.moe_shape import PUBLISHED, shape_of

    devices = [accelerator(name) for name in dict.fromkeys(args.hardware.split(","))]
    names = ", ".join(device.name for device in devices)
    if args.file is not None or args.dies is not None:
        raise InputError(
            f"-o and --dies are for pods that run here, of {POD} dies alone: leave --hardware out"
        )
    if not args.extrapolate:
        raise InputError(
            f"nothing was timed in BF16 on {names}: how much of their peaks they reach is assumed; "
            "--extrapolate plans all the same"
        )
    shape = PUBLISHED.get(args.model.lower())
    if shape is None:
        shape = shape_of(args.model, resolve_model(args.model).config)
    context, slo_ns = Demand(args.prompt, args.output).context, 1e6 * args.slo_ms
    found = pairings(shape, devices, context, slo_ns)
    bound = f"T_iter <= {args.slo_ms:g} ms"
    print(f"{shape.name}, {context} positions, E = {shape.experts}, {bound}, tok/s by T_iter, in BF16\n")
    _print("", explain.device_table(found[:SHOWN]))
    _print("why", explain.device_reasons(shape, found[0], context, slo_ns))
    _print("if", explain.device_sensitivity(shape, found[0], context, slo_ns))
    return 0


def _pod(args: argparse.Namespace) -> int:
    """Deployments of CloudMatrix384 dies."""
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.planner import explain
    from xdeepserve.planner.fit import Demand, PodProfile
    from xdeepserve.planner.layouts import plans
    from xdeepserve.planner.moe_shape import PUBLISHED

    if args.model.lower() in PUBLISHED:
        raise InputError(
            f"model {args.model} is known by its sizes alone: name devices, as in --hardware h20,l40s"
        )
    demand, checkpoint = Demand(args.prompt, args.output), resolve_model(args.model)
    limit = checkpoint.config.max_position_embeddings
    if demand.max_len > limit:
        raise InputError(
            f"--prompt and --output are {demand.max_len} tokens together, and {args.model} has {limit} "
            f"positions; try --prompt {max(1, limit - args.output)}"
        )
    slo_ns, dies = 1e6 * args.slo_ms, args.dies or MAX_DIES
    with working("plan: timing-only runs"):
        profile = PodProfile(checkpoint, demand)
        found = plans(profile, dies, slo_ns, args.extrapolate)
    best, bound = found[0], f"T_iter <= {args.slo_ms:g} ms"
    pod = "1 die" if dies == 1 else f"{dies} dies"
    print(f"{args.model} on {pod}, prompts of {demand.prompt}, {demand.output} new, {bound}\n")
    _print("", explain.pod_table(found[:SHOWN]))
    _print("why", explain.pod_reasons(profile, best, slo_ns))
    _print("if", explain.pod_sensitivity(profile, best, slo_ns, args.extrapolate))
    if args.file is not None:
        check = (
            f"xdeepserve bench plan --model {args.model} --deployment {args.file} --context {demand.context}"
        )
        times = f"T_iter {best.iteration_ns / 1e6:.2f} ms, TPOT {best.tpot_ns / 1e6:.2f} ms"
        figures = f"{times}, {best.throughput:,.0f} tokens/s"
        comments = [
            f"{best.layout.title()}: planned for {args.model} on {pod}, {bound}",
            f"predicted: {figures}; checked by",
            check,
            *(f"{explain.EXTRAPOLATED}: {note}" for note in best.notes),
        ]
        args.file.write_text(explain.toml(best.layout.settings(demand, best.requests), comments))
        print(f"written: {args.file}; to check it: {check}")
    return 0


def _print(title: str, lines: Sequence[str]) -> None:
    if title:
        print(f"{title}:")
    for line in lines:
        print(f"  {line}" if title else line)
    print()
