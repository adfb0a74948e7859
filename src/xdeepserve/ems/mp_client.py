"""MP SDK: an application's access to the pool (CloudMatrix 4.4.1).

A client knows the ring, and where each server's segment lies. It finds a key's server by itself and asks the
server for a place or a pin. Then it passes the address to the mover of the bytes: the DMA of a die, straight
from or to the server's DRAM. A server refuses a key that is not its own by its view. The client then gets the
newest view from the Controller; while the Controller is lost, the key counts as absent.

Calls take effect within the caller's turn. Virtual time passes only in `ask`, a message to servers and back,
and in `bring` and `commit`, for the volumes' share: bytes through each server's VPC card, one after the
other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from xdeepserve.ems.mp_controller import MPController
from xdeepserve.ems.mp_server import Lease, MPServer, StaleViewError
from xdeepserve.errors import HardwareError, ProtocolError
from xdeepserve.hw.memory import Address
from xdeepserve.hw.nic import Cards
from xdeepserve.hw.volume import Key

T = TypeVar("T")


class MPClient:
    """An application's access to the pool."""

    def __init__(self, controller: MPController, cards: Cards) -> None:
        self.controller, self.cards = controller, cards
        self.clock, self.message_ns = cards.fabric.clock, 2 * cards.startup_ns
        self.ring, self._ranges = controller.view(), controller.ranges()
        self.counts: Counter[str] = Counter()

    # ---- at once ------------------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        """Whether the pool has a value."""
        return bool(self._ask(key, lambda server: server.contains(key)))

    def is_in_dram(self, key: Key) -> bool:
        """Whether there is a copy of a value in DRAM."""
        return bool(self._ask(key, lambda server: server.is_in_dram(key)))

    def touch(self, key: Key) -> None:
        """Mark a value, if there is one, as used."""
        self._ask(key, lambda server: server.touch(key))

    def begin(self, key: Key, nbytes: int) -> Lease | None:
        """Begin a put: reserve a place for a value. None if the pool has the value already, or has no
        room."""
        lease = self._checked(self._ask(key, lambda server: server.begin(key, nbytes)))
        self._passed("put", 1, lease)
        return lease

    def revoke(self, leases: Sequence[Lease]) -> None:
        """Give reserved places back; nothing will be written there any more."""
        for lease in leases:
            lease.server.revoke(lease)

    def end(self, leases: Sequence[Lease], weight: float = 1.0) -> int:
        """End a put without waiting until the volumes have the values. Returns how many values the pool has
        now. Their bytes pass the servers' cards all the same."""
        return sum(self._end(mine[0].server, mine, weight) for mine in _by_server(leases))

    def pin(self, key: Key) -> Lease | None:
        """Begin a get: keep a value where it is. None if there is none."""
        lease = self._ask(key, lambda server: server.pin(key))
        self._passed("get", 1, lease)
        return lease

    def release(self, lease: Lease) -> bool:
        """End a get. Returns False if the value was not kept until now, so the bytes read are void."""
        is_sound = not lease.server.is_lost and lease.server.release(lease)
        self._passed("get", 4, lease)
        return is_sound

    # ---- in virtual time ----------------------------------------------------------------------------

    async def ask(self) -> None:
        """Wait for a message to servers, sent to all at once, and their answer."""
        await self.clock.sleep(self.message_ns)

    async def bring(self, leases: Sequence[Lease], weight: float = 1.0) -> None:
        """Bring pinned values from volumes to DRAM, on all servers at once; second phase of a get.

        The address of a lease stays None where that fails. A byte takes the time of `weight` bytes.
        """
        missing = _by_server([lease for lease in leases if lease.address is None])
        if missing:
            await self.clock.gather(*(self._promote(mine, weight) for mine in missing))

    async def _promote(self, leases: Sequence[Lease], weight: float) -> None:
        for lease in leases:
            nbytes = math.ceil(weight * lease.nbytes)
            self._passed("get", 2, lease)
            end = self.cards.reserve(lease.server.node, "receive", nbytes, "from volume")
            await self.clock.sleep_until(end)
            if not lease.server.is_lost and lease.server.promote(lease):
                self._checked(lease)
                self._passed("get", 3, lease)

    async def commit(self, leases: Sequence[Lease], weight: float = 1.0) -> int:
        """End a put of written bytes; wait for the volumes. Returns how many values the pool has now. A byte
        takes the time of `weight` bytes."""
        return sum(await self.clock.gather(*(self._commit(mine, weight) for mine in _by_server(leases))))

    async def _commit(self, leases: Sequence[Lease], weight: float) -> int:
        server, nbytes = leases[0].server, math.ceil(weight * sum(lease.nbytes for lease in leases))
        self._passed("put", 2, leases[0])
        await self.clock.sleep_until(self.cards.reserve(server.node, "transmit", nbytes, "to volume"))
        num_kept = server.end(leases)
        self._passed("put", 3, leases[0])
        return num_kept

    def _end(self, server: MPServer, leases: Sequence[Lease], weight: float) -> int:
        nbytes = math.ceil(weight * sum(lease.nbytes for lease in leases))
        self.cards.reserve(server.node, "transmit", nbytes, "to volume")
        return server.end(leases)

    # ---- the engine room ----------------------------------------------------------------------------

    def _passed(self, operation: str, step: int, lease: Lease | None) -> None:
        moments = self.cards.fabric.moments
        if moments.is_on and lease is not None:
            moments.passed(operation, step, lease.server.node)

    def _ask(self, key: Key, question: Callable[[MPServer], T]) -> T | None:
        """Ask a key's server. Returns None if the server is lost, or the newest view does not lead to it."""
        for _ in range(2):
            server = self.controller.servers.get(self.ring.owner(key))
            if server is not None and not server.is_lost:
                try:
                    return question(server)
                except StaleViewError:
                    self.counts["stale views"] += 1
            if self.controller.is_lost or self.controller.view().version == self.ring.version:
                return None
            self.ring, self._ranges = self.controller.view(), self.controller.ranges()
        return None

    def _checked(self, lease: Lease | None) -> Lease | None:
        """Check a lease's address against the range registered by its server. Raises ProtocolError if it lies
        outside."""
        if lease is not None and lease.address is not None:
            start, nbytes = self._ranges[lease.server.name]
            if not _is_within(lease.address, lease.nbytes, start, nbytes):
                raise ProtocolError(
                    f"{lease.server.name} gave {lease.address} for {lease.nbytes} bytes, and has registered "
                    f"{nbytes} from {start} on"
                )
        return lease


def _by_server(leases: Sequence[Lease]) -> list[list[Lease]]:
    """Group leases by the server of each."""
    found: dict[str, list[Lease]] = {}
    for lease in leases:
        found.setdefault(lease.server.name, []).append(lease)
    return [*found.values()]


def _is_within(address: Address, nbytes: int, start: Address, length: int) -> bool:
    if address.node != start.node:
        raise HardwareError(f"node {address.node} is not the server's: that is node {start.node}")
    return start.offset <= address.offset and address.offset + nbytes <= start.offset + length
