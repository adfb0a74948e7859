"""When the host has launched what a die is about to run (xDeepServe 2.3, CloudMatrix 4.2.4)."""

from __future__ import annotations

from xdeepserve.engine.deployment import ExecutionConfig
from xdeepserve.hw.die import Die


class Launcher:
    """Launches of one die's step.

    Single-op: the host launches operator after operator, ahead of the die if it can; a kernel waits for its
    launch. Graph: the whole step is one launch, whose time is the step's; naive MTP needs the host again
    between the main model's graph and the draft's.
    """

    def __init__(self, die: Die, config: ExecutionConfig) -> None:
        self.die, self.config = die, config
        self.is_capturing = False  # the step runs operator by operator, and is recorded
        self._launched_ns = 0
        op = die.spec.dispatch_ns("op")
        self._stage_ns = round(op * die.spec.stage_launches.value)
        self._graph_ns = die.spec.dispatch_ns("graph")
        self._sampling_ns = round(1e9 * die.spec.host_sampling.value)

    @property
    def is_eager(self) -> bool:
        """Whether the host launches operators one by one."""
        return self.config.mode == "op" or self.is_capturing

    def begin(self) -> None:
        """The step's plan has reached the die: from here on the host launches."""
        self._launched_ns = self.die.clock.now

    async def kernel(self) -> None:
        """Wait until the host has launched the next stage."""
        if self.is_eager:
            self._launched_ns += self._stage_ns
            await self.die.clock.sleep_until(self._launched_ns)

    async def next_graph(self) -> None:
        """Between the main model and MTP. Pipelined, it was launched while the main model ran."""
        if self.config.mtp == "naive":
            await self.die.clock.sleep(self._sampling_ns + self._graph_ns)
            self._launched_ns = self.die.clock.now
