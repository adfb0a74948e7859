"""`xdeepserve replay`: serve a trace of requests, with tokens by a small pod, or time only by many TEs."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdeepserve.cli.options import Parser, add_deployment, check_writable, note, overrides_of
from xdeepserve.errors import InputError
from xdeepserve.progress import Status, working

if TYPE_CHECKING:
    from xdeepserve.platform.cluster import Cluster
    from xdeepserve.platform.cluster_replay import ClusterServed
    from xdeepserve.platform.fleet_words import Decision, FleetTE
    from xdeepserve.platform.hindsight import Hindsight
    from xdeepserve.platform.service_report import (
        Bounds,
        MissedBound,
        Outcome,
        ServiceReport,
        StoppedReplay,
    )
    from xdeepserve.platform.traces import RequestTrace

    Result = tuple[list[Outcome], ServiceReport, dict[str, Any]]  # of a policy, or of a pod

ENOUGH = 0.9  # of requests within their bounds: so many TEs are as many as a load needs
SHOWN_EVENTS = 40  # of scaling
EXPLAINED = 8  # TEs whose scores a decision shows; with --json, all


def add_options(parser: Parser) -> None:
    """Add the options: the trace, the TEs that serve it, and the service level."""
    from xdeepserve.platform.traces import described

    parser.epilog = (
        "TRACE may be made:KEY=VALUE,...: requests of a generator, with seed=N, requests=N, seconds=S,\n"
        "prompt=N and output=N tokens, spread=, turns=, pause=, systems=, system=, burst=, swing=, habit=\n"
        "and block=\nFormats of files, also compressed as .gz, .bz2, .xz or .zst (columns: xdeepserve docs "
        "platform):\n" + textwrap.fill(described(), 100)
    )
    option = parser.add_argument
    option("trace", metavar="TRACE", help="a file, or made:KEY=VALUE,...")
    option("--format", metavar="F", help="of the file, see below; by default it is found")
    add_deployment(parser)
    parser.set_defaults(deployment=None, model=None)
    option("--cluster", type=Path, metavar="FILE", help="time only, on these TEs (xdeepserve docs platform); "
           "without --deployment and --cluster: as many TEs of 32 dies as the load needs, of --model, by "
           "default deepseek-r1")  # fmt: skip
    option("--exact", action="store_true", help="on the engine itself; takes far longer")
    option("--policy", metavar="P,Q", help="who gets a request, whatever the cluster's file says; several or "
           "all are compared, on the TEs of the file or on as many as the first one needs")  # fmt: skip
    option("--heat", type=Path, metavar="FILE", help="for pd-aware and deepserve, by bench heatmap")
    option("--first", type=int, metavar="N", help="of the trace, the first N requests")
    option("--faster", type=float, default=1.0, metavar="X", help="arrivals X times as fast; default 1")
    option("--shrink", type=int, default=1, metavar="N", help="with tokens: divide all lengths by N")
    option("--slo-ttft", type=float, default=30.0, metavar="S", help="a bound in seconds; default 30")
    option("--slo-tpot", type=float, default=100.0, metavar="MS", help="a bound in ms; default 100")
    option(
        "--explain",
        action="store_true",
        help="a line for each request: its TE, scores of the eight best (with --json, of all), and of some "
        "what turned out best",
    )
    option("--regret", type=int, metavar="N", help="with --explain: how many requests are tried on every "
           "TE; by default as many as take some seconds")  # fmt: skip
    option("--plot", type=Path, metavar="FILE", help="draw TTFT and TPOT over time (needs matplotlib)")
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Serve the trace and print the results."""
    _check(args)
    from xdeepserve.platform import service_report
    from xdeepserve.platform.service_report import Bounds

    trace = requests_of(args.trace, args.format, args.command)
    trace = trace._replace(requests=trace.requests[: args.first])
    if args.faster != 1:
        from xdeepserve.platform.traces import at_rate

        trace = trace._replace(requests=at_rate(trace.requests, args.faster))
    plt: Any = None
    if args.plot is not None:
        from xdeepserve.bench.report import pyplot

        check_writable(args.plot, "--plot")
        plt = pyplot()  # before the work, not after it
    bounds = Bounds(args.slo_ttft, args.slo_tpot)
    results = [_with_tokens(args, trace, bounds)] if args.deployment else _time_only(args, trace, bounds)
    outcomes, found, more = results[0]
    if args.plot is not None:
        service_report.plot(outcomes, bounds, args.plot, plt, more.get("scaling", ()))
    if args.json:
        import msgspec

        each = [msgspec.to_builtins(more) | msgspec.to_builtins(found) for _, found, more in results]
        print(json.dumps({"trace": args.trace, **(each[0] if len(each) == 1 else {"policies": each})}))
        return 0
    several = {more["policy"]: found for _, found, more in results if len(results) > 1}
    for name, value in more.items():
        if name not in ("decisions", "hindsight", "scaling", "missed", *(["policy"] if several else [])):
            print(f"{name:<11}{value}")
    if several:
        print(*service_report.compared(several), sep="\n")
        return 0
    events = more.get("scaling", ())
    print(*(event.line() for event in events[:SHOWN_EVENTS]), sep="\n", end="\n" if events else "")
    if len(events) > SHOWN_EVENTS:
        print(f"and {len(events) - SHOWN_EVENTS} more events; --json has all")
    print(*found.lines(), sep="\n")
    if "missed" in more:
        print(*why_missed(outcomes, found, more["missed"]), sep="\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise InputError for options out of range, or options that do not go together."""
    if args.deployment is not None and args.cluster is not None:
        raise InputError("--deployment serves tokens, and --cluster takes time only: choose one")
    if args.deployment is None:
        tokens = {
            "--shrink": args.shrink != 1, "--set": bool(args.overrides),
            "--precision": args.precision != "int8",
        }  # fmt: skip
        if idle := [name for name, is_given in tokens.items() if is_given]:
            raise InputError(
                f"{', '.join(idle)}: only with --deployment D, which serves tokens; time only, sizes of TEs "
                "stand in a file: --cluster FILE"
            )
    elif args.policy is not None or args.heat is not None or args.explain or args.exact:
        raise InputError("--policy, --heat, --explain and --exact belong to --cluster; see scheduler.route")
    if args.exact and (args.cluster is None or args.explain):
        raise InputError(f"--exact {'has no --explain' if args.explain else 'needs --cluster FILE'}")
    if args.policy is not None and (args.policy == "all" or "," in args.policy):
        for name, is_given in (("--explain", args.explain), ("--plot", args.plot is not None)):
            if is_given:
                raise InputError(f"{name} shows one policy, found --policy {args.policy}: choose one of them")
    if args.regret is not None and not args.explain:
        raise InputError("--regret belongs to --explain")
    for name, least in (("first", 1), ("shrink", 1), ("regret", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name} must be at least {least}, found {value}")
    for name in ("faster", "slo_ttft", "slo_tpot"):
        if not 0 < getattr(args, name) < 1e9:
            raise InputError(f"--{name.replace('_', '-')} must be above 0, found {getattr(args, name):g}")


def requests_of(trace: str, form: str | None, command: str) -> RequestTrace:
    """Read the requests of a file or of the generator, and print notes on what had to be mended."""
    from xdeepserve.platform import made_traffic, traces

    if form is not None:
        traces.trace_format(form)  # refused for generated requests, too
    if trace.startswith(made_traffic.PREFIX):
        traffic = made_traffic.parsed(trace)
        return traces.RequestTrace(made_traffic.made(traffic), traffic.block, "generated")
    found = traces.read_trace(Path(trace), form)
    for each in found.notes:
        note(command, f"{trace}: {each}")
    return found


def _with_tokens(args: argparse.Namespace, trace: RequestTrace, bounds: Bounds) -> Result:
    from xdeepserve.llm import LLM, digest
    from xdeepserve.platform.service_report import report
    from xdeepserve.platform.token_replay import replayed

    model = args.model or "tiny"
    with (
        working(f"replay: {len(trace.requests)} requests"),
        LLM(model, args.deployment, args.precision, overrides=overrides_of(args)) as llm,
    ):
        served = replayed(llm, trace.requests, trace.block, args.shrink)
    more = {"model": model, "deployment": args.deployment, "format": trace.form}
    more["digest"] = digest(served.outputs)
    return served.outcomes, report(served.outcomes, served.names, bounds, served.busy_ns), more


def _time_only(args: argparse.Namespace, trace: RequestTrace, bounds: Bounds) -> list[Result]:
    """Serve the requests by each policy. Steps are priced once, and all policies have the same TEs."""
    import msgspec

    from xdeepserve.engine.balance.heat_map import read_heat_map
    from xdeepserve.engine.deploy.policies import ROUTE
    from xdeepserve.model.presets import resolve_model
    from xdeepserve.platform.cluster import check_simulated, policies_of, priced_kinds
    from xdeepserve.platform.cluster_replay import ClusterReplay
    from xdeepserve.platform.hindsight import hindsights
    from xdeepserve.platform.length_predictor import told_lengths
    from xdeepserve.platform.traces import check_positions

    requests = trace.requests
    asked = [] if args.policy is None else policies_of(args.policy)
    cluster = _asked(args)
    policies = asked or [cluster.policy]
    looking = [each for each in policies if ROUTE.has(each, "reads a heat map")]
    if args.heat is not None and not looking:
        raise InputError(f"--heat: policy {', '.join(policies)} looks at no heat map")
    heat = None if args.heat is None else read_heat_map(args.heat)
    check_positions(requests, resolve_model(cluster.model).config.max_position_embeddings, cluster.model)
    predict, error = told_lengths(cluster.lengths, requests)
    results: list[Result] = []
    if args.exact:
        clusters = [msgspec.structs.replace(cluster, policy=policy) for policy in policies]
        return [_exact(args, each, trace, bounds) for each in clusters]
    check_simulated(cluster)
    with working("replay") as status:
        status.text = "replay: steps are priced"
        kinds = priced_kinds(cluster, trace.block, status.progress)

        replay = ClusterReplay(requests, kinds, heat, predict, bounds)

        def serve(sized: Cluster, least: float) -> ClusterServed | StoppedReplay:
            count = sum(te.count for te in sized.te)
            status.text = f"replay: {len(requests):,} requests on {count} TE{'s' if count > 1 else ''}"
            return replay.tried(sized, args.explain, status.progress, least)

        for policy in policies:
            cluster = msgspec.structs.replace(cluster, policy=policy)
            if args.cluster is None and not results:
                cluster, served = _sized(cluster, serve, status)
            else:
                served = replay.serve(cluster, args.explain, status.progress)
            outcomes, found = served.outcomes, served.report
            more: dict[str, Any] = {"model": cluster.model, "cluster": _of(cluster), "format": trace.form}
            more["policy"] = policy
            if error is not None:
                more["lengths"] = error.line()
            if (cluster.roles, cluster.scale, cluster.pool) != (None, None, None):
                more["scaling"] = served.events
            results.append((outcomes, found, more))
            if args.cluster is None and found.within < ENOUGH:
                status.text = "replay: late requests are tried on an idle TE"
                more["missed"] = replay.missed(cluster, served)
        tried: list[Hindsight] = []
        if args.explain and args.regret != 0:
            status.text = "replay: requests are tried on other TEs"
            tried = hindsights(lambda forced: replay.fleet(cluster, None, forced)[0], requests,
                               served.decisions, served.served, args.regret, status.progress)  # fmt: skip
    if args.explain:
        most = len(served.tes) if args.json else EXPLAINED
        after = {each.number: each for each in tried}
        more["decisions"] = [
            explained(each, served.tes, most, after.get(each.number)) for each in served.decisions
        ]
        more["hindsight"] = tried
        more["regret"] = regret_of(tried)
        if not args.json:
            print(*more["decisions"], "", sep="\n")
    if not heat and looking and len({te.is_apart for te in served.tes}) == 2:
        note(args.command, f"without --heat, {', '.join(looking)} takes TEs of both kinds for alike")
    return results


def _exact(args: argparse.Namespace, cluster: Cluster, trace: RequestTrace, bounds: Bounds) -> Result:
    """Serve the requests on the cluster's TEs by the engine, time only."""
    from xdeepserve.platform.exact_replay import exactly

    heat = None if args.heat is None else str(args.heat)
    with working(f"replay: {len(trace.requests):,} requests on the engine"):
        outcomes, found, events = exactly(cluster, trace.requests, trace.block, bounds, heat)
    more: dict[str, Any] = {"model": cluster.model, "cluster": _of(cluster), "format": trace.form}
    more["policy"] = cluster.policy
    if cluster.scale is not None:
        more["scaling"] = events
    return outcomes, found, more


def _asked(args: argparse.Namespace) -> Cluster:
    """Make the cluster of a file, or TEs whose number is yet to be found, with the model of the options."""
    import msgspec

    from xdeepserve.model.presets import resolve_model
    from xdeepserve.platform.cluster import Cluster, ClusterTE, read_cluster

    cluster = Cluster((ClusterTE(),)) if args.cluster is None else read_cluster(args.cluster)
    cluster = msgspec.structs.replace(cluster, model=args.model or cluster.model)
    if args.cluster is None:
        drafts = min(cluster.te[0].mtp, resolve_model(cluster.model).config.num_nextn_predict_layers)
        cluster = msgspec.structs.replace(cluster, te=(ClusterTE(mtp=drafts),))
    return cluster


def _of(cluster: Cluster) -> str:
    """Describe the number of TEs and dies of a cluster."""
    num_tes, dies = sum(te.count for te in cluster.te), cluster.te[0].dies
    if cluster.scale is not None:
        return f"{cluster.scale.least} to {cluster.scale.most} TEs of {dies} dies"
    if cluster.roles is not None:
        return f"{num_tes} TEs of {dies} dies, which change roles"
    return f"{num_tes} TEs, {sum(te.count * te.dies for te in cluster.te)} dies"


def _sized(
    cluster: Cluster, serve: Callable[[Cluster, float], ClusterServed | StoppedReplay], status: Status
) -> tuple[Cluster, ClusterServed]:
    """Find the fewest TEs for serving ENOUGH of the requests within their bounds, and how these serve."""
    from xdeepserve.platform.cluster_replay import ClusterServed
    from xdeepserve.platform.te_count import least_count

    whole: dict[int, ClusterServed] = {}

    def tried(sized: Cluster, least: float) -> ServiceReport | StoppedReplay:
        served, count = serve(sized, least), sized.te[0].count
        if not isinstance(served, ClusterServed):
            status.row(f"{count} TEs have less than {100 * least:.1f} % within the bounds")
            return served
        whole[count] = served
        status.row(f"{count} TEs have {100 * served.report.within:.1f} % within the bounds")
        return served.report

    sized = least_count(cluster, tried, ENOUGH)
    return sized, whole[sized.te[0].count]


def why_missed(outcomes: Sequence[Outcome], found: ServiceReport, missed: Sequence[MissedBound]) -> list[str]:
    """Say that no number of TEs keeps the bounds, which bound is not kept and why, and which would be."""
    from xdeepserve.platform.service_report import Bounds, is_within

    bounds = {each.name: math.ceil(each.p99) for each in missed}
    would = Bounds(bounds.get("TTFT", found.bounds.ttft_s), bounds.get("TPOT", found.bounds.tpot_ms))
    share = sum(is_within(each, would) for each in outcomes) / len(outcomes)
    return [
        "",
        f"{100 * ENOUGH:g} % were sought within both bounds: no number of TEs has more than "
        f"{100 * found.within:.1f} %",
        *(each.line() for each in missed),
        f"--slo-ttft {would.ttft_s:g} --slo-tpot {would.tpot_ms:g} would have {100 * share:.1f} %; TEs of "
        "other sizes stand in a file: --cluster FILE",
    ]


def explained(decision: Decision, tes: Sequence[FleetTE], most: int, after: Hindsight | None = None) -> str:
    """Format a decision in a line: the `most` best TEs, the best first, with the deciding keys. If hindsight
    is given, the line also names the TE that turned out best."""
    could = [te for te, keys in enumerate(decision.keys) if keys[0] != float("inf")]
    order = sorted(could, key=lambda te: (*decision.keys[te], te))[:most]
    keys = (", ".join(f"{key:.4g}" for key in decision.keys[te]) for te in order)
    scores = "; ".join(f"{tes[te].name}: {each}" for te, each in zip(order, keys, strict=True))
    more = f"; {len(could) - len(order)} more" if len(could) > len(order) else ""
    line = f"request {decision.number} -> {tes[decision.te].name} ({scores}{more})"
    if after is None:
        return line
    took = f"{line}; it took {after.took_ns / 1e9:.3f} s"
    if after.best == after.te:
        return f"{took}, the best"
    best = f"{after.best_ns / 1e9:.3f} s on {tes[after.best].name}"
    return f"{took}, and {best}: regret {100 * after.regret:.1f} %"


def regret_of(tried: Sequence[Hindsight]) -> str:
    """Format how much longer requests took than on the TE that turned out best."""
    if not tried:
        return "of none"
    lost = [100 * each.regret for each in tried]
    right = sum(each.best == each.te for each in tried)
    return (
        f"{sum(lost) / len(lost):.1f} % on average of {len(lost)} requests, at most {max(lost):.1f} %; "
        f"{right} had the best TE"
    )
