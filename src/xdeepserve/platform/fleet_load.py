"""What the TEs of a fleet have to do, for who decides how many there are."""

from __future__ import annotations

from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.step_price import StepCounts


def load_of(fleet: Fleet, te: int, wait_ns: float) -> float:
    """1 where its KV or its places are taken, or prompts would wait for `wait_ns`; more if they wait."""
    loads = []
    for stepper in fleet.steppers_of(te):
        limits, groups = stepper.limits, stepper.price.num_groups
        loads += [stepper.kv_load, stepper.num_tasks / (limits.num_seqs * groups)]
        loads.append(stepper.queued_ns / wait_ns)
    return max(loads)


def prefill_ns(fleet: Fleet) -> float:
    """How long all TEs have computed prompts, in sum."""
    return sum(stepper.prefill_ns for stepper in fleet.steppers)


def alone_ns(fleet: Fleet, te: int, num_prompt: int) -> float:
    """Until the first token of a prompt that finds nobody and no cached prefix, about."""
    stepper = fleet.steppers_of(te)[0]
    rows = stepper.limits.num_rows
    chunks = [(done, min(rows, num_prompt - done)) for done in range(0, num_prompt, rows)]
    return sum(
        stepper.price(StepCounts(new, new, new * (done + (new + 1) / 2), done + new)) for done, new in chunks
    )
