"""`xdeepserve bench plan`: the planner beside MegaScale-Infer's publications, exhaustive search, and
timing-only runs of its plans.

Rows of the paper are in BF16 on devices that were not timed here: identities of its tables, and ratios.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from xdeepserve.bench.papers.fits import all_left_out
from xdeepserve.bench.papers.superpod import COMM_RATIO_DBRX, MEGASCALE
from xdeepserve.bench.report import Kind, Row, pyplot
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.hw.accelerators import ACCELERATORS
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.devices import pairings, space_of
from xdeepserve.planner.layouts import (
    LayoutPlan,
    PodLayout,
    is_known,
    layout_of,
    least_known,
    predict,
    sized,
    times_apart,
)
from xdeepserve.planner.moe_shape import BF16, PUBLISHED
from xdeepserve.planner.performance import LatencyBound, Times, moe_util
from xdeepserve.planner.pod_search import MICROBATCHES, PodSpace, plans
from xdeepserve.planner.pod_search import exhaustive as exhaustive_pod
from xdeepserve.planner.search import NodeKind, Space, algorithm_1, balanced, exhaustive, search
from xdeepserve.prices.curve import Curve
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.prices.step_run import DecodeRun, decode_iteration

SLO_NS = 150e6  # MS 7.1
CONTEXT = Demand().context
GPUS = ("l20", "h800", "a800", "h20", "l40s")
RATIO_BOUND, RUN_BOUND = 4, 5  # percent
NUM_SPACES = 200
NUM_DRAWN = 8
BOUNDS_MS, M_DIES = (80.0, 110.0), 48
# Model, dies, SLO in ms: plans of every layout are run.
MIXED = (("deepseek-r1", 64, 100.0), ("dbrx", 24, 150.0))
# Model, dies, bounds in ms, number: pods whose layouts are all tried.
PODS = (
    ("tiny", (1, 13), (0.5, 6.0), 100),
    ("dbrx", (4, 26), (15.0, 200.0), 94),
    ("deepseek-r1", (34, 70), (35.0, 120.0), 6),
)
CHECKED = (("deepseek-r1", 64, 50.0), ("deepseek-r1", 96, 100.0), ("tiny", 16, 4.0))


def all_rows(model: str = "tiny", deployment: str | None = None, context: int | None = None) -> Iterator[Row]:
    """Yield all rows in order of computation; with a deployment only that of an iteration of it."""
    if deployment is not None:
        return iter([of_deployment(model, deployment, context)])
    published = table_3, identities, microbatches, dbrx, pairs, spaces
    runs = checked, drawn, best_number, mixed, superpod, left_out
    return itertools.chain.from_iterable(part() for part in (*published, *runs))


# ---- what the paper publishes ------------------------------------------------------------------------------


def table_3() -> list[Row]:
    """Compute MS Table 3: performance for a price of 1."""
    units = ("GB", "GB/s", "TFLOPS")
    return [
        Row(f"ms.t3/{name}/{unit}", value, unit, "predicted")
        for name in GPUS
        for unit, value in zip(units, ACCELERATORS[name].per_cost(), strict=True)
    ]


def identities() -> list[Row]:
    """Compute the batch at the A100's ridge, the utilisation of Mixtral's experts there, and bytes to an
    expert (MS 2.3, 7.3)."""
    mixtral, ridge = PUBLISHED["mixtral-8x22b"], MS_RIDGE_FLOPS / MS_RIDGE_BANDWIDTH
    util = moe_util(mixtral.top_k, mixtral.experts, ridge, ridge)
    nbytes = 128 * mixtral.top_k / mixtral.experts * mixtral.hidden * BF16 / 2
    return [
        Row("ms.ridge", ridge, "", "predicted"),
        Row("ms.moe_util", 100 * util, "%", "predicted"),
        Row("ms.m2n.size", nbytes, "B", "predicted"),
    ]


MS_RIDGE_FLOPS, MS_RIDGE_BANDWIDTH = 312e12, 2e12  # A100, as MS 2.3 rounds it


def microbatches() -> list[Row]:
    """Compute throughput of three microbatches over that of two, by equation 5, if T_a = T_e (MS 7.4). One
    ratio T_c / T_f is fitted, to DBRX; the others follow by hidden size and top-k."""
    rows = []
    for name, size in MEGASCALE.items():
        shape = next(each for each in PUBLISHED.values() if each.name == name)
        times = Times(1.0, 1.0, COMM_RATIO_DBRX * size / MEGASCALE["DBRX"])
        gain = 3 / times.total(3, shape.layers) / (2 / times.total(2, shape.layers))
        kind: Kind = "calibrated" if name == "DBRX" else "predicted"
        row = Row(f"ms.pp.m23/{name}/simulated=equation 5", gain, "x", kind)
        rows.append(bounded(row, row.error_pct or 0.0, RATIO_BOUND))
    return rows


def dbrx() -> list[Row]:
    """Compute the attention nodes for balancing DBRX's 16 experts on A800, k1 E / (k3 K); throughput peaked
    at 8 (MS Figure 15). An expert counts with Table 2's two GEMMs, and with the three that it has."""
    rows, a800 = [], ACCELERATORS["a800"]
    for matrices, name in ((2, "ms.dp/DBRX"), (3, "plan/dbrx/n_a/three matrices")):
        shape = msgspec.structs.replace(PUBLISHED["dbrx"], matrices=matrices)
        space = space_of(shape, a800, a800, CONTEXT, SLO_NS)
        rows.append(Row(name, balanced(space, space.attention[0], space.experts[0]), "nodes", "predicted"))
    return rows


def pairs() -> list[Row]:
    """Find the best pair of Table 3's devices for each model, by throughput per cost. The paper takes H20 for
    attention and L40S for experts."""
    rows = []
    for shape in PUBLISHED.values():
        best = pairings(shape, [ACCELERATORS[name] for name in GPUS], CONTEXT, LatencyBound(SLO_NS))[0]
        note = f"{best.attention.name} for attention, {best.experts.name} for experts; efficiencies assumed"
        rows.append(Row(f"plan/pair/{shape.name}", best.plan.tpuc, "tok/s", "predicted", note))
    return rows


# ---- against exhaustive search ----------------------------------------------------------------------------


def random_space(rng: np.random.Generator) -> Space:
    """Draw a small search space: two sizes of nodes each, up to 10 attention nodes, 24 requests in a
    microbatch."""

    def time() -> Curve:
        k, fixed, floor = rng.uniform(0.2, 5), rng.uniform(0, 60), rng.uniform(0, 40)
        rows = tuple(float(1 << i) for i in range(9))
        return Curve.of(rows, lambda b: fixed + max(floor, k * b))

    def message() -> Curve:
        startup, per_byte = rng.uniform(0, 20), rng.uniform(0, 0.01)
        return Curve((0.0, 1e6), (startup, startup + 1e6 * per_byte))

    def side(tp: int, positions: float) -> NodeKind:
        price = tp * rng.uniform(0.5, 3)
        return NodeKind(tp=tp, time=time(), message=message(), price=price, max_positions=positions)

    return Space(
        attention=tuple(side(tp, rng.uniform(20, 200)) for tp in (1, 2)),
        experts=tuple(side(tp, 0.0) for tp in (1, 2)),
        num_experts=int(rng.choice([2, 4, 8])),
        top_k=int(rng.choice([1, 2])),
        layers=int(rng.integers(2, 20)),
        context=1.0,
        token_nbytes=100.0,
        slo_ns=float(rng.uniform(1000, 8000)),
        max_nodes=10,
        max_batch=24,
    )


def shares(count: int = NUM_SPACES, seed: int = 0) -> Iterator[tuple[float, float]]:
    """Yield, for random spaces, the planner's throughput per cost, and that of Algorithm 1 as printed, over
    the best of all points. Both are 1 if there is no plan and none is found."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        space = random_space(rng)
        best, found, printed = exhaustive(space), search(space), algorithm_1(space)
        if best is None:
            yield float(not found), float(not printed)
        else:
            yield tuple(plans[0].tpuc / best.tpuc if plans else 0.0 for plans in (found, printed))  # type: ignore[misc]


def pod_shares(seed: int = 0) -> Iterator[float]:
    """Yield, for random pods and bounds, the planner's tokens per second over those of the best layout. The
    share is 1 if no layout keeps the bound and none is found."""
    rng = np.random.default_rng(seed)
    for model, (least, most), (shortest, longest), count in PODS:
        profile = PodProfile(resolve_model(model), Demand())
        for _ in range(count):
            dies, slo_ms = int(rng.integers(least, most + 1)), shortest * (longest / shortest) ** rng.random()
            space = PodSpace(dies, 1e6 * slo_ms)
            best = exhaustive_pod(profile, space)
            try:
                found = plans(profile, space)[0].throughput
            except DeploymentError:
                found = 0.0
            yield found / best[0].throughput if best else float(not found)


def spaces() -> Iterator[Row]:
    """Compute the worst share of random spaces and pods, and how often the best point is found."""
    planner, printed = zip(*shares(), strict=True)
    yield _worst("planner", planner, "spaces")
    yield _worst("Algorithm 1 as printed", printed, "spaces")
    yield _worst("pods", list(pod_shares()), "pods and bounds")


def _worst(name: str, found: Sequence[float], of: str) -> Row:
    exact = sum(share > 1 - 1e-12 for share in found)
    note = f"the best point in {exact} of {len(found)} {of}"
    return Row(f"plan/exhaustive/{name}/worst", 100 * min(found), "%", "measured", note)


# ---- against timing-only runs -----------------------------------------------------------------------------


def checked() -> Iterator[Row]:
    """Run the best plan of each kind of layout."""
    for model, dies, slo_ms in CHECKED:
        profile = PodProfile(resolve_model(model), Demand())
        best: dict[str, tuple[PodLayout, int]] = {}
        for plan in plans(profile, PodSpace(dies, 1e6 * slo_ms, True)):
            best.setdefault(plan.layout.kind, (plan.layout, plan.requests))
        for layout, requests in best.values():
            yield _against_run(f"plan/{model}/{layout.title()}", profile, layout, requests)


def drawn(count: int = NUM_DRAWN, seed: int = 0) -> Iterator[Row]:
    """Run random layouts and batches within the measured range. A plan is the best of many predictions, which
    have to hold elsewhere, too."""
    rng, profile = np.random.default_rng(seed), PodProfile(resolve_model("deepseek-r1"), Demand())
    while count:
        routed = int(rng.choice([16, 32, 64]))
        layout = PodLayout(
            kind="moe-attention",
            dies=int(rng.integers(2, 16)),
            domains=int(rng.integers(1, 6)),
            microbatches=int(rng.integers(1, 5)),
            routed=routed,
            shared=routed // int(rng.choice([4, 8])),
        )
        requests = int(rng.choice([1, 3, 8, 20, 50, 90]))
        if requests >= least_known(profile, layout) and is_known(layout, requests):
            count -= 1
            name = f"plan/drawn/{layout.title()}, {requests} requests"
            yield _against_run(name, profile, layout, requests)


def mixed() -> Iterator[Row]:
    """Run the best plan of each pair of devices, by throughput per cost."""
    for model, dies, slo_ms in MIXED:
        profile, best = PodProfile(resolve_model(model), Demand()), dict[tuple[str, str], LayoutPlan]()
        space = PodSpace(dies, 1e6 * slo_ms, True, devices=("h20", "l40s"))
        for plan in plans(profile, space):
            best.setdefault(plan.layout.devices, plan)
        for plan in best.values():
            name = f"plan/{model}/{plan.layout.title()}"
            yield _against_run(name, profile, plan.layout, plan.requests)


def best_number() -> Iterator[Row]:
    """Find the number of microbatches with most tokens per second, in DeepSeek-R1's best layout of each
    bound. The prediction is compared with runs of all numbers, each with as many requests as the bound
    allows."""
    profile = PodProfile(resolve_model("deepseek-r1"), Demand())
    for slo_ms in BOUNDS_MS:
        space = PodSpace(M_DIES, 1e6 * slo_ms, kinds=("moe-attention",))
        first = plans(profile, space)[0].layout
        layouts = [msgspec.structs.replace(first, microbatches=m) for m in MICROBATCHES]
        sizes = [sized(profile, layout, space.slo_ns, False) for layout in layouts]
        tried = [plan for plan in sizes if plan is not None]
        ran = [_throughput(plan, _run(profile, plan.layout, plan.requests).iteration_ns) for plan in tried]
        m = max(tried, key=lambda plan: plan.throughput).layout.microbatches
        run = tried[ran.index(max(ran))].layout.microbatches
        note = f"runs: {run}, of {len(tried)} numbers that keep {slo_ms:g} ms"
        yield Row(f"plan/best m/{first.title().split(',')[0]}", m, "microbatches", "predicted", note)


def _throughput(plan: LayoutPlan, iteration_ns: float) -> float:
    """Compute the tokens per second of a plan with another time of an iteration."""
    return msgspec.structs.replace(plan, iteration_ns=iteration_ns).throughput


def left_out() -> list[Row]:
    """Compute the median error of every fitted table as predicted from the others. A plan is as good as the
    times that it is made from."""
    return [
        Row(f"plan/without its table/{each.fit}/{each.table}", each.median, "%", "measured", "median error")
        for each in all_left_out()
    ]


def superpod() -> list[Row]:
    """Compare the plan for DeepSeek-R1 on a SuperPod at 50 ms with the deployment of xDeepServe 7.1 under the
    same bound. Both are without MTP, with MegaScale's medians of prompts and answers."""
    profile, space = PodProfile(resolve_model("deepseek-r1"), Demand()), PodSpace(768, 50e6)
    published = PodLayout(kind="moe-attention", dies=160, domains=3, microbatches=2, routed=256, shared=32)
    rows = []
    for name, plan in (
        ("best", plans(profile, space)[0]),
        ("xDeepServe 7.1's", sized(profile, published, space.slo_ns, False)),
    ):
        assert plan is not None
        layout = plan.layout
        arriving, pace = plan.requests * layout.dies, times_apart(profile, layout, plan.requests).f
        busy = [
            f"{profile.other(held, stage, arriving / held) / 1e3:.0f} us"
            for held, stage in ((layout.routed, "Experts"), (layout.shared, "SharedExpert"))
        ]
        note = (
            f"{layout.title()}: routed dies compute {busy[0]}, shared ones {busy[1]}, of {pace / 1e3:.0f} us"
        )
        rows.append(Row(f"plan/deepseek-r1/768 dies/{name}", plan.throughput, "tok/s", "predicted", note))
    return rows


def of_deployment(model: str, deployment: str, context: int | None) -> Row:
    """Predict and run a deployment, a preset or a file, with as many requests as it takes and has KV blocks
    for. They are at `context`, or two tokens before their greatest length. Raises InputError for a context
    without room."""
    checkpoint, resolved = resolve_model(model), resolve(deployment)
    layout, requests = layout_of(resolved, checkpoint.config)
    sizes = next(te for te in fit(resolved, checkpoint.config, True) if te.place.role != "prefill")
    longest = min(sizes.steps.max_model_len, sizes.kv.num_blocks * sizes.kv.block_size) - 2
    if not 1 <= (context := context or longest) <= longest:
        raise InputError(
            f"--context {context}: requests of deployment {resolved.name} decode after 1 to {longest} "
            f"positions; try {longest}"
        )
    room = sizes.kv.num_blocks // -(-(context + 2) // sizes.kv.block_size)
    requests = max(1, min(requests, room // layout.microbatches))
    profile = PodProfile(checkpoint, Demand.at(context, sizes.steps.max_model_len))
    return _against_run(f"plan/{model}/{resolved.name}", profile, layout, requests, resolved)


def _run(
    profile: PodProfile, layout: PodLayout, requests: int, deployment: Deployment | None = None
) -> DecodeRun:
    """Run an iteration of a layout, or of the deployment that has it."""
    settings = deployment or layout.deployment(profile.demand, requests)
    batch = requests * layout.microbatches
    return decode_iteration(profile.checkpoint, settings, profile.demand.context, batch, TimingConfig())


def _against_run(
    name: str, profile: PodProfile, layout: PodLayout, requests: int, deployment: Deployment | None = None
) -> Row:
    """Predict and run an iteration; return the predicted milliseconds with the error."""
    predicted, run = predict(profile, layout, requests), _run(profile, layout, requests, deployment)
    error = 100 * (predicted / run.iteration_ns - 1)
    row = Row(f"{name}/T_iter", predicted / 1e6, "ms", "predicted", f"run: {run.iteration_ns / 1e6:.3f} ms, ")
    return bounded(row, error, RUN_BOUND)


def bounded(row: Row, error: float, bound: int) -> Row:
    """Return a row with a note: its error in percent, unless the row already shows it, and whether the error
    keeps the bound."""
    kept = "kept" if abs(error) <= bound else "NOT KEPT"
    own = f"{row.note}{error:+z.1f} %; " if row.published is None else ""
    return msgspec.structs.replace(row, note=f"{own}bound of {bound} %: {kept}")


def plot(rows: list[Row], path: Path) -> None:
    """Draw the errors of predicted iterations, in percent, beside the bound. Raises InputError without
    matplotlib."""
    plt = pyplot()
    runs = [row for row in rows if row.name.endswith("/T_iter")]
    errors = [float(row.note.split(" ms, ")[1].split(" %")[0]) for row in runs]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.25 * len(runs)), layout="constrained")
    axes.barh([row.name.removeprefix("plan/").removesuffix("/T_iter") for row in runs], errors)
    for bound in (-RUN_BOUND, RUN_BOUND):
        axes.axvline(bound, color="grey", linestyle=":")
    axes.set(title="predicted T_iter over that of a timing-only run", xlabel="error in percent")
    figure.savefig(path, dpi=120)
