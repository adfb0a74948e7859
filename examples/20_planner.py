"""Walkthrough 20: the planner.

How many dies for attention, how many for experts, how large a batch? MegaScale-Infer answers with eight
equations and a search (MS 4). Here the search is run over Table 3's devices, whose times are priced from
their published peaks; then over the deployments of this project, whose times are read off timing-only runs.
The plan that comes out is run: first in virtual time alone, then with tokens, which are those of one die.

    python examples/20_planner.py
"""

from __future__ import annotations

import msgspec

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.accelerators import ACCELERATORS
from xdeepserve.llm import digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner import explain
from xdeepserve.planner.devices import pairings, space_of
from xdeepserve.planner.layouts import predict
from xdeepserve.planner.moe_shape import PUBLISHED
from xdeepserve.planner.performance import LatencyBound, Times
from xdeepserve.planner.pod_search import PodSpace, plans
from xdeepserve.planner.search import balanced
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.prices.step_run import decode_iteration
from xdeepserve.progress import working

SLO_NS = 150e6
PARAMS = SamplingParams(max_tokens=6, temperature=0.0)


def ping_pong() -> None:
    print("T_total of 10 layers, T_a = T_e = 1, T_c = 0.28 (equation 5), by microbatches:")
    for m in (1, 2, 3, 4):
        total = Times(1.0, 1.0, 0.28).total(m, 10)
        print(f"  m = {m}: {total:5.2f}, throughput {m / total:.3f}")


def devices() -> None:
    dbrx, a800 = PUBLISHED["dbrx"], ACCELERATORS["a800"]
    table_2 = msgspec.structs.replace(dbrx, matrices=2)
    space = space_of(table_2, a800, a800, 650, SLO_NS)
    nodes = balanced(space, space.attention[0], space.experts[0])
    print(f"\nDBRX on A800: {nodes:.1f} attention nodes balance 16 experts; published: best with 8")
    names = ("a800", "h20", "l40s")
    found = pairings(dbrx, [ACCELERATORS[name] for name in names], 650, LatencyBound(SLO_NS))
    print("\n".join(explain.device_table(found[:3])))


def pod() -> None:
    model = resolve_model("tiny")
    demand = Demand(prompt=40, output=24)
    with working("Predicting deployments"):
        profile = PodProfile(model, demand)
        found = [plan for plan in plans(profile, PodSpace(8, 2e6)) if plan.layout.routed]
    print("\n`tiny` on 8 dies, 2 ms, experts on dies of their own:")
    print("\n".join(explain.pod_table(found[:3])))
    layout, requests = found[0].layout, found[0].requests
    settings = layout.settings(demand, requests)
    print("\nas a file:\n")
    print(explain.toml(settings, [layout.title()]))

    deployment = layout.deployment(demand, requests)
    batch = requests * layout.microbatches
    with working("Running the best one, time only"):
        run = decode_iteration(model, deployment, demand.context, batch, TimingConfig())
    error = 100 * (predict(profile, layout, requests) / run.iteration_ns - 1)
    print(f"T_iter: run {run.iteration_ns / 1e6:.3f} ms; the prediction is within 5 %: {abs(error) < 5}")
    prompts = ["Once upon a time", "The fox", "What is 3 + 4?"]
    digests = []
    for where in (layout.deployment(demand, 4), "monolithic"):  # a laptop's batch
        with LLM(model, where) as llm:
            digests.append(digest(llm.generate(prompts, PARAMS, keep_logits=True)))
    print(f"with tokens, the digest of one die: {digests[0] == digests[1]}")


if __name__ == "__main__":
    ping_pong()
    devices()
    pod()
