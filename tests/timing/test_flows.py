"""Ways without barriers, in time only: beside the protocols that move bytes, and at a superpod's size."""

import asyncio
import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from xdeepserve import SamplingParams
from xdeepserve.bench.papers import superpod
from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.services.cost import ServiceCost
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.ways.flow.clock import FlowClock
from xdeepserve.engine.ways.flow.costs import Errand
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeadlineError, DeploymentError
from xdeepserve.hw.spec import Spec
from xdeepserve.llm import LLM
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.step_run import decode_iteration

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8 + i] for i in range(6)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
US = 1_000


def end_ns(deployment: str, overrides: Sequence[str], is_timing_only: bool) -> int:
    """When all answers are there."""
    with LLM("tiny-random", deployment, overrides=overrides, timing_only=is_timing_only) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        llm.engine.check_integrity()
        return max(output.metrics.last_token_ns for output in outputs)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("moe-attention", ["dataflow=true"]),
        ("moe-attention", ["dataflow=true", "attention.carrier=urma"]),
        ("eaas", []),
        ("eaas", ["services.batch_clients=4", "services.batch_timeout_us=20"]),
        ("eaas", ["experts.copies=1"]),
    ],
)
def test_it_takes_as_long_as_with_bytes(deployment: str, overrides: list[str]) -> None:
    """The stages are priced alike; what differs is who is routed where."""
    times = [end_ns(deployment, overrides, is_timing_only) for is_timing_only in (True, False)]
    assert times[0] == pytest.approx(times[1], rel=0.03)
    assert times[0] == end_ns(deployment, overrides, True)


@pytest.fixture(scope="module")
def small_r1() -> Checkpoint:
    """DeepSeek-R1 in full width, with 6 layers."""
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=6)
    return model


@pytest.mark.campaign
def test_dataflow_at_the_size_of_a_superpod(small_r1: Checkpoint) -> None:
    """768 dies. Experts serve what has come, in smaller batches than with barriers."""
    barriers = superpod.disaggregated_deployment(3, 160, 256, 32, 96)
    flows = msgspec.structs.replace(barriers, dataflow=True)
    with_barriers, without = (
        decode_iteration(small_r1, each, 3072, 96, TimingConfig()) for each in (barriers, flows)
    )
    assert without.spent_ns["MLA"] == with_barriers.spent_ns["MLA"]
    assert 0 < without.iteration_ns / with_barriers.iteration_ns - 1 < 0.1
    assert without == decode_iteration(small_r1, flows, 3072, 96, TimingConfig())


def test_how_long_the_steps_of_a_client_take() -> None:
    """As the protocol's traces tell it of tiny-random: two tokens for two experts each on three servers."""
    cost = ServiceCost(Spec(), Layout(4, 1, 3, 64, 4, quantize=True))
    assert cost.write_ns(1, 3, 3) == pytest.approx(29.2 * US, rel=0.02)
    assert cost.read_ns(1, 3, 3) == pytest.approx(29.0 * US, rel=0.02)
    assert cost.answer_ns(2, 2, 2) == pytest.approx(9.1 * US, rel=0.02)
    assert cost.write_ns(0, 0, 0) < 10 * US  # nobody to write to
    far = cost._replace(far=1.0)
    assert far.write_ns(1, 3, 3) > cost.write_ns(1, 3, 3) + 2 * Spec().far_latency_ns() - 1


def test_sums_at_the_servers_are_fewer_rows() -> None:
    """A row for each (token, server) instead of each (token, expert); the router's scores go there, too."""
    rows = ServiceCost(Spec(), Layout(4, 128, 9, 7168, 8, quantize=True))
    sums = rows._replace(server_sums=True)
    assert rows.back_share(128, 128 * 8, 2) == 1
    assert sums.back_share(128, 128 * 8, 1) == 1 / 8  # all of a token's experts are there
    assert sums.back_share(128, 128, 64) == 1  # one copy of each token
    assert sums.back_share(4, 8, 2) == 0.75  # two copies, on the same server every other time
    assert sums.read_ns(128, 1024, 8) < rows.read_ns(128, 1024, 8)
    assert sums.write_ns(128, 1024, 8) > rows.write_ns(128, 1024, 8)
    assert sums.read_ns(0, 0, 0) < rows.read_ns(128, 1024, 8)


def test_sums_at_the_servers_are_for_time_alone() -> None:
    """With few servers most experts of a token are on the same ones."""
    sums = ["experts.routed_dies=2", "services.server_sums=true"]
    assert end_ns("eaas", sums, True) < end_ns("eaas", sums[:1], True)
    with pytest.raises(DeploymentError, match=r"server_sums is for timing-only runs: sums .* bits must not$"):
        LLM("tiny-random", "eaas", overrides=sums)


def test_who_does_not_answer_is_named() -> None:
    sizes = ["attention.dies=2", "attention.microbatches=2", "experts.routed_dies=2", "dataflow=true"]
    plan = PodPlan(resolve_model("tiny-random"), resolve("moe-attention", sizes), timing=TimingConfig())
    clock, wiring = plan.pod.clock, plan.tes[0].wiring
    assert isinstance(wiring, ClockWiring)
    hub, lane = wiring.away, 2  # of attention die 1, microbatch 0
    assert isinstance(hub, FlowClock)

    async def ask() -> None:
        rows = np.array([[2, 0, 1], [0, 0, 0]])
        hub.send(lane, 7, Errand(2, 3, 2), rows)
        await hub.back(lane, 50 * US)

    async def main() -> None:
        await clock.spawn(ask())

    with pytest.raises(DeadlineError, match=re.escape("attention 1, microbatch 0")) as caught:
        asyncio.run(main())
    assert "expert 0, expert 2" in str(caught.value)
    assert "answers of event 7" in str(caught.value)


@pytest.mark.parametrize("deployment", ["moe-attention", "eaas"])
def test_a_sample_of_a_pod_does_not_say_where_experts_are(deployment: str) -> None:
    overrides = ["dataflow=true"] if deployment == "moe-attention" else []
    with pytest.raises(DeploymentError, match=r"timing: of_dies and (dataflow|services) exclude each other"):
        PodPlan(resolve_model("tiny-random"), resolve(deployment, overrides), timing=TimingConfig(of_dies=64))
