"""How a client reaches the memory of servers: few operations, all of them its own, none of the server's.

The protocol is the same however bytes get there: by URMA within a pod (`OverURMA`), or to the buffers of
server processes (`outside`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.errors import LostDieError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.traffic import Integers


class Reach(Protocol):
    """One client's. Nodes are those of the seats."""

    die: Die
    follows_others: bool
    """Servers may be older than this client, and have had another one in its place."""

    @property
    def now_ns(self) -> int:
        """The time in which servers are waited for."""

    def place(self, node: int, area: str, region: str, offset: int) -> Address:
        """Where something of a server's memory is."""

    def state(self, address: Address) -> int | None:
        """The byte that the latest read has found there; None: no read of it comes back."""

    def is_silent(self, node: int) -> bool:
        """Whether reads do not come back from there."""

    def generation(self, epoch: int) -> int:
        """Which one a server must be of whom the monitor has given this epoch; 0: any."""

    async def write(self, pieces: Sequence[Copy], name: str) -> None:
        """From the die's own memory to servers, in order. What goes to a server that is gone is lost."""

    async def gather(self, nodes: Integers, offsets: Integers, sizes: Integers, at: int, name: str) -> None:
        """Read pieces, one after another, to the die's own memory. LostDieError if one does not come back."""

    async def comes_back(self, address: Address) -> bool:
        """Whether a read of the byte there comes back."""

    async def poll(
        self,
        places: Sequence[tuple[Address, int]],
        observe: Callable[[], bool],
        deadline_ns: int,
        describe: Callable[[], Waiting],
    ) -> None:
        """Read bytes of servers, and of the die's own memory, until `observe` is satisfied. DeadlineError as
        `describe` words it."""


class OverURMA:
    """Within a pod: servers are dies, and time is virtual."""

    follows_others = False

    def __init__(self, die: Die, layout: ServiceLayout) -> None:
        self.die, self._layout = die, layout

    @property
    def now_ns(self) -> int:
        return self.die.clock.now

    def place(self, node: int, area: str, region: str, offset: int) -> Address:
        found = getattr(self.die.fabric.memories[node], area).regions[self._layout.region(region)]
        return Address(node, found.offset + offset)

    def state(self, address: Address) -> int | None:
        memories = self.die.fabric.memories
        return None if self.is_silent(address.node) else memories[address.node].buffer[address.offset]

    def is_silent(self, node: int) -> bool:
        return node in self.die.fabric.memories.silent

    def generation(self, epoch: int) -> int:
        return 0  # they begin anew when dies are called back

    async def write(self, pieces: Sequence[Copy], name: str) -> None:
        await self.die.urma.copy(pieces, name)

    async def gather(self, nodes: Integers, offsets: Integers, sizes: Integers, at: int, name: str) -> None:
        await self.die.urma.gather(nodes, offsets, sizes, at, name)

    async def comes_back(self, address: Address) -> bool:
        try:
            await self.die.mte.load([(address, 1)], name="expert slot")
        except LostDieError:
            return False
        return True

    async def poll(
        self,
        places: Sequence[tuple[Address, int]],
        observe: Callable[[], bool],
        deadline_ns: int,
        describe: Callable[[], Waiting],
    ) -> None:
        await self.die.poll(places, observe, deadline_ns=deadline_ns, describe=describe)
