"""The price of a step beside the step itself, stage by stage, to 1 percent."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from xdeepserve.engine.deploy.deployment import (
    CacheConfig,
    Deployment,
    ExecutionConfig,
    PipelineConfig,
    SchedulerConfig,
)
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import InputError
from xdeepserve.hw.spec import Spec
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.step_price import StepCounts, StepPrice, priced
from xdeepserve.prices.step_run import StepShare, one_step

LAYERS = 16  # of DeepSeek-R1's 61, to save time; with few, a step of few rows depends on who draws what
DEPLOYMENT = Deployment(
    name="te",
    kind="colocated",
    dies=32,
    scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=1024),
    cache=CacheConfig(block_size=128, num_blocks=2048, prefix=False),
    max_model_len=32768,
)


def model() -> Checkpoint:
    checkpoint = resolve_model("deepseek-r1")
    checkpoint.config = msgspec.structs.replace(checkpoint.config, num_hidden_layers=LAYERS)
    return checkpoint


Shares = Callable[[int], list[StepShare]]
STEPS: dict[str, Shares] = {
    "all alike": lambda group: [StepShare(5000)] * 20,
    "one request": lambda group: [StepShare(5000)] if group == 3 else [],
    "nine": lambda group: [StepShare(3000 + group)] if group < 9 else [],
    "all different": lambda group: [StepShare(1000 + 100 * group)] * (group % 7),
    "two fuller groups": lambda group: [StepShare(2000)] * (40 if group < 2 else 10),
    "a chunk beside decodes": lambda group: (
        [StepShare(3000, 1000), *[StepShare(2000)] * 8] if group == 0 else [StepShare(2000)] * 8
    ),
    "chunks alone": lambda group: [StepShare(512 * group, 300 + 10 * group)] if group % 2 else [],
}


def counts(price: StepPrice, shares_of: Shares, mtp: int) -> StepCounts:
    """What the shares of a step come to."""
    groups = [[(s.before, s.rows or 1 + mtp) for s in shares_of(group)] for group in range(price.num_groups)]
    rows = [sum(rows for _, rows in group) for group in groups]
    context = [sum(rows * before + rows * (rows + 1) / 2 for before, rows in group) for group in groups]
    read = [sum(before + rows for before, rows in group) for group in groups]
    most = max(range(len(groups)), key=lambda g: price.attention(rows[g], context[g], read[g]))
    logits = [sum(1 if s.rows else 1 + mtp for s in shares_of(group)) for group in range(price.num_groups)]
    return StepCounts(max(rows), sum(rows), context[most], read[most], max(logits))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mtp": 1},
        {"prefill_attention": "unabsorbed"},
        pytest.param({"tp": 4}, marks=pytest.mark.campaign),
    ],
    ids=["dp", "mtp", "unabsorbed", "tp"],
)
def test_a_step_costs_what_its_stages_do(changes: dict[str, Any]) -> None:
    deployment = msgspec.structs.replace(DEPLOYMENT, **changes)
    price = priced(model(), deployment)
    assert price.num_groups == (8 if "tp" in changes else 32)
    # Drafts change the rows of a request, not how groups are told apart: every second step has them.
    for name, shares_of in list(STEPS.items())[:: 2 if changes else 1]:
        run = one_step(model(), deployment, shares_of, TimingConfig())
        predicted = price(counts(price, shares_of, deployment.mtp)) - price.gap
        assert predicted == pytest.approx(run.iteration_ns, rel=0.01), name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dies": 8}, "weights and KV of the fullest die take .* GiB, and it has 64"),
        ({"pipeline": PipelineConfig(microbatches=2)}, "one of kind monolithic or colocated, with one"),
        ({"kind": "moe-attention", "dies": None}, "one of kind monolithic or colocated"),
    ],
)
def test_what_has_no_such_price_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        priced(resolve_model("deepseek-r1"), msgspec.structs.replace(DEPLOYMENT, **changes))


def test_a_step_planned_ahead_pays_for_no_gap_and_one_too_short_for_that_has_no_price() -> None:
    ahead = Host(ExecutionConfig(mode="graph", overlap=True), Spec(), 4)
    after = Host(ExecutionConfig(mode="graph"), Spec(), 4)
    assert after.mean_ns() - ahead.mean_ns() == ahead.ahead_ns() > 2e6
    given = resolve("colocated", ["dies=2", "execution.overlap=true", "max_model_len=64"])
    with pytest.raises(InputError, match=r"steps of 0\.\d\d ms are shorter than the 2\.\d\d ms"):
        priced(resolve_model("tiny-random"), given, rows=(1, 8))
