"""Object store with the checkpoints: one queue for the whole pod (OBS, CloudMatrix Table 1).

However many servers read at once, they share the bucket's bandwidth, request after request.
"""

from __future__ import annotations

import math

from .clock import Clock
from .spec import Spec


class Bucket:
    """Reads of the object store, in the order of their requests."""

    def __init__(self, clock: Clock, spec: Spec) -> None:
        self.clock, self._ns_per_byte = clock, 1e9 / spec.storage_bandwidth.value
        self._busy_until = 0
        self.nbytes = 0  # that have been read

    async def read(self, nbytes: int, weight: float = 1.0) -> None:
        """Let the time pass until `nbytes` have been read; a byte takes the time of `weight` bytes."""
        start = max(self.clock.now, self._busy_until)
        self._busy_until = start + math.ceil(weight * nbytes * self._ns_per_byte)
        self.nbytes += nbytes
        await self.clock.sleep_until(self._busy_until)
