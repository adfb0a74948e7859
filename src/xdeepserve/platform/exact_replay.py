"""Replay of a trace on a cluster's TEs by the engine, time only: each die and each exchange takes its time.

It is what a fleet simulates at the grain of a step: the same job executor, TE-shells, schedulers and RTCs, on
dies instead of prices. It takes far longer, and all settings of a deployment may be tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment, ListedTE
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import InputError
from xdeepserve.llm import LLM
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.cluster import Cluster, deployment_of, kv_positions, names_of
from xdeepserve.platform.service_report import Bounds, Outcome, ServiceReport, report
from xdeepserve.platform.token_replay import replayed
from xdeepserve.platform.traces import TracedRequest

OF_ALL = ("mtp", "scheduler", "cache", "execution", "pipeline", "experts", "exchange", "combine")


def exactly(
    cluster: Cluster, requests: Sequence[TracedRequest], block: int, bounds: Bounds, heat: str | None = None
) -> tuple[list[Outcome], ServiceReport]:
    """Serve requests on the TEs of a cluster by the engine; return outcomes in the order of the trace.

    `heat` is a heat map's file. Raises InputError for a cluster that no engine can be.
    """
    deployment = engine_of(cluster, requests, block, heat)
    timing = TimingConfig(acceptance=cluster.te[0].acceptance)
    with LLM(resolve_model(cluster.model), deployment, timing_only=timing) as llm:
        served = replayed(llm, requests, block, keep_logits=False)
    return served.outcomes, report(served.outcomes, names_of(cluster), bounds, served.busy_ns)


def engine_of(
    cluster: Cluster, requests: Sequence[TracedRequest], block: int, heat: str | None = None
) -> Deployment:
    """Make the deployment of an engine with the cluster's TEs. Raises InputError if there is none."""
    _check(cluster)
    first, model = deployment_of(cluster.te[0], block), resolve_model(cluster.model)
    size, needed = first.cache.block_size, [each.input_length + each.output_length for each in requests]
    positions = min(kv_positions(model, deployment_of(te, block)) for te in cluster.te)
    # With a block for each position of the trace none is ever evicted.
    num_blocks = min(positions // size, sum(-(-each // size) + 1 for each in needed))
    cache = msgspec.structs.replace(first.cache, num_blocks=num_blocks)
    scheduler = msgspec.structs.replace(
        first.scheduler,
        route=cluster.policy,
        heat=heat,
        hint_age_ms=cluster.stale_ms,
        max_waiting=len(requests),
    )
    listed = tuple(
        ListedTE(
            role=te.role,
            count=te.count,
            dies=te.dies,
            tp=te.tp,
            tp_mode=te.tp_mode,
            o_proj_tp=te.o_proj_tp,
            max_num_seqs=te.max_num_seqs,
            max_num_batched_tokens=te.max_num_batched_tokens,
        )
        for te in cluster.te
    )
    return msgspec.structs.replace(
        first,
        name="the cluster",
        kind="mixed",
        dies=None,
        tp=None,
        tp_mode=None,
        o_proj_tp=None,
        te=listed,
        cache=cache,
        scheduler=scheduler,
        max_model_len=min(max(needed) + 1, model.config.max_position_embeddings),
    )


def _check(cluster: Cluster) -> None:
    """Raise InputError for a cluster that an engine cannot be."""
    moving = [name for name in ("scale", "roles", "pool") if getattr(cluster, name) is not None]
    if moving:
        raise InputError(f"--exact: the engine's TEs stay as they are: without [{'], ['.join(moving)}]")
    if cluster.lengths != "none":
        raise InputError(f"--exact: the engine is told nothing of answers: lengths={cluster.lengths}")
    if any(te.apart for te in cluster.te):
        raise InputError('--exact: apart=true: list TEs with role="prefill" and with role="decode" instead')
    first = cluster.te[0]
    for number, te in enumerate(cluster.te[1:], 2):
        for name in (*OF_ALL, "acceptance"):
            if getattr(te, name) != getattr(first, name):
                raise InputError(
                    f"--exact: [[te]] {number}: {name} must be that of the first: an engine has one"
                )
