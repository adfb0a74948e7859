"""Rings and fields of a rank, the places of its peers', and the buffers in use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal, TypeAlias

from xdeepserve.comm.p2p.layout import RING_FIELD, RingField, RingLayout
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address, Region

PairOp: TypeAlias = Literal["send", "receive"]


class RingMemory:
    """Memory of send and receive, as a rank sees it.

    `layout.plan` must have been called on the plans of all `dies`; `places` has the number of the group's set
    of fields and rings on each, unless each has one. `in_use` has the offset and size of the app area's
    buffers of transfers under way, by operation and peer.
    """

    def __init__(
        self, die: Die, rank: int, dies: Sequence[int], layout: RingLayout, places: Sequence[int] | None
    ) -> None:
        self.die, self.rank, self.dies, self.layout = die, rank, tuple(dies), layout
        rings, tails, acks = (
            [self._find(peer, part, places[peer] if places else None) for peer in range(len(dies))]
            for part in ("rings", "tails", "acks")
        )
        self.rings, self.tails, self.acks = rings[rank], tails[rank], acks[rank]
        self.peer_rings, self.peer_tails, self.peer_acks = (
            [region.offset for region in regions] for regions in (rings, tails, acks)
        )
        self.in_use: dict[tuple[PairOp, int], tuple[int, int]] = {}

    def fields(self, area: int, peer: int, num_cores: int) -> list[RingField]:
        """Return the fields of the first cores of `peer`, in the tails or acks at offset `area` of this
        rank."""
        raw = self.die.memory.read(area + self.layout.field(peer, 0), num_cores * RING_FIELD.size)
        return RingField.unpack_all(raw)

    def peer_field(self, area: list[int], peer: int, core: int) -> Address:
        """Return the address, in a peer's tails or acks, of the field for this rank."""
        return Address(self.dies[peer], area[peer] + self.layout.field(self.rank, core))

    # ---- buffers ------------------------------------------------------------------------------------

    def claim(self, op: PairOp, peer: int, start: int, nbytes: int) -> None:
        """Reserve a buffer for a transfer. Raises AddressError if another transfer uses it, even through
        another handle."""
        if nbytes and op == "send":
            self.die.memory.claims.share(start, nbytes, self._reader(peer))
        elif nbytes:
            self.die.memory.claims.take(start, nbytes, f"receive of rank {self.rank} from {peer}")

    def unclaim(self, op: PairOp, peer: int, start: int, nbytes: int) -> None:
        """Give back a buffer reserved by `claim`."""
        if nbytes and op == "send":
            self.die.memory.claims.unshare(start, nbytes, self._reader(peer))
        elif nbytes:
            self.die.memory.claims.release(start)

    def release(self, op: PairOp, peer: int) -> None:
        """Give back the buffer of the transfer with a peer, if there is any."""
        if (use := self.in_use.pop((op, peer), None)) is not None:
            self.unclaim(op, peer, *use)

    def _reader(self, peer: int) -> str:
        return f"send of rank {self.rank} to {peer}"

    def _find(self, peer: int, part: str, place: int | None) -> Region:
        """Return a part of the set on a rank's die. Raises DeploymentError if the die has no such region."""
        die, nbytes = self.dies[peer], self.layout.region_nbytes[part]
        memory = self.die.fabric.memories[die]
        area = memory.managed if part == "rings" else memory.metadata
        region = area.regions.get(self.layout.region(part))
        sizes = (nbytes,) if place is None else range((place + 1) * nbytes, sys.maxsize)
        if region is None or region.nbytes not in sizes:
            found = "none" if region is None else f"{region.nbytes} bytes"
            raise DeploymentError(
                f"rank {self.rank} of ring layout '{self.layout.name}' needs {nbytes} bytes of "
                f"{part} on every die, but die {die} of rank {peer} has {found}: "
                "layouts must be equal"
            )
        return Region(area, region.name, region.start + (place or 0) * nbytes, nbytes)
