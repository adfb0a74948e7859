"""Expert services at the paper's size: DeepSeek-R1 on up to 64 dies, in time only (EaaS 5.3, 5.4 and 5.6).

Half of the dies are clients and half are servers, as in EaaS 5.2. One server in eight has the shared expert,
of which the paper says nothing. Requests are in the middle of answers of up to 768 tokens. The dies are
CloudMatrix's and not Hopper GPUs, so only ratios can be compared. They differ where the paper's ratios follow
from costs that are particular to GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec

from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.report import Row
from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    CacheConfig,
    Deployment,
    ExpertConfig,
    SchedulerConfig,
)
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.step_run import DecodeRun, decode_iteration

CONTEXT = 600
SCALES, SERVED, TRAFFIC, REQUESTS = (32, 40, 48, 56, 64), 8192, 5120, 4096
SKEWS = (0.3, 0.6)
PER_SHARED = 8  # servers for one with the shared expert


def services(clients: int, routed: int, shared: int, batch: int, microbatches: int = 2) -> Deployment:
    """Make a deployment of expert services with `batch` requests on each client."""
    deployment = Deployment(
        name="expert services",
        kind="eaas",
        attention=AttentionConfig(domains=1, dies=clients, microbatches=microbatches),
        experts=ExpertConfig(routed_dies=routed, shared_dies=shared),
    )
    return _with_room(deployment, batch)


def colocated(dies: int, batch: int) -> Deployment:
    """Make the colocated baseline: every die has attention and experts, in one group."""
    return _with_room(Deployment(name="colocated", kind="colocated", exchange="push", dies=dies), batch)


def _with_room(deployment: Deployment, batch: int) -> Deployment:
    return msgspec.structs.replace(
        deployment,
        max_model_len=CONTEXT + 64,
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=batch),
        cache=CacheConfig(block_size=128, num_blocks=batch * (CONTEXT // 128 + 1), prefix=False),
    )


@functools.cache
def halves(dies: int, requests: int, microbatches: int = 2, lost: int = 0, skew: float = 0.0) -> DecodeRun:
    """Run an iteration with half of the dies as clients and half as servers. Some servers with routed experts
    may be lost: the others hold their experts in even shares, as copies spread everywhere would."""
    clients = dies // 2
    shared, batch = clients // PER_SHARED, -(-requests // clients)
    return _run(services(clients, clients - shared - lost, shared, batch, microbatches), skew)


def _run(deployment: Deployment, skew: float = 0.0) -> DecodeRun:
    batch = deployment.scheduler.max_num_seqs
    return decode_iteration(resolve_model(MODEL), deployment, CONTEXT, batch, TimingConfig(skew=skew))


def rate(run: DecodeRun) -> float:
    """Compute the tokens per second of a run."""
    return run.num_tokens / run.iteration_ns * 1e9


def rows() -> Iterator[Row]:
    """Yield all rows; takes a minute."""
    yield from scaling()
    yield from saving()
    yield from loss()
    yield from double_batching()
    yield from balance()


def scaling() -> Iterator[Row]:
    """Compute EaaS 5.3, Figure 11: throughput when requests grow in proportion to dies."""
    by_dies = {dies: rate(halves(dies, SERVED * dies // SCALES[-1])) for dies in SCALES}
    for dies, found in by_dies.items():
        yield Row(f"eaas/r1/dies={dies}/throughput", found, "tok/s", "predicted")
    note = "EaaS 5.3: near-linear; 2 is as many as dies"
    gain = by_dies[SCALES[-1]] / by_dies[SCALES[0]]
    yield Row(f"eaas/r1/scaling={SCALES[0]}_to_{SCALES[-1]}", gain, "x", "predicted", note)


def saving() -> Iterator[Row]:
    """Compute EaaS 5.3: traffic falls from 8,192 requests to 5,120. Rows give the share of dies that can be
    saved with each request still as fast, and the same dies against a colocated group of 64, which cannot
    shrink."""
    most = SCALES[-1]
    before_ns = halves(most, SERVED).iteration_ns
    fewest = most
    while halves(fewest - 2, TRAFFIC).iteration_ns <= before_ns:
        fewest -= 2
    note = f"EaaS 5.3: 40 of 64; here {fewest} are as fast as 64 were"
    yield Row("eaas.save", 100 * (1 - fewest / most), "%", "predicted", note)
    same = rate(halves(most * TRAFFIC // SERVED, TRAFFIC)) / rate(_run(colocated(most, TRAFFIC // most)))
    note = "EaaS 5.3: 1; these dies' colocated steps take less than services', GPUs' more"
    yield Row(f"eaas/r1/requests={TRAFFIC}/40_dies_over_64_colocated", same, "x", "predicted", note)


def loss() -> Iterator[Row]:
    """Compute EaaS 5.4: a GPU of 64 is lost, and its experts' copies take over. Results are below 0 if
    clients set the pace, because each client then writes to one server less. With one microbatch, clients
    wait for servers."""
    for microbatches, name in ((2, "eaas.fail"), (1, "eaas/r1/lost=1_of_64/one_microbatch")):
        before, after = (rate(halves(64, REQUESTS, microbatches, lost)) for lost in (0, 1))
        yield Row(name, 100 * (1 - after / before), "%", "predicted", "a server of 64 dies")


def double_batching() -> Iterator[Row]:
    """Compute EaaS 5.6: the loss without double batching. Two microbatches read attention's weights twice,
    which these dies regain only with more rows than the paper's."""
    for dies, requests in ((64, REQUESTS), (32, REQUESTS), (64, SERVED)):
        drop = 100 * (1 - rate(halves(dies, requests, 1)) / rate(halves(dies, requests)))
        is_theirs = (dies, requests) == (64, REQUESTS)
        name = "eaas.abl.dbo" if is_theirs else f"eaas/r1/double_batching/dies={dies}/requests={requests}"
        yield Row(name, drop, "%", "predicted", f"{requests // (dies // 2)} requests of a client")


def balance() -> Iterator[Row]:
    """Compute EaaS 5.6: EPLB gains 2.4, 4.4 and 5.1 % there. The skew of the load is not published; here the
    rows give the gain of a perfect balance for experts with popularity i ** -skew."""
    for skew in SKEWS:
        for microbatches in (1, 2):
            skewed, even = (rate(halves(64, REQUESTS, microbatches, skew=each)) for each in (skew, 0.0))
            name = f"eaas/r1/balance/skew={skew:g}/microbatches={microbatches}"
            yield Row(name, 100 * (even / skewed - 1), "%", "predicted", "EaaS 5.6, with EPLB: 2.4 to 5.1")
