"""MP Controller: members and namespaces of the pool (CloudMatrix 4.4.1).

The Controller makes the views of the ring, and hands them to servers and clients. They go on with the view
that they have when the Controller is lost: no server joins or leaves, and everything else works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from xdeepserve.ems.mp_server import MPServer
from xdeepserve.ems.ring import Ring
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.memory import Address
from xdeepserve.hw.volume import Key, Volume

BATCH = 32 << 20  # bytes that are moved from volume to volume in one transaction


class MPController:
    """The control plane of a pool."""

    def __init__(self, servers: Sequence[MPServer], quotas: Mapping[str, int | None]) -> None:
        self.servers = {server.name: server for server in servers}
        self.quotas = dict(quotas)
        self.is_lost = False
        self._ring = Ring([])
        self._announce([server.name for server in servers])

    def view(self) -> Ring:
        """Return the newest view. Raises ProtocolError if the Controller is lost."""
        self._check()
        return self._ring

    def ranges(self) -> dict[str, tuple[Address, int]]:
        """Return each server's registered range: the beginning of its segment, and its bytes."""
        self._check()
        return {name: server.range for name, server in self.servers.items()}

    def leave(self, name: str) -> None:
        """Take a failed server out of the ring: other servers own its keys from now on."""
        self._check()
        self._announce([each for each in self._ring.members if each != name])

    def join(self, name: str) -> None:
        """Put a server back into the ring: it owns its keys again."""
        self._check()
        self._announce([*self._ring.members, name])

    def create_namespace(self, name: str, quota: int | None) -> None:
        """Create a namespace: a part of the pool that sees only its own values, at most `quota` bytes on each
        server."""
        self._check()
        self.quotas[name] = quota
        self._tell_namespaces()

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace with all its values."""
        self._check()
        del self.quotas[name]
        self._tell_namespaces()
        for server in self.servers.values():
            server.forget(name)

    def _announce(self, members: Sequence[str]) -> None:
        self._ring = Ring(sorted(members), self._ring.version + 1)
        for server in self.servers.values():
            server.ring = self._ring

    def _tell_namespaces(self) -> None:
        for server in self.servers.values():
            server.quotas = dict(self.quotas)

    def _check(self) -> None:
        if self.is_lost:
            raise ProtocolError("the pool's Controller is lost")


def rebalance(volumes: Mapping[str, Volume], ring: Ring) -> int:
    """Move every value to the volume of its owner, and return how many have moved.

    `volumes` are those of the ring's members, and maybe others. A value leaves its old place when it is safe
    in the new place.
    """
    moved = 0
    for name, volume in volumes.items():
        strangers = [key for key in volume.rows if ring.owner(key) != name]
        for batch in _batches(strangers, volume):
            by_owner: dict[str, dict[Key, bytes]] = {}
            for key in batch:
                value = volume.get(key)
                if value is not None:
                    by_owner.setdefault(ring.owner(key), {})[key] = value
            for owner, values in by_owner.items():
                if volumes[owner].put(values):
                    moved += len(values)
                    volume.delete(list(values))
    return moved


def _batches(keys: Iterable[Key], volume: Volume) -> list[list[Key]]:
    batches: list[list[Key]] = [[]]
    size = 0
    for key in keys:
        if size > BATCH:
            batches.append([])
            size = 0
        batches[-1].append(key)
        size += volume.rows[key].nbytes
    return batches
