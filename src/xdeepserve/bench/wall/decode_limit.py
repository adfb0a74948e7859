"""The memory limit of a decode step on this computer: weights and caches must be read.

A step reads each weight that its tokens need, and each token's KV cache, once. Experts count as equally
likely: a token takes K of E experts, so a batch of B takes E (1 - (1 - K / E)^B). Computing time is left out,
and so are weights that stay in caches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.die.kv_memory import cache_parts
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.kernels import limits
from xdeepserve.model.weights import weight_specs

NEAR = 64 << 20  # bytes that caches may hold from step to step: a smaller model does not wait for memory
REPEATS = 9
READ = 128 << 20  # bytes that each thread reads to see how fast that is
NOT_READ = ("embed", "cos", "sin")  # but for a row of each token


def limit_rows(config: ModelConfig, threads: int, batches: Sequence[int], context: float) -> Iterator[Row]:
    """Yield the bandwidth of `threads` threads, and the limit of tokens per second for each batch; nothing
    for a small model."""
    if step_nbytes(config, 1, 0) < NEAR:
        return
    rate, label = read_rate(threads), f"decode/limit of memory/threads={threads}"
    yield Row(f"{label}/read", rate / 1e9, "GB/s", "measured")
    for batch in batches:
        step_s = step_nbytes(config, batch, context) / rate
        yield Row(f"{label}/batch={batch}", batch / step_s, "tok/s", "measured")


def step_nbytes(config: ModelConfig, batch: int, context: float) -> float:
    """Compute the bytes read by a step of the INT8 recipe on one die: `batch` sequences of `context`
    positions."""
    specs = weight_specs(config, "int8", TILE, num_mtp=0)
    routed = sum(spec.nbytes for name, spec in specs.items() if ".experts." in name)
    rest = sum(
        spec.nbytes for name, spec in specs.items() if ".experts." not in name and name not in NOT_READ
    )
    share = config.num_experts_per_tok / config.n_routed_experts if routed else 0.0
    parts = [
        part
        for layer in range(config.num_hidden_layers)
        for part in cache_parts(config, "int8", 1, TILE, config.attention_of(layer))
    ]
    cached = sum(part.block_nbytes for part in parts) / TILE
    return rest + routed * (1 - (1 - share) ** batch) + batch * context * cached


def read_rate(threads: int) -> float:
    """Measure the bytes per second that `threads` threads read from memory, each its own array; the best of
    REPEATS."""
    arrays, times = [np.ones(READ // 4, np.float32) for _ in range(threads)], []
    limits.read(arrays[0])
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(limits.read, arrays))
            times.append(time.perf_counter() - start)
    return threads * READ / min(times)
