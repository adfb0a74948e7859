"""The papers' statements in words, each as a question to the rows of benchmarks."""

from __future__ import annotations

import itertools

from xdeepserve.bench.papers.said_by_xdeepserve import XDEEPSERVE
from xdeepserve.bench.papers.trend import Trend, Values

EPS = (8, 16, 32, 64, 128, 256)
BATCHES = (8, 24, 96, 112, 128)
PROMPTS = (1024, 2048, 4096, 8192)
REUSE = ("12.5%", "25%", "50%", "75%", "90%")
GPUS = ("l20", "h800", "a800", "h20", "l40s")
TRACES = ("chats", "long prompts", "long answers")
PD_AWARE = "schedule/{}/rate={}/claim/pd-aware over round-robin"


def _ping_pong_gains(v: Values) -> list[float]:
    speeds = v.along("pingpong.r1/m={}/simulated=trampolines", (1, 2, 3, 4))
    return [after / before for before, after in itertools.pairwise(speeds)]


TRENDS = (
    *XDEEPSERVE,
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
        lambda v: all(v.falls(f"ems/ttft/{plane}/reuse={{}}", ("0%", *REUSE)) for plane in ("ub", "vpc")),
    ),
    Trend(
        "cm.cache.plane",
        "5.4.3, Figure 23",
        "over UB sooner than over VPC, at every rate of reuse",
        "pool",
        lambda v: all(v[f"ems/ttft/ub/reuse={rate}"] < v[f"ems/ttft/vpc/reuse={rate}"] for rate in REUSE),
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
        "ds.heat.stable",
        "5.3.2",
        "over 80 % of the heat map's squares have the same sign at every rate",
        "policies",
        lambda v: v["schedule/heatmap/stable"] > 80,
        "64 % of 25 squares: lengths and rates of the paper's map are not published, those here are ours.",
    ),
    Trend(
        "ds.pdaware.low",
        "5.3.2, Figure 7",
        "at a low rate PD-aware scheduling is as good as round robin",
        "policies",
        lambda v: all(0.95 < gain < 1.05 for gain in v.along(PD_AWARE.format("{}", 2), TRACES)),
        "Not worse than by 6 %, and 1.9 times as fast where prompts are long: some TEs suit them always.",
    ),
    Trend(
        "ds.pdaware.middle",
        "5.3.2, Figure 7",
        "at 10 requests a second it is better",
        "policies",
        lambda v: all(gain > 1 for gain in v.along(PD_AWARE.format("{}", 10), TRACES)),
        "It is on two traces of three; where answers are long it is 6 % slower.",
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
