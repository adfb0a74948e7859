"""The papers' statements in words, each as a question to the rows of benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SIZES = (4096, 65536, 262144, 1048544, 4194304, 9437184)
JITTER = "engine/jitter/{}/first_dispatch_p99"
EPS = (8, 16, 32, 64, 128, 256)
BATCHES = (8, 24, 96, 112, 128)
PROMPTS = (1024, 2048, 4096, 8192)
REUSE = ("12.5%", "50%", "90%")
GPUS = ("l20", "h800", "a800", "h20", "l40s")
TRACES = ("chats", "long prompts", "long answers")
RANKS = (1, 2, 4)
ONLINE = "heatmap/online/rate={}"
ONLINE_RATES = (1, 2, 4, 8)
HEAT = "heatmap/rate={}/prompt={}/output={}"
HEAT_RATES, HEAT_PROMPTS, HEAT_OUTPUTS = (2, 10, 20), (256, 1024, 2048, 4096, 8192), (32, 128, 256, 512, 1024)
LOADING = "deepserve/loading/ranks={}/{}"
PD_AWARE = "schedule/{}/rate={}/claim/pd-aware over round-robin"


class Values(dict[str, float]):
    """Values of benchmark rows by name."""

    def along(self, name: str, places: Iterable[object]) -> list[float]:
        """Return the rows named by a name with a `{}`, at these places."""
        return [self[name.format(place)] for place in places]

    def grows(self, name: str, places: Iterable[object]) -> bool:
        """Return whether the value of each row is larger than that of the row before."""
        return all(before < after for before, after in itertools.pairwise(self.along(name, places)))

    def falls(self, name: str, places: Sequence[object]) -> bool:
        """Return whether the value of each row is smaller than that of the row before."""
        return self.grows(name, tuple(reversed(places)))


class Trend(NamedTuple):
    """A statement of a paper, with its place; which of `trends.ROWS` answer it, and how.

    `why` explains a statement that does not hold here.
    """

    id: str
    where: str
    said: str
    rows: str
    holds: Callable[[Values], bool]
    why: str = ""


def _scaling(v: Values) -> list[float]:
    return [v[f"p2p/bytes={size}/aiv=2"] / v[f"p2p/bytes={size}/aiv=48"] for size in SIZES]


def _ping_pong_gains(v: Values) -> list[float]:
    speeds = v.along("pingpong.r1/m={}/simulated=trampolines", (1, 2, 3, 4))
    return [after / before for before, after in itertools.pairwise(speeds)]


def _basic_gains(v: Values, batch: int) -> list[float]:
    return [v[f"basic/gain/{op}/ep={ep}/batch={batch}"] for op in ("dispatch", "combine") for ep in EPS[:3]]


def _heat_at_ends(v: Values, rate: int) -> bool:
    """Return whether, in the heat map of a rate, prompts beyond the shortest length gain more than that one,
    and answers the more the shorter they are. Gains are means over a row or a column."""
    rows = [[v[HEAT.format(rate, prompt, output)] for output in HEAT_OUTPUTS] for prompt in HEAT_PROMPTS]
    shortest, *longer = (sum(row) / len(row) for row in rows)
    by_output = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    return sum(longer) / len(longer) > shortest and by_output == sorted(by_output, reverse=True)


def _longest_answers(v: Values, rate: int) -> list[int]:
    """Return, by the length of prompts, the longest answers for which TEs in halves are better."""
    return [
        max((output for output in HEAT_OUTPUTS if v[HEAT.format(rate, prompt, output)] > 0), default=0)
        for prompt in HEAT_PROMPTS
    ]


def _wins_over_losses(v: Values) -> float:
    """Return the mean gain of TEs in halves where they win, divided by their mean loss where they lose."""
    gains = [value for name, value in v.items() if "/output=" in name]
    wins, losses = [gain for gain in gains if gain > 0], [-gain for gain in gains if gain <= 0]
    return sum(wins) / len(wins) / (sum(losses) / len(losses))


TRENDS = (
    Trend(
        "xds.small",
        "3.1, Figure 5",
        "below 1 MB, two AIV cores send and receive within 20 us",
        "p2p",
        lambda v: max(v.along("p2p/bytes={}/aiv=2", SIZES[:4])) < 20,
    ),
    Trend(
        "xds.cores",
        "3.1, Figure 5",
        "the larger the data, the more is gained by 48 cores instead of 2",
        "p2p",
        lambda v: _scaling(v) == sorted(_scaling(v)) and _scaling(v)[0] < 1.05,
    ),
    Trend(
        "xds.figure6",
        "3.2, Figure 6",
        "at EP128 dispatch takes longer than combine up to 32 tokens, and less beyond",
        "crossing",
        lambda v: v["xds.ep.crossover"] == 32,
        "The lines cross, at 43 tokens: up to there they lie within 3 us of each other.",
    ),
    Trend(
        "xds.figure6.ends",
        "3.2, Figure 6",
        "dispatch takes longer than combine for few tokens, and less for many",
        "pull and push",
        lambda v: (
            v["pull/dispatch/ep=8/batch=8"] > v["pull/combine/ep=8/batch=8"]
            and v["pull/dispatch/ep=8/batch=128"] < v["pull/combine/ep=8/batch=128"]
        ),
    ),
    Trend(
        "xds.trampoline",
        "3.3",
        "with few AIV cores for attention, trampolines beat scattering to all",
        "a2e",
        lambda v: (
            v["xds.a2e/simulated=trampoline/attention_aiv=4/copies=9/hidden=7168"]
            < v["naive/a2e/attention_aiv=4/copies=9/hidden=7168"]
        ),
    ),
    Trend(
        "xds.urma.startup",
        "3.3",
        "URMA starts later than MTE: a small exchange takes longer by it",
        "carriers",
        lambda v: v["carrier/mte/a2e"] < v["carrier/urma/a2e"],
    ),
    Trend(
        "xds.urma.dma",
        "3.3",
        "URMA, which no CPU asks, starts earlier than DMA",
        "p2p",
        lambda v: v["p2p/bytes=1048576/engine=urma/zero_copy"] < v["p2p/bytes=1048576/engine=dma/zero_copy"],
    ),
    Trend(
        "xds.urma.large",
        "3.3",
        "for large transfers URMA beats two AIV cores, whose buffers bound them",
        "p2p",
        lambda v: v["p2p/bytes=67108864/engine=urma/zero_copy"] < v["p2p/bytes=67108864/aiv=2/zero_copy"] / 2,
    ),
    Trend(
        "xds.urma.mte2",
        "3.3",
        "URMA leaves MTE2, which computing needs as well, to others",
        "carriers",
        lambda v: (
            v["carrier/urma/attention_mte2"] < v["carrier/mte/attention_mte2"]
            and v["carrier/urma/trampoline_mte2"] < v["carrier/mte/trampoline_mte2"]
        ),
    ),
    Trend(
        "xds.prefill",
        "4.3",
        "dealing prompts out together cuts the longest waits for a first token",
        "engine",
        lambda v: v["engine/prefill/collaborative/p99_ttft"] < v["engine/prefill/two-level/p99_ttft"],
    ),
    Trend(
        "xds.decode.kv",
        "4.3",
        "by use of KV blocks, groups are loaded more evenly than in turn",
        "engine",
        lambda v: v["engine/decode/kv/kv_spread"] < v["engine/decode/round-robin/kv_spread"],
    ),
    Trend(
        "xds.decode.tpot",
        "4.3",
        "and the slowest tokens are faster",
        "engine",
        lambda v: v["engine/decode/kv/p99_tpot"] < v["engine/decode/round-robin/p99_tpot"],
    ),
    Trend(
        "xds.decode.ttst",
        "4.3",
        "and second tokens come sooner, which wait where a group is full",
        "engine",
        lambda v: v["engine/decode/kv/p99_ttst"] < v["engine/decode/round-robin/p99_ttst"],
    ),
    Trend(
        "xds.decode.open",
        "4.3",
        "among groups with room, those with the least KV make the slowest tokens faster than in turn",
        "engine",
        lambda v: v["engine/decode/gain/over_next-open/p99_tpot/worst_seed"] > 1,
        "In the mean of the seeds they do, not in each: most of the gain is that full groups are left out.",
    ),
    Trend(
        "xds.statuses",
        "4.3",
        "KV use that groups tell from time to time is enough to load them more evenly than in turn",
        "engine",
        lambda v: (
            max(v.along("engine/decode/status_period={}/kv_spread", ("0.1s", "1s", "10s")))
            < v["engine/decode/round-robin/kv_spread"]
        ),
    ),
    Trend(
        "xds.jitter",
        "4.4",
        "garbage that is collected at any time makes the first dispatch latest of all",
        "engine",
        lambda v: (
            v["engine/jitter/automatic-gc/first_dispatch_p99"]
            > max(v.along(JITTER, ("controlled", "no-core-pinning", "no-cached-graphs")))
        ),
    ),
    Trend(
        "xds.pinning",
        "4.4",
        "pinned cores and cached graphs each take launches' jitter away",
        "engine",
        lambda v: (
            v["engine/jitter/controlled/first_dispatch_p99"]
            < min(v.along(JITTER, ("no-core-pinning", "no-cached-graphs")))
        ),
    ),
    Trend(
        "xds.graph",
        "2.3",
        "launching a graph is faster than launching every operator",
        "engine",
        lambda v: v["engine/execution/graph/tpot"] < v["engine/execution/single-op/tpot"],
    ),
    Trend(
        "xds.ahead",
        "4.6",
        "planning a step while one runs hides the host's work",
        "engine",
        lambda v: v["engine/execution/graph-overlap/tpot"] < v["engine/execution/graph/tpot"],
    ),
    Trend(
        "xds.eplb",
        "4.5, Figure 11",
        "replicas of hot experts even out the dies",
        "experts",
        lambda v: (
            v["engine/experts/tiny/eplb/hottest_die_over_mean"]
            < v["engine/experts/tiny/primaries/hottest_die_over_mean"]
        ),
    ),
    Trend(
        "xds.eplb.forward",
        "4.5, Figure 11",
        "at the published skew a few hot experts hold all dies up, and one slot a die mends most of it",
        "skew",
        lambda v: (
            v["experts/hottest die/one slot a die"] < 2 < 10 < v["experts/hottest die/primaries"]
            and v["xds.eplb.gain"] > 40
        ),
    ),
    Trend(
        "xds.mtp.latency",
        "4.6",
        "a drafted token lowers the time per token at a fixed batch",
        "decode",
        lambda v: v["xds.mtp.latency"] > 0,
    ),
    Trend(
        "xds.mtp.second",
        "4.6",
        "a second MTP layer drafts better than the first one used again",
        "engine",
        lambda v: v["engine/mtp/tiny/k=2,reuse/tokens_per_step"] < v["engine/mtp/tiny/k=2/tokens_per_step"],
    ),
    Trend(
        "xds.mtp.pipelined",
        "4.6",
        "MTP that stays on the die beats one that goes back to the host",
        "engine",
        lambda v: v["engine/mtp/pipelined/tpot"] < v["engine/mtp/naive/tpot"],
    ),
    Trend(
        "xds.route",
        "5.1",
        "prompts led to their cached prefixes wait less than by load alone",
        "engine",
        lambda v: (
            v["engine/route/cost/mean_ttft"] < v["engine/route/sequences/mean_ttft"]
            and v["engine/route/cost/cached"] > v["engine/route/sequences/cached"]
        ),
    ),
    Trend(
        "cm.ep.latency",
        "5.5.1, Table 6",
        "dispatch and combine take longer the more ranks there are",
        "exchanges",
        lambda v: all(v.grows(f"cm.t6/{op}/ep={{}}", EPS) for op in ("dispatch", "combine")),
    ),
    Trend(
        "cm.ep.bandwidth",
        "5.5.1, Table 6",
        "a rank's bandwidth declines with the number of ranks",
        "exchanges",
        lambda v: all(v.falls(f"cm.t6/bandwidth/{op}/ep={{}}", EPS) for op in ("dispatch", "combine")),
    ),
    Trend(
        "cm.ep.combine",
        "5.5.1, Table 6",
        "combine has the higher bandwidth at every number of ranks",
        "exchanges",
        lambda v: all(
            v[f"cm.t6/bandwidth/dispatch/ep={ep}"] < v[f"cm.t6/bandwidth/combine/ep={ep}"] for ep in EPS
        ),
    ),
    Trend(
        "cm.interference",
        "4.3.3",
        "KV that comes over RoCE leaves exchanges on UB alone, over UB it delays them",
        "interference",
        lambda v: (
            v["interference/roce/dispatch"] == v["interference/none/dispatch"] < v["interference/ub/dispatch"]
        ),
    ),
    Trend(
        "cm.early",
        "4.2.1",
        "a token quantised before it is sent is about half of one that is not",
        "messages",
        lambda v: 0.4 < v["cm.msg/dispatch"] / v["cm.msg/combine"] < 0.6,
    ),
    Trend(
        "cm.basic",
        "4.2.1",
        "three all-to-alls take longer than the fused operators",
        "all-to-alls",
        lambda v: min(_basic_gains(v, 8) + _basic_gains(v, 128)) > 1,
    ),
    Trend(
        "cm.basic.startup",
        "4.2.1",
        "and most so where few tokens move, as the startup of DMA and the host's waits stay",
        "all-to-alls",
        lambda v: all(few > many for few, many in zip(_basic_gains(v, 8), _basic_gains(v, 128), strict=True)),
    ),
    Trend(
        "cm.prefill.skew",
        "4.3.1",
        "with prompts of uneven lengths DP waits for the longest, and SP-TP-SP is done sooner",
        "parallelism",
        lambda v: v["engine/parallelism/gain/uneven/last_ttft"] > 1,
    ),
    Trend(
        "cm.prefill.few",
        "4.3.1",
        "with fewer prompts than dies, DP leaves dies idle and first tokens come later",
        "parallelism",
        lambda v: v["engine/parallelism/gain/few/mean_ttft"] > 1,
    ),
    Trend(
        "cm.prefill.collectives",
        "4.3.1",
        "and the two more collectives of SP-TP-SP cost little",
        "parallelism",
        lambda v: v["engine/parallelism/gain/even/last_ttft"] > 0.9,
        "With even prompts, which DP suits, SP-TP-SP takes 36 % longer.",
    ),
    Trend(
        "cm.gemm.k",
        "5.5.3, Table 9",
        "GEMMs with a longer K use the cores better",
        "GEMMs",
        lambda v: all(
            v.grows(f"cm.t9/utilisation/groups=4/M={m}/K={{}}", (4096, 8192)) for m in (2048, 7168)
        ),
    ),
    Trend(
        "cm.gemm.bound",
        "5.5.3, Table 9",
        "they are bound by cores: what uses these better needs less of HBM",
        "GEMMs",
        lambda v: all(v.falls(f"cm.t9/bandwidth/groups=4/M={m}/K={{}}", (4096, 8192)) for m in (2048, 7168)),
    ),
    Trend(
        "cm.prefill.lengths",
        "5.4.1, Figure 21a",
        "prefill has less throughput the longer prompts are, with two microbatches and without",
        "prompts",
        lambda v: all(v.falls(f"prefill/{way}/prompt={{}}", PROMPTS) for way in ("two", "one")),
    ),
    Trend(
        "cm.slo",
        "5.2.2, Table 4",
        "the stricter the TPOT, the smaller the batch and the throughput",
        "decode",
        lambda v: (
            v.grows("cm.t4/batch={}", BATCHES[:3]) and v.grows("cm.t4/throughput/batch={}", BATCHES[:3])
        ),
    ),
    Trend(
        "cm.lengths",
        "5.2.2, Table 4",
        "shorter prompts leave room for larger batches and more throughput",
        "decode",
        lambda v: v.grows("cm.t4/throughput/batch={}", BATCHES[2:]),
    ),
    Trend(
        "cm.mb.peak",
        "5.4.1, Figure 20a",
        "two microbatches gain most at a batch of 96",
        "microbatches",
        lambda v: v["cm.mb.decode/batch=96"] > max(v.along("cm.mb.decode/batch={}", (64, 128))),
    ),
    Trend(
        "cm.mb.modest",
        "5.4.1",
        "and far less than the 35 % that others report, as UB leaves less to hide",
        "microbatches",
        lambda v: (
            min(v.along("cm.mb.decode/batch={}", (64, 96, 128))) > 1
            and max(v.along("cm.mb.decode/batch={}", (64, 96, 128))) < 1.2
        ),
    ),
    Trend(
        "cm.streams",
        "4.2.3",
        "with 16 and 8 cores, attention's and experts' streams take about as long",
        "decode",
        lambda v: 0.9 < v["cm.streams/stream0"] / v["cm.streams/stream1"] < 1.1,
    ),
    Trend(
        "cm.mtp.batch",
        "5.4.2, Figure 22a",
        "MTP gains more the smaller the batch, and never loses",
        "decode",
        lambda v: v["cm.mtp.gain/batch=8"] > v["cm.mtp.gain/batch=128"] > 1,
    ),
    Trend(
        "cm.mtp.layer",
        "5.4.2, Figure 22b",
        "a layer takes longer with MTP, by less than the tokens it brings",
        "decode",
        lambda v: 1 < v["cm.mtp.layer/with"] / v["cm.mtp.layer/without"] < 1.7,
    ),
    Trend(
        "cm.cache.reuse",
        "5.4.3, Figure 23",
        "the more of a prompt is cached, the sooner its first token",
        "pool",
        lambda v: all(
            v[f"ems/ttft/{plane}/reuse=12.5%"] < v["ems/ttft/none"]
            and v.falls(f"ems/ttft/{plane}/reuse={{}}", REUSE)
            for plane in ("ub", "vpc")
        ),
        "Over UB it is. Over VPC an eighth of each prompt comes too late for one step: the engine takes two.",
    ),
    Trend(
        "cm.cache.plane",
        "5.4.3, Figure 23",
        "over UB sooner than over VPC, at every rate of reuse",
        "pool",
        lambda v: all(v[f"ems/ttft/ub/reuse={rate}"] < v[f"ems/ttft/vpc/reuse={rate}"] for rate in REUSE),
    ),
    Trend(
        "cm.cache.throughput",
        "5.4.3, Figure 23a",
        "prefill has more throughput the more of the prompts is cached",
        "pool",
        lambda v: all(v.grows(f"ems/throughput/{plane}/reuse={{}}", REUSE) for plane in ("ub", "vpc")),
    ),
    Trend(
        "cm.cache.shared",
        "4.1",
        "one pool of all hosts' DRAM has more hits than caches of single instances, however requests go",
        "locality",
        lambda v: (
            v["locality/pool, by load/cached"]
            > max(v.along("locality/own caches, by {}/cached", ("prefix", "load")))
        ),
    ),
    Trend(
        "cm.cache.stateless",
        "4.1",
        "with it, requests that go by load alone wait less than those bound to where their prefix is",
        "locality",
        lambda v: (
            v["locality/pool, by load/p99_ttft"] < v["locality/own caches, by prefix/p99_ttft"]
            and v["locality/gain/over own caches, by prefix"] > 1
        ),
    ),
    Trend(
        "cm.model.warm",
        "4.4.3, Table 1",
        "a pool warms as fast as local DRAM, with an eighth of the memory",
        "loading",
        lambda v: (
            v["cm.t1/warm/ems"] < 1.01 * v["cm.t1/warm/local-dram"]
            and v["cm.t1/dram/ems"] < v["cm.t1/dram/local-dram"] / 7
        ),
    ),
    Trend(
        "cm.model.switch",
        "4.4.3, Table 1",
        "and switches models far faster than either alternative",
        "loading",
        lambda v: v["cm.t1/switch/ems"] < min(v.along("cm.t1/switch/{}", ("no-cache", "local-dram"))) / 10,
    ),
    Trend(
        "ds.asynchronous",
        "4.1, Figure 3",
        "asynchronous scheduling and faster messages more than double throughput within 50 ms a token",
        "host",
        lambda v: v["ds.v1v2"] > 2,
        "By 1.17 with the 2 ms of xDeepServe's hosts between steps; with 11 ms it would hold.",
    ),
    Trend(
        "ds.online.tpot",
        "4.5, Figure 4",
        "online, TEs in halves have a lower TPOT at the same throughput",
        "online",
        lambda v: all(
            v[f"{ONLINE}/apart/tpot".format(rate)] < v[f"{ONLINE}/both/tpot".format(rate)]
            for rate in ONLINE_RATES
        ),
    ),
    Trend(
        "ds.online.throughput",
        "4.5, Figure 4",
        "and far more throughput within a bound of TPOT",
        "online",
        lambda v: all(
            v[f"{ONLINE}/apart/within".format(rate)] > 1.5 * v[f"{ONLINE}/both/within".format(rate)]
            for rate in ONLINE_RATES
        ),
    ),
    Trend(
        "ds.heat.regions",
        "5.3.1, Figure 6 (1)",
        "TEs in halves are better for longer prompts and shorter answers",
        "heat map",
        lambda v: all(_heat_at_ends(v, rate) for rate in HEAT_RATES),
    ),
    Trend(
        "ds.heat.longer",
        "5.3.1, Figure 6 (1)",
        "the longer the prompt, the longer the answers for which they are",
        "heat map",
        lambda v: all(_longest_answers(v, rate) == sorted(_longest_answers(v, rate)) for rate in HEAT_RATES),
        "At 10 requests/s with prompts of 8,192 tokens both TEs are overloaded, the one in halves more so.",
    ),
    Trend(
        "ds.heat.larger",
        "5.3.1, Figure 6 (2)",
        "and they win by more than they lose",
        "heat map",
        lambda v: _wins_over_losses(v) > 2,
    ),
    Trend(
        "ds.heat.stable",
        "5.3.1, 5.3.2 (3)",
        "over 80 % of the heat map's squares have the same sign at every rate",
        "heat map",
        lambda v: v["heatmap/stable"] > 80,
        "68 % of 25 squares at 2, 10 and 20 requests/s, which are ours; 84 % at 2, 5 and 10, where a TE in "
        "halves has room for the longest answers.",
    ),
    Trend(
        "ds.pdaware.low",
        "5.3.2, Figure 7",
        "at a low rate PD-aware scheduling is as good as round robin",
        "policies",
        lambda v: all(0.95 < gain < 1.05 for gain in v.along(PD_AWARE.format("{}", 2), TRACES)),
        "It is on two traces of three; long prompts, which suit some TEs, are served 1.8 times as fast.",
    ),
    Trend(
        "ds.pdaware.middle",
        "5.3.2, Figure 7",
        "at 10 requests a second it is better",
        "policies",
        lambda v: all(gain > 1 for gain in v.along(PD_AWARE.format("{}", 10), TRACES)),
        "It is on two traces of three; where answers are long it is 5 % slower.",
    ),
    Trend(
        "ds.pdaware.high",
        "5.3.2, Figure 7",
        "and at a very high rate it is worse",
        "policies",
        lambda v: all(gain < 1 for gain in v.along(PD_AWARE.format("{}", 40), TRACES)),
        "It is on two traces of three; chats, which share prefixes, are served faster all the same.",
    ),
    Trend(
        "ds.pdaware.overload",
        "5.3.2, Figure 7",
        "but not by much",
        "policies",
        lambda v: min(v.along(PD_AWARE.format("{}", 40), TRACES)) > 0.8,
    ),
    Trend(
        "ds.load.hit",
        "6.2, Figure 10",
        "weights in DRAM beforehand load far faster than weights in storage",
        "starts",
        lambda v: all(
            v[LOADING.format(n, "DRAM hit")] < v[LOADING.format(n, "DRAM miss")] / 4 for n in RANKS
        ),
    ),
    Trend(
        "ds.load.fork",
        "6.2, Figure 10",
        "NPU-fork over HCCS is faster than loading from DRAM",
        "starts",
        lambda v: all(v[LOADING.format(n, "HCCS")] < v[LOADING.format(n, "DRAM hit")] for n in RANKS),
    ),
    Trend(
        "ds.load.links",
        "6.2, Figure 10",
        "and much faster than over RoCE",
        "starts",
        lambda v: all(v[LOADING.format(n, "HCCS")] < v[LOADING.format(n, "RoCE")] / 2 for n in RANKS),
    ),
    Trend(
        "ds.load.ranks",
        "6.2, Figure 10",
        "with equal weights on each NPU, more NPUs load longer from DRAM, and a fork takes as long",
        "starts",
        lambda v: (
            v.grows("deepserve/loading/ranks={}/DRAM hit", RANKS)
            and len({v[LOADING.format(n, "HCCS")] for n in RANKS}) == 1
        ),
    ),
    Trend(
        "ds.fork.many",
        "6.2, Figure 11",
        "a fork scales to many TEs at a time",
        "starts",
        lambda v: v["deepserve/fork/tes=23"] < 1.5 * v["deepserve/fork/tes=1"],
    ),
    Trend(
        "ds.fork.contention",
        "6.2, Figure 11",
        "and costs a source that decodes meanwhile a limited part of its speed",
        "starts",
        lambda v: 1 < v["deepserve/fork/tpot of its source"] < 1.5,
    ),
    Trend(
        "eaas.weak",
        "5.3, Figure 11",
        "twice the GPUs serve nearly twice the requests, in any step between",
        "services",
        lambda v: (
            v.grows("eaas/r1/dies={}/throughput", (32, 40, 48, 56, 64))
            and v["eaas/r1/scaling=32_to_64"] > 1.8
        ),
    ),
    Trend(
        "eaas.fail",
        "5.4, Figure 10",
        "a lost server of 64 costs hardly any throughput",
        "loss",
        lambda v: max(v["eaas.fail"], v["eaas/r1/lost=1_of_64/one_microbatch"]) < 2,
    ),
    Trend(
        "ms.pp.diminishing",
        "7.4, Figure 14",
        "each more microbatch gains less than the one before",
        "ping-pong",
        lambda v: (
            _ping_pong_gains(v) == sorted(_ping_pong_gains(v), reverse=True) and _ping_pong_gains(v)[0] > 1.5
        ),
    ),
    Trend(
        "ms.pp.enough",
        "4.1",
        "with communication hidden, further microbatches gain nothing",
        "ping-pong",
        lambda v: _ping_pong_gains(v)[-1] < 1.01,
    ),
    Trend(
        "ms.pp.models",
        "7.4, Figure 14",
        "the third microbatch gains more with larger, finer models",
        "MegaScale",
        lambda v: v.grows("ms.pp.m23/{}", ("Mixtral-8x22B", "DBRX", "Scaled-MoE")),
    ),
    Trend(
        "ms.hardware.attention",
        "4.3, Table 3",
        "for its price H20 has most bandwidth: it is for attention",
        "MegaScale",
        lambda v: v["ms.t3/h20/GB/s"] == max(v.along("ms.t3/{}/GB/s", GPUS)),
    ),
    Trend(
        "ms.hardware.experts",
        "4.3, Table 3",
        "and L40S most computing: it is for experts",
        "MegaScale",
        lambda v: v["ms.t3/l40s/TFLOPS"] == max(v.along("ms.t3/{}/TFLOPS", GPUS)),
    ),
)
