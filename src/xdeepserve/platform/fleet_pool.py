"""A fleet with a memory pool of prompts' KV, shared by all TEs; servers of the pool come and go (CloudMatrix
4.1, 4.4.2).

A request waits until the pool's blocks of its prompt that its DP group lacks have arrived; the rest is
computed. A new server takes its part of the keys from the others, and a leaving server gives its part to
them. Either takes the time of a server's bytes over its UB port.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from xdeepserve.hw.spec import Spec
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_scaling import ScaleAct, ScaleEvent
from xdeepserve.platform.pool_cache import PoolCache
from xdeepserve.platform.pool_size import PoolBounds, PoolState, next_servers


class FleetPool:
    """Memory pool of a fleet, with `servers` servers, each with room for `room` blocks of `block_nbytes`."""

    def __init__(
        self, fleet: Fleet, servers: int, room: int, block_nbytes: float, bounds: PoolBounds, spec: Spec
    ) -> None:
        self.fleet, self.bounds = fleet, bounds
        self.cache = PoolCache(room, servers, bounds.most)
        self.state = PoolState(servers)
        self.block_ns = 1e9 * block_nbytes / spec.pool_load.value
        self.change_s = room * block_nbytes / spec.ub_bandwidth.value
        self.events: list[ScaleEvent] = []
        self.server_s = 0.0  # servers, over time
        self._counted_at = 0.0
        self._used: deque[tuple[float, list[int]]] = deque()  # when, what each number would have found
        self._is_changing = False
        fleet.share(self)
        fleet.look_at(0.0, self._look)

    def match(self, blocks: tuple[int, ...]) -> int:
        """Return how many blocks of a prompt, from the first on, the pool has."""
        return self.cache.match(blocks)

    def use(self, blocks: tuple[int, ...], known: int) -> None:
        """Record a computed prompt, of which the DP group itself had the first `known` blocks."""
        self._used.append((self.fleet.now, self.cache.use(blocks, known)))

    def _saved(self) -> list[float]:
        """Estimate the TE time saved by 1, 2, ... servers, in TEs."""
        fleet, bounds = self.fleet, self.bounds
        while self._used and self._used[0][0] < fleet.now - 1e9 * bounds.while_s:
            self._used.popleft()
        seconds = min(bounds.while_s, max(bounds.every_s, fleet.now / 1e9))
        found = np.sum([each for _, each in self._used], axis=0) if self._used else np.zeros(bounds.most)
        stepper = fleet.steppers[0]
        tokens = np.cumsum(found) * stepper.limits.block / seconds
        return [float(each) for each in tokens * stepper.token_ns / 1e9]

    def _count(self) -> None:
        """Count the servers' time since the last count, before their number changes."""
        self.server_s += self.cache.servers * (self.fleet.now - self._counted_at) / 1e9
        self._counted_at = self.fleet.now

    def _look(self) -> None:
        fleet = self.fleet
        self._count()
        if not fleet.is_open:
            return
        if not self._is_changing:
            before = self.state
            self.state = next_servers(before, fleet.now / 1e9, self._saved(), self.change_s, self.bounds)
            if self.state.servers != before.servers:
                self._is_changing = True
                self._tell(
                    "wanted", f"{self.state.servers} servers, not {before.servers}: {self.state.reason}"
                )
                fleet.at(fleet.now + 1e9 * self.change_s, self._change)
        fleet.look_at(fleet.now + 1e9 * self.bounds.every_s, self._look)

    def _change(self) -> None:
        self._count()
        before, after = self.cache.servers, self.state.servers
        self.cache.resize(after)
        self._is_changing = False
        what: ScaleAct = "joins" if after > before else "leaves"
        count = abs(after - before)
        self._tell(what, f"{count} server{'s' if count > 1 else ''}, {self.change_s:.2f} s for their keys")

    def _tell(self, what: ScaleAct, reason: str) -> None:
        fleet = self.fleet
        self.events.append(ScaleEvent(fleet.now, what, "pool", len(fleet.serving), reason))
