"""`xdeepserve bench ems`: the memory pool beside CloudMatrix's Table 1 and Figure 23; hit rates on traces.

Model loading runs the pool itself on the virtual clock, with a small model of which each byte stands for
many.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xdeepserve.bench.papers.request_traces import generated, hits_of_belady, hits_of_lru
from xdeepserve.bench.papers.sizes import DIES_PER_CHIP, MODEL
from xdeepserve.bench.report import Kind, Row, pyplot
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.model_cache import NAMESPACE, ModelId
from xdeepserve.ems.mp_server import Lease
from xdeepserve.errors import InputError
from xdeepserve.hw.bucket import Bucket
from xdeepserve.hw.clock import Process
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.traces import FORMATS, TracedRequest, read_trace
from xdeepserve.prices.formula import CHIP_TOKENS, PrefillCost

MODEL_NBYTES = 671e9  # CM Table 1: DeepSeek-R1 in INT8
INSTANCES = 8
NUM_BLOCKS, BLOCK_NBYTES = 256, 4096  # of the model that stands for it
SERVERS = 48


def all_rows(requests: Path | None = None, format: str | None = None) -> Iterator[Row]:
    """Yield all rows in order of computation, with hit rates of the given trace, or of a generated one.
    Raises InputError for a trace without hash ids."""
    trace, block_tokens = generated(seed=1), 512
    if requests is not None:
        found = read_trace(requests, format)
        trace, block_tokens = found.requests, found.block
        if not any(request.blocks for request in trace):
            formats = ", ".join(each.name for each in FORMATS if each.ids)
            raise InputError(
                f"{requests}: no request has tokens and hash ids; formats with them are {formats}"
            )
    return itertools.chain(table_1(), figure_23(), hit_rates(trace, block_tokens))


# ---- Table 1: loading a model ------------------------------------------------------------------------------


WEIGHT = MODEL_NBYTES / (NUM_BLOCKS * BLOCK_NBYTES)  # bytes that each of its bytes stands for


def block(number: int) -> bytes:
    """Return the content of a model's block: its number, repeated."""
    return number.to_bytes(4, "big") * (BLOCK_NBYTES // 4)


async def load(pool: MemoryPool, model: ModelId) -> float:
    """Load a model into an instance, block after block while others still come to DRAM; return the
    seconds."""
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
    """Load a model into an instance from the bucket alone, which other instances read, too; return the
    seconds."""
    start = pod.clock.now
    for _ in range(NUM_BLOCKS):
        await bucket.read(BLOCK_NBYTES, WEIGHT)
    return (pod.clock.now - start) / 1e9


def table_1(spec: Spec | None = None) -> list[Row]:
    """Compute CM Table 1: eight instances load a model at once, and one instance switches among eight models.
    Two values are calibrated, the bandwidths of the bucket and of an instance; the rest follows."""
    pod = Pod(spec=spec or Spec())
    bucket = Bucket(pod.clock, pod.spec)
    alone = _run(pod, _together(*(load_alone(pod, bucket) for _ in range(INSTANCES))))
    one = _run(pod, load_alone(pod, bucket))
    warm = MODEL_NBYTES / pod.spec.pool_load.value
    with tempfile.TemporaryDirectory() as directory:
        pool = _pool(Path(directory), pod.spec)
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


def _pool(path: Path, spec: Spec) -> MemoryPool:
    pod = Pod(spec=spec)
    room = 2 * INSTANCES * NUM_BLOCKS * BLOCK_NBYTES // SERVERS  # of two times all models
    pool = MemoryPool(pod, path, SERVERS, room, 8 * room, {NAMESPACE: None})
    pool.open()
    pod.materialise()
    pool.start()
    for version in range(1, INSTANCES + 1):
        pool.catalogue.register(ModelId("r1", str(version)), [BLOCK_NBYTES] * NUM_BLOCKS)
    return pool


async def _together(*works: Coroutine[Any, Any, float]) -> list[float]:
    """Run coroutines side by side, from within a process of their clock."""
    process = asyncio.current_task()
    assert isinstance(process, Process)
    return await process.clock.gather(*works)


def _run(pod: Pod, work: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        return await pod.clock.spawn(work)

    return asyncio.run(main())


# ---- Figure 23: context caching ----------------------------------------------------------------------------

# Of the time to the first token what does not shrink with reuse: fitted to the four values of 5.4.3.
FIXED_SHARE = 0.378
KV_NBYTES = CHIP_TOKENS * 61 * 1152  # BF16 latents and keys of a chip's tokens
SERVER_CHIPS = 8  # of a server, which has one card for VPC


class Reuse(NamedTuple):
    """Time to the first token over both planes, for a share of reused prompts."""

    ub_ms: float
    vpc_ms: float


def reuse(share: float, fixed_share: float = FIXED_SHARE, prefill: PrefillCost | None = None) -> Reuse:
    """Compute the time to the first token with a share of the prompts reused. Reuse leaves a fixed share of
    Table 2's prefill and the part of the other tokens. Fetching adds the time of the dies' DMA over UB, or of
    the server's VPC card for all its chips."""
    prefill = prefill or PrefillCost(resolve_model(MODEL).config)
    spec, nbytes = prefill.spec, share * KV_NBYTES
    line = prefill.batch_ns() * (fixed_share + (1 - share) * (1 - fixed_share))
    ub = spec.startup_ns("dma") + spec.link_ns(0, 0, nbytes / DIES_PER_CHIP)
    vpc = 1e9 * (spec.vpc_startup.value + nbytes * SERVER_CHIPS / spec.vpc_bandwidth.value)
    return Reuse((line + ub) / 1e6, (line + vpc) / 1e6)


def caching(fixed_share: float = FIXED_SHARE, prefill: PrefillCost | None = None) -> list[Row]:
    """Compute the values in the text of Figure 23."""
    base, some, half, most = (reuse(share, fixed_share, prefill) for share in (0.0, 0.125, 0.5, 0.9))
    return [
        Row("cm.cc.ttft/reuse=50%", base.ub_ms - half.ub_ms, "ms", "calibrated"),
        Row("cm.cc.ttft/reuse=90%", base.ub_ms - most.ub_ms, "ms", "calibrated"),
        Row("cm.cc.tput/12.5%->50%", some.ub_ms / half.ub_ms, "x", "calibrated"),
        Row("cm.cc.tput/reuse=90%", base.ub_ms / most.ub_ms, "x", "calibrated"),
        Row("cm.cc.tput/UB over VPC", most.vpc_ms / most.ub_ms, "x", "predicted"),
    ]


def figure_23() -> list[Row]:
    """Compute the values in the text of Figure 23, and its two curves."""
    rows = caching()
    for percent in (0, 12.5, 25, 50, 75, 90):
        times = reuse(percent / 100)
        for plane, ms in (("ub", times.ub_ms), ("vpc", times.vpc_ms)):
            rows.append(Row(f"ems/ttft/{plane}/reuse={percent:g}%", ms, "ms", "calibrated"))
    return rows


# ---- hit rates ---------------------------------------------------------------------------------------------


def hit_rates(trace: list[TracedRequest], block_tokens: int) -> Iterator[Row]:
    """Compute the share of prompt tokens found in pools of several sizes, in percent: DRAM alone, with
    volumes of eight times its size, and at best. Volumes also hold everything that DRAM holds."""
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
    """Draw the time to the first token over reuse, on both planes, as in Figure 23b. Raises InputError
    without matplotlib."""
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
