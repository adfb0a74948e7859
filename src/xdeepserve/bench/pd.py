"""KV from prefill to decode by request and by layer: when the first decode step of a long prompt begins.

DeepSeek-R1 at full size, timing-only, on a pod that has nothing else to do: a prompt of 4096 tokens on 32
prefill dies (DP groups of 4, eager), then decode on 32 dies. Times of prefill are not calibrated; what is
compared is what comes after it. All rows are predictions: DeepServe 4.4 names both ways and gives no number.

    first_decode_step   from the arrival of the request
    handoff             of that, from the end of prefill: transfer, the scheduler's gap, the launch
"""

from __future__ import annotations

from typing import Literal

from xdeepserve.bench.report import Row
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import (
    CacheConfig,
    Deployment,
    ExecutionConfig,
    SchedulerConfig,
    TEConfig,
)
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.run.clock.routing import TimingConfig
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.loop import run
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model

MODEL = "deepseek-r1"
NUM_PROMPT = 4096
DIES, PREFILL_TP = 32, 4  # CM 4.1: prefill on 32 dies; XDS 5.1: TP=4 for prefill attention
WAYS: tuple[Literal["request", "layer"], ...] = ("request", "layer")
FABRICS: tuple[Literal["ub", "roce", "vpc"], ...] = ("ub", "roce", "vpc")


def rows(model: Checkpoint | None = None) -> list[Row]:
    """Both ways over each fabric, and by request divided by by layer."""
    found = []
    for fabric in FABRICS:
        handoffs = []
        for way in WAYS:
            prefilled_ns, begins_ns = first_decode_step(deployment(fabric, way), model)
            handoffs.append(begins_ns - prefilled_ns)
            name = f"engine/pd/{fabric}/{way}"
            found.append(Row(f"{name}/first_decode_step", begins_ns / 1e6, "ms", "predicted"))
            found.append(Row(f"{name}/handoff", handoffs[-1] / 1e6, "ms", "predicted"))
        by_request, by_layer = handoffs
        found.append(Row(f"engine/pd/gain/{fabric}/handoff", by_request / by_layer, "x", "predicted"))
    return found


def deployment(fabric: Literal["ub", "roce", "vpc"], transfer: Literal["request", "layer"]) -> Deployment:
    """The deployment that is measured: prefill in TP groups, on as many dies as decode."""
    return Deployment(
        name="pd",
        kind="pd",
        prefill=TEConfig(dies=DIES, tp=PREFILL_TP),
        decode=TEConfig(dies=DIES),
        fabric=fabric,
        transfer=transfer,
        mtp=1,
        max_model_len=NUM_PROMPT + 128,
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=NUM_PROMPT),
        cache=CacheConfig(block_size=128, num_blocks=64, prefix=False),
        execution=ExecutionConfig(),
    )


def first_decode_step(deployment: Deployment, model: Checkpoint | None = None) -> tuple[int, int]:
    """When a request has been prefilled, and when its first decode step begins, in ns from its arrival."""
    engine = Engine(PodPlan(model or resolve_model(MODEL), deployment, timing=TimingConfig()))
    return run(_serve_one(engine))


async def _serve_one(engine: Engine) -> tuple[int, int]:
    await engine.start()
    clock, begins = engine.plan.pod.clock, []

    def watch(group: DPGroup) -> None:
        launch = group.launch

        def watched(step_idx: int, delay_ns: int = 0, bucket: int = 0) -> None:
            if group.num_planned_rows:
                begins.append(clock.now + delay_ns)
            launch(step_idx, delay_ns, bucket)

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
