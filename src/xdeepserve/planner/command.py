"""`xdeepserve plan`: from a model, a latency bound and hardware to a deployment."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xdeepserve.cli.options import Parser, check_writable
from xdeepserve.errors import InputError, meant
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.planner.performance import LatencyBound
    from xdeepserve.planner.pod_search import PodSpace
    from xdeepserve.prices.profile import Demand

POD = "cm384"
MAX_DIES = 768
MIXED_DIES = 64  # of several kinds, unless it is said
SHOWN = 8


def add_options(parser: Parser) -> None:
    """Add the options: model, demand, bound, hardware, and the output file."""
    option = parser.add_argument
    option(
        "--model",
        required=True,
        metavar="M",
        help="as for generate, or deepseek-r1, deepseek-v3, mixtral-8x22b, dbrx, scaled-moe",
    )
    option(
        "--tpot-ms",
        type=float,
        metavar="T",
        help="a request may wait so long for its next token: an iteration, and the scheduler's gap of 2 ms",
    )
    option(
        "--slo-ms",
        type=float,
        metavar="T",
        help="instead: a decode iteration (T_iter) may take so long; TPOT = T_iter + 2 ms",
    )
    option(
        "--dies",
        type=int,
        metavar="N",
        help=f"of a CloudMatrix384; default {MAX_DIES}, a SuperPod; of other devices {MIXED_DIES}",
    )
    option(
        "--hardware",
        metavar="A,B",
        help="devices for attention and experts (l20, h800, a800, h20, l40s, cm384, 910b), compared by "
        "throughput per cost: with --dies or -o in deployments that run here, else in BF16, on nodes of up "
        "to 8, by MegaScale-Infer's search; default cm384",
    )
    option("--kind", metavar="K,L", help="of deployments: colocated, pd, moe-attention, transformerless")
    option("--prompt", type=int, metavar="N", help="tokens; default 571, the median of MS 7.1")
    option("--output", type=int, metavar="N", help="tokens; default 159, the median of MS 7.1")
    option("--trace", metavar="TRACE", help="lengths of prompts and answers from a trace, as replay reads it")
    option("--format", metavar="F", help="of the trace, as for replay; by default it is found")
    option("--extrapolate", action="store_true", help="also plans with what was never timed, marked so")
    option("-o", dest="file", type=Path, metavar="FILE", help="write the best plan, for --deployment FILE")


def run(args: argparse.Namespace) -> int:
    """Print the best plans. Raises InputError for a request that cannot be planned."""
    bound = _bound(args)
    for name in ("prompt", "output"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, found {value}; try 1")
        if value is not None and args.trace is not None:
            raise InputError(f"--trace has prompts and answers of its own: leave --{name} out")
    if args.format is not None and args.trace is None:
        raise InputError("--format is of a trace, and there is no --trace")
    if args.dies is not None and not 1 <= args.dies <= MAX_DIES:
        nearest = 1 if args.dies < 1 else MAX_DIES
        raise InputError(f"--dies must be between 1 and {MAX_DIES}, found {args.dies}; try {nearest}")
    if args.file is not None:
        if args.file.suffix != ".toml":
            raise InputError(f"-o {args.file}: a deployment is a .toml file; try {args.file}.toml")
        check_writable(args.file, "-o")
    names = dict.fromkeys((POD if args.hardware is None else args.hardware).split(","))
    runs_here = list(names) == [POD] or args.file is not None or args.dies is not None
    return _pod(args, bound, list(names)) if runs_here else _devices(args, bound, list(names))


def _bound(args: argparse.Namespace) -> LatencyBound:
    """Read the latency bound. Raises InputError for none, for two, and for a bound that no plan can keep."""
    from xdeepserve.planner.performance import GAP_NS, LatencyBound

    gap_ms, slo, tpot = GAP_NS / 1e6, args.slo_ms, args.tpot_ms
    if slo is None and tpot is None:
        raise InputError("plan needs a latency bound: --tpot-ms 50, or --slo-ms 48 for an iteration (T_iter)")
    if slo is not None and tpot is not None:
        raise InputError(
            f"--slo-ms {slo:g} and --tpot-ms {tpot:g} are two bounds of one time (TPOT = T_iter + {gap_ms:g} "
            "ms): give one of them"
        )
    if slo is not None:
        if not 0 < slo < math.inf:
            raise InputError(f"--slo-ms must be a number above 0, found {slo:g}")
        return LatencyBound(1e6 * slo)
    if not gap_ms < tpot < math.inf:
        raise InputError(
            f"--tpot-ms must be a number above {gap_ms:g}, the scheduler's gap in ms, found {tpot:g}"
        )
    return LatencyBound(1e6 * tpot - GAP_NS, of_tpot=True)


def _demand(args: argparse.Namespace) -> Demand:
    """Read the demand of requests: options, or the means of a trace, whose longest request has to fit."""
    from xdeepserve.platform.command import requests_of
    from xdeepserve.prices.profile import Demand

    if args.trace is None:
        default = Demand()
        return Demand(args.prompt or default.prompt, args.output or default.output)
    requests = requests_of(args.trace, args.format, args.command).requests
    count = len(requests)
    if not any(each.input_length + each.output_length for each in requests):
        raise InputError(f"--trace {args.trace} has {'no tokens in its' if count else 'no'} requests")
    return Demand(
        max(1, round(sum(each.input_length for each in requests) / count)),
        max(1, round(sum(each.output_length for each in requests) / count)),
        max(each.input_length + each.output_length for each in requests),
    )


def _check_length(args: argparse.Namespace, demand: Demand, limit: int) -> None:
    """Raise InputError for requests of more positions than the model has."""
    if demand.max_len <= limit:
        return
    if args.trace is not None:
        whose, nearest = "the longest request of --trace has", f"a trace whose requests have {limit} at most"
    else:
        whose = "--prompt and --output are together"
        halves = f"--prompt {limit - limit // 2} --output {limit // 2}"
        nearest = f"--output {limit - demand.prompt}" if demand.prompt < limit else halves
        nearest = f"--prompt {limit - demand.output}" if demand.output < limit else nearest
    raise InputError(
        f"{whose} {demand.max_len} tokens, and {args.model} has {limit} positions; try {nearest}"
    )


def _devices(args: argparse.Namespace, bound: LatencyBound, names: list[str]) -> int:
    """Compare pairs of devices in BF16, which are not run."""
    from xdeepserve.hw.accelerators import accelerator
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.planner import explain
    from xdeepserve.planner.devices import pairings
    from xdeepserve.planner.moe_shape import PUBLISHED, shape_of

    if args.kind is not None:
        raise InputError(
            f"--kind {args.kind}: devices are compared with attention and experts apart; --dies N plans a pod"
        )
    devices = [accelerator(name) for name in names]
    if not args.extrapolate:
        raise InputError(_untimed([device.name for device in devices], "in BF16 "))
    shape, demand = PUBLISHED.get(args.model.lower()), _demand(args)
    if shape is None:
        shape = shape_of(args.model, resolve_model(args.model).config)
    _check_length(args, demand, shape.positions)
    context, slo_ns = demand.context, bound.slo_ns
    found = pairings(shape, devices, context, bound)
    print(f"{shape.name}, {context} positions, E = {shape.experts}, {bound}, tok/s by T_iter, in BF16\n")
    _print("", explain.device_table(found[:SHOWN]))
    _print("the best", explain.device_totals(shape, found[0], demand))
    _print("why", explain.device_reasons(shape, found[0], context, slo_ns))
    _print("if", explain.device_sensitivity(shape, found[0], context, slo_ns))
    return 0


def _untimed(names: Sequence[str], how: str = "") -> str:
    """Explain why devices without measured times are refused."""
    return (
        f"nothing was timed {how}on {', '.join(names)}: how much of their peaks they reach is assumed; "
        "--extrapolate plans all the same"
    )


def _asked(args: argparse.Namespace, bound: LatencyBound, names: list[str]) -> PodSpace:
    """Read the space of a search over deployments: dies, bound, kinds and devices."""
    from xdeepserve.hw.accelerators import accelerator
    from xdeepserve.planner.pod_search import KINDS, PodSpace

    kinds = () if args.kind is None else tuple(args.kind.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"--kind '{kind}'{meant(kind, KINDS)}: there are {', '.join(KINDS)}")
    beside = {"pd", "transformerless"} & {*kinds}
    if beside and not args.extrapolate:
        raise InputError(
            f"--kind {', '.join(sorted(beside))}: prefill times are not calibrated; --extrapolate plans all "
            "the same, or moe-attention and colocated are what decodes there"
        )
    devices = [accelerator(name).name for name in names]
    untimed = [name for name in devices if name != POD]
    if untimed and kinds and {*kinds} <= {"colocated", "pd"}:
        raise InputError(
            f"--kind {args.kind} is of {POD} alone, without {', '.join(untimed)}: these are planned with "
            "experts on dies of their own; try --kind moe-attention"
        )
    if untimed and not args.extrapolate:
        raise InputError(_untimed(untimed))
    return PodSpace(
        num_dies=args.dies or (MAX_DIES if not untimed else MIXED_DIES),
        slo_ns=bound.slo_ns,
        extrapolates=args.extrapolate,
        kinds=kinds,
        devices=tuple(devices),  # type: ignore[arg-type]
        of_tpot=bound.of_tpot,
    )


def _pod(args: argparse.Namespace, bound: LatencyBound, names: list[str]) -> int:
    """Plan deployments to run here, of CloudMatrix384 dies or of other devices."""
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.planner import explain
    from xdeepserve.planner.pod_search import plans
    from xdeepserve.prices.profile import PodProfile

    asked, demand, checkpoint = _asked(args, bound, names), _demand(args), resolve_model(args.model)
    _check_length(args, demand, checkpoint.config.max_position_embeddings)
    slo_ns, dies = asked.slo_ns, asked.num_dies
    with working("plan: timing-only runs"):
        profile = PodProfile(checkpoint, demand, args.model)
        found = plans(profile, asked)
        best = found[0]
        totals = explain.pod_totals(profile, best, asked.counts_price)
    pod = "1 die" if dies == 1 else f"{dies} dies"
    print(f"{args.model} on {pod}, prompts of {demand.prompt}, {demand.output} new, {bound}\n")
    _print("", explain.pod_table(explain.shown(found, SHOWN), asked.counts_price))
    _print("the best", totals)
    _print("why", explain.pod_reasons(profile, best, slo_ns))
    _print("if, with this layout kept", explain.pod_sensitivity(profile, best, slo_ns, args.extrapolate))
    if args.file is not None:
        check = (
            f"xdeepserve bench plan --model {args.model} --deployment {args.file} --context {demand.context}"
        )
        halves = f"the prompt ({demand.prompt}) and half of the answer ({demand.output})"
        context = f"--context {demand.context}: {halves}"
        times = f"T_iter {best.iteration_ns / 1e6:.2f} ms, TPOT {best.tpot_ns / 1e6:.2f} ms"
        figures = f"{times}, {best.throughput:,.0f} tokens/s"
        comments = [
            f"{best.layout.title()}: planned for {args.model} on {pod}, {bound}",
            f"predicted: {figures}; checked by",
            check,
            context,
            *(f"{explain.EXTRAPOLATED}: {note}" for note in best.notes),
        ]
        args.file.write_text(explain.toml(best.layout.settings(demand, best.requests), comments))
        print(f"written: {args.file}; to check it: {check}")
        print(f"  the check takes a minute or more for a large model; {context}")
    return 0


def _print(title: str, lines: Sequence[str]) -> None:
    if title:
        print(f"{title}:")
    for line in lines:
        print(f"  {line}" if title else line)
    print()
