"""KV from prefill to decode by request and by layer: the start of the first decode step of a long prompt.

DeepSeek-R1 runs at full size, timing-only, on an otherwise idle pod: a prompt of 4096 tokens on 32 prefill
dies (DP groups of 4, eager), then decode on 32 dies. Prefill times are not calibrated; the time after prefill
is compared. All rows are predictions: DeepServe 4.4 names both ways and gives no number. On UB, decode's DMA
engine pulls, or kernels of both sides send and receive (rows "send-receive"). xDeepServe 5.1 uses
send/receive, and gives times for single messages alone (Figure 5, `bench comm`).

    first_decode_step   from the arrival of the request
    handoff             of that, from the end of prefill: transfer, the scheduler's gap, the launch
"""

from __future__ import annotations

from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.report import Row
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import (
    CacheConfig,
    Deployment,
    ExecutionConfig,
    Fabric,
    Over,
    SchedulerConfig,
    TEConfig,
    Transfer,
)
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.loop import run
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model

NUM_PROMPT = 4096
DIES, PREFILL_TP = 32, 4  # CM 4.1: prefill on 32 dies; XDS 5.1: TP=4 for prefill attention
WAYS: tuple[Transfer, ...] = ("request", "layer")
FABRICS: tuple[Fabric, ...] = ("ub", "roce", "vpc")
SENT: Over = "send-receive"


def rows(model: Checkpoint | None = None) -> list[Row]:
    """Compute both ways over each fabric, and the ratio of by request to by layer; on UB also both means, and
    their ratio."""
    found, handoffs = [], dict[tuple[str, str], int]()
    means: list[tuple[str, Fabric, Over]] = [(fabric, fabric, "dma") for fabric in FABRICS]
    for name, fabric, over in [*means, (SENT, "ub", SENT)]:
        for way in WAYS:
            prefilled_ns, begins_ns = first_decode_step(deployment(fabric, way, over), model)
            handoffs[name, way] = handoff_ns = begins_ns - prefilled_ns
            row = f"engine/pd/{name}/{way}"
            found.append(Row(f"{row}/first_decode_step", begins_ns / 1e6, "ms", "predicted"))
            found.append(Row(f"{row}/handoff", handoff_ns / 1e6, "ms", "predicted"))
        gain = handoffs[name, "request"] / handoffs[name, "layer"]
        found.append(Row(f"engine/pd/gain/{name}/handoff", gain, "x", "predicted"))
    for way in WAYS:
        gain = handoffs["ub", way] / handoffs[SENT, way]
        found.append(Row(f"engine/pd/gain/{SENT}_over_dma/{way}/handoff", gain, "x", "predicted"))
    return found


def deployment(fabric: Fabric, transfer: Transfer, over: Over = "dma") -> Deployment:
    """Make the measured deployment: prefill in TP groups, on as many dies as decode."""
    return Deployment(
        name="pd",
        kind="pd",
        prefill=TEConfig(dies=DIES, tp=PREFILL_TP),
        decode=TEConfig(dies=DIES),
        fabric=fabric,
        transfer=transfer,
        transfer_over=over,
        mtp=1,
        max_model_len=NUM_PROMPT + 128,
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=NUM_PROMPT),
        cache=CacheConfig(block_size=128, num_blocks=64, prefix=False),
        execution=ExecutionConfig(),
    )


def first_decode_step(deployment: Deployment, model: Checkpoint | None = None) -> tuple[int, int]:
    """Measure the end of a request's prefill, and the start of its first decode step, in ns from its
    arrival."""
    engine = Engine(PodPlan(model or resolve_model(MODEL), deployment, timing=TimingConfig()))
    return run(_serve_one(engine))


async def _serve_one(engine: Engine) -> tuple[int, int]:
    await engine.start()
    clock, begins = engine.plan.pod.clock, []

    def watch(group: DPGroup) -> None:
        launch = group.launch

        def watched(step_idx: StepNo, delay_ns: int = 0, bucket: int = 0, num_parts: int = 1) -> None:
            if group.num_rows(step_idx):
                begins.append(clock.now + delay_ns)
            launch(step_idx, delay_ns, bucket, num_parts)

        group.launch = watched  # type: ignore[method-assign]

    for group in engine.je.tes[-1].groups:
        watch(group)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    metrics = None
    async for delta in engine.submit([0] * NUM_PROMPT, params, "prompt"):
        metrics = delta.metrics or metrics
    await engine.stop()
    assert metrics is not None
    assert metrics.ttft_ns is not None
    return metrics.ttft_ns, begins[0] - metrics.arrival_ns
