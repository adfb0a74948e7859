"""Sharing of a die's HBM bandwidth among kernels that run side by side.

A kernel says how long it takes by itself, and for how much of that its bytes would keep all of HBM busy. So
it draws that share of the bandwidth, evenly. Kernels that together draw more than there is get max-min fair
shares, and take longer: one that draws less than an even share has all that it asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .clock import Clock


class Draw:
    """A kernel under way: remaining time if it ran alone (ns), and its share of HBM bandwidth (0 to 1)."""

    def __init__(self, alone_ns: float, hbm_ns: float) -> None:
        self.left_ns = alone_ns
        self.share = min(1.0, hbm_ns / alone_ns) if alone_ns else 0.0


class SharedHBM:
    """Lets the kernels of a die share its HBM bandwidth."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._draws: list[Draw] = []
        self._at_ns = 0

    def begin(self, alone_ns: int, hbm_ns: float) -> Draw:
        """Begin a kernel now: `alone_ns` is its time without others, `hbm_ns` the time of its bytes at full
        bandwidth."""
        self._advance()
        draw = Draw(alone_ns, hbm_ns)
        self._draws.append(draw)
        return draw

    async def end(self, draw: Draw) -> None:
        """Wait until a kernel has ended."""
        self._advance()
        while draw.left_ns > 0:
            await self.clock.sleep(self._rest_ns(draw))
            self._advance()

    def _advance(self) -> None:
        """Advance all kernels to now. Called at each begin and end, because shares are constant in
        between."""
        elapsed: float = self.clock.now - self._at_ns
        self._at_ns = self.clock.now
        while elapsed > 0 and self._draws:
            elapsed -= step(self._draws, elapsed)
            self._draws = [draw for draw in self._draws if draw.left_ns > 0]

    def _rest_ns(self, draw: Draw) -> int:
        """Return the time (ns) until a kernel ends, if no other begins."""
        others, total = [_copy(each) for each in self._draws], 0.0
        mine = others[self._draws.index(draw)]
        while mine.left_ns > 0:
            total += step([each for each in others if each.left_ns > 0], math.inf)
        return math.ceil(total)


def step(draws: Sequence[Draw], most_ns: float) -> float:
    """Let kernels go on until the first ends, or for `most_ns`; return the time that passed (ns)."""
    speeds = fair_speeds([draw.share for draw in draws])
    until = [draw.left_ns / speed for draw, speed in zip(draws, speeds, strict=True)]
    elapsed = min(most_ns, *until)
    for draw, speed, ns in zip(draws, speeds, until, strict=True):
        draw.left_ns = 0.0 if ns <= elapsed else draw.left_ns - elapsed * speed
    return elapsed


def side_by_side(streams: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the end (ns) of each stream when all begin at 0. A stream is a list of kernels (time alone, time
    of its bytes), one after another."""
    waiting = [[Draw(*kernel) for kernel in reversed(stream) if kernel[0] > 0] for stream in streams]
    ends, now = [0.0] * len(streams), 0.0
    while under_way := [stream[-1] for stream in waiting if stream]:
        now += step(under_way, math.inf)
        for number, stream in enumerate(waiting):
            if stream and not stream[-1].left_ns:
                stream.pop()
                ends[number] = now
    return ends


def fair_speeds(shares: Sequence[float]) -> list[float]:
    """Return the max-min fair speed (0 to 1.0) of each kernel, given the shares of HBM they ask for."""
    speeds, left = [1.0] * len(shares), 1.0
    for done, place in enumerate(sorted(range(len(shares)), key=lambda at: shares[at])):
        given = min(shares[place], left / (len(shares) - done))
        if shares[place]:
            speeds[place] = given / shares[place]
        left -= given
    return speeds


def _copy(draw: Draw) -> Draw:
    other = Draw(0, 0.0)
    other.left_ns, other.share = draw.left_ns, draw.share
    return other
