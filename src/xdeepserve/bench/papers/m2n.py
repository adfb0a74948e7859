"""`xdeepserve bench m2n`: M2N and point-to-point calls in groups, byte by byte in virtual time.

The paper's ratios are to NCCL on its cluster. The costs of group calls are assumed here, so our ratios only
stand beside the paper's as data. Predictions are what follows from the mechanism: which way is faster, and
how each grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.bench.papers.group_calls import GroupCalls, GroupCosts
from xdeepserve.bench.report import Row, pyplot
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.hw.congestion import DEFAULT_CONTROL, TUNED_CONTROL
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.rdma import RDMANetwork
from xdeepserve.m2n.layout import M2NLayout
from xdeepserve.m2n.sides import M2NAttention, M2NExpert, M2NMesh

KIB = 1024
SIZES = (16, 64, 256, 1024)  # KiB from each sender to each receiver (MS Figure 11)
SCALES = (4, 8, 16, 32)  # senders and receivers, 256 KiB (MS Figure 12)
ROUNDS = 9
HEADER = 16  # bytes of a row before its payload
PUBLISHED = {  # MS 7.3, percent less and times as much
    256: "published, beside NCCL: median -68.2 %, P99 -92.9 %, throughput x4.2",
    0: "published: median up to -80.8 %, P99 up to -96.2 %, throughput up to x9.9",
}


class Latencies(NamedTuple):
    """Latencies until the last receiver has all bytes [ns]: median and largest of the rounds."""

    median: float
    worst: float


def m2n(count: int, nbytes: int, rounds: int = ROUNDS, hot: int = 1, **network: Any) -> Latencies:
    """Measure M2N from `count` senders to `count` receivers, `nbytes` each; the first receiver gets `hot`
    times as much. `network` are keywords of RDMANetwork."""
    senders, receivers = tuple(range(count)), tuple(range(count, 2 * count))
    group = Group(receivers, tuple(range(count)))
    layout = M2NLayout(senders, group, hot, count, nbytes - HEADER)
    pod = Pod()
    for die in senders:
        layout.plan_attention(pod.plan(die))
    for die in receivers:
        layout.plan_expert(pod.plan(die))
    pod.materialise()
    mesh = M2NMesh(RDMANetwork(pod.fabric, pod.spec_of, **network), layout)
    sides = [M2NAttention(pod.dies[die], rank, mesh, quantize_rows) for rank, die in enumerate(senders)]
    ends = [M2NExpert(pod.dies[die], rank, mesh, quantize_rows) for rank, die in enumerate(receivers)]
    counts = np.ones(count, np.int64)
    counts[0] = hot
    rows = np.zeros((counts.sum(), layout.rows.dispatch_row), np.uint8)
    return _timed(
        pod,
        rounds,
        lambda event: [side.sender.send("M2N", event, rows, counts) for side in sides],
        lambda event: [end.receiver.receive("M2N", event, rows.shape[1]) for end in ends],
    )


def group_calls(count: int, nbytes: int, rounds: int = ROUNDS) -> Latencies:
    """Measure the traffic of M2N sent by point-to-point calls in groups, NCCL's way (MS 5)."""
    pod = Pod()
    for die in range(2 * count):
        host = pod.topology.host(pod.topology.server_of(die))
        GroupCalls.plan(pod.plan(die), pod.plan(host), count, nbytes)
    pod.materialise()
    network = RDMANetwork(pod.fabric, pod.spec_of, DEFAULT_CONTROL, acks_first=False)
    ends = [GroupCalls(pod.dies[d], d % count, network, nbytes, GroupCosts()) for d in range(2 * count)]
    return _timed(
        pod,
        rounds,
        lambda _: [end.send(ends[count:]) for end in ends[:count]],
        lambda _: [end.receive(count) for end in ends[count:]],
    )


def _timed(pod: Pod, rounds: int, send: Any, receive: Any) -> Latencies:
    """Time rounds in sequence, each until all receivers have their bytes."""

    async def main() -> list[int]:
        took = []
        for event in range(1, rounds + 1):
            start = pod.clock.now
            others = [pod.clock.spawn(coro) for coro in send(event)]
            await asyncio.gather(*[pod.clock.spawn(coro) for coro in receive(event)])
            took.append(pod.clock.now - start)
            await asyncio.gather(*others)
        return took

    took = asyncio.run(main())
    return Latencies(float(np.median(took)), float(max(took)))


def all_rows() -> Iterator[Row]:
    """Yield all rows in order of computation."""
    for count, kib in (*((8, kib) for kib in SIZES), *((n, 256) for n in SCALES if n != 8)):
        rounds = ROUNDS if count < 16 else 3
        ours, theirs = m2n(count, kib * KIB, rounds), group_calls(count, kib * KIB, rounds)
        name = f"m2n/{count} to {count}/{kib} KiB"
        note = PUBLISHED.get(kib if count == 8 else -1, PUBLISHED[0])
        yield Row(f"{name}/median", ours.median / 1e3, "us", "predicted")
        yield Row(f"{name}/median in groups", theirs.median / 1e3, "us", "predicted", "costs assumed")
        less = 100 * (1 - ours.median / theirs.median), 100 * (1 - ours.worst / theirs.worst)
        yield Row(f"{name}/median less", less[0], "%", "predicted", note)
        yield Row(f"{name}/worst less", less[1], "%", "predicted", note)
        yield Row(f"{name}/throughput", theirs.median / ours.median, "x", "predicted", note)
    yield from _uneven()


def _uneven() -> Iterator[Row]:
    """Measure an uneven load: a receiver gets eight times as much, with the control that MS 5 tunes and
    without."""
    tuned, default = (
        m2n(8, 256 * KIB, 3, 8, control=each).median for each in (TUNED_CONTROL, DEFAULT_CONTROL)
    )
    name = "m2n/8 to 8/256 KiB, one receiver 8 times"
    yield Row(f"{name}/median", tuned / 1e3, "us", "predicted", "tuned congestion control")
    yield Row(
        f"{name}/median, default control", default / 1e3, "us", "predicted", "MS 5: no figure published"
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw the median latency over sizes, both ways (MS Figure 11). Raises InputError without matplotlib."""
    figure, axes = pyplot().subplots(layout="constrained")
    value = {row.name: row.value for row in rows}
    for label, end in (("M2N", "median"), ("calls in groups", "median in groups")):
        axes.plot(SIZES, [value[f"m2n/8 to 8/{kib} KiB/{end}"] for kib in SIZES], "o-", label=label)
    axes.set(xscale="log", yscale="log", xlabel="KiB from each of 8 to each of 8", ylabel="us, median")
    axes.legend()
    figure.savefig(path, dpi=120)
