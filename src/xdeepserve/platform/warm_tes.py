"""Pre-warmed TEs of a fleet: pods with processes that run and have no model yet (DeepServe 6.1).

There are some; who needs a TE takes one, and begins with its weights. For each that is taken another one is
started, which takes what a pod and processes take that nobody had ready. Without any left a TE starts cold.
"""

from __future__ import annotations

from collections.abc import Callable

from xdeepserve.platform.fleet import Fleet


class WarmTEs:
    """`wanted` of them, all there at first; another one needs `start_s`. `tell` hears when one is there."""

    def __init__(self, fleet: Fleet, wanted: int, start_s: float, tell: Callable[[int], None]) -> None:
        self._fleet, self._start_s, self._tell = fleet, start_s, tell
        self.wanted, self.ready = wanted, wanted
        self._starting = 0

    def take(self) -> bool:
        """Whether there was one, which is taken now and started anew."""
        if not self.ready:
            return False
        self.ready -= 1
        self._start()
        return True

    def give_back(self) -> None:
        """Who has taken one needs it no more. It stays, if there are not as many as wanted."""
        self.ready = min(self.wanted, self.ready + 1)

    def _start(self) -> None:
        if self.ready + self._starting < self.wanted:
            self._starting += 1
            self._fleet.look_at(self._fleet.now + 1e9 * self._start_s, self._comes)

    def _comes(self) -> None:
        self._starting -= 1
        if self.ready < self.wanted:
            self.ready += 1
            self._tell(self.ready)
