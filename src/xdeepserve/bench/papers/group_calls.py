"""Point-to-point calls in groups, as in a general library: the alternative that M2N replaces (MegaScale-Infer
5).

The calls have the faults that the paper names of NCCL. Bytes are copied to a proxy on the CPU, and from a
proxy on the other side. A group is set up and each of its operations checked. A group has at most eight
operations, and the next begins when it has ended. The device is synchronised, which now and then takes long.
All durations are assumed, because the paper only shows curves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, MemoryPlan
from xdeepserve.hw.rdma import CompletionQueue, QueueEntry, RDMANetwork, poll_writes

GROUP = 8  # operations of a group at most (MS 5)


class GroupCosts(msgspec.Struct, frozen=True):
    """Costs of group calls in ns, all assumed.

    A synchronisation takes `sync`, and one in `rarely` takes `stall` more.
    """

    setup: int = 20_000
    operation: int = 2_000
    sync: int = 10_000
    rarely: int = 20
    stall: int = 150_000


class GroupCalls:
    """End of group calls on a die: messages of `nbytes` to peers and from peers.

    `plan` reserves `data.out` and `data.in` on the die, and as much for the proxy on its host, with a slot
    for each of up to `num_peers`.
    """

    def __init__(
        self, die: Die, rank: int, network: RDMANetwork, nbytes: int, costs: GroupCosts, seed: int = 0
    ) -> None:
        self.die, self.rank, self.network, self.nbytes, self.costs = die, rank, network, nbytes, costs
        self.host = network.fabric.topology.host(network.fabric.topology.server_of(die.index))
        self.sent: CompletionQueue = network.queue()
        self.received: CompletionQueue = network.queue()
        self._rng = np.random.default_rng((seed, die.index))

    @staticmethod
    def plan(die: MemoryPlan, host: MemoryPlan, num_peers: int, nbytes: int) -> None:
        """Reserve the regions of a die and of its proxy."""
        for part in ("out", "in"):
            die.app.alloc(f"data.{part}", num_peers * nbytes)
            host.app.alloc(f"proxy.{die.node}.{part}", num_peers * nbytes)

    def at(self, part: str, slot: int) -> Address:
        """Return the address of a slot on the die."""
        return self.die.memory.app.regions[f"data.{part}"].address.plus(slot * self.nbytes)

    def proxy(self, part: str, slot: int) -> Address:
        """Return the address of a slot of the proxy."""
        regions = self.network.fabric.memories[self.host].app.regions
        return regions[f"proxy.{self.die.index}.{part}"].address.plus(slot * self.nbytes)

    async def send(self, peers: Sequence[GroupCalls]) -> None:
        """Send each peer a message from the slot of the peer's number, in groups."""
        clock = self.die.clock
        for first in range(0, len(peers), GROUP):
            group = list(enumerate(peers))[first : first + GROUP]
            await clock.sleep(self.costs.setup + self.costs.operation * len(group))
            await self._synchronise()
            for slot, peer in group:
                copy = Copy(self.at("out", slot), self.proxy("out", slot), self.nbytes)
                await self.die.dma.copy([copy], "to the proxy")
                pair = self.network.connect(self.die.index, peer.die.index, self.sent, peer.received)
                pair.write(self.proxy("out", slot), peer.proxy("in", self.rank), self.nbytes, self.rank)
            await poll_writes(self.sent, len(group), self.die.index, clock.now + 10**9, self._waiting)
            await self._synchronise()

    async def receive(self, num_peers: int) -> None:
        """Receive a message of each peer into the slot of the peer's number."""
        clock = self.die.clock
        await clock.sleep(self.costs.setup + self.costs.operation * num_peers)
        for _ in range(num_peers):
            entry: QueueEntry = await self.received.poll(clock.now + 10**9, self._waiting)
            slot = entry.immediate or 0
            self.network.flush(self.host)
            copy = Copy(self.proxy("in", slot), self.at("in", slot), self.nbytes)
            await self.die.dma.copy([copy], "from the proxy")
        await self._synchronise()

    async def _synchronise(self) -> None:
        is_slow = self._rng.integers(self.costs.rarely) == 0
        await self.die.clock.sleep(self.costs.sync + self.costs.stall * int(is_slow))

    def _waiting(self) -> Waiting:
        return Waiting("group call", self.rank, "peers", "completion", "one", "none")
