"""Access of a client to the memory of servers: few operations, all by the client, none by the server.

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
    """Way for a client to reach servers. Nodes are those of the seats."""

    die: Die
    follows_others: bool
    """Servers may be older than this client, and have had another one in its place."""

    @property
    def now_ns(self) -> int:
        """Clock (ns) for measuring waits for servers."""

    def place(self, node: int, area: str, region: str, offset: int) -> Address:
        """Return the address of a part of a server's memory."""

    def state(self, address: Address) -> int | None:
        """Return the byte found at an address by the latest read; None if reads of it do not come back."""

    def is_silent(self, node: int) -> bool:
        """Whether reads from a node do not come back."""

    def generation(self, epoch: int) -> int:
        """Return the generation required of a server with this epoch; 0 if any will do."""

    async def write(self, pieces: Sequence[Copy], name: str) -> None:
        """Write from the die's own memory to servers, in order. Writes to a server that is gone are lost."""

    async def gather(self, nodes: Integers, offsets: Integers, sizes: Integers, at: int, name: str) -> None:
        """Read pieces, in order, to the die's own memory. Raises LostDieError if one does not come back."""

    async def comes_back(self, address: Address) -> bool:
        """Whether a read of the byte at an address comes back."""

    async def poll(
        self,
        places: Sequence[tuple[Address, int]],
        observe: Callable[[], bool],
        deadline_ns: int,
        describe: Callable[[], Waiting],
    ) -> None:
        """Read bytes of servers, and of the die's own memory, until `observe` is satisfied. Raises
        DeadlineError as `describe` words it."""


class OverURMA:
    """Access within a pod: servers are dies, and time is virtual."""

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
