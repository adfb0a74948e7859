"""`xdeepserve bench comm`: communication in virtual time, beside the published latencies.

The protocols run in send/receive, in the comparisons of pull with push and of trampolines with the naive
pull, and in rows named "simulated". Dispatch and combine at EP 8 to 256, A2E and E2A come from the
operator-level model. All read the one parameter table, `hw.spec`; no row has a factor of its own. Fitted
parameters are fitted to the rows marked calibrated, or follow from the same runs.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from xdeepserve.bench.papers import basic_flow, carriers
from xdeepserve.bench.papers.sizes import (
    A2E_COPIES,
    A2E_SHRINK,
    EP_SIZES,
    FITTED_EP_SIZES,
    HIDDEN,
    TOP_K,
    quantize,
    slower,
)
from xdeepserve.bench.report import Kind, Row, pyplot
from xdeepserve.comm.cost import OPS, CommCost
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange_choices import Exchange
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.means import Means
from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RingLayout
from xdeepserve.comm.p2p.message_end import Engine
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide, NaiveExpertSide
from xdeepserve.engine.ways.among.real import ENDS, ExchangeHandle
from xdeepserve.errors import InputError
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec

MESSAGES = (4 << 10, 64 << 10, 256 << 10, (1 << 20) - 32, 4 << 20, 9 << 20)
CORES = (2, 8, 48)
LARGE_MESSAGES = (1 << 20, 9 << 20, 64 << 20)  # by DMA and URMA
PULL_PUSH_BATCHES = (8, 32, 128)
SIMULATED_EP_SIZES = (8, 16, 32)
SHRINK = 4
FEW_TOKENS = 8  # of a rank
ASSUMED = "startups and launches are assumed: dma_startup, op_dispatch, command_latency"
ATTENTION_CORES = (2, 4, 8, 16, 48)  # AIV cores of an attention die, of which XDS 3.3 says: few
ATTENTION, EXPERTS, A2E_BATCH = 160, 288, 96  # XDS 3.3


def rows() -> list[dict[str, Any]]:
    """Return all rows, as `--json` prints them."""
    return [row.as_dict() for row in all_rows()]


def all_rows() -> Iterator[Row]:
    """Yield all rows in order of computation."""
    parts = (
        *(send_receive, exchanges, simulated_exchanges, all_to_alls),
        *(a2e, trampolines, carriers.rows, buffers, pull_push),
    )
    return itertools.chain.from_iterable(part() for part in parts)


def _kind(is_fitted: bool) -> Kind:
    return "calibrated" if is_fitted else "predicted"


# ---- send and receive (XDS 3.1) -----------------------------------------------------------------------


def send_receive() -> list[Row]:
    """Compute the curve over sizes and AIV cores, the paper's two statements about it, and large messages by
    DMA."""
    times = {(n, c): simulate_send(n, c) / 1000 for n in MESSAGES for c in CORES}
    curve = [
        Row(f"p2p/bytes={nbytes}/aiv={cores}", time, "us", _kind(_is_fitted(nbytes, cores)))
        for (nbytes, cores), time in times.items()
    ]
    for nbytes in LARGE_MESSAGES:
        for engine in ("mte", "dma", "urma"):
            time = simulate_send(nbytes, 2, engine, True) / 1000
            how = "aiv=2" if engine == "mte" else f"engine={engine}"
            curve.append(Row(f"p2p/bytes={nbytes}/{how}/zero_copy", time, "us", "predicted"))
    return [*figure_5(), *curve]


def figure_5(spec: Spec | None = None) -> list[Row]:
    """Compute the paper's two statements about the curve of Figure 5."""
    slowest = max(simulate_send(nbytes, 2, spec=spec) for nbytes in MESSAGES if nbytes < 1 << 20)
    speedup = simulate_send(9 << 20, 2, spec=spec) / simulate_send(9 << 20, 48, spec=spec)
    return [
        Row("xds.p2p.small", slowest / 1000, "us", "calibrated"),
        Row("xds.p2p.scaling", speedup, "x", "calibrated"),
    ]


def _is_fitted(nbytes: int, cores: int) -> bool:
    """Whether the parameters were fitted to a statement about this time."""
    return (nbytes < 1 << 20 and cores == 2) or (nbytes == 9 << 20 and cores in (2, 48))


@functools.cache
def simulate_send(
    nbytes: int, cores: int, engine: Engine = "mte", zero_copy: bool = False, spec: Spec | None = None
) -> int:
    """Simulate a send between dies of different servers; return ns of virtual time from its start to its
    end."""
    how: dict[str, Any] = {"cores": cores, "engine": engine}

    async def main() -> int:
        pod = Pod(spec=spec or Spec())
        slots = pod.spec.ring_slot.value, pod.spec.ring_slots.value
        layout = RingLayout(num_ranks=2, slot_nbytes=int(slots[0]), num_slots=int(slots[1]))
        dies = (0, pod.topology.dies_per_server)
        for die in dies:
            plan = pod.plan(die)
            layout.plan(plan)
            plan.app.alloc("buffer", nbytes)
        pod.materialise()
        sender, receiver = (PointToPoint(pod.dies[die], i, dies, layout) for i, die in enumerate(dies))
        src, dst = (pod.memory(die).app.regions["buffer"].offset for die in dies)
        receive = receiver.die.spawn(receiver.receive(dst, nbytes, 0, 1, **how))
        await sender.die.spawn(sender.send(src, nbytes, 1, 1, zero_copy=zero_copy, **how))
        end = pod.clock.now
        await receive
        return end

    return asyncio.run(main())


# ---- dispatch and combine, A2E and E2A ----------------------------------------------------------------


def exchanges(cost: CommCost | None = None) -> list[Row]:
    """Compute dispatch and combine of CM Table 6, with batch 128 per rank."""
    cost = cost or CommCost(way="push")
    return [
        Row(
            f"cm.t6/{op}/ep={ep}",
            cost.exchange_ns(op, ep, 128, TOP_K) / 1000,
            "us",
            _kind(ep in FITTED_EP_SIZES),
        )
        for op in OPS
        for ep in EP_SIZES
    ]


def simulated_exchanges() -> list[Row]:
    """Simulate FusedDispatch and FusedCombine of CloudMatrix's Table 6."""
    return [
        Row(f"cm.t6/{op}/ep={ep}/simulated=push", time / 1000, "us", _kind(ep in FITTED_EP_SIZES))
        for ep in SIMULATED_EP_SIZES
        for op, time in zip(OPS, simulate_exchange("push", ep, 128, SHRINK), strict=True)
    ]


def all_to_alls() -> list[Row]:
    """Simulate the basic flow of three all-to-alls at Table 6's batch, and at one of few tokens (CM 4.2.1).

    Rows `gain` divide its times by those of FusedDispatch and FusedCombine: above 1 these win.
    """
    result = []
    for ep, batch in itertools.product(SIMULATED_EP_SIZES, (FEW_TOKENS, 128)):
        times = basic_flow.simulate(ep, batch, SHRINK), simulate_exchange("push", ep, batch, SHRINK)
        for op, basic, fused in zip(OPS, *times, strict=True):
            where = f"{op}/ep={ep}/batch={batch}"
            result.append(Row(f"basic/{where}", basic / 1000, "us", "predicted", ASSUMED))
            result.append(Row(f"basic/gain/{where}", basic / fused, "x", "predicted", ASSUMED))
    return result


def a2e(cost: CommCost | None = None) -> list[Row]:
    """Compute A2E and E2A of XDS 3.3: batch 96, 288 expert dies; a token has eight routed copies and one for
    the shared expert."""
    cost = cost or CommCost()
    return [
        Row(name, time(ATTENTION, EXPERTS, A2E_BATCH, A2E_COPIES) / 1000, "us", "predicted")
        for name, time in (("xds.a2e", cost.a2e_ns), ("xds.e2a", cost.e2a_ns))
    ]


def trampolines(attention_cores: Sequence[int] = ATTENTION_CORES) -> list[Row]:
    """Simulate A2E and E2A with trampolines and by the naive pull, at the size of XDS 3.3, by the AIV cores
    of an attention die.

    An attention die spares a few (`Spec.attention_cores`) of 48. Rows `gain` divide the naive pull's time by
    that with trampolines: below 1 trampolines lose.
    """
    result, few = [], int(Spec().attention_cores.value)
    for cores in attention_cores:
        times: dict[str, dict[str, int]] = {}
        for way in ("trampoline", "naive"):
            times[way] = dict(zip(("a2e", "e2a"), simulate_a2e(way, cores), strict=True))
            for op, time in times[way].items():
                is_papers = way == "trampoline" and cores == few
                name = f"xds.{op}/simulated={way}" if is_papers else f"{way}/{op}"
                name += f"/attention_aiv={cores}/copies={A2E_COPIES}/hidden={HIDDEN}"
                result.append(Row(name, time / 1000, "us", "predicted"))
        for op in ("a2e", "e2a"):
            gain = times["naive"][op] / times["trampoline"][op]
            result.append(Row(f"trampoline/gain/{op}/attention_aiv={cores}", gain, "x", "predicted"))
    return result


@functools.cache
def simulate_a2e(way: str, cores: int, shrink: int = A2E_SHRINK) -> tuple[int, int]:
    """Simulate an A2E, and an E2A that all expert dies begin at once; return the slowest die's times [ns].

    As in `simulate_exchange`, tokens are shorter and the hardware is slower, by `shrink`. The shared expert
    is one of a token's experts, all drawn at random.
    """
    hidden, top_k = HIDDEN // shrink, A2E_COPIES
    gc.collect()  # a pod is full of cycles, and the one before may hold half a gigabyte
    dies = tuple(range(ATTENTION + EXPERTS))
    sides = Sides(dies[:ATTENTION], Group(dies[ATTENTION:], tuple(range(EXPERTS))))
    layout, pod = A2ELayout(sides, A2E_BATCH, top_k, hidden), Pod(spec=slower(shrink))
    is_naive = way == "naive"
    for die in dies[:ATTENTION]:
        (layout.plan_naive_attention if is_naive else layout.plan_attention)(pod.plan(die))
    for die in dies[ATTENTION:]:
        (layout.plan_naive_expert if is_naive else layout.plan_expert)(pod.plan(die))
    pod.materialise()
    attention: Any = NaiveAttentionSide if is_naive else AttentionSide
    expert: Any = NaiveExpertSide if is_naive else ExpertSide
    clock = pod.clock
    later = 10_000_000  # ns: all A2Es are over

    async def attend(rank: int) -> int:
        side = attention(pod.dies[dies[rank]], rank, layout, quantize, Means(cores))
        rng = np.random.default_rng(rank)
        topk_idx = np.argsort(rng.random((A2E_BATCH, EXPERTS)), axis=1)[:, :top_k].astype(np.int32)
        x = np.zeros((A2E_BATCH, hidden), np.float32)
        await side.a2e(x, topk_idx, np.ones(topk_idx.shape, np.float32), 1)
        await side.e2a(1)
        return clock.now - later

    async def serve(rank: int) -> int:
        side = expert(pod.dies[dies[ATTENTION + rank]], rank, layout, quantize)
        received = await side.a2e(1)
        end = clock.now
        await clock.sleep_until(later)
        await side.e2a(np.zeros((len(received), hidden), np.float32), 1)
        return end

    async def main() -> tuple[int, int]:
        tasks = [pod.dies[die].spawn(attend(rank)) for rank, die in enumerate(dies[:ATTENTION])]
        tasks += [pod.dies[die].spawn(serve(rank)) for rank, die in enumerate(dies[ATTENTION:])]
        ends = await asyncio.gather(*tasks)
        return max(ends[ATTENTION:]), max(ends[:ATTENTION])

    return asyncio.run(main())


def buffers() -> list[Row]:
    """Compute sizes of messages and of preallocated buffers (CM 4.2.1). Counted, hence exact."""
    layout = FusedLayout(num_ranks=320, local_batch=96, top_k=TOP_K, hidden=HIDDEN, experts_per_rank=1)
    return [
        Row("cm.msg/dispatch", layout.dispatch_message / 1024, "KB", "measured"),
        Row("cm.msg/combine", layout.combine_message / 1024, "KB", "measured"),
        Row("cm.buffers/dispatch", layout.dispatch_buffer / 2**20, "MB", "measured"),
        Row("cm.buffers/combine", layout.combine_buffer / 2**20, "MB", "measured"),
    ]


# ---- pull against push ----------------------------------------------------------------------------------


def pull_push() -> list[Row]:
    """Simulate xDeepServe's pull-based and CloudMatrix's push-based exchange, for 8 ranks."""
    result = []
    for batch in PULL_PUSH_BATCHES:
        for way in ("pull", "push"):
            for op, time in zip(OPS, simulate_exchange(way, 8, batch), strict=True):
                is_fitted = batch == 128  # Table 6's
                result.append(Row(f"{way}/{op}/ep=8/batch={batch}", time / 1000, "us", _kind(is_fitted)))
    return result


@functools.cache
def simulate_exchange(
    way: Exchange, num_ranks: int, batch: int, shrink: int = 1, int8_answers: bool = False
) -> tuple[int, int]:
    """Simulate a dispatch and a combine at DeepSeek-R1's sizes; return the slowest rank's times [ns].

    With `shrink`, tokens are shorter by this factor, and everything that moves or works on bytes is slower by
    it and holds fewer. Times stay the same except for the padding of rows, with less of this computer's
    memory.
    """
    hidden, spec = HIDDEN // shrink, slower(shrink)
    num_experts = max(num_ranks, TOP_K)
    group = Group(tuple(range(num_ranks)), tuple(e % num_ranks for e in range(num_experts)))

    async def program(xccl: ExchangeHandle) -> tuple[int, int]:
        rng = np.random.default_rng(xccl.rank)
        chosen = [rng.permutation(num_experts)[:TOP_K] for _ in range(batch)]
        clock, start = xccl.die.clock, xccl.die.clock.now
        got = await xccl.dispatch(np.zeros((batch, hidden), np.float32), np.array(chosen, np.int32), 1)
        dispatched = clock.now - start
        await clock.sleep_until(start + 1_000_000)  # all dispatches are over
        start = clock.now
        out = np.zeros((len(got), hidden), np.float32)
        await xccl.combine(out, topk_weights=np.ones((batch, TOP_K), np.float32), event_id=1)
        return dispatched, clock.now - start

    async def main() -> tuple[int, int]:
        pod = Pod(spec=spec)
        kind = ENDS[way]
        sizes: Any = {"top_k": TOP_K, "hidden": hidden, "int8_answers": int8_answers}
        layout: Any = kind.layout.for_group(group, batch, **sizes)
        if isinstance(layout, FusedLayout):
            layout = msgspec.structs.replace(layout, alignment=layout.alignment // shrink)
        for die in group.dies:
            layout.plan(pod.plan(die))
        pod.materialise()
        ends = [(pod.dies[die], rank, group, layout, quantize) for rank, die in enumerate(group.dies)]
        handles = [kind.handle(*end) for end in ends]
        times = await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])
        return max(t for t, _ in times), max(t for _, t in times)

    return asyncio.run(main())


# ---- plot -----------------------------------------------------------------------------------------------


def plot(all_rows: list[Row], path: Path) -> None:
    """Draw three panels: send/receive, Table 6, pull against push. Raises InputError without matplotlib."""
    plt = pyplot()
    value = {row.name: row.value for row in all_rows}
    published = {row.name: row.published.value for row in all_rows if row.published is not None}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for cores in CORES:
        times = [value[f"p2p/bytes={nbytes}/aiv={cores}"] for nbytes in MESSAGES]
        left.plot([nbytes / 2**20 for nbytes in MESSAGES], times, "o-", label=f"{cores} AIV cores")
    left.set(title="send/receive", xlabel="MB", ylabel="us", xscale="log", yscale="log")
    left.axhline(20, color="grey", linestyle=":", label="XDS: below 1 MB, 2 cores")
    for op, mark in (("dispatch", "o"), ("combine", "s")):
        names = [f"cm.t6/{op}/ep={ep}" for ep in EP_SIZES]
        middle.plot(EP_SIZES, [published[name] for name in names], mark, label=f"{op}, CM Table 6")
        middle.plot(EP_SIZES, [value[name] for name in names], "-", label=f"{op}, ours")
    middle.set(title="dispatch and combine, batch 128", xlabel="EP", ylabel="us", ylim=(0, 180))
    middle.set_xscale("log", base=2)
    for way, style in (("pull", "o-"), ("push", "s--")):
        for op in OPS:
            times = [value[f"{way}/{op}/ep=8/batch={batch}"] for batch in PULL_PUSH_BATCHES]
            right.plot(PULL_PUSH_BATCHES, times, style, label=f"{way} {op}")
    right.set(title="pull against push, EP 8, simulated", xlabel="batch", ylabel="us", ylim=(0, None))
    for axes in (left, middle, right):
        axes.legend()
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path}: cannot be written: {error}") from None
    plt.close(figure)
