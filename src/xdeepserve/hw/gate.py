"""A die's gate: every kernel and every transfer of the die passes it before it begins."""

from __future__ import annotations

from .clock import Clock


class Gate:
    """Gate of a die or host, through which its kernels and transfers go one by one; open unless closed.

    Those that have begun end in time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.opens_ns = 0  # nothing begins before
        self.is_shut = False  # then whoever wants to begin awaits `passed`

    def close(self, until_ns: int) -> None:
        """Let nothing begin before `until_ns` (virtual time)."""
        self.opens_ns, self.is_shut = max(self.opens_ns, until_ns), True

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._clock.now < self.opens_ns:
            await self._clock.sleep_until(self.opens_ns)
        self.is_shut = False
