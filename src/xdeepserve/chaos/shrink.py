"""The least schedule that still fails the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from xdeepserve.chaos.fault_schedule import FaultSchedule


def shrink(schedule: FaultSchedule, still_fails: Callable[[FaultSchedule], bool]) -> FaultSchedule:
    """Leave out faults, requests and settings as long as `still_fails` says so: deterministic and greedy.

    Nothing more can be left out of what comes back.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(schedule):
            if still_fails(smaller):
                schedule, is_smaller = smaller, True
                break
    return schedule


def _smaller(schedule: FaultSchedule) -> Iterator[FaultSchedule]:
    """Schedules with one thing less."""

    def but(**changes: object) -> FaultSchedule:
        return msgspec.structs.replace(schedule, **changes)

    for i in range(len(schedule.faults)):
        yield but(faults=schedule.faults[:i] + schedule.faults[i + 1 :])
    for i in range(len(schedule.servers)):
        yield but(servers=schedule.servers[:i] + schedule.servers[i + 1 :])
    for fewer in sorted({1, schedule.num_requests // 2, schedule.num_requests - 1}):
        if 0 < fewer < schedule.num_requests:
            yield but(num_requests=fewer)
    if schedule.pool in ("crowded", "filled"):
        yield but(pool="filled" if schedule.pool == "crowded" else "empty")
    if schedule.clock_seed is not None:
        yield but(clock_seed=None)
    for i in reversed(range(len(schedule.settings))):
        yield but(settings=schedule.settings[:i] + schedule.settings[i + 1 :])
