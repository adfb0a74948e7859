"""Traces of dies in lockstep: spans with layer, microbatch and domain, and arrows from die to die.

A timetable moves all dies on at once. Here its spans are drawn die by die, for the dies that the trace shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.hw.die import Die

Ns = npt.NDArray[np.int64]
Place = dict[str, Any]


class Shown(NamedTuple):
    """A die shown in the trace: its number in lockstep, its index in the pod, and its DP domain."""

    at: int
    die: int
    domain: int


class Drawing:
    """Draws some dies, in `num_domains` DP domains of equal size (0: none); draws nothing without a trace."""

    def __init__(self, dies: Sequence[Die], num_domains: int = 0) -> None:
        self.trace = dies[0].trace
        self.is_on = False
        size = len(dies) // max(1, num_domains)
        shown = [
            Shown(i, die.index, i // size)
            for i, die in enumerate(dies)
            if not self.trace.is_hidden(die.index)
        ]
        self.shown = shown
        self._by_domain = [[one for one in shown if one.domain == d] for d in range(max(1, num_domains))]
        self._has_domains = num_domains > 0
        self._places: list[Place] = [{}] * max(1, num_domains)

    def begin(self) -> None:
        """Decide at the start of a run whether all of it is drawn, or nothing.

        Tracing may be switched on and off in between.
        """
        self.is_on = self.trace.is_on

    def at(self, **place: int) -> None:
        """Set the place in the model (layer, microbatch) for later spans."""
        if self.is_on:
            domains = range(len(self._places)) if self._has_domains else ()
            self._places = [{**place, "domain": d} for d in domains] or [place]

    def place(self, domain: int = 0) -> Place:
        """Return the arguments of spans of a domain."""
        return self._places[domain]

    def of(self, domain: int | None) -> list[Shown]:
        """Return the shown dies of a domain, or of all domains."""
        return self.shown if domain is None else self._by_domain[domain]

    def spans(
        self, lane: str, name: str, start: Ns, end: Ns, domain: int | None = None, place: Place | None = None
    ) -> None:
        """Draw a span on every shown die from `start` to `end` [dies]; dies that took no time get none."""
        if not self.is_on:
            return
        for at, die, own in self.of(domain):
            if end[at] > start[at]:
                args = self._places[own] if place is None else place
                self.trace.span(die, lane, name, int(start[at]), int(end[at]), args)

    def meeting(self, op: str, lane: str, start: Ns, end: Ns) -> None:
        """Draw spans of an operation of all dies, with arrows from the die that came last."""
        self.spans(lane, op, start, end)
        if not self.is_on or not len(start):
            return
        last = int(start.argmax())
        source = next((one.die for one in self.shown if one.at == last), None)
        for at, die, _ in self.shown:
            if source is not None and at != last:
                self.trace.flow(
                    f"{op} last to come", source, lane, int(start[last]), die, lane, int(end[at]) - 1
                )
