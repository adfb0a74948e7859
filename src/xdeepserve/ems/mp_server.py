"""MP Server: a host's part of the pool, DRAM over a volume (CloudMatrix 4.4.1).

A value is written in phases. `begin` reserves a place in DRAM, where the writer moves the bytes. `end`
commits the value to the volume, and from then on all clients see it; `revoke` gives the place back instead. A
value that is read is pinned: it is evicted neither from DRAM nor from the volume until it is released, or its
lease ends.

The volume has every value. DRAM has copies of the most recently used. When DRAM is fuller than `HIGH`, the
least recently used copies are evicted until it is down to `LOW`. The volume does the same, and values evicted
there are gone. A copy in DRAM is compared with the volume's digest, so bytes that have changed are never
handed out.

Calls take effect within the caller's turn. Virtual time for them is the caller's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from xdeepserve.ems.dram import HIGH, LOW, Dram
from xdeepserve.ems.ring import Ring
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.memory import SCRIBBLE, Address, Region
from xdeepserve.hw.volume import Key, Volume, digest_of

LEASE_NS = 60_000_000_000  # until a place or a pin is taken back from who does not come again


class StaleViewError(ProtocolError):
    """Error: a key belongs to another server by this server's view of the ring."""


@dataclass(eq=False)
class Lease:
    """The right to write, or to go on reading, a value at `address` (None: not in DRAM yet).

    A place that is being written stays reserved until its writer ends or revokes the lease, however long that
    takes. A late write must not get into another value.
    """

    key: Key
    nbytes: int
    kind: Literal["write", "read"]
    server: MPServer
    epoch: int
    expires_ns: int
    address: Address | None = None


class MPServer:
    """Server of the pool on a host: DRAM over a volume. `now` tells virtual time, by which leases end.

    `counts` counts events: puts, hits and bytes by tier, evictions, mismatches, refusals.
    """

    def __init__(
        self,
        name: str,
        node: int,
        volume: Volume,
        dram_nbytes: int,
        volume_nbytes: int,
        now: Callable[[], int],
    ) -> None:
        self.name, self.node, self.volume, self._now = name, node, volume, now
        self.dram_nbytes, self.volume_nbytes = dram_nbytes, volume_nbytes
        self.ring = Ring([name])
        self.quotas: dict[str, int | None] = {}  # bytes of each namespace on this server; None: no bound
        self.epoch = 0  # of its DRAM: the content of an older one is lost
        self.is_lost = False
        self.counts: Counter[str] = Counter()
        self._memories: AddressSpace | None = None
        self._region: Region | None = None
        self.dram = Dram(dram_nbytes, lambda key: key in self._pins)
        self._writing: dict[Key, Lease] = {}
        self._num_losses = 0  # that the volume had had when DRAM was looked through last
        self._pins: dict[Key, list[Lease]] = {}

    # ---- life ---------------------------------------------------------------------------------------

    def start(self, memories: AddressSpace, region: Region, quotas: dict[str, int | None]) -> None:
        """Start the server: materialised DRAM, an open volume and quotas are given."""
        self._memories, self._region, self.quotas = memories, region, quotas
        self._shrink_volume({})

    def lose(self) -> None:
        """Lose the host's DRAM, because the host has failed. The volume is elsewhere and keeps its values."""
        assert self._memories is not None
        self._memories.write(self._address(0), bytes([SCRIBBLE]) * self.dram_nbytes)
        self.is_lost, self.epoch = True, self.epoch + 1
        self.dram.clear()
        self._pins = {}

    def recover(self) -> None:
        """Bring the host back. DRAM fills again from the volume, as values are asked for."""
        self.is_lost = False

    def forget(self, namespace: str) -> None:
        """Delete all values of a deleted namespace. Values that are being read are deleted when released."""
        keys = [key for key in self.volume.rows if key.namespace == namespace and key not in self._pins]
        self.delete(keys)

    @property
    def range(self) -> tuple[Address, int]:
        """Address and bytes of the server's segment, registered with clients at the start."""
        return self._address(0), self.dram_nbytes

    # ---- asking -------------------------------------------------------------------------------------

    def contains(self, key: Key) -> bool:
        """Whether the server has a value. Raises StaleViewError if the key is not its own by its view."""
        self._check(key)
        return key in self.volume.rows

    def is_in_dram(self, key: Key) -> bool:
        """Whether there is a copy of a value in DRAM."""
        return key in self.dram

    def touch(self, key: Key) -> None:
        """Mark a value, if there is one, as most recently used in both tiers."""
        self._check(key)
        self.volume.touch(key)
        self.dram.find(key)

    # ---- writing ------------------------------------------------------------------------------------

    def begin(self, key: Key, nbytes: int) -> Lease | None:
        """Reserve a place for a value. None if the value is there or being written, or there is no room."""
        self._check(key)
        self._tidy()
        quota = self.quotas[key.namespace]
        if key in self.volume.rows or key in self._writing or key in self.dram:
            return None  # it is there, or coming, or somebody still reads what the volume has lost
        if nbytes > LOW * self.volume_nbytes or (quota is not None and nbytes > quota):
            self.counts["refused"] += 1
            return None
        address = self._place(nbytes)
        if address is None:
            self.counts["refused"] += 1
            return None
        lease = Lease(key, nbytes, "write", self, self.epoch, self._now() + LEASE_NS, address)
        self._writing[key] = lease
        return lease

    def end(self, leases: Sequence[Lease]) -> int:
        """Commit values of written places; return how many the pool has now.

        Only leases in force count, in order, as far as there is room beside pinned values. These are
        committed together; if the disk has no room, none is. Places of values that are not committed are
        freed.
        """
        for lease in leases:
            if self.is_lost or lease.epoch != self.epoch or lease.key.namespace not in self.quotas:
                self.revoke(lease)
        held = self._fitting([lease for lease in leases if self._holds(lease)])
        if not held:
            return 0
        self._shrink_volume({lease.key: lease.nbytes for lease in held})
        if not self.volume.put({lease.key: self._bytes(lease) for lease in held}):
            for lease in held:
                self.revoke(lease)
            return 0
        for lease in held:
            assert lease.address is not None
            del self._writing[lease.key]
            self.dram.add(lease.key, self._offset(lease.address))
            self.counts["puts"] += 1
            self.counts["put bytes"] += lease.nbytes
        return len(held)

    def revoke(self, lease: Lease) -> None:
        """Give a place back without a value. Harmless when the lease has ended."""
        if self._holds(lease):
            assert lease.address is not None
            del self._writing[lease.key]
            self.dram.allocator.free(self._offset(lease.address))

    # ---- reading ------------------------------------------------------------------------------------

    def pin(self, key: Key) -> Lease | None:
        """Pin a value until `release`; None if there is none. A value that is not in DRAM must be
        promoted."""
        self._check(key)
        self._tidy()
        if key not in self.volume.rows:
            self.counts["misses"] += 1
            return None
        nbytes = self.volume.rows[key].nbytes
        lease = Lease(key, nbytes, "read", self, self.epoch, self._now() + LEASE_NS)
        self._pins.setdefault(key, []).append(lease)
        self.volume.touch(key)
        if self._find(lease):
            self.counts["dram hits"] += 1
            self.counts["dram bytes"] += nbytes
        return lease

    def promote(self, lease: Lease) -> bool:
        """Bring a pinned value from the volume to DRAM. Returns False if it is damaged, or there is no
        room."""
        if not self._holds(lease):
            return False
        if self._find(lease):
            return True
        value = self.volume.get(lease.key)
        address = None if value is None else self._place(lease.nbytes)
        if value is None or address is None:
            self.counts["lost"] += 1
            return False
        assert self._memories is not None
        self._memories.write(address, value)
        self.dram.add(lease.key, self._offset(address))
        lease.address = address
        self.counts["volume hits"] += 1
        self.counts["volume bytes"] += lease.nbytes
        return True

    def release(self, lease: Lease) -> bool:
        """Release a value after reading. Returns False if the lease had ended before: the bytes read are
        void."""
        if not self._holds(lease):
            return False
        key = lease.key
        self._pins[key].remove(lease)
        if not self._pins[key]:
            del self._pins[key]
            if key.namespace not in self.quotas:  # it was deleted meanwhile
                self.delete([key])
            elif key in self.dram and key not in self.volume.rows:
                self.dram.evict(key)
        return True

    # ---- the engine room ----------------------------------------------------------------------------

    def _check(self, key: Key) -> None:
        if self.ring.owner(key) != self.name:
            raise StaleViewError(f"{self.name} does not have this key by view {self.ring.version}")
        if key.namespace not in self.quotas:
            raise ProtocolError(f"{self.name} has no namespace {key.namespace}")

    def _address(self, offset: int) -> Address:
        assert self._region is not None
        return self._region.address.plus(offset)

    @property
    def num_leases(self) -> int:
        """Number of leases in force: values that are being read or written."""
        return len(self._writing) + sum(map(len, self._pins.values()))

    def _offset(self, address: Address) -> int:
        return address.offset - self._address(0).offset

    def _bytes(self, lease: Lease) -> memoryview:
        assert self._memories is not None
        assert lease.address is not None
        return self._memories.read(lease.address, lease.nbytes)

    def _holds(self, lease: Lease) -> bool:
        """Whether a lease is still in force."""
        if lease.kind == "write":
            return self._writing.get(lease.key) is lease
        return lease in self._pins.get(lease.key, ())

    def _tidy(self) -> None:
        """Take back expired pins, and evict copies of values that the volume has lost."""
        now = self._now()
        for leases in list(self._pins.values()):
            for lease in [lease for lease in leases if lease.expires_ns <= now]:
                self.release(lease)
        losses = self.volume.num_mismatches + self.volume.num_rebuilt
        if losses != self._num_losses:
            self._num_losses = losses
            for key in [key for key in self.dram.idle if key not in self.volume.rows]:
                self.dram.evict(key)

    def _find(self, lease: Lease) -> bool:
        """Set a lease's address if DRAM has the value unchanged. Returns whether it has."""
        offset = self.dram.find(lease.key)
        if offset is None or lease.key not in self.volume.rows:
            return False
        lease.address = self._address(offset)
        if digest_of(lease.key, self._bytes(lease)) != self.volume.rows[lease.key].digest:
            self.counts["mismatches"] += 1
            self.dram.evict(lease.key)
            self._pins[lease.key] = [lease]  # what others are reading there is void
            lease.address = None
            return False
        return True

    def _place(self, nbytes: int) -> Address | None:
        """Find room in DRAM, by eviction if necessary."""
        offset = self.dram.place(nbytes)
        return None if offset is None else self._address(offset)

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete values without readers from both tiers."""
        for key in keys:
            if key in self.dram:
                self.dram.evict(key)
        self.volume.delete(keys)

    def _fitting(self, leases: Sequence[Lease]) -> list[Lease]:
        """Choose the leases with values that fit on the volume and in quotas, beside pinned values. The
        others are revoked."""
        used: Counter[str] = Counter()
        for key in self._pins:
            if key in self.volume.rows:
                used[key.namespace] += self.volume.rows[key].nbytes
        fitting = []
        for lease in leases:
            name, quota = lease.key.namespace, self.quotas[lease.key.namespace]
            total, mine = used.total() + lease.nbytes, used[name] + lease.nbytes
            if total > HIGH * self.volume_nbytes or (quota is not None and mine > quota):
                self.counts["refused"] += 1
                self.revoke(lease)
                continue
            used[name] = mine
            fitting.append(lease)
        return fitting

    def _shrink_volume(self, coming: dict[Key, int]) -> None:
        """Make room on the volume for coming values, within the quotas of namespaces and the volume's
        bound."""
        total = Counter(self.volume.nbytes)
        for key, nbytes in coming.items():
            total[key.namespace] += nbytes
        bounds = [(name, quota, quota) for name, quota in self.quotas.items() if quota is not None]
        bounds.append(("", int(HIGH * self.volume_nbytes), int(LOW * self.volume_nbytes)))
        victims: dict[Key, None] = {}
        for namespace, most, enough in bounds:
            used = total[namespace] if namespace else total.total()
            if used <= most:
                continue
            for key, row in self.volume.rows.items():  # the oldest first
                if used <= enough:
                    break
                if key not in self._pins and key not in victims and namespace in ("", key.namespace):
                    victims[key] = None
                    total[key.namespace] -= row.nbytes
                    used -= row.nbytes
        self.counts["volume evictions"] += len(victims)
        self.delete(list(victims))

    def check_integrity(self) -> None:
        """Check DRAM against the records: copies in places of their own, and all of them on the volume."""
        allocator = self.dram.allocator
        allocator.check_integrity()
        writing = [lease.address for lease in self._writing.values() if lease.address is not None]
        placed = sorted([*self.dram.offsets(), *map(self._offset, writing)])
        if placed != sorted(allocator.sizes):
            raise ProtocolError(f"{self.name}: places {sorted(allocator.sizes)}, values {placed}")
        lost = [key for key in self.dram.idle if key not in self.volume.rows]
        if lost and not self.volume.num_mismatches + self.volume.num_rebuilt:
            raise ProtocolError(f"{self.name}: {len(lost)} values are in DRAM and not on the volume")
