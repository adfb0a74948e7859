"""The arithmetic limit of a prefill on this computer: no product is faster than out of registers.

A row of a prompt goes through each product of the INT8 recipe once, and through the products of the experts
that it takes. It goes through attention over half of the prompt on average (DSA: over no more than it
chooses). A prompt's last row also goes through the head. Products of bytes and exact ones of BF16 count at
the rate of the fastest instructions for each, on all threads. Weights except the head come from memory once
for each step of `rows` rows. The longer of computing and reading is the limit. Routers, indexers'
comparisons, reading and writing of rows, and everything that is not a product are left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.bench.wall.decode_limit import NEAR, NOT_READ, read_rate, step_nbytes
from xdeepserve.jit.compiling import uses_amx
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.kernels import limits
from xdeepserve.model.weights import weight_specs

REPEATS, CALLS = 9, 20
HEAD, FLOAT32 = "head", (".gate", ".index_gate")


class Operations(NamedTuple):
    """Multiplications and additions: of bytes, and of BF16 numbers."""

    int8: float
    bf16: float


def limit_rows(
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
