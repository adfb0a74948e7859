"""RDMA as a CPU library uses it (MegaScale-Infer 5): queue pairs, writes with immediate, completion queues.

A *write with immediate* brings bytes from one memory into another one, and leaves an entry with 32 bits of
the sender's in the receiver's completion queue when the last byte has come; the sender gets an entry of its
own when the receiver's card has acknowledged it. Cards cut writes into segments, of which their queue pairs
take turns. A segment that is lost, or damaged (its checksum tells), is sent again with all behind it, so
bytes arrive in order and whole, or the write fails after RETRIES.

The source is read when a segment leaves: whoever overwrites it before its completion sends the new bytes.
What a card writes to a device's memory passes PCIe: it is certain to be there only behind a `flush`, which
reads over PCIe behind the writes (GDRCopy), or after LANDING_NS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import GlitchError, HardwareError
from .clock import Waiter, Waiting
from .congestion import TUNED_CONTROL, CongestionControl
from .engines import Fabric
from .memory import Address
from .rdma_card import RETRIES, RDMACard, WriteUnderWay
from .spec import Spec
from .topology import Plane

LANDING_NS = 2_000  # assumed: the longest that a posted write is on its way over PCIe


class QueueEntry(NamedTuple):
    """An entry of a completion queue. `immediate` is the sender's in a receiver's, None in its own."""

    peer: int  # the node at the other end
    immediate: int | None
    nbytes: int
    is_ok: bool = True


class CompletionQueue:
    """Entries in the order in which they came; one process polls it."""

    def __init__(self, fabric: Fabric) -> None:
        self._clock = fabric.clock
        self.entries: deque[QueueEntry] = deque()
        self._waiter: Waiter | None = None

    def put(self, entry: QueueEntry) -> None:
        """A card's."""
        self.entries.append(entry)
        if self._waiter is not None:
            self._waiter.wake()

    async def poll(self, deadline_ns: int, describe: Callable[[], Waiting]) -> QueueEntry:
        """The next entry, as soon as there is one. DeadlineError, as `describe` words it."""
        while not self.entries:
            self._waiter = self._clock.waiter(describe)
            try:
                await self._clock.wait(self._waiter, deadline_ns)
            finally:
                self._waiter = None
        return self.entries.popleft()


class QueuePair:
    """A reliable connection by which `source` writes to `target`, with a completion queue at each end."""

    def __init__(
        self, network: RDMANetwork, source: int, target: int, sent: CompletionQueue, received: CompletionQueue
    ) -> None:
        network.fabric.topology.check_path(source, target, Plane.ROCE)
        self.network, self.source, self.target = network, source, target
        self.sent, self.received = sent, received
        self.card, self.far = network.card(source), network.card(target)

    def write(self, src: Address, dst: Address, nbytes: int, immediate: int) -> None:
        """Post a write with immediate; `nbytes` may be 0, which brings the immediate alone.

        HardwareError for an immediate of more than 32 bits, AddressError for bytes outside of an area.
        """
        if not 0 <= immediate < 1 << 32:
            raise HardwareError(f"an immediate has 32 bits, and {immediate} does not fit")
        memories = self.network.fabric.memories
        memories[src.node].check(src.offset, nbytes)
        memories[dst.node].check(dst.offset, nbytes)
        self.card.post(self, WriteUnderWay(src, dst, nbytes, immediate))

    @property
    def is_busy(self) -> bool:
        """Something that it has posted is not acknowledged."""
        return bool(self.card.queues.get(self) and self.card.queues[self].writes)

    def at(self, offset: int) -> Address:
        """An address in the memory that it writes to."""
        return Address(self.target, offset)

    def reset(self) -> None:
        """Drop what is under way."""
        self.card.forget(self)

    def complete(self, write: WriteUnderWay) -> None:
        """The far end has all of a write."""
        self.received.put(QueueEntry(self.source, write.immediate, write.nbytes))

    def acknowledge(self, write: WriteUnderWay, is_ok: bool = True) -> None:
        """The near end hears so, or that there is no hope."""
        self.sent.put(QueueEntry(self.target, None, write.nbytes, is_ok))


class RDMANetwork:
    """Cards by node, with one way to send. `is_lost(source, target, number)` says whether the segment of that
    number, counted over all cards, is lost: for tests of what happens then.
    """

    def __init__(
        self,
        fabric: Fabric,
        spec_of: Callable[[int], Spec],
        control: CongestionControl = TUNED_CONTROL,
        acks_first: bool = True,
        is_lost: Callable[[int, int, int], bool] | None = None,
    ) -> None:
        self.fabric, self.control, self.acks_first = fabric, control, acks_first
        self.is_lost, self._spec_of = is_lost, spec_of
        self._cards: dict[int, RDMACard] = {}
        self._landing: dict[int, list[tuple[int, int, bytes]]] = {}  # by node: when at last, where, what
        self.num_segments = self.num_lost = self.num_notices = 0

    def card(self, node: int) -> RDMACard:
        """A node's card."""
        if node not in self._cards:
            self._cards[node] = RDMACard(self, node, self._spec_of(node))
        return self._cards[node]

    def queue(self) -> CompletionQueue:
        """A new completion queue."""
        return CompletionQueue(self.fabric)

    def connect(
        self, source: int, target: int, sent: CompletionQueue, received: CompletionQueue
    ) -> QueuePair:
        """A new queue pair."""
        return QueuePair(self, source, target, sent, received)

    def damages(self, source: int, target: int, data: bytes) -> bool:
        """Whether a segment on its way does not arrive as it was sent: it is lost, or its checksum fails."""
        self.num_segments += 1
        lost = self.is_lost is not None and self.is_lost(source, target, self.num_segments)
        links = self.fabric.links
        lost = lost or (bool(links) and links.carry(Plane.ROCE, source, target, data) is not data)
        lost = lost or target in self.fabric.memories.silent
        self.num_lost += lost
        return lost

    def land(self, dst: Address, data: bytes) -> None:
        """A card has posted a write over PCIe."""
        now, landing = self.fabric.clock.now, self._landing.setdefault(dst.node, [])
        landing.append((now + LANDING_NS, dst.offset, data))
        while landing[0][0] <= now:
            self._arrive(dst.node, landing.pop(0))

    def flush(self, node: int) -> None:
        """A read over PCIe: all writes that were posted before it are in memory."""
        for piece in self._landing.pop(node, ()):
            self._arrive(node, piece)

    def _arrive(self, node: int, piece: tuple[int, int, bytes]) -> None:
        if node not in self.fabric.memories.silent:
            self.fabric.memories[node].write_checked(*piece[1:])


async def poll_writes(
    queue: CompletionQueue, count: int, die: int, deadline_ns: int, describe: Callable[[], Waiting]
) -> None:
    """Until so many writes are acknowledged. GlitchError, a link's, if the card gave one up."""
    for _ in range(count):
        entry = await queue.poll(deadline_ns, describe)
        if not entry.is_ok:
            raise GlitchError(
                die, "link-error", f"a write to node {entry.peer} was not acknowledged {RETRIES} times"
            )
