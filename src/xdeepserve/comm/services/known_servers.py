"""What a client knows of the expert servers: their generations, and which of them it can use (EaaS 3.4, 4.4).

Two find out that a server is dead: the monitor, which writes a byte to the mask in each client's memory, and
the client itself, whose polls have gone on for too long. Either way it is left out, and what was asked of it
is asked of a replica. A server that the client has given up by itself is used again when its late answer is
there; one that the monitor has masked, when the monitor says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.services.layout import CARD, Card, ServiceLayout
from xdeepserve.errors import FieldError, LostDieError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address


class KnownServers:
    """One client's view, which its microbatches share. `layout.plan_client` must have been called."""

    def __init__(self, die: Die, client: int, layout: ServiceLayout) -> None:
        self.die, self.layout, self.label = die, layout, f"client {client}"
        count, memory = layout.servers.num_ranks, die.memory
        self.mask_region = memory.metadata.regions[layout.region("mask")]
        self._mask: npt.NDArray[np.uint8] = memory.view(self.mask_region, np.uint8, count)
        self._cards = memory.app.regions[layout.region("cards")]
        self.given_up = [False] * count  # by the client itself
        self.gone: set[int] = set()  # whose memory does not answer
        self.generations = [0] * count  # 0: not connected

    def reset(self) -> None:
        """Nothing is asked of anybody; who is masked by the monitor stays so."""
        self.given_up = [False] * len(self.given_up)
        self.generations = [0] * len(self.generations)

    def is_masked(self, server: int) -> bool:
        """Whether the monitor holds a server for lost."""
        return bool(self._mask[server])

    def is_usable(self, server: int) -> bool:
        """Whether to ask it anything."""
        return not (self._mask[server] or self.given_up[server] or server in self.gone)

    def forget(self, server: int) -> None:
        """Its generation is over: connect again before the next request."""
        self.generations[server] = 0

    def place(self, server: int, area: str, part: str, offset: int) -> Address:
        """Where something of a server's memory is."""
        node = self.layout.servers.dies[server]
        region = getattr(self.die.fabric.memories[node], area).regions[self.layout.region(part)]
        return Address(node, region.offset + offset)

    async def connect(self, servers: Sequence[int]) -> bool:
        """Read the cards of those that are not connected, at once (steps 5 and 6 of 4.4's handshake: buffers
        and addresses; QPs have no counterpart where memories are one address space). False if one of them is
        gone, and another has to be found.

        FieldError if a server is not of this client's layout: another model, or another precision.
        """
        new = [server for server in servers if not self.generations[server]]
        if not new:
            return True
        places = [self.place(server, "metadata", "card", 0) for server in new]
        nodes, offsets = (np.array(each, np.int64) for each in zip(*places, strict=True))
        sizes = np.full(len(new), CARD.size, np.int64)
        try:
            await self.die.urma.gather(nodes, offsets, sizes, self._cards.offset, "expert cards")
        except LostDieError:
            silent = self.die.fabric.memories.silent
            self.gone |= {server for server in new if self.layout.servers.dies[server] in silent}
            return False
        for at, server in enumerate(new):
            raw = self.die.memory.read(self._cards.offset + at * CARD.size, CARD.size)
            card = Card(*CARD.unpack(raw))
            expected = self.layout.card(card.generation)
            if card != expected or not card.generation:
                raise FieldError(
                    f"connect: {self.label} and expert server {server} do not fit together: field card: "
                    f"expected {expected}, seen {card}",
                    op="connect",
                    rank=self.label,
                    peer=f"expert server {server}",
                    field="card",
                    expected=expected,
                    seen=card,
                )
            self.generations[server] = card.generation
        return True
