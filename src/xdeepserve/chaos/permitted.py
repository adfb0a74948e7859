"""Permitted errors of a schedule, derived from the plan alone and not from the events of its run."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from xdeepserve.chaos.fault_schedule import FaultSchedule
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.job.executor import can_serve
from xdeepserve.engine.te.repairs import Repairs
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.hw.fault_kinds import ERROR_CODES
from xdeepserve.hw.faults import Fault

# What an error must tell: who is lost, or who waits for whom.
NAMED = re.compile(
    r"die \d+ .*is lost|cannot reach|waits for peer|no .* (can be reached|is left)|heartbeat|silent"
    r"|die \d+ reports|are not those that were sent|no replica of"
)


def _is_lasting(fault: Fault) -> bool:
    """Whether a glitch has a code after which running again is not tried."""
    return fault.code is not None and not ERROR_CODES[fault.code].is_transient


def permits_errors(schedule: FaultSchedule, plan: PodPlan) -> bool:
    """Whether requests may end with an error.

    They may if the TEs that lose no die, and no link between their dies, could not serve together. They also
    may if one of these TEs prefills and has no intact way to a TE that decodes. The following are no reasons:

    - a fault that is over before any deadline
    - an error code or a report after which a TE runs its steps again, with KV recomputed that is lost; others
      cost the TE all its dies
    - lost expert servers, if others that do not leave have their experts; servers that come do not count
    - lost clients of expert servers, if there are other clients
    - a broken part of the memory pool, because requests without its answer compute

    Where TEs come as load does, errors are permitted only if a link is down, which another TE may then need.
    With failover, errors are permitted only if the remaining dies are too few for a TE of each role, or if a
    link is down that KV may then need.
    """
    tes, faults = plan.tes, schedule.faults
    moves = schedule.servers
    leaving = {each.server for each in moves if each.what == "remove server" and each.server is not None}
    if _may_fail_sequences(faults, plan):
        return True
    if plan.deployment.scale is not None:  # another TE comes, on other dies
        return any(fault.kind in ("down", "flipped") and fault.link is not None for fault in faults)
    if plan.deployment.recovery.failover:
        return _is_beyond_failover(faults, plan)
    whole = [te for te in tes if not _is_broken(te, faults, leaving)]
    senders = [te for te in whole if te.sizes.place.role == "prefill"]
    receivers = [te for te in whole if te.sizes.place.role == "decode"]
    is_cut_off = any(all(_is_cut(a, b, faults) for b in receivers) for a in senders)
    return is_cut_off or not can_serve(whole)


def _may_fail_sequences(faults: Sequence[Fault], plan: PodPlan) -> bool:
    return plan.deployment.recovery.kv_loss == "fail" and any(fault.page is not None for fault in faults)


def _is_beyond_failover(faults: Sequence[Fault], plan: PodPlan) -> bool:
    roles = {te.sizes.place.role for te in plan.tes}
    cut = [fault for fault in faults if fault.kind in ("down", "flipped") and fault.link is not None]
    if cut and "both" not in roles:
        return True
    lost = {fault.die for fault in faults if fault.kind == "lost"}
    hosts = {fault.host for fault in faults if fault.kind == "lost"}
    dies = [die for te in plan.tes for die in te.every_die]
    well = [die for die in dies if die not in lost and plan.pod.topology.server_of(die) not in hosts]
    needed = sum(map(plan.least_dies, roles))
    return len(well) + plan.deployment.recovery.spare_dies - len(cut) < needed


def _is_broken(te: TEPlan, faults: Sequence[Fault], leaving: Collection[int]) -> bool:
    lost = {fault.die for fault in faults if fault.kind == "lost" or _is_lasting(fault)}
    lost |= {fault.die for fault in faults if fault.page is not None and _holds_metadata(fault, te)}
    hosts = {fault.host for fault in faults if fault.kind == "lost"}
    if not any(fault.rule is not None and fault.rule.needs_all_dies for fault in faults):
        lost -= _missed_by_nobody(te, lost, leaving) | _missed_clients(te, lost)
    loses = any(die in lost or te.pod.topology.server_of(die) in hosts for die in _dies_of(te))
    return loses or _is_cut(te, te, faults)


def _dies_of(te: TEPlan) -> set[int]:
    """Return the dies of a TE's DP groups and of its expert servers, which other TEs may share."""
    return {*te.dies, *(server.die for server in te.members.servers)}


def _missed_by_nobody(te: TEPlan, lost: Collection[int | None], leaving: Collection[int]) -> set[int]:
    """Find expert servers not needed: the remaining servers hold their experts, too. Servers that leave or
    may come do not count as remaining."""
    sizes, found = te.sizes, set[int]()
    if te.services is None:
        return found
    routed = sizes.place.routed_dies
    shared = sizes.place.expert_dies[len(routed) :]
    own = [*map(set, sizes.experts.experts_of[: len(routed)])]
    have = [
        held | copies for held, copies in zip(own, map(set, sizes.experts.copies_of), strict=False)
    ] or own
    out = {*lost, *(sizes.place.expert_dies[number] for number in (*leaving, *sizes.place.vacant))}
    left = [held for die, held in zip(routed, have, strict=True) if die not in out]
    if set().union(*left) == set().union(*own):
        found |= set(routed)
    if not set(shared) <= out:
        found |= set(shared)
    return found


def _missed_clients(te: TEPlan, lost: Collection[int | None]) -> set[int]:
    """Return the client dies of expert servers that may be lost: all of them, if at least one remains."""
    there = set(te.dies) if te.can_miss_clients else set[int]()
    return there if there - {*lost} else set()


def _holds_metadata(fault: Fault, te: TEPlan) -> bool:
    if fault.die not in _dies_of(te) or fault.page is None:
        return False
    memory = te.pod.memories.plans[fault.die]
    start = memory.find_page(fault.page)
    return start is not None and Repairs.has_metadata(memory, start)


def _is_cut(a: TEPlan, b: TEPlan, faults: Sequence[Fault]) -> bool:
    """Whether a link between dies of two TEs, or of one, is down or corrupts data."""
    links = [fault.link for fault in faults if fault.kind in ("down", "flipped") and fault.link is not None]
    ours, theirs = _dies_of(a), _dies_of(b)
    return any((x in ours and y in theirs) or (y in ours and x in theirs) for x, y in links)
