"""Load of TEs for the AutoScaler: 1 at full capacity, from what TE-shells and DP groups know.

A TE is full if its places or its KV are taken, or if its prompts would wait as long as the bound of TTFT.
Decoding waits while a part of a prompt is in a step. So where there is a bound of TPOT all TEs are full, too,
if the time of such steps is all the time that there is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from xdeepserve.engine.balance.dp import GroupStatus, prefill_cost
from xdeepserve.engine.deploy.deployment import Role

WHILE_NS: Final = 10e9  # over which the time for prompts is taken


class TEWork(NamedTuple):
    """Work of a TE, or of one of its halves.

    groups    reports of its DP groups, which count the step under way as computed
    pending   tokens of each sequence that no DP group has yet
    max_seqs  places of all DP groups
    """

    role: Role
    groups: Sequence[GroupStatus]
    pending: Sequence[int]
    max_seqs: int


class PromptSteps:
    """Steps of TEs that compute parts of prompts: their time in sum, and their speed at best.

    A unit of prefill cost takes at least `ns_per_cost`: little in full steps of all DP groups, and more where
    few prompts have come so far. No step was shorter than `least_ns`.
    """

    def __init__(self) -> None:
        self.total_ns, self.ns_per_cost, self.least_ns = 0.0, math.inf, math.inf

    def hear(self, step_ns: float, cost: float) -> None:
        """Learn from the time of a step that has computed prompts of this prefill cost."""
        self.ns_per_cost = min(self.ns_per_cost, step_ns / cost)
        self.least_ns = min(self.least_ns, step_ns)

    def take_in(self, other: PromptSteps) -> None:
        """Add the time and the speed of the steps of another TE."""
        self.total_ns += other.total_ns
        self.ns_per_cost = min(self.ns_per_cost, other.ns_per_cost)
        self.least_ns = min(self.least_ns, other.least_ns)

    def wait_ns(self, cost: float) -> float:
        """Estimate the time to compute prompts of this prefill cost; 0 if nothing is known of steps yet."""
        return cost * self.ns_per_cost if self.ns_per_cost < math.inf else 0.0


def load_of(work: TEWork, steps: PromptSteps, ttft_ns: float) -> float:
    """Return the load of a TE that computes prompts as fast as `steps` did.

    A prefill TE's KV does not count: it keeps that of prefilled requests for as long as decode is full. A
    decode TE computes no prompts. A bound of TTFT that no step keeps asks for nothing.
    """
    groups, pending = work.groups, work.pending
    loads = [(sum(each.num_sequences for each in groups) + len(pending)) / work.max_seqs]
    if work.role != "prefill":
        loads.append(sum(each.kv_load for each in groups) / len(groups))
    if work.role != "decode" and steps.least_ns <= ttft_ns:
        cost = sum(each.queued_cost for each in groups) + sum(prefill_cost(num, 0) for num in pending)
        loads.append(steps.wait_ns(cost) / ttft_ns)
    return max(loads)


class PromptShare:
    """Number of TEs whose whole time the steps with parts of prompts have taken lately."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # when, time of such steps till then

    def take(self, now_ns: float, total_ns: float) -> float:
        """Return the share, given the time of all such steps up to now."""
        totals = self._totals
        totals.append((now_ns, total_ns))
        while len(totals) > 2 and totals[1][0] <= now_ns - WHILE_NS:
            totals.popleft()
        since_ns, before_ns = totals[0]
        return (total_ns - before_ns) / max(now_ns - since_ns, WHILE_NS)
