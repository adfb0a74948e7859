"""Replay of a trace on a cluster's TEs by the engine, time only: each die and each exchange takes its time.

It is what a fleet simulates at the grain of a step: the same job executor, TE-shells, schedulers and RTCs, on
dies instead of prices. It takes far longer, and all settings of a deployment may be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment, ListedTE, ScaleConfig
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.engine.dp.events import Observed, TEChanged, TEJoined, TEsWanted
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import InputError
from xdeepserve.hw.topology import Topology
from xdeepserve.llm import LLM
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.cluster import Cluster, ClusterScale, deployment_of, kv_positions, names_of
from xdeepserve.platform.fleet_scaling import ScaleAct, ScaleEvent
from xdeepserve.platform.service_report import Bounds, Outcome, ServiceReport, report
from xdeepserve.platform.token_replay import replayed
from xdeepserve.platform.traces import TracedRequest

OF_ALL = ("mtp", "scheduler", "cache", "execution", "pipeline", "experts", "exchange", "combine")


class ExactlyServed(NamedTuple):
    """Results of a replay by the engine: requests' outcomes in the order of the trace, the report, and events
    of TEs by time."""

    outcomes: list[Outcome]
    report: ServiceReport
    events: list[ScaleEvent]


class _ScaleWatch:
    """Writes down how an engine's TEs come and go, under the names that a fleet gives them."""

    def __init__(self, cluster: Cluster, llm: LLM) -> None:
        self._je, self._now, self._begin = llm.engine.je, lambda: llm.virtual_ns, llm.virtual_ns
        self.events: list[ScaleEvent] = []
        self.names = dict(zip([te.plan.name for te in self._je.tes], names_of(cluster), strict=True))
        self._num_new = 0
        self._asked_ns = 0

    def see(self, event: Observed) -> None:
        """Write down an event of the engine."""
        match event:
            case TEsWanted():
                self._asked_ns = self._now()
                self._tell("wanted", "", f"{event.num_tes} of them: {event.reason}")
            case TEJoined(te=te):
                self.names[te] = f"new {self._num_new}"
                self._num_new += 1
                self._tell("joins", te, f"{(self._now() - self._asked_ns) / 1e9:.2f} s after it was wanted")
            case TEChanged(te=te, life=life) if te in self.names:
                if life == "draining":
                    self._tell("drains", te, f"it ends {self._num_sequences(te)} requests first")
                elif life == "ready":
                    self._tell("stays", te, "it was draining")
                elif life == "gone":
                    self._tell("leaves", te, "it has ended what it had")

    def _num_sequences(self, name: str) -> int:
        return next(te.num_sequences for te in self._je.tes if te.plan.name == name)

    def _tell(self, what: ScaleAct, te: str, reason: str) -> None:
        num = len(self._je.tes.ready("both"))
        event = ScaleEvent(self._now() - self._begin, what, self.names.get(te, ""), num, reason)
        self.events.append(event)


def exactly(
    cluster: Cluster, requests: Sequence[TracedRequest], block: int, bounds: Bounds, heat: str | None = None
) -> ExactlyServed:
    """Serve requests on the TEs of a cluster by the engine.

    `heat` is a heat map's file. Raises InputError for a cluster that no engine can be.
    """
    deployment = engine_of(cluster, requests, block, bounds, heat)
    timing = TimingConfig(acceptance=cluster.te[0].acceptance)
    with LLM(resolve_model(cluster.model), deployment, timing_only=timing) as llm:
        watch = _ScaleWatch(cluster, llm)
        llm.engine.observe(watch.see)
        served = replayed(llm, requests, block, keep_logits=False)
    names = [*watch.names.values()]
    return ExactlyServed(
        served.outcomes, report(served.outcomes, names, bounds, served.busy_ns), watch.events
    )


def engine_of(
    cluster: Cluster,
    requests: Sequence[TracedRequest],
    block: int,
    bounds: Bounds,
    heat: str | None = None,
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
        scale=None if cluster.scale is None else _scale_of(cluster.scale, bounds),
        max_model_len=min(max(needed) + 1, model.config.max_position_embeddings),
    )


def _scale_of(scale: ClusterScale, bounds: Bounds) -> ScaleConfig:
    """Return the settings of an engine whose TEs come and go as those of a cluster."""
    numbers = {name: getattr(scale, name) for name in ScaleBounds.__struct_fields__}
    warm = scale.warm if scale.prewarmed else 0
    return ScaleConfig(**numbers, warm=warm, ttft_s=bounds.ttft_s, tpot_s=bounds.tpot_ms / 1e3)


def _check(cluster: Cluster) -> None:
    """Raise InputError for a cluster that an engine cannot be."""
    lacking = [name for name in ("roles", "pool") if getattr(cluster, name) is not None]
    if lacking:
        raise InputError(f"--exact: at the grain of a step alone there is [{'], ['.join(lacking)}]")
    if cluster.scale is not None and not cluster.scale.fork:
        raise InputError("--exact: [scale]: fork=false: the engine's TEs load from one that is there")
    dies, has = 0 if cluster.scale is None else cluster.scale.most * cluster.te[0].dies, Topology().num_dies
    if dies > has:
        raise InputError(f"--exact: [scale]: most is for {dies} dies, and the engine's pod has {has}")
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
