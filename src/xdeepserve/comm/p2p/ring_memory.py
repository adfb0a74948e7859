"""Rings and fields of a rank, the places of its peers', and the buffers in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from xdeepserve.comm.p2p.layout import RING_FIELD, RingField, RingLayout
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address

PairOp: TypeAlias = Literal["send", "receive"]


class RingMemory:
    """Memory of send and receive, as a rank sees it.

    `layout.plan` must have been called on the plans of all `dies`. `in_use` has the offset and size of the
    app area's buffers of transfers under way, by operation and peer.
    """

    def __init__(self, die: Die, rank: int, dies: Sequence[int], layout: RingLayout) -> None:
        self.die, self.rank, self.dies, self.layout = die, rank, tuple(dies), layout
        memories, memory = die.fabric.memories, die.memory
        self.rings = memory.managed.regions[layout.region("rings")]
        self.tails = memory.metadata.regions[layout.region("tails")]
        self.acks = memory.metadata.regions[layout.region("acks")]
        self._check_peers()
        nodes = np.asarray(dies, np.int64)
        self.peer_rings = memories.offsets_of("managed", layout.region("rings"))[nodes].tolist()
        self.peer_tails = memories.offsets_of("metadata", layout.region("tails"))[nodes].tolist()
        self.peer_acks = memories.offsets_of("metadata", layout.region("acks"))[nodes].tolist()
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

    def _check_peers(self) -> None:
        """Check the plans of all dies: they must have regions of this layout's sizes. Raises DeploymentError
        if not."""
        for peer, die in enumerate(self.dies):
            memory = self.die.fabric.memories[die]
            for part, nbytes in self.layout.region_nbytes.items():
                area = memory.managed if part == "rings" else memory.metadata
                region = area.regions.get(self.layout.region(part))
                if region is None or region.nbytes != nbytes:
                    found = "none" if region is None else f"{region.nbytes} bytes"
                    raise DeploymentError(
                        f"rank {self.rank} of ring layout '{self.layout.name}' needs {nbytes} bytes of "
                        f"{part} on every die, but die {die} of rank {peer} has {found}: "
                        "layouts must be equal"
                    )
