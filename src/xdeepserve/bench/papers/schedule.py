"""`xdeepserve bench schedule`: routing policies for requests, on three traces at three loads.

DeepSeek-R1 runs on three TEs of 64 dies that do both and three in halves, time only at the grain of a step.
Hints of prefixes are 100 ms old. Traces are generated: chats that share much, unrelated requests with long
prompts and short answers, and the other way round. A rate is that of all requests if turns of a chat came at
once; with pauses between turns it is half of that. Lengths are so spread that a single trace says more about
its longest prompts than about policies. So results are means over SEEDS, with their spread; regret and rows
`lengths` are of the first trace of each kind.

Beside DeepServe's Algorithm 1 stand its parts alone, and published policies of others. `deepserve` is told
the mean length of answers. `deepserve/knows` is told the true length of each: the worth of a perfect
predictor, which nobody has. Rows `lengths` give the worth of a predictor that has learned from the first half
of a trace. They also cover a fourth trace, whose applications differ in the length of their answers.

Rows `claim` are the paper's claims (5.3.2, Figure 7): PD-aware scheduling against round robin should be even
at low load, better at the middle one, and worse at the highest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from xdeepserve.bench.papers import heatmap
from xdeepserve.bench.report import Row
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.platform.cluster import Cluster, ClusterTE, PricedKind, fleet_tes
from xdeepserve.platform.fleet import Fleet, Predict
from xdeepserve.platform.fleet_words import Decision, FleetTE, ServedRequest
from xdeepserve.platform.hindsight import hindsights
from xdeepserve.platform.length_predictor import LengthPredictor, held_out_error, split
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.traces import TracedRequest

EACH = 3  # TEs of a kind
STALE_NS = 100_000_000
RATES = (2.0, 10.0, 40.0)  # requests per second
NUM_REQUESTS = 600
SEEDS = tuple(range(1, 9))  # of the traces
TRACES = {
    "chats": MadeTraffic(turns=5, prompt=4000, output=200, pause=10),
    "long prompts": MadeTraffic(turns=1, systems=0, prompt=6000, output=60),
    "long answers": MadeTraffic(turns=1, systems=0, prompt=500, output=600),
}
APPLICATIONS = MadeTraffic(turns=1, systems=12, system=2000, prompt=3000, output=300, spread=0.5, habit=1.2)
CLAIM = "claim/pd-aware over round-robin"
SAMPLED = 6  # requests whose every other choice is tried


class PolicyResult(NamedTuple):
    """Results of a policy: mean latencies in ms, and the share of prompt tokens that was cached.

    For several traces the values are means, and `spread` is the standard deviation of their latencies.
    """

    ttft: float
    tpot: float
    latency: float
    hits: float
    spread: float = 0.0

    @staticmethod
    def of(served: Sequence[ServedRequest]) -> PolicyResult:
        """Compute the means of some requests."""
        tpot = [each.tpot_ns for each in served if each.tpot_ns is not None]
        return PolicyResult(
            float(np.mean([each.ttft_ns for each in served])) / 1e6,
            float(np.mean(tpot)) / 1e6,
            float(np.mean([each.last_ns - each.at_ns for each in served])) / 1e6,
            sum(each.num_cached for each in served) / sum(each.num_prompt for each in served),
        )

    @staticmethod
    def mean(found: Sequence[PolicyResult]) -> PolicyResult:
        """Compute the mean of several traces' results, all with equal weight."""
        ttft, tpot, latency, hits, _ = np.mean(found, axis=0).tolist()
        return PolicyResult(
            ttft, tpot, latency, hits, float(np.std([each.latency for each in found], ddof=1))
        )


def all_rows() -> Iterator[Row]:
    """Yield all rows in order of computation."""
    heat, tes = heatmap.here(), six(heatmap.kinds())
    yield Row("schedule/heatmap/stable", 100 * heat.stable, "%", "predicted", "DeepServe 5.3.2: over 80 %")
    for name in TRACES:
        for rate in RATES:
            yield from compared(name, rate, tes, heat)
    for rate in RATES:
        work = generated(APPLICATIONS, rate)
        yield from answer_lengths(f"schedule/applications/rate={rate:g}", work, tes, heat, STALE_NS)


def six(kinds: list[PricedKind]) -> list[FleetTE]:
    """Make the six TEs: three of each kind."""
    return fleet_tes(Cluster(tuple(ClusterTE(count=EACH, apart=te.apart) for te in heatmap.PAIR)), kinds)


def compared(name: str, rate: float, tes: list[FleetTE], heat: HeatMap) -> Iterator[Row]:
    """Yield every policy's results on the traces of a kind at a load."""
    results = {policy: over_traces(policy, name, rate, tes, heat) for policy in ROUTE.rows}
    results["deepserve/knows"] = over_traces("deepserve", name, rate, tes, heat, knows=True)
    at = f"schedule/{name}/rate={rate:g}"
    for way, each in results.items():
        yield Row(f"{at}/{way}/ttft", each.ttft, "ms", "predicted")
        yield Row(f"{at}/{way}/tpot", each.tpot, "ms", "predicted")
        yield Row(f"{at}/{way}/latency", each.latency, "ms", "predicted")
        yield Row(f"{at}/{way}/spread", each.spread, "ms", "predicted", "of traces' latencies, one sigma")
        yield Row(f"{at}/{way}/hits", 100 * each.hits, "%", "predicted")
    yield _claim(at, rate, results["round-robin"].latency / results["pd-aware"].latency)
    work = trace(name, rate)
    yield Row(f"{at}/deepserve/regret", regret(work, tes, heat), "%", "predicted", "of latency")
    yield from answer_lengths(at, work, tes, heat, STALE_NS)


@functools.cache
def claims() -> tuple[Row, ...]:
    """Compute only the paper's claims about PD-aware scheduling, once."""
    return tuple(_claims())


def _claims() -> Iterator[Row]:
    heat, tes = heatmap.here(), six(heatmap.kinds())
    for name in TRACES:
        for rate in RATES:
            ways: tuple[str, ...] = ("round-robin", "pd-aware")
            other, aware = (over_traces(way, name, rate, tes, heat).latency for way in ways)
            yield _claim(f"schedule/{name}/rate={rate:g}", rate, other / aware)


def claim(name: str, rate: float) -> str:
    """Name the row of the paper's claim for a trace at a rate."""
    return f"schedule/{name}/rate={rate:g}/{CLAIM}"


def _claim(at: str, rate: float, gain: float) -> Row:
    """Compute the speedup of the mean request, PD-aware over round robin (DeepServe 5.3.2, Figure 7)."""
    should = dict(zip(RATES, ("as good", "better", "worse"), strict=True))[rate]
    return Row(f"{at}/{CLAIM}", gain, "x", "predicted", f"the paper: {should}")


def over_traces(
    policy: str, name: str, rate: float, tes: Sequence[FleetTE], heat: HeatMap, knows: bool = False
) -> PolicyResult:
    """Measure a policy on the traces of a kind. It is told the mean length of answers, or with `knows` each
    one's."""
    found = []
    for seed in SEEDS:
        work = trace(name, rate, seed)
        found.append(PolicyResult.of(serve(policy, work, tes, heat, None if knows else mean_answer(work))))
    return PolicyResult.mean(found)


def mean_answer(work: Sequence[TracedRequest]) -> float:
    """Compute the mean tokens of the requests' answers."""
    return float(np.mean([each.output_length for each in work]))


def trace(name: str, rate: float, seed: int = SEEDS[0]) -> list[TracedRequest]:
    """Make a trace of TRACES at a rate."""
    return generated(TRACES[name], rate, seed)


def generated(work: MadeTraffic, rate: float, seed: int = SEEDS[0]) -> list[TracedRequest]:
    """Make requests with some statistics at a rate."""
    seconds = NUM_REQUESTS / rate
    pause = work.pause * RATES[0] / rate  # people answer sooner, too, else the rate would be another
    return made(msgspec.structs.replace(work, requests=NUM_REQUESTS, seconds=seconds, pause=pause, seed=seed))


def serve(
    policy: str,
    work: Sequence[TracedRequest],
    tes: Sequence[FleetTE],
    heat: HeatMap,
    mean: float | None,
) -> list[ServedRequest]:
    """Serve the requests by a policy. Without a `mean` the policy is told the true length of each answer."""
    return Fleet(tes, policy, heat, lambda each: each.output_length if mean is None else mean, STALE_NS).run(
        work
    )


def regret(work: Sequence[TracedRequest], tes: Sequence[FleetTE], heat: HeatMap) -> float:
    """Measure the regret of some requests: how much longer they took than on the TE that turned out best, all
    others unchanged. The result is the mean, in percent of the best."""
    mean = mean_answer(work)
    chosen: list[Decision] = []
    fleet = partial(Fleet, tes, "deepserve", heat, lambda _: mean, STALE_NS)
    served = fleet(explain=chosen.append).run(work)
    found = hindsights(lambda ways: fleet(forced=ways), work, chosen, served, SAMPLED)
    return 100 * float(np.mean([each.regret for each in found]))


# What knowing the length of answers is worth: Algorithm 1 with nothing, a mean, a prediction, the truth.
#
# A predictor learns from the first half of a trace; latencies are of the requests of the second. In the first
# all who are told anything are told the mean of its answers, so that the second begins alike for them.
# `none` has no heat map: which kind of TE is better cannot be looked up without a length.

PAPER = "DeepServe 5.3.3: 84.9 % of buckets, by a classifier of texts"


def answer_lengths(
    at: str, work: Sequence[TracedRequest], tes: Sequence[FleetTE], heat: HeatMap, stale_ns: int
) -> Iterator[Row]:
    """Yield the predictor's error, and the mean latency of held-out requests with each kind of knowledge."""
    learned, held_out = split(work)
    predictor = LengthPredictor(learned)
    mean = float(np.mean([each.output_length for each in learned]))
    begins = held_out[0].at_ns
    error = held_out_error(predictor, learned, held_out)
    yield Row(f"{at}/lengths/error", error.mean_error, "tokens", "predicted", "held out, absolute")
    yield Row(f"{at}/lengths/error of one median", error.mean_error_of_median, "tokens", "predicted")
    yield Row(f"{at}/lengths/bucket", 100 * error.same_bucket, "%", "predicted", PAPER)
    yield Row(f"{at}/lengths/bucket of one median", 100 * error.same_bucket_of_median, "%", "predicted")
    ways: dict[str, tuple[HeatMap | None, Predict]] = {
        "none": (None, lambda each: 0.0),
        "mean": (heat, lambda each: mean),
        "predicted": (heat, lambda each: predictor(each) if each.at_ns >= begins else mean),
        "told": (heat, lambda each: each.output_length if each.at_ns >= begins else mean),
    }
    for way, (known, predict) in ways.items():
        served = Fleet(tes, "deepserve", known, predict, stale_ns).run(work)
        took = [each.last_ns - each.at_ns for each in served if each.at_ns >= begins]
        yield Row(f"{at}/lengths/{way}/latency", float(np.mean(took)) / 1e6, "ms", "predicted")
