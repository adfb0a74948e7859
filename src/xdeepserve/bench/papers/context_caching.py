"""Prefill with a part of each prompt in the memory pool (CloudMatrix 5.4.3, Figure 23): runs of the engine.

DeepSeek-R1 runs timing-only with the pool of 32 hosts, on a server of a prefill instance: 16 dies in two DP
groups, billed as half of 32 (CM 4.1, 4.3). Each group gets 16 prompts of 4,096 tokens at once, which are
16,384 tokens on a chip. Their first blocks are in the pool's DRAM. No number is fitted to any of these rows.

Each time is that of runs with few layers, continued to all of them in proportion to the layers. Blocks in the
pool have 128 tokens, so 90 % of a prompt are 29 of its 32 blocks. TTFT is that of the whole batch, until its
last prompt has its first token: the paper's batch is one step, where the engine starts what is there.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence

import msgspec

from xdeepserve.bench.papers.sizes import DIES_PER_CHIP, MODEL
from xdeepserve.bench.report import Row
from xdeepserve.ems.pool_use import PoolUse
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import (
    CacheConfig,
    Deployment,
    EmsConfig,
    PipelineConfig,
    PoolFabric,
    SchedulerConfig,
)
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.spec import Spec
from xdeepserve.loop import run
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import CHIP_TOKENS, EP, PROMPT
from xdeepserve.prices.step_run import uncollected

DIES, GROUP = 16, 8  # of a server, and of a DP group (preset cloudmatrix384)
NUM_PROMPTS = DIES // DIES_PER_CHIP * CHIP_TOKENS // PROMPT
BLOCK, HOSTS = 128, 32  # tokens in a block of the pool; hosts that give DRAM to it (CM 4.4.2, 5.1)
SHALLOW, DEEP = 5, 9  # layers
SHARES = (0.125, 0.5, 0.9)
PLANES: tuple[PoolFabric, ...] = ("ub", "vpc")
FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def deployment(plane: PoolFabric | None, path: str, microbatches: int = 2) -> Deployment:
    """Make a server of a prefill instance as in CM 4.3, with the pool in a directory, or without it."""
    per_group = NUM_PROMPTS * GROUP // DIES
    pool = EmsConfig(path, HOSTS, dram_mb=1 << 20, volume_mb=1 << 22, block_size=BLOCK, fabric=plane or "ub")
    return Deployment(
        name="prefill instance",
        kind="colocated",
        dies=DIES,
        tp=GROUP,
        tp_mode="sp-tp-sp",
        exchange="push",
        prefill_attention="unabsorbed",
        pipeline=PipelineConfig(microbatches=microbatches, overlap="engines"),
        max_model_len=PROMPT + BLOCK,
        scheduler=SchedulerConfig(max_num_seqs=per_group, max_num_batched_tokens=per_group * PROMPT),
        # What comes from the pool must not be evicted before it is used.
        cache=CacheConfig(block_size=BLOCK, num_blocks=4 * per_group * PROMPT // BLOCK),
        ems=EmsConfig() if plane is None else pool,
    )


@functools.cache
def ttft_ms(
    share: float = 0.0, plane: PoolFabric | None = None, spec: Spec | None = None, microbatches: int = 2
) -> float:
    """Prefill a batch of prompts with a share of each in the pool, or without a pool; return its TTFT."""
    shallow, deep = (run_batch(share, plane, layers, spec, microbatches) for layers in (SHALLOW, DEEP))
    return deep + (resolve_model(MODEL).config.num_hidden_layers - DEEP) * (deep - shallow) / (DEEP - SHALLOW)


def run_batch(
    share: float, plane: PoolFabric | None, layers: int, spec: Spec | None = None, microbatches: int = 2
) -> float:
    """Run a batch on a model of some layers, and return its TTFT [ms]."""
    blocks = round(share * PROMPT / BLOCK)
    known = blocks * BLOCK
    prompts = [[number] * known + [NUM_PROMPTS + number] * (PROMPT - known) for number in range(NUM_PROMPTS)]
    with tempfile.TemporaryDirectory() as path:
        given = deployment(plane, path, microbatches)
        return max(ttfts_ms(given, prompts, layers, blocks, TimingConfig(of_dies=EP), spec))


def ttfts_ms(
    deployment: Deployment,
    prompts: Sequence[list[int]],
    layers: int,
    blocks: int = 0,
    timing: TimingConfig | None = None,
    spec: Spec | None = None,
) -> list[float]:
    """Prefill prompts that arrive together; return each one's time to the first token [ms].

    The first `blocks` blocks of each are put into the pool before. Raises XDeepServeError if not all of them
    came from there.
    """
    model = resolve_model(MODEL)
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=layers)
    plan = PodPlan(model, deployment, timing=timing or TimingConfig(), spec=spec)
    with uncollected():
        return run(_prefill(Engine(plan), prompts, blocks))


async def _prefill(engine: Engine, prompts: Sequence[list[int]], blocks: int) -> list[float]:
    await engine.start()
    clock, use = engine.plan.pod.clock, engine.plan.pool_use
    found: list[float] = []
    num_cached = 0
    if isinstance(use, PoolUse) and use.contexts is not None:
        keys = [key for prompt in prompts for key in use.contexts.keys(prompt, blocks)]
        leases = [lease for key in keys if (lease := use.contexts.begin(key)) is not None]
        use.contexts.client.end(leases)
    requests: list[Request] = []

    async def client() -> None:
        await clock.sleep(10**9)  # until the cards are free of what was put
        for number, prompt in enumerate(prompts):
            requests.append(engine.submit(prompt, FIRST, f"prompt {number}", is_bounded=False))

    await clock.spawn(client(), name="client")
    for request in requests:
        async for delta in request:
            if delta.metrics is not None and delta.metrics.ttft_ns is not None:
                found.append(delta.metrics.ttft_ns / 1e6)
                num_cached += delta.metrics.num_cached_tokens
    await engine.stop()
    if num_cached != len(prompts) * blocks * BLOCK:
        raise XDeepServeError(f"{num_cached} tokens came from the pool, expected {blocks * BLOCK} a prompt")
    return found


@functools.cache
def figure_23(planes: tuple[PoolFabric, ...] = PLANES, spec: Spec | None = None) -> list[Row]:
    """Compute the values in the text of Figure 23, and the points of its curves on some planes."""
    base = ttft_ms(spec=spec)
    found = {(plane, share): ttft_ms(share, plane, spec) for plane in planes for share in SHARES}
    some, half, most = (found["ub", share] for share in SHARES)
    values = [("cm.cc.ttft/none", base, "ms")]
    for percent, ms in ((50, half), (90, most)):
        values.append((f"cm.cc.ttft/less/reuse={percent}%", 100 * (1 - ms / base), "%"))
        values.append((f"cm.cc.ttft/reuse={percent}%", base - ms, "ms"))
    values += [("cm.cc.tput/12.5%->50%", some / half, "x"), ("cm.cc.tput/reuse=90%", base / most, "x")]
    if "vpc" in planes:
        gain = max(found["vpc", share] / found["ub", share] for share in SHARES)
        values.append(("cm.cc.tput/UB over VPC", gain, "x"))
    curves = {"none": base} | {f"{plane}/reuse={100 * share:g}%": ms for (plane, share), ms in found.items()}
    for place, ms in curves.items():
        values.append((f"ems/ttft/{place}", ms, "ms"))
        values.append((f"ems/throughput/{place}", 1000 * CHIP_TOKENS / ms, "tok/s"))
    note = f"continued from {SHALLOW} and {DEEP} layers"
    return [Row(name, value, unit, "predicted", note) for name, value, unit in values]


def curves(rows: Sequence[Row]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the curves of Figure 23b by plane: percents of reuse, and times to the first token [ms]."""
    values = {row.name: row.value for row in rows}
    percents = [100 * share for share in SHARES]
    base = values["ems/ttft/none"]
    return {
        plane: ([0.0, *percents], [base, *(values[f"ems/ttft/{plane}/reuse={each:g}%"] for each in percents)])
        for plane in PLANES
        if f"ems/throughput/{plane}/reuse={percents[0]:g}%" in values
    }
