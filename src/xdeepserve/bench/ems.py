"""`xdeepserve bench ems`: the memory pool beside CloudMatrix's Table 1 and Figure 23; hit rates on traces.

Model loading runs the pool itself, with a model of which each byte stands for many, on the virtual clock.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xdeepserve.bench.comm import pyplot
from xdeepserve.bench.report import Kind, Row
from xdeepserve.bench.request_traces import generated, hits_of_belady, hits_of_lru
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.model_cache import NAMESPACE, ModelId
from xdeepserve.ems.mp_server import Lease
from xdeepserve.hw.bucket import Bucket
from xdeepserve.hw.clock import Process
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec
from xdeepserve.platform.traces import BLOCK_TOKENS, TracedRequest, TraceFormat, read_trace

MODEL_NBYTES = 671e9  # CM Table 1: DeepSeek-R1 in INT8
INSTANCES = 8
NUM_BLOCKS, BLOCK_NBYTES = 256, 4096  # of the model that stands for it
SERVERS = 48


def all_rows(requests: Path | None = None, form: TraceFormat = "mooncake") -> Iterator[Row]:
    """Rows as they are found; hit rates of a trace, if one is given, else of a generated one."""
    trace = generated(seed=1) if requests is None else read_trace(requests, form)
    block_tokens = BLOCK_TOKENS[form]
    return itertools.chain(table_1(), figure_23(), hit_rates(trace, block_tokens))


# ---- Table 1: loading a model ------------------------------------------------------------------------------


WEIGHT = MODEL_NBYTES / (NUM_BLOCKS * BLOCK_NBYTES)  # bytes that each of its bytes stands for


def block(number: int) -> bytes:
    """What a block of a model holds."""
    return number.to_bytes(4, "big") * (BLOCK_NBYTES // 4)


async def load(pool: MemoryPool, model: ModelId) -> float:
    """Load a model into one instance, block after block while others still come to DRAM: seconds."""
    clock, spec = pool.pod.clock, pool.pod.spec
    cache, start, end = pool.models(WEIGHT), clock.now, clock.now
    hint = clock.spawn(cache.prefetch(model, block))

    async def take(number: int, lease: Lease) -> None:
        nonlocal end
        assert lease.address is not None
        assert bytes(pool.pod.memories.read(lease.address, lease.nbytes)) == block(number)
        end = max(end, clock.now) + round(1e9 * cache.weight * lease.nbytes / spec.pool_load.value)
        await clock.sleep_until(end)

    assert not await cache.load(model, block, take)
    await clock.join(hint)
    return (clock.now - start) / 1e9


async def load_alone(pod: Pod, bucket: Bucket) -> float:
    """Load a model into one instance from the bucket alone, which others read, too: seconds."""
    start = pod.clock.now
    for _ in range(NUM_BLOCKS):
        await bucket.read(BLOCK_NBYTES, WEIGHT)
    return (pod.clock.now - start) / 1e9


def table_1() -> list[Row]:
    """Eight instances load one model at once, and one instance switches among eight models. Two values are
    calibrated, the bucket's bandwidth and an instance's; the rest follows."""
    pod = Pod()
    bucket = Bucket(pod.clock, pod.spec)
    alone = _run(pod, _together(*(load_alone(pod, bucket) for _ in range(INSTANCES))))
    one = _run(pod, load_alone(pod, bucket))
    warm = MODEL_NBYTES / pod.spec.pool_load.value
    with tempfile.TemporaryDirectory() as directory:
        pool = _pool(Path(directory))
        model = ModelId("r1", "1")
        cold = _run(pool.pod, _together(*(load(pool, model) for _ in range(INSTANCES))))
        again = _run(pool.pod, load(pool, model))
        copies = pool.bucket.nbytes / (NUM_BLOCKS * BLOCK_NBYTES)
        others = [ModelId("r1", str(version)) for version in range(2, INSTANCES + 1)]
        for other in others:
            _run(pool.pod, load(pool, other))
        caches, times = [], []
        for other in (model, *others):
            state = pool.models().query(other)
            caches.append(state.in_dram / state.total)
            times.append(_run(pool.pod, load(pool, other)))
        pool.close()
    hit = 1 / INSTANCES  # a host's DRAM has the model that it had before, one of eight
    values: list[tuple[str, float, str, Kind]] = [
        ("cold/no-cache", max(alone), "s", "predicted"),
        ("cold/local-dram", max(alone), "s", "predicted"),
        ("cold/ems", max(cold), "s", "predicted"),
        ("warm/local-dram", warm, "s", "calibrated"),
        ("warm/ems", again, "s", "calibrated"),
        ("dram/local-dram", INSTANCES, "x", "predicted"),
        ("dram/ems", copies, "x", "predicted"),
        ("hit/local-dram", 100 * hit, "%", "predicted"),
        ("hit/ems", 100 * sum(caches) / len(caches), "%", "predicted"),
        ("switch/no-cache", one, "s", "calibrated"),
        ("switch/local-dram", hit * warm + (1 - hit) * one, "s", "predicted"),
        ("switch/ems", sum(times) / len(times), "s", "predicted"),
    ]
    return [Row(f"cm.t1/{name}", value, unit, kind) for name, value, unit, kind in values]


def _pool(path: Path) -> MemoryPool:
    pod = Pod()
    room = 2 * INSTANCES * NUM_BLOCKS * BLOCK_NBYTES // SERVERS  # of two times all models
    pool = MemoryPool(pod, path, SERVERS, room, 8 * room, {NAMESPACE: None})
    pool.open()
    pod.materialise()
    pool.start()
    for version in range(1, INSTANCES + 1):
        pool.catalogue.register(ModelId("r1", str(version)), [BLOCK_NBYTES] * NUM_BLOCKS)
    return pool


async def _together(*works: Coroutine[Any, Any, float]) -> list[float]:
    """Side by side, from within a process of the clock that they run on."""
    process = asyncio.current_task()
    assert isinstance(process, Process)
    return await process.clock.gather(*works)


def _run(pod: Pod, work: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        return await pod.clock.spawn(work)

    return asyncio.run(main())


# ---- Figure 23: context caching ----------------------------------------------------------------------------

# A prompt of 4,096 tokens, 16,384 a chip: time to the first token without reuse, and the part of it that does
# not shrink with reuse. Both are fitted to the four values of 5.4.3, which no line meets better.
TTFT_MS, FIXED_SHARE = 2541.5, 0.356
KV_NBYTES = 16384 * 61 * 1152  # BF16 latents and keys of so many tokens
VPC_LOSS = 1.52  # CM 5.4.3: how much slower VPC is at most; the bandwidth of its path is not published


class Reuse(NamedTuple):
    """Time to the first token by how much of the prompts is reused."""

    ub_ms: float
    vpc_ms: float


def reuse(share: float, spec: Spec | None = None) -> Reuse:
    """The fitted line, and what fetching adds to it: dies' DMA over UB, or VPC at the bandwidth that makes
    the published ratio at 90 %."""
    spec = spec or Spec()
    line = TTFT_MS * (FIXED_SHARE + (1 - share) * (1 - FIXED_SHARE))
    ub = (spec.startup_ns("dma") + spec.link_ns(0, 0, share * KV_NBYTES / 2)) / 1e6  # a chip has two dies
    most = TTFT_MS * (FIXED_SHARE + 0.1 * (1 - FIXED_SHARE)) + spec.link_ns(0, 0, 0.9 * KV_NBYTES / 2) / 1e6
    vpc = share / 0.9 * (VPC_LOSS - 1) * most + ub
    return Reuse(line + ub, line + vpc)


def figure_23() -> list[Row]:
    """The text of Figure 23, and its two curves."""
    base, half, most = (reuse(share).ub_ms for share in (0.0, 0.5, 0.9))
    rows = [
        Row("cm.cc.ttft/reuse=50%", base - half, "ms", "calibrated"),
        Row("cm.cc.ttft/reuse=90%", base - most, "ms", "calibrated"),
        Row("cm.cc.tput/12.5%->50%", reuse(0.125).ub_ms / half, "x", "calibrated"),
        Row("cm.cc.tput/reuse=90%", base / most, "x", "calibrated"),
        Row("cm.cc.tput/UB over VPC", reuse(0.9).vpc_ms / most, "x", "calibrated"),
    ]
    for percent in (0, 12.5, 25, 50, 75, 90):
        times = reuse(percent / 100)
        for plane, ms in (("ub", times.ub_ms), ("vpc", times.vpc_ms)):
            rows.append(Row(f"ems/ttft/{plane}/reuse={percent:g}%", ms, "ms", "calibrated"))
    return rows


# ---- hit rates ---------------------------------------------------------------------------------------------


def hit_rates(trace: list[TracedRequest], block_tokens: int) -> Iterator[Row]:
    """Tokens of prompts that a pool of some sizes has, in percent: DRAM alone, with volumes of eight times
    its size, which have all that is in DRAM, too, and at best."""
    distinct = len({each for request in trace for each in request.blocks})
    total = sum(min(request.input_length, len(request.blocks) * block_tokens) for request in trace)

    def percent(hits: Iterator[int]) -> float:
        found = zip(hits, trace, strict=True)
        return 100 * sum(min(count * block_tokens, request.input_length) for count, request in found) / total

    for part in (256, 64, 16, 4):
        capacity = max(1, distinct // part)
        name = f"ems/hits/{capacity * block_tokens} tokens of DRAM"
        yield Row(f"{name}/lru", percent(hits_of_lru(trace, capacity)), "%", "measured")
        yield Row(f"{name}/lru, volumes of 8x", percent(hits_of_lru(trace, 8 * capacity)), "%", "measured")
        yield Row(f"{name}/belady", percent(hits_of_belady(trace, capacity)), "%", "measured")


def plot(rows: list[Row], path: Path) -> None:
    """Time to the first token over reuse, on both planes, as in Figure 23b. InputError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    for plane in ("ub", "vpc"):
        prefix = f"ems/ttft/{plane}/reuse="
        points = [
            (float(row.name.removeprefix(prefix)[:-1]), row.value)
            for row in rows
            if row.name.startswith(prefix)
        ]
        axes.plot(*zip(*points, strict=True), "o-", label=f"memory pool over {plane.upper()}")
    axes.set_xlabel("tokens of the prompt that are reused [%]")
    axes.set_ylabel("time to first token [ms]")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
