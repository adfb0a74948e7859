"""The least case that still fails the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from xdeepserve.chaos.case import Case


def shrink(case: Case, still_fails: Callable[[Case], bool]) -> Case:
    """Leave out faults, requests and settings as long as `still_fails` says so: deterministic and greedy.

    Nothing more can be left out of what comes back.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(case):
            if still_fails(smaller):
                case, is_smaller = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""

    def but(**changes: object) -> Case:
        return msgspec.structs.replace(case, **changes)

    for i in range(len(case.faults)):
        yield but(faults=case.faults[:i] + case.faults[i + 1 :])
    for fewer in sorted({1, case.num_requests // 2, case.num_requests - 1}):
        if 0 < fewer < case.num_requests:
            yield but(num_requests=fewer)
    if case.clock_seed is not None:
        yield but(clock_seed=None)
    for i in reversed(range(len(case.settings))):
        yield but(settings=case.settings[:i] + case.settings[i + 1 :])
