"""Caches that belong to prefill TEs against the memory pool that all share (CloudMatrix 4.1, 4.4).

Chats and single prompts, the workload of `bench engine`'s routes, reach three prefill TEs. A TE's own cache
is in its HBM and in the DRAM of its host. Requests then go where their prefix is, as in KVCache-centric
serving, or to the TE with fewest requests. The pool is the same DRAM and, as in CM 4.1, that of the decode
TE's host; with it requests go to the TE with fewest requests. The paper says which wins, and gives no number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

import msgspec

from xdeepserve.bench.papers import engine
from xdeepserve.bench.report import Row
from xdeepserve.engine.deploy.deployment import CacheConfig, Deployment, EmsConfig, Route
from xdeepserve.model.cache_layout import entries_nbytes

HBM_BLOCKS, HOST_BLOCKS = 96, 64  # KV blocks of a DP group in HBM, and of a die in its host's DRAM
BLOCK, LAYERS = 128, 4
WAYS: dict[str, tuple[Route, bool]] = {
    "own caches, by prefix": ("cost", False),
    "own caches, by load": ("sequences", False),
    "pool, by load": ("sequences", True),
}


def rows(work: Sequence[engine.TimedRequest] | None = None) -> Iterator[Row]:
    """Measure the share of prompts' tokens that are found in caches, and the time to the first token."""
    work = engine.talks() if work is None else work
    total = sum(each.num_prompt for each in work)
    times = {}
    for way, (route, has_pool) in WAYS.items():
        with tempfile.TemporaryDirectory() as path:
            result = engine.serve(
                _deployment(route, path if has_pool else None), work, engine.with_layers(LAYERS)
            )
        cached = sum(m.num_cached_tokens for m in result.metrics) / total
        times[way] = result.mean_ttft_ms()
        yield Row(f"locality/{way}/cached", 100 * cached, "%", "predicted", "of all prompts' tokens")
        yield Row(f"locality/{way}/mean_ttft", times[way], "ms", "predicted")
        yield Row(f"locality/{way}/p99_ttft", result.p99_ttft_ms(), "ms", "predicted")
    for way in ("own caches, by prefix", "own caches, by load"):
        yield Row(f"locality/gain/over {way}", times[way] / times["pool, by load"], "x", "predicted")


def _deployment(route: Route, path: str | None) -> Deployment:
    base = engine.prefill_tes(route, 1)
    num_host = HOST_BLOCKS if path is None else 0
    cache = CacheConfig(block_size=BLOCK, num_blocks=HBM_BLOCKS, num_host_blocks=num_host)
    return msgspec.structs.replace(base, cache=cache, ems=EmsConfig() if path is None else _pool(base, path))


def _pool(base: Deployment, path: str) -> EmsConfig:
    """Make a pool of the hosts of all TEs, also of the one that decodes, whose DRAM no prefill TE has for
    itself. What is in DRAM is on volumes, too, so their size bounds the pool."""
    assert base.prefill is not None
    assert base.decode is not None
    dies = base.prefill.dies or 0
    nbytes = BLOCK * entries_nbytes(engine.with_layers(LAYERS).config, "int8", LAYERS)
    return EmsConfig(
        path,
        servers=base.prefill.count + (base.decode.dies or 0) // dies,
        block_size=BLOCK,
        dram_mb=1 << 11,
        volume_mb=HOST_BLOCKS * dies * nbytes >> 20,
    )
