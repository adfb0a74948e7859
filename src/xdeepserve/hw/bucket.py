"""The object store's bucket that holds checkpoints: one queue for the whole pod (OBS, CloudMatrix Table 1).

However many servers read at once, the bucket gives them its bandwidth together, request after request.
"""

from __future__ import annotations

import math

from .clock import Clock
from .spec import Spec


class Bucket:
    """Reads of a bucket, in the order in which they are asked for."""

    def __init__(self, clock: Clock, spec: Spec) -> None:
        self.clock, self._ns_per_byte = clock, 1e9 / spec.storage_bandwidth.value
        self._busy_until = 0
        self.nbytes = 0  # that have been read

    async def read(self, nbytes: int, weight: float = 1.0) -> None:
        """What it takes until so many bytes are here; a byte takes the time of `weight` bytes."""
        start = max(self.clock.now, self._busy_until)
        self._busy_until = start + math.ceil(weight * nbytes * self._ns_per_byte)
        self.nbytes += nbytes
        await self.clock.sleep_until(self._busy_until)
