"""The job executor that a plan's deployment asks for."""

from __future__ import annotations

from pathlib import Path

from xdeepserve.engine.balance.heat_map import read_heat_map
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.dp.events import Events, Observer
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.job.links import Carriage
from xdeepserve.engine.job.router import Router
from xdeepserve.model.answer_lengths import read_answer_lengths


def make_executor(plan: PodPlan, observers: list[Observer]) -> JobExecutor:
    """Without TEs yet. `observers` are told what happens to requests: those that there are then. InputError
    for a heat map that is none."""
    d = plan.deployment
    carriage = Carriage(plan.pod, d.fabric, d.transfer_over, plan.kv_weight)
    heat = None if d.scheduler.heat is None else read_heat_map(Path(d.scheduler.heat))
    lengths = None if heat is None else read_answer_lengths(plan.checkpoint.directory)
    router = Router(d.scheduler.job_executors, d.scheduler.route, d.seed, heat, lengths)
    retry_ns = round(1e9 * d.health.probe_s)
    return JobExecutor(plan.pod, Events(observers), carriage, router, retry_ns, d.scheduler.admission)
