"""Knowledge of a client about expert servers: where they are, and which it can use (EaaS 3.4, 4.4).

Both the monitor and the client can find out that a server is dead. The monitor writes a byte to the mask in
each client's memory; the client notices polls that go on for too long. Either way the server is left out, and
its requests go to a replica. A server that the client has given up is used again when its late answer has
come. A server that the monitor has masked is used again when the monitor unmasks it.

A replacement server is on another die, and registers with the monitor, which writes the new seat and then
clears the mask. The epoch of the seat changes, so the client drops what it knew of the seat and connects
again before it sends requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.services.layout import CARD, Card, Presence, ServiceLayout
from xdeepserve.comm.services.reach import Reach
from xdeepserve.errors import FieldError, LostDieError
from xdeepserve.hw.memory import Address


class KnownServers:
    """View of a client on the servers, shared by its microbatches.

    `layout.plan_client` must have been called.
    """

    def __init__(self, reach: Reach, client: int, layout: ServiceLayout) -> None:
        self.reach, self.layout, self.label = reach, layout, f"client {client}"
        self.die = die = reach.die
        count, memory = layout.servers.num_ranks, die.memory
        self.mask_region = memory.metadata.regions[layout.region("mask")]
        self._mask: npt.NDArray[np.uint8] = memory.view(self.mask_region, np.uint8, count)
        seats = memory.metadata.regions[layout.region("seats")]
        self._seats: npt.NDArray[np.uint32] = memory.view(seats, np.uint32, (count, 2))
        self._seats[:, 0], self._seats[:, 1] = layout.servers.dies, 1
        self._cards = memory.app.regions[layout.region("cards")]
        self._given_up: set[tuple[int, int]] = set()  # by the client itself: servers, and their epochs
        self._gone: set[tuple[int, int]] = set()  # whose memory does not answer
        self._generations: dict[tuple[int, int], int] = {}  # of those that are connected

    def reset(self) -> None:
        """Forget given-up servers and connections; servers masked by the monitor stay masked."""
        self._given_up.clear()
        self._generations.clear()

    def epoch(self, server: int) -> int:
        """Return the number of the server at its seat, counted over all that have been there."""
        return int(self._seats[server, 1])

    def _this(self, server: int) -> tuple[int, int]:
        return server, int(self._seats[server, 1])

    def is_masked(self, server: int) -> bool:
        """Whether the monitor says the server is lost or its seat empty."""
        return self._mask[server] in (Presence.LOST, Presence.ABSENT)

    def is_gone(self, server: int) -> bool:
        """Whether nothing can come from a server any more: its seat is empty, or its memory does not
        answer."""
        return self._mask[server] == Presence.ABSENT or self._this(server) in self._gone

    def is_usable(self, server: int) -> bool:
        """Whether the client may send requests to a server."""
        this = self._this(server)
        return self._mask[server] == Presence.THERE and this not in self._given_up and this not in self._gone

    def is_given_up(self, server: int) -> bool:
        """Whether the client itself sends a server no requests, for as long as it is late."""
        return self._this(server) in self._given_up

    def give_up(self, server: int) -> None:
        """Mark a server as given up because its answer is late."""
        self._given_up.add(self._this(server))

    def trust(self, server: int) -> None:
        """Use a given-up server again, because its late answer has come."""
        self._given_up.discard(self._this(server))

    def lose(self, server: int) -> None:
        """Mark a server as gone because its memory does not answer."""
        self._gone.add(self._this(server))

    def find(self, server: int) -> None:
        """Note a sign of life from a server's memory. Old requests in its slots are looked at before new ones
        are sent."""
        if self._this(server) in self._gone:
            self._gone.discard(self._this(server))
            self.give_up(server)

    def forget(self, server: int) -> None:
        """Forget a server's generation when it is over, so that the client connects again before the next
        request."""
        self._generations.pop(self._this(server), None)

    def generation(self, server: int) -> int:
        """Return the generation reported by a server on connecting; 0 without a connection."""
        return self._generations.get(self._this(server), 0)

    def place(self, server: int, area: str, part: str, offset: int) -> Address:
        """Return the address of a part of a server's memory."""
        return self.reach.place(int(self._seats[server, 0]), area, part, offset)

    async def connect(self, servers: Sequence[int]) -> bool:
        """Read the cards of servers not yet connected, all at once (steps 5 and 6 of 4.4's handshake: buffers
        and addresses). QPs have no counterpart where memories are one address space. Returns False if a
        server is gone, and another must be found.

        Raises FieldError if a server is not of this client's layout: another model, or another precision.
        """
        new = [self._this(server) for server in servers if not self.generation(server)]
        if not new:
            return True
        sizes = np.full(len(new), CARD.size, np.int64)
        try:
            places = [self.place(server, "metadata", "card", 0) for server, _ in new]
            nodes, offsets = (np.array(each, np.int64) for each in zip(*places, strict=True))
            await self.reach.gather(nodes, offsets, sizes, self._cards.offset, "expert cards")
        except LostDieError:
            self._gone |= {this for this in new if self.reach.is_silent(int(self._seats[this[0], 0]))}
            return False
        for at, (server, epoch) in enumerate(new):
            raw = self.die.memory.read(self._cards.offset + at * CARD.size, CARD.size)
            card = Card(*CARD.unpack(raw))
            expected = self.layout.card(self.reach.generation(epoch) or card.generation)
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
            self._generations[server, epoch] = card.generation
        return True
