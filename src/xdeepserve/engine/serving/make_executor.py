"""Builds the job executor described by a plan's deployment."""

from __future__ import annotations

from pathlib import Path

from xdeepserve.engine.balance.heat_map import read_heat_map
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.dp.events import Events, Observer
from xdeepserve.engine.job.carriage import Carriage
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.job.router import Router
from xdeepserve.model.answer_lengths import read_answer_lengths


def make_executor(plan: PodPlan, observers: list[Observer]) -> JobExecutor:
    """Build a job executor without TEs yet; `observers` are told of its requests' events. Raises InputError
    for an invalid heat map."""
    d = plan.deployment
    carriage = Carriage(plan.pod, d.fabric, d.transfer_over, plan.kv_weight)
    heat = None if d.scheduler.heat is None else read_heat_map(Path(d.scheduler.heat))
    lengths = None if heat is None else read_answer_lengths(plan.checkpoint.directory)
    router = Router(d.scheduler.job_executors, d.scheduler.route, d.seed, heat, lengths)
    retry_ns = round(1e9 * d.health.probe_s)
    return JobExecutor(plan.pod, Events(observers), carriage, router, retry_ns, d.scheduler.admission)
