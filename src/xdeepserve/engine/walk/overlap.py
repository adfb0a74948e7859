"""Time of a step's parts that overlap on a die, from the times of their kernels and exchanges alone.

The parts go through the layers by the rules of the schedules (`walk/schedule.py`). Forecasts of steps and the
formula of prefill need no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from xdeepserve.hw.hbm import Draw, step
from xdeepserve.hw.spec import Core


class PricedItem(NamedTuple):
    """Kernel or exchange of a half of a layer: its time alone, that of its bytes at all of HBM's bandwidth,
    and the operators that the host launches. An exchange is on no core."""

    core: Core | None
    ns: float
    hbm_ns: float
    operators: int


class Halves(NamedTuple):
    """Items of both halves of a layer."""

    attention: list[PricedItem]
    feed: list[PricedItem]


class StreamTurn(NamedTuple):
    """Place in a stream where a part waits until `number` others have left the stream."""

    stream: int
    number: int


class StreamEnd(NamedTuple):
    """End of a half of a layer: its stream is free, and after `layer` all parts have one layer less."""

    stream: int
    layer: int | None


def walk_ns(parts: Sequence[Sequence[Halves]], by_cores: bool, op_ns: int) -> list[float]:
    """Walk parts of a step through layers as the schedules do (`walk/schedule.py`); return the time in ns at
    which each layer has ended.

    `by_cores`: each stream has cores of its own, and kernels of both share HBM. Otherwise a kernel has all
    cores of its kind to itself. The host needs `op_ns` for the launch of each operator.
    """
    todo = [_places(halves, m, len(parts), by_cores)[::-1] for m, halves in enumerate(parts)]
    num_left, ends = [0, 0], [0.0] * len(parts[0])
    under_way: dict[int, Draw] = {}
    free_ns: dict[Core, float] = {}  # when the cores of a kind have ended all kernels so far
    is_launched = [not op_ns] * len(parts)
    now = launched_ns = 0.0
    while any(todo) or under_way:
        is_moving = True
        while is_moving:
            is_moving = False
            for m, places in enumerate(todo):
                while places and m not in under_way:
                    place = places[-1]
                    if isinstance(place, StreamTurn):
                        if num_left[place.stream] < place.number:
                            break
                    elif isinstance(place, StreamEnd):
                        num_left[place.stream] += 1
                        if place.layer is not None:
                            ends[place.layer] = now
                    elif not is_launched[m]:
                        is_launched[m], launched_ns = True, launched_ns + place.operators * op_ns
                        if launched_ns > now:
                            under_way[m] = Draw(launched_ns - now, 0.0)
                        continue
                    else:
                        is_launched[m] = not op_ns
                        begin_ns = now
                        if not by_cores and place.core is not None:
                            begin_ns = max(now, free_ns.get(place.core, now))
                            free_ns[place.core] = begin_ns + place.ns
                        under_way[m] = Draw(begin_ns + place.ns - now, place.hbm_ns if by_cores else 0.0)
                    places.pop()
                    is_moving = True
        if under_way:
            now += step(list(under_way.values()), math.inf)
        for m in [m for m, draw in under_way.items() if not draw.left_ns]:
            del under_way[m]
    return ends


def _places(
    halves: Sequence[Halves], m: int, num_parts: int, by_cores: bool
) -> list[StreamTurn | StreamEnd | PricedItem]:
    """List the places of part number `m` on its way; by engines, only attention has turns."""
    places: list[StreamTurn | StreamEnd | PricedItem] = []
    for number, half in enumerate(halves):
        turn = number * num_parts + m
        places += [StreamTurn(0, turn), *half.attention, StreamEnd(0, None)]
        places += [StreamTurn(1, turn)] if by_cores else []
        places += [*half.feed, StreamEnd(1, number)]
    return places
