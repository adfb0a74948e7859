"""The limits of decode and prefill on this computer: what must be read, and what must be computed.

A step reads each weight that its tokens need, and each token's KV cache, once. Experts count as equally
likely: a token takes K of E experts, so a batch of B takes E (1 - (1 - K / E)^B). Weights that stay in caches
are left out, and for decode so is computing time.

In prefill no product is faster than out of registers. A row of a prompt goes through each product of the INT8
recipe once, and through the products of the experts that it takes. It goes through attention over half of the
prompt on average (DSA: over no more than it chooses). A prompt's last row also goes through the head.
Products of bytes and exact ones of BF16 count at the rate of the fastest instructions for each, on all
threads. Weights except the head come from memory once for each step of `rows` rows. The longer of computing
and reading is the limit. Routers, indexers' comparisons, reading and writing of rows, and everything that is
not a product are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.die.kv_memory import cache_parts
from xdeepserve.jit.compiling import uses_amx
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.kernels import limits
from xdeepserve.model.weights import weight_specs

NEAR = 64 << 20  # bytes that caches may hold from step to step: a smaller model does not wait for memory
REPEATS = 9  # the best of these counts
READ = 128 << 20  # bytes that each thread reads to see how fast that is
NOT_READ = ("embed", "cos", "sin")  # but for a row of each token
CALLS = 20  # of a product, in each repeat
HEAD, FLOAT32 = "head", (".gate", ".index_gate")


def decode_rows(config: ModelConfig, threads: int, batches: Sequence[int], context: float) -> Iterator[Row]:
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


# ---- prefill -----------------------------------------------------------------------------------------------


class Operations(NamedTuple):
    """Multiplications and additions: of bytes, and of BF16 numbers."""

    int8: float
    bf16: float


def prefill_rows(
    config: ModelConfig, threads: int, cases: Iterator[tuple[int, int]], rows: int
) -> Iterator[Row]:
    """Yield the rates of products, and tokens per second of each (batch, prompt) in steps of `rows` rows;
    nothing for a small model."""
    if step_nbytes(config, 1, 0) < NEAR:
        return
    if uses_amx():
        peaks = (limits.int8_unit_peak, limits.UNIT_OPS), (limits.exact_unit_peak, limits.UNIT_OPS / 2)
    else:
        peaks = (limits.dot_peak, limits.DOT_OPS), (limits.exact_peak, limits.EXACT_OPS)
    (int8, bf16), label = (_rate(*each, threads) for each in peaks), f"prefill/limit/threads={threads}"
    yield Row(f"{label}/products of bytes", int8 / 1e9, "GOPS", "measured")
    yield Row(f"{label}/products of BF16", bf16 / 1e9, "GFLOPS", "measured")
    memory = read_rate(threads)
    for batch, prompt in cases:
        ops, at_once = row_operations(config, prompt), min(batch * prompt, rows)
        products_s = at_once * (ops.int8 / int8 + ops.bf16 / bf16)
        rate = at_once / max(products_s, _weights_nbytes(config, at_once) / memory)
        yield Row(f"{label}/batch={batch}/prompt={prompt}", rate, "tok/s", "measured")


def row_operations(config: ModelConfig, prompt: int) -> Operations:
    """Compute the operations of a row of a prompt with `prompt` rows, on average."""
    share = config.num_experts_per_tok / config.n_routed_experts if config.n_routed_experts else 0.0
    int8 = bf16 = 0.0
    for name, spec in weight_specs(config, "int8", TILE, num_mtp=0).items():
        if not spec.is_matrix or name in NOT_READ or name.endswith(FLOAT32):
            continue
        ops = 2.0 * float(np.prod(spec.shape)) * (share if ".experts." in name else 1.0)
        if spec.dtype == np.int8:
            int8 += ops
        else:  # what a checkpoint keeps in floating point takes exact products, too
            bf16 += ops / prompt if name == HEAD else ops
    positions = min((prompt + 1) / 2, config.index_topk or math.inf)
    seen = 2.0 * positions * config.num_hidden_layers * config.num_attention_heads
    values, keys = seen * config.value_columns, seen * config.key_columns
    if config.has_latents:  # scores are products of bytes but for the RoPE part
        int8 += values
    return Operations(int8, bf16 + values + keys)


def _weights_nbytes(config: ModelConfig, rows: int) -> float:
    """Compute the bytes of weights read by a step of `rows` rows that ends no prompt."""
    return step_nbytes(config, rows, 0) - weight_specs(config, "int8", TILE, num_mtp=0)[HEAD].nbytes


def _rate(peak: Callable[[], None], ops: float, threads: int) -> float:
    """Measure the operations per second of `threads` threads at once; the best of REPEATS."""

    def work(_: int) -> None:
        for _ in range(CALLS):
            peak()

    peak()
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            times.append(time.perf_counter() - start)
    return threads * CALLS * ops / min(times)
