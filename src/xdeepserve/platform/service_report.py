"""Report of a replay: latencies, goodput under bounds, hit rate, and work of each TE."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

PERCENTILES = (50, 90, 99)


class Bounds(msgspec.Struct, frozen=True):
    """Service level of a request: both bounds must hold for it to count."""

    ttft_s: float = 30.0
    tpot_ms: float = 100.0


class Outcome(NamedTuple):
    """Outcome of a request, in ns of virtual time.

    `te` is the TE's number; `first_te` is the TE that computed the prompt, if another.
    """

    te: int
    at_ns: float
    ttft_ns: float
    tpot_ns: float | None
    last_ns: float
    num_prompt: int
    num_output: int
    num_cached: int
    first_te: int | None = None


class TELoad(msgspec.Struct, frozen=True):
    """Work of a TE. `busy` is its share of the time; None where it was not counted."""

    name: str
    num_requests: int  # whose prompt it computed, or whose answer it ended
    num_tokens: int  # of these answers
    hit_rate: float  # of the tokens of these prompts
    busy: float | None = None


class MissedBound(msgspec.Struct, frozen=True):
    """Bound that requests miss, and how many of them would miss it alone, on an idle TE.

    `shortest` is the least of the latter by tokens to compute: of the prompt for TTFT, of the answer for
    TPOT; `alone` is its time on an idle TE, in the unit of the bound. Both are None if there is none.
    """

    name: Literal["TTFT", "TPOT"]
    bound: float
    unit: Literal["s", "ms"]
    p99: float
    num_late: int
    share: float  # of all requests
    num_late_alone: int
    shortest: int | None
    alone: float | None

    def line(self) -> str:
        """Format the bound, by how much it is missed, and the cause."""
        example = ""
        if self.shortest is not None:
            whose = "a prompt" if self.name == "TTFT" else "an answer"
            example = f", {whose} of {self.shortest:,} tokens in {self.alone:,.1f} {self.unit}"
        return (
            f"{self.name} of {self.num_late:,} requests ({100 * self.share:.1f} %) is over {self.bound:g} "
            f"{self.unit}, p99 {self.p99:,.1f} {self.unit}: {self.num_late_alone:,} miss the bound even on "
            f"an idle TE{example}, {self.num_late - self.num_late_alone:,} for requests beside them"
        )


class ServiceReport(msgspec.Struct, frozen=True):
    """Figures of a replay, from the first arrival on.

    `goodput` is requests within both bounds per second, `within` their share.
    """

    num_requests: int
    seconds: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    goodput: float
    within: float
    hit_rate: float  # of the tokens of all prompts
    tes: list[TELoad]
    bounds: Bounds

    def lines(self, shown: int = 16) -> list[str]:
        """Format the report as a table for people."""
        b = self.bounds
        rows = [
            f"{self.num_requests:,} requests in {self.seconds:,.1f} s of virtual time",
            f"{'':<10}{'mean':>12}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES),
        ]
        for name, values in (("TTFT ms", self.ttft_ms), ("TPOT ms", self.tpot_ms)):
            rows.append(f"{name:<10}" + "".join(f"{value:>12,.1f}" for value in values.values()))
        rows += [
            f"goodput   {self.goodput:.2f} requests/s: {100 * self.within:.1f} % have their first token in "
            f"{b.ttft_s:g} s and others every {b.tpot_ms:g} ms",
            f"hit rate  {100 * self.hit_rate:.1f} % of the prompts' tokens came from prefix caches",
            "",
            f"{'TE':<14}{'requests':>10}{'tokens':>12}{'hits':>8}{'busy':>8}",
        ]
        for te in self.tes[:shown]:
            busy = "" if te.busy is None else f"{100 * te.busy:.0f} %"
            hits = f"{100 * te.hit_rate:.0f} %"
            rows.append(f"{te.name:<14}{te.num_requests:>10,}{te.num_tokens:>12,}{hits:>8}{busy:>8}")
        if len(self.tes) > shown:
            rows.append(f"and {len(self.tes) - shown} more")
        return rows


class StoppedReplay(NamedTuple):
    """A replay that ended early, because too many requests had missed their bounds for sure."""

    num_requests: int
    num_arrived: int
    num_missed: int
    num_ended: int

    @property
    def within(self) -> float:
        """Share of all requests that may still keep their bounds."""
        return (self.num_requests - self.num_missed) / self.num_requests


def report(
    outcomes: Sequence[Outcome], names: Sequence[str], bounds: Bounds, busy_ns: Sequence[float] | None = None
) -> ServiceReport:
    """Compute the figures of the requests; `busy_ns` is each TE's busy time."""
    ttft = [each.ttft_ns / 1e6 for each in outcomes]
    tpot = [each.tpot_ns / 1e6 for each in outcomes if each.tpot_ns is not None]
    good = sum(is_within(each, bounds) for each in outcomes)
    took_ns = max(each.last_ns for each in outcomes) - min(each.at_ns for each in outcomes)
    begun: list[list[Outcome]] = [[] for _ in names]
    ended: list[list[Outcome]] = [[] for _ in names]
    for each in outcomes:
        begun[each.te if each.first_te is None else each.first_te].append(each)
        ended[each.te].append(each)
    loads = [
        TELoad(
            name,
            len(ended[number]) + sum(each.te != number for each in begun[number]),
            sum(each.num_output for each in ended[number]),
            _hits(begun[number]),
            None if busy_ns is None else busy_ns[number] / took_ns,
        )
        for number, name in enumerate(names)
    ]
    return ServiceReport(
        len(outcomes), took_ns / 1e9, _figures(ttft), _figures(tpot), good / took_ns * 1e9,
        good / len(outcomes), _hits(outcomes), loads, bounds,
    )  # fmt: skip


def is_within(each: Outcome, bounds: Bounds) -> bool:
    """Whether a request kept both bounds."""
    return each.ttft_ns <= 1e9 * bounds.ttft_s and (each.tpot_ns or 0) <= 1e6 * bounds.tpot_ms


class _BoundedTime(NamedTuple):
    """Time of a request that has a bound, and the number of tokens that it grows with."""

    name: Literal["TTFT", "TPOT"]
    unit: Literal["s", "ms"]
    bound: Callable[[Bounds], float]
    took: Callable[[Outcome], float]
    tokens: Callable[[Outcome], int]


BOUNDED_TIMES = (
    _BoundedTime(
        "TTFT", "s", lambda b: b.ttft_s, lambda o: o.ttft_ns / 1e9, lambda o: o.num_prompt - o.num_cached
    ),
    _BoundedTime("TPOT", "ms", lambda b: b.tpot_ms, lambda o: (o.tpot_ns or 0) / 1e6, lambda o: o.num_output),
)


def missed_bounds(
    outcomes: Sequence[Outcome], bounds: Bounds, alone: Callable[[int], Outcome]
) -> list[MissedBound]:
    """Find the bounds that requests miss, and those that miss one even alone: `alone(n)` is the outcome of
    the n-th request on an idle TE."""
    found, on_idle_te = [], functools.cache(alone)
    for name, unit, bound_of, took, tokens in BOUNDED_TIMES:
        bound = bound_of(bounds)
        late = [number for number, each in enumerate(outcomes) if took(each) > bound]
        if not late:
            continue
        late_alone = [each for each in map(on_idle_te, late) if took(each) > bound]
        shortest = min(late_alone, key=tokens, default=None)
        found.append(
            MissedBound(
                name, bound, unit, float(np.percentile([took(each) for each in outcomes], 99)),
                len(late), len(late) / len(outcomes), len(late_alone),
                None if shortest is None else tokens(shortest),
                None if shortest is None else took(shortest),
            )
        )  # fmt: skip
    return found


def _hits(outcomes: Sequence[Outcome]) -> float:
    total = sum(each.num_prompt for each in outcomes)
    return sum(each.num_cached for each in outcomes) / total if total else 0.0


def _figures(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    array = np.asarray(values)
    return {"mean": float(array.mean())} | {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}


def compared(reports: Mapping[str, ServiceReport]) -> list[str]:
    """Format reports of the same requests as a table, a row for each name."""
    rows = [["policy", "TTFT ms", "p99", "TPOT ms", "p99", "goodput/s", "within", "hits"]]
    for name, each in reports.items():
        pairs = itertools.product((each.ttft_ms, each.tpot_ms), ("mean", "p99"))
        times = [f"{values.get(key, 0.0):,.1f}" for values, key in pairs]
        shares = [f"{100 * share:.1f} %" for share in (each.within, each.hit_rate)]
        rows.append([name, *times, f"{each.goodput:.2f}", *shares])
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        f"{name:<{first}}" + "".join(f"{cell:>{2 + width}}" for cell, width in zip(row, others, strict=True))
        for name, *row in rows
    ]


class TECount(Protocol):
    """Number of TEs taking requests from a time on."""

    @property
    def at_ns(self) -> float: ...
    @property
    def num_serving(self) -> int: ...


def plot(
    outcomes: Sequence[Outcome], bounds: Bounds, path: Path, plt: Any, counts: Sequence[TECount] = ()
) -> None:
    """Draw TTFT and TPOT of each request by its arrival, with the bounds, and the number of TEs if it
    changes. `plt` is matplotlib's."""
    rows = 3 if counts else 2
    figure, axes = plt.subplots(rows, 1, figsize=(8, 3 * rows), sharex=True, layout="constrained")
    at = [each.at_ns / 1e9 for each in outcomes]
    axes[0].plot(at, [each.ttft_ns / 1e9 for each in outcomes], ".", markersize=2)
    axes[0].axhline(bounds.ttft_s, color="tab:red", linewidth=1)
    axes[0].set_ylabel("TTFT, s")
    axes[1].plot(at, [(each.tpot_ns or 0) / 1e6 for each in outcomes], ".", markersize=2)
    axes[1].axhline(bounds.tpot_ms, color="tab:red", linewidth=1)
    axes[1].set_ylabel("TPOT, ms")
    if counts:
        times = [0.0, *(each.at_ns / 1e9 for each in counts), max(each.last_ns for each in outcomes) / 1e9]
        numbers = [each.num_serving for each in counts]
        axes[2].step(times, [numbers[0], *numbers, numbers[-1]], where="post")
        axes[2].set_ylabel("TEs that take requests")
    axes[-1].set_xlabel("arrival, s of virtual time")
    for axis in axes:
        axis.set_ylim(bottom=0)
    figure.savefig(path)
