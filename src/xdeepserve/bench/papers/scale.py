"""`xdeepserve bench scale`: the time to start more TEs (DeepServe 6), step by step.

TEs of DeepSeek-R1 have 32 dies each; 24 TEs fill a SuperPod, and between SuperPods there is RoCE. The number
grows from one TE to as many as 64, with every combination of the paper's three remedies, in its order:
pre-warmed pods and TEs, the model in DRAM beforehand, NPU-fork. `platform/scale_up.py` has the times of steps
and their sources; assumed ones are named in the notes. The paper's text says of its own results only "64
instances within seconds".

During a fork the source's UB port and memory serve both. Its time per token is then an upper bound: all
exchange time counts as the port's, of which the fork has half, and all other stages count as waiting for
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from xdeepserve.bench.report import Row, pyplot
from xdeepserve.comm.cost import OPS
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.cluster import Cluster, ClusterTE, deployment_of, priced_kinds, scale_up_of
from xdeepserve.platform.scale_up import ScaleUp, ScaleWays
from xdeepserve.prices.step_run import decode_iteration

TE = ClusterTE(dies=32, mtp=0)
COUNTS = (1, 2, 4, 8, 16, 32, 64)
BATCH, CONTEXT = 32, 4096  # of each die, while a fork runs


def all_rows() -> Iterator[Row]:
    """Yield seconds by step, remedies and number of TEs; then the cost of a fork for its source."""
    cluster = Cluster((TE,))
    model = resolve_model(cluster.model)
    (kind,) = priced_kinds(cluster, block=512)
    up = scale_up_of(model, TE, kind.price, ScaleWays())
    for ways in all_ways():
        yield from of_ways(msgspec.structs.replace(up, ways=ways))
    first = up.seconds(1, 0)
    yield Row("scale/first of all", first, "s", "predicted", "nobody to fork from: pre-warmed, from DRAM")
    for chunked in (True, False):
        name = f"scale/fork of 23/{'chunked' if chunked else 'whole'}"
        yield Row(name, up.fork_s(23, is_chunked=chunked), "s", "predicted", "along a chain in a SuperPod")
    yield from of_source(up)


def all_ways() -> list[ScaleWays]:
    """List the combinations of remedies in the paper's order, none first, all last."""
    return [ScaleWays(*each) for each in itertools.product((False, True), repeat=3)]


def name_of(ways: ScaleWays) -> str:
    """Name a combination of remedies, or `cold` for none."""
    names = ("warm", "dram", "fork")
    return "+".join(n for n, on in zip(names, msgspec.structs.astuple(ways), strict=True) if on) or "cold"


def of_ways(up: ScaleUp) -> Iterator[Row]:
    """Yield the steps of the last TE, and the sum of all five, by the number of TEs."""
    at = f"scale/{name_of(up.ways)}"
    for step in up.steps(COUNTS[-1] - 1, 1):
        yield Row(f"{at}/tes={COUNTS[-1]}/{step.name}", step.seconds, "s", "predicted", step.source)
    for count in COUNTS[1:]:
        note = "DeepServe 1: 64 in parallel within seconds" if count == COUNTS[-1] else ""
        yield Row(f"{at}/tes={count}", up.seconds(count - 1, 1), "s", "predicted", note)


def of_source(up: ScaleUp) -> Iterator[Row]:
    """Yield the time of a decode TE's step, alone and while its weights are read for a fork."""
    deployment = deployment_of(TE)
    blocks = BATCH * (CONTEXT // deployment.cache.block_size + 1) + 4
    cache = msgspec.structs.replace(deployment.cache, num_blocks=blocks)
    changes = {"cache": cache, "max_model_len": CONTEXT + 8, "execution": None}  # the gap is added below
    deployment = msgspec.structs.replace(deployment, **changes)
    run = decode_iteration(resolve_model(Cluster((TE,)).model), deployment, CONTEXT, BATCH, TimingConfig())
    spec, gap = up.spec, up.spec.scheduler_gap.value * 1e9
    port = sum(run.spent_ns.get(name, 0.0) for name in OPS)
    left = 1 - spec.ub_bandwidth.value / (spec.hbm_bandwidth.value * spec.hbm_efficiency.value)
    during = 2 * port + (run.iteration_ns - port) / left
    at = f"scale/source/batch={BATCH}"
    yield Row(f"{at}/tpot", (run.iteration_ns + gap) / 1e6, "ms", "predicted")
    yield Row(
        f"{at}/tpot during a fork", (during + gap) / 1e6, "ms", "predicted",
        "at most; DeepServe 6.2: contention is limited",
    )  # fmt: skip
    yield Row(
        f"{at}/steps during a fork",
        1e9 * up.fork_s(1) / (during + gap),
        "",
        "predicted",
        "as long as it lasts",
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw the seconds until the last of 64 TEs serves, step upon step, by remedies. Raises InputError
    without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    at = f"/tes={COUNTS[-1]}/"
    names = [name_of(ways) for ways in all_ways()]
    left = dict.fromkeys(names, 0.0)
    parts = [row for row in rows if at in row.name]
    for step in dict.fromkeys(row.name.split(at)[1] for row in parts):
        values = {row.name.split("/")[1]: row.value for row in parts if row.name.endswith(step)}
        axes.barh(names, [values[name] for name in names], left=[left[name] for name in names], label=step)
        left = {name: left[name] + values[name] for name in names}
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel(f"from 1 TE to {COUNTS[-1]} [s]")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
