"""Prefill attention by DP alone and by SP-TP-SP, on the 32 dies of an instance (CloudMatrix 4.3.1).

DeepSeek-R1 runs timing-only. With DP each prompt is on one die, and dies with short prompts wait for the
longest. With SP-TP-SP eight dies share all prompts of their DP group. Both deployments get the same prompts,
which arrive together: even ones, uneven ones of the same mean, and fewer than there are dies. 4 of the 61
layers are run, to save wall time. The paper gives the reasons, and no number.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from xdeepserve.bench.papers import context_caching
from xdeepserve.bench.report import Row
from xdeepserve.engine.deploy.deployment import CacheConfig, Deployment, SchedulerConfig
from xdeepserve.engine.ways.routing import generator
from xdeepserve.prices.formula import CHIP_TOKENS, EP, PROMPT

LAYERS = 4
DIE_TOKENS = CHIP_TOKENS // 2
WAYS = {"dp": 1, "sp-tp-sp": context_caching.GROUP}  # dies of a DP group
FEW = 8  # prompts, a quarter of the dies
LONGEST = 2 * PROMPT


def prompts() -> dict[str, list[int]]:
    """Return the lengths of the prompts of each workload; even and uneven ones have as many tokens."""
    count = EP * DIE_TOKENS // PROMPT
    drawn = np.exp(generator(3, 0, 0).uniform(np.log(LONGEST / 32), np.log(LONGEST), count))
    for _ in range(100):  # the cut lowers the mean
        drawn = np.minimum(LONGEST, drawn * PROMPT / drawn.mean())
    return {"even": [PROMPT] * count, "uneven": drawn.astype(int).tolist(), "few": [PROMPT] * FEW}


def deployment(tp: int) -> Deployment:
    """Make a prefill instance with DP groups of `tp` dies."""
    base, tokens = context_caching.deployment(None, ""), DIE_TOKENS * tp
    return msgspec.structs.replace(
        base,
        dies=EP,
        tp=tp,
        tp_mode="sp-tp-sp" if tp > 1 else "tp",
        max_model_len=LONGEST + 128,
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=tokens),
        cache=CacheConfig(block_size=128, num_blocks=4 * tokens // 128, prefix=False),
    )


def rows() -> Iterator[Row]:
    """Measure the mean and the last time to the first token. Rows `gain` divide DP's times by SP-TP-SP's."""
    for name, lengths in prompts().items():
        times = {}
        for way, tp in WAYS.items():
            found = context_caching.ttfts_ms(deployment(tp), [[0] * length for length in lengths], LAYERS)
            times[way] = {"mean_ttft": float(np.mean(found)), "last_ttft": max(found)}
            for what, value in times[way].items():
                yield Row(f"engine/parallelism/{name}/{way}/{what}", value, "ms", "predicted")
        for what, before in times["dp"].items():
            gain = before / times["sp-tp-sp"][what]
            yield Row(f"engine/parallelism/gain/{name}/{what}", gain, "x", "predicted")
