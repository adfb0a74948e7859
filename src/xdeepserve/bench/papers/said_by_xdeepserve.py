"""xDeepServe's statements in words, each as a question to the rows of benchmarks."""

from __future__ import annotations

from xdeepserve.bench.papers.trend import Trend, Values

SIZES = (4096, 65536, 262144, 1048544, 4194304, 9437184)
JITTER = "engine/jitter/{}/first_dispatch_p99"


def _scaling(v: Values) -> list[float]:
    return [v[f"p2p/bytes={size}/aiv=2"] / v[f"p2p/bytes={size}/aiv=48"] for size in SIZES]


XDEEPSERVE = (
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
)
