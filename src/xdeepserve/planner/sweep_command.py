"""`xdeepserve sweep`: the cost of a decode iteration for each combination of settings, batch and context."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdeepserve.cli.options import Parser, check_writable, numbers
from xdeepserve.errors import InputError
from xdeepserve.progress import working

if TYPE_CHECKING:
    from xdeepserve.planner.sweep import Point, SweepResult

SHOWN_STAGES = 5  # of a row, for people
BATCHES = ("batch ", "context ")  # of a row's parts, what is no setting
OVERLAP = (
    "Shares add up to more than 100 % where two microbatches overlap: each has a part of the die's cores, "
    "and both go on at once."
)
SHARED = "as above"  # a row that differs from others in nothing


def add_options(parser: Parser) -> None:
    """Add the options: the values to combine, and the files of the table and plot."""
    option = parser.add_argument
    option("--model", default="deepseek-r1", metavar="M", help="as for describe; default deepseek-r1")
    option(
        "--deployment",
        default="moe-attention",
        metavar="D",
        help="with one TE: monolithic, colocated, moe-attention, or a .toml file; default moe-attention",
    )
    option(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=A,B,C",
        help="a setting, and the values to try; may be repeated: all combinations are run",
    )
    parser.take_settings()
    option("--batch", type=numbers, default=[32], metavar="N,N", help="requests of a DP group; default 32")
    option("--context", type=numbers, default=[4096], metavar="N,N", help="positions of each; default 4096")
    option("--dies", type=int, metavar="N", help="leave out combinations that have not N dies in all")
    option("--acceptance", type=float, default=0.9, metavar="P", help="of a draft, with mtp; default 0.9")
    option("--processes", type=int, metavar="N", help="how many at a time; default one for each core")
    option(
        "--ray",
        nargs="?",
        const="local",
        metavar="HOST:PORT",
        help="on a Ray cluster: this one, auto, or, without a value, one that is started here",
    )
    option("--csv", type=Path, metavar="FILE", help="write the table, with the share of every stage")
    option("--plot", type=Path, metavar="FILE", help="draw tokens per second over TPOT (needs matplotlib)")
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run every combination and print a row for each; return 1 if all of them are refused."""
    import msgspec

    from xdeepserve.bench.report import pyplot
    from xdeepserve.engine.deploy.settings import nearest, settings
    from xdeepserve.planner import sweep

    if args.processes is not None and args.processes < 1:
        raise InputError(f"--processes must be at least 1, found {args.processes}")
    for path, option in ((args.csv, "--csv"), (args.plot, "--plot")):
        if path is not None:
            check_writable(path, option)
    if args.plot is not None:
        pyplot()  # before the work, not after it
    choices = chosen(args.overrides)
    known = {each.key for each in settings()}
    for key in choices:
        if key not in known:  # said once, and before the first combination is begun
            raise InputError(f"unknown setting {key}{nearest(key)}")
    todo = sweep.points(
        args.model, args.deployment, choices, args.batch, args.context, args.acceptance, args.dies
    )
    results: list[SweepResult] = []
    labels, refused = Labels(todo), Refusals()
    with working("sweep") as status:
        for result in _measured(todo, args.processes, args.ray):
            results.append(result)
            which = "" if (label := labels(result)) == SHARED else f"{label}: "
            status.row(f"{len(results)}/{len(todo)} {which}{said(result, refused)}")
    if args.csv is not None:
        sweep.write_csv(results, args.csv)
    if args.plot is not None:
        plot(results, labels, args.plot)
    if args.json:
        print(json.dumps({"rows": msgspec.to_builtins(results)}))
    else:
        _print(results, labels)
    return 1 if all(result.refusal for result in results) else 0


def _measured(todo: Sequence[Point], processes: int | None, ray: str | None) -> Iterator[SweepResult]:
    """Yield results in the order of the points, from processes of this computer or from a cluster."""
    from xdeepserve.planner.sweep import measure, sweep
    from xdeepserve.remote.on_ray import over

    return sweep(todo, processes) if ray is None else over(ray, measure, todo, processes)


def chosen(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Parse ['a=1,2', 'b=x'] to {'a': ['1', '2'], 'b': ['x']}. Raises InputError."""
    found: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise InputError(f"'{override}' is not of the form key=value,value")
        if key in found:
            raise InputError(f"{key} is given twice; its values go together: {key}=a,b")
        found[key] = text.split(",")
    return found


class Refusals(dict[str, int]):
    """Reasons of refused combinations, with the number of each."""

    def __call__(self, reason: str) -> str:
        """Count a refusal and return a message, short if the reason was given before."""
        self[reason] = self.get(reason, 0) + 1
        return f"refused: {reason}" if self[reason] == 1 else "refused for the same reason"


def said(result: SweepResult, refused: Refusals) -> str:
    """Format the row's costs, or the reason of its refusal, which is printed only once."""
    if result.refusal:
        return refused(result.refusal)
    return (
        f"TPOT {result.tpot_ms:.2f} ms, {result.tokens_per_s_chip:.0f} tokens/s per chip, "
        + ("bound by " if result.attention_busy is not None else "")
        + result.bound
    )


class Labels:
    """Labels of rows: the settings common to all rows, printed once, and those that distinguish a row."""

    def __init__(self, todo: Sequence[Point]) -> None:
        parts = [_parts(point) for point in todo]
        self.common = [part for part in parts[0] if all(part in each for each in parts)]

    def __call__(self, result: SweepResult, *without: str) -> str:
        """Return a row's own settings, except those that begin with one of `without`."""
        own = [part for part in _parts(result.point) if part not in self.common]
        return ", ".join(part for part in own if not part.startswith(without)) or SHARED


def _parts(point: Point) -> list[str]:
    return [*point.overrides, f"batch {point.batch}", f"context {point.context}"]


def _print(results: Sequence[SweepResult], labels: Labels) -> None:
    """Print the results, the best first; settings common to all rows are printed once."""
    good = sorted((r for r in results if not r.refusal), key=lambda r: -r.tokens_per_s_chip)
    point = results[0].point
    print(f"{point.model}, {point.deployment}: {', '.join(labels.common)}")
    if good:
        print(
            "TPOT: a step and the scheduler's gap, which xDeepServe has though it plans ahead, by the tokens "
            "that a request gets; a chip is two dies."
        )
        if any(r.overlaps for r in good):
            print(OVERLAP)
        print(f"{'dies':>5} {'step ms':>9} {'TPOT ms':>9} {'tok/s/chip':>11}  {'bound':<16} settings")
    for r in good:
        print(
            f"{r.dies:>5} {r.iteration_ms:>9.2f} {r.tpot_ms:>9.2f} {r.tokens_per_s_chip:>11.0f}  "
            f"{r.bound:<16} {labels(r)}"
        )
        shown = [f"{name} {share:.0f} %" for name, share in list(r.shares.items())[:SHOWN_STAGES]]
        if r.experts_busy is not None:
            busy = f"attention dies compute {r.attention_busy:.0f} %, expert dies {r.experts_busy:.0f} %"
            print(f"{'':>39}{busy}")
        print(f"{'':>39}{', '.join(shown)}")
    for line in (*refused_lines(results, labels), *beyond_lines(results), *best_lines(results, labels)):
        print(line)


def refused_lines(results: Sequence[SweepResult], labels: Labels) -> list[str]:
    """Format a line for each reason of refusal. Settings refused at every batch and context are named without
    these."""
    reasons: dict[tuple[str, ...], set[str]] = {}
    for r in results:
        reasons.setdefault(r.point.overrides, set()).add(r.refusal)
    lines = []
    for reason in dict.fromkeys(r.refusal for r in results if r.refusal):
        alike = dict.fromkeys(
            labels(r, *(BATCHES if reasons[r.point.overrides] == {reason} else ()))
            for r in results
            if r.refusal == reason
        )
        which = "" if [*alike] == [SHARED] else f"{'; '.join(alike)}: "
        lines.append(f"refused: {which}{reason}")
    return lines


def beyond_lines(results: Sequence[SweepResult]) -> list[str]:
    """Format the quantities beyond all published times, each once."""
    notes = dict.fromkeys(note for r in results for note in r.beyond)
    return [f"how far off is not known: {note}" for note in notes]


def best_lines(results: Sequence[SweepResult], labels: Labels) -> list[str]:
    """Format the settings with most tokens per second of a chip: for each batch and context, or once if the
    settings are the same everywhere. The number of dies is added if it differs."""
    good = [r for r in results if not r.refusal]
    if len(good) < 2:
        return []
    is_one = len({r.point.overrides for r in results}) == 1
    groups: dict[tuple[int, int], list[SweepResult]] = {}
    for r in good:
        groups.setdefault((0, 0) if is_one else (r.point.batch, r.point.context), []).append(r)
    differ = len({r.dies for r in good}) > 1
    lines = []
    for (batch, context), rows in groups.items():
        top = max(rows, key=lambda r: r.tokens_per_s_chip)
        at = "" if is_one else f" at batch {batch}, context {context}"
        costs = f"TPOT {top.tpot_ms:.2f} ms, {top.tokens_per_s_chip:.0f} tokens/s per chip"
        dies = f", of {top.dies} dies" if differ else ""
        lines.append(f"best{at}: {labels(top, *(() if is_one else BATCHES))}: {costs}{dies}")
    if differ:
        lines.append("Their dies are not equally many: --dies N leaves those with N.")
    return lines


def plot(results: Sequence[SweepResult], labels: Labels, path: Path) -> None:
    """Draw tokens per second of a chip over TPOT. Each combination of settings is a line through its batches,
    which are written beside the points if there are several."""
    from xdeepserve.bench.report import pyplot

    plt: Any = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lines: dict[str, list[SweepResult]] = {}
    for result in results:
        if not result.refusal:
            lines.setdefault(labels(result, "batch "), []).append(result)
    batches = {result.point.batch for result in results}
    for name, line in lines.items():
        axes.plot([r.tpot_ms for r in line], [r.tokens_per_s_chip for r in line], "o-", label=name)
        for r in line if len(batches) > 1 else ():
            axes.annotate(f" {r.point.batch}", (r.tpot_ms, r.tokens_per_s_chip), fontsize=7)
    of = "; numbers are batches" if len(batches) > 1 else ""
    axes.set_title(f"{', '.join(labels.common)}{of}", fontsize=8, wrap=True)
    axes.set_xlabel("TPOT, ms of virtual time")
    axes.set_ylabel("tokens per second of a chip")
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend(fontsize=8)
    figure.savefig(path)
