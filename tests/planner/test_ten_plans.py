"""Plans for three models on three lists of hardware: what they predict, and the bits that they leave."""

import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.model.hf_fixtures import fixtures
from xdeepserve.cli import main
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.llm import LLM, digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.layouts import layout_of, predict
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.prices.step_run import decode_iteration

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
PROMPTS = [[7], list(range(3, 40)), [5, 6, 7] * 9]
GQA = next(each for each in fixtures() if each.name == "minimax-rotary-dim")
LISTS = ("cm384", "h20,l40s", "910b,cm384")


class Plan(NamedTuple):
    model: str
    slo_ms: float
    dies: int
    hardware: str
    kind: str

    def args(self, file: Path) -> list[str]:
        given = ["plan", "--model", self.model, "--slo-ms", str(self.slo_ms), "--dies", str(self.dies)]
        return [*given, "--hardware", self.hardware, "--kind", self.kind, "--extrapolate", "-o", str(file)]


MODELS = (("deepseek-r1", 100, 64), ("dbrx", 150, 24), ("tiny", 3, 8))
PLANS = [
    Plan(*model, hardware, kind)
    for model in MODELS
    for hardware in LISTS
    for kind in ("colocated", "moe-attention")
    if kind == "moe-attention" or hardware == "cm384"
]


@pytest.mark.campaign
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_is_found_soon_and_its_file_takes_what_it_says_with_the_bits_of_one_die(
    plan: Plan, tmp_path: Path
) -> None:
    file, start = tmp_path / "plan.toml", time.process_time()
    assert main(plan.args(file)) == 0
    assert time.process_time() - start < 10
    checkpoint, deployment = resolve_model(plan.model), resolve(str(file))
    layout, requests = layout_of(deployment, checkpoint.config)
    demand = Demand()
    predicted = predict(PodProfile(checkpoint, demand), layout, requests)
    batch = requests * layout.microbatches
    run = decode_iteration(checkpoint, deployment, demand.context, batch, TimingConfig())
    assert predicted == pytest.approx(run.iteration_ns, rel=0.05)

    small = resolve_model(GQA.checkpoint_dir(tmp_path) if plan.model == "dbrx" else "tiny-random")
    fewer = msgspec.structs.replace(
        layout,
        dies=min(2, layout.dies),
        count=min(2, layout.count),
        domains=min(2, layout.domains),
        routed=min(2, layout.routed),
        shared=min(small.config.n_shared_experts, layout.routed),
    )
    digests = []
    for where in (fewer.deployment(Demand(40, 24), 4), "monolithic"):
        with LLM(small, where) as llm:
            digests.append(digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)))
    assert digests[0] == digests[1]
