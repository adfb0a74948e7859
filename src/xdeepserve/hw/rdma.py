"""RDMA for CPU libraries (MegaScale-Infer 5): queue pairs, writes with immediate, completion queues.

A *write with immediate* brings bytes from one memory into another. When the last byte has come, it leaves an
entry with 32 bits from the sender in the receiver's completion queue. The sender gets an entry of its own
when the receiver's card has acknowledged the write. Cards cut writes into segments, and queue pairs take
turns. A segment that is lost, or damaged by its checksum, is sent again with all behind it. So bytes arrive
in order and whole, or the write fails after RETRIES.

The source is read when a segment leaves: overwriting it before the completion sends the new bytes. A card's
writes to a device's memory pass PCIe. They are certain to be there only behind a `flush`, which reads over
PCIe behind the writes (GDRCopy), or after LANDING_NS.

One side of a card transmits, one segment after another; the other side receives in the same way. A segment
flies for `roce_startup` in between. Queue pairs with something to send take turns. Acknowledgements and
congestion notices pass the same side. They go before all data (MegaScale-Infer's high-priority queues), or as
one more queue pair that waits for its turn, which is the problem that the paper found. A queue pair sends one
write at a time: the next one when this one is acknowledged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import GlitchError, HardwareError, LinkError
from .clock import Waiter, Waiting
from .congestion import TUNED_CONTROL, CongestionControl, SendingRate
from .engines import Fabric
from .memory import Address
from .spec import Spec
from .topology import Plane

CONTROL_NBYTES = 64  # public: an acknowledgement with its headers, padded to the least Ethernet frame
RETRIES = 7  # public: the largest retry count of a reliable queue pair
LANDING_NS = 2_000  # assumed: the longest that a posted write is on its way over PCIe


class QueueEntry(NamedTuple):
    """Entry of a completion queue. `immediate` comes from the sender in a receiver's queue; None in a
    sender's own."""

    peer: int  # the node at the other end
    immediate: int | None
    nbytes: int
    is_ok: bool = True


class CompletionQueue:
    """Completion entries in order of arrival; one process polls them."""

    def __init__(self, fabric: Fabric) -> None:
        self._clock = fabric.clock
        self.entries: deque[QueueEntry] = deque()
        self._waiter: Waiter | None = None

    def put(self, entry: QueueEntry) -> None:
        """Add a card's entry and wake the polling process."""
        self.entries.append(entry)
        if self._waiter is not None:
            self._waiter.wake()

    async def poll(self, deadline_ns: int, describe: Callable[[], Waiting]) -> QueueEntry:
        """Take the next entry, as soon as there is one. Raises DeadlineError, as `describe` words it."""
        while not self.entries:
            self._waiter = self._clock.waiter(describe)
            try:
                await self._clock.wait(self._waiter, deadline_ns)
            finally:
                self._waiter = None
        return self.entries.popleft()


class QueuePair:
    """Reliable connection for writes from `source` to `target`, with a completion queue at each end."""

    def __init__(
        self, network: RDMANetwork, source: int, target: int, sent: CompletionQueue, received: CompletionQueue
    ) -> None:
        network.fabric.topology.check_path(source, target, Plane.ROCE)
        self.network, self.source, self.target = network, source, target
        self.sent, self.received = sent, received
        self.card, self.far = network.card(source), network.card(target)

    def write(self, src: Address, dst: Address, nbytes: int, immediate: int) -> None:
        """Post a write with immediate; `nbytes` may be 0, then only the immediate is sent.

        Raises HardwareError for an immediate of more than 32 bits, AddressError for bytes outside of an area.
        """
        if not 0 <= immediate < 1 << 32:
            raise HardwareError(f"an immediate has 32 bits, and {immediate} does not fit")
        memories = self.network.fabric.memories
        memories[src.node].check(src.offset, nbytes)
        memories[dst.node].check(dst.offset, nbytes)
        self.card.post(self, WriteUnderWay(src, dst, nbytes, immediate))

    @property
    def is_busy(self) -> bool:
        """Whether a posted write has not been acknowledged yet."""
        return bool(self.card.queues.get(self) and self.card.queues[self].writes)

    def at(self, offset: int) -> Address:
        """Return an address in the target's memory."""
        return Address(self.target, offset)

    def reset(self) -> None:
        """Drop all writes under way on this queue pair."""
        self.card.forget(self)

    def complete(self, write: WriteUnderWay) -> None:
        """Note at the far end that a write has fully arrived."""
        self.received.put(QueueEntry(self.source, write.immediate, write.nbytes))

    def acknowledge(self, write: WriteUnderWay, is_ok: bool = True) -> None:
        """Note at the near end that a write was acknowledged, or has failed."""
        self.sent.put(QueueEntry(self.target, None, write.nbytes, is_ok))


class RDMANetwork:
    """RDMA cards of a pod's nodes.

    `is_lost(source, target, number)`, for tests, says whether a segment is lost; `number` counts over all
    cards.
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
        """Return the card of a node."""
        if node not in self._cards:
            self._cards[node] = RDMACard(self, node, self._spec_of(node))
        return self._cards[node]

    def queue(self) -> CompletionQueue:
        """Make a new completion queue."""
        return CompletionQueue(self.fabric)

    def connect(
        self, source: int, target: int, sent: CompletionQueue, received: CompletionQueue
    ) -> QueuePair:
        """Make a new queue pair between two nodes."""
        return QueuePair(self, source, target, sent, received)

    def damages(self, source: int, target: int, data: bytes) -> bool:
        """Whether a segment is lost on its way, or arrives damaged so that its checksum fails."""
        self.num_segments += 1
        lost = self.is_lost is not None and self.is_lost(source, target, self.num_segments)
        links = self.fabric.links
        lost = lost or (bool(links) and links.carry(Plane.ROCE, source, target, data) is not data)
        lost = lost or target in self.fabric.memories.silent
        self.num_lost += lost
        return lost

    def land(self, dst: Address, data: bytes) -> None:
        """Post a received write over PCIe; it reaches memory after LANDING_NS at the latest, or at a
        `flush`."""
        now, landing = self.fabric.clock.now, self._landing.setdefault(dst.node, [])
        landing.append((now + LANDING_NS, dst.offset, data))
        while landing[0][0] <= now:
            self._arrive(dst.node, landing.pop(0))

    def flush(self, node: int) -> None:
        """Read over PCIe, and thereby bring all writes posted before to memory."""
        for piece in self._landing.pop(node, ()):
            self._arrive(node, piece)

    def _arrive(self, node: int, piece: tuple[int, int, bytes]) -> None:
        if node not in self.fabric.memories.silent:
            self.fabric.memories[node].write_checked(*piece[1:])


class WriteUnderWay:
    """A posted write, as both ends know it: `next` segment to send, `expected` one to receive."""

    def __init__(self, src: Address, dst: Address, nbytes: int, immediate: int) -> None:
        self.src, self.dst, self.nbytes, self.immediate = src, dst, nbytes, immediate
        self.next = self.expected = self.known = self.tries = 0
        self.num_segments = 0
        self.is_over = self.has_refused = False


class SendQueue:
    """Writes waiting on a queue pair, and its sending rate."""

    def __init__(self, rate: SendingRate) -> None:
        self.writes: deque[WriteUnderWay] = deque()
        self.rate, self.ready_ns, self.is_queued = rate, 0, False


class RDMACard:
    """Network card of a node, with the bandwidth of its `spec`. All times are of the network's clock."""

    def __init__(self, network: RDMANetwork, node: int, spec: Spec) -> None:
        self.network, self.node, self.clock = network, node, network.fabric.clock
        self.ns_per_byte = 1e9 / spec.roce_bandwidth.value
        self.flight_ns = math.ceil(spec.roce_startup.value * 1e9 - 1e-6)
        self.retry_ns = math.ceil(spec.rdma_retry.value * 1e9 - 1e-6)
        self.segment = int(spec.rdma_segment.value)
        self.queues: dict[QueuePair, SendQueue] = {}
        self._turns: deque[QueuePair | None] = deque()  # None: what controls there are
        self._controls: deque[tuple[RDMACard, Callable[[], None]]] = deque()
        self._state, self._run_number = "idle", 0
        self._received_until = 0

    # ---- what is to be sent ---------------------------------------------------------------------------

    def post(self, pair: QueuePair, write: WriteUnderWay) -> None:
        """Add a write to the end of its queue pair's writes."""
        queue = self.queues.setdefault(pair, SendQueue(SendingRate(self.network.control)))
        write.num_segments = max(1, -(-write.nbytes // self.segment))
        queue.writes.append(write)
        self._enqueue(pair)

    def forget(self, pair: QueuePair) -> None:
        """Drop all writes under way on a queue pair."""
        for write in self.queues[pair].writes if pair in self.queues else ():
            write.is_over = True
        self.queues.pop(pair, None)

    def control(self, far: RDMACard, then: Callable[[], None]) -> None:
        """Send an acknowledgement or a notice; `then` is called at the far end."""
        self._controls.append((far, then))
        if not self.network.acks_first and None not in self._turns:
            self._turns.append(None)
        self._wake()

    def _enqueue(self, pair: QueuePair) -> None:
        queue = self.queues[pair]
        if not queue.is_queued:
            queue.is_queued = True
            self._turns.append(pair)
        self._wake()

    def _wake(self) -> None:
        if self._state != "sending":
            self._state, self._run_number = "sending", self._run_number + 1
            self.clock.detach(self._transmit(self._run_number), f"card {self.node}")

    # ---- transmitting ---------------------------------------------------------------------------------

    async def _transmit(self, number: int) -> None:
        """Send until nothing is left. If something comes while all queue pairs pause, another run takes
        over."""
        while number == self._run_number:
            if self._controls and (self.network.acks_first or self._turns[0] is None):
                await self._send_control()
            elif (pair := self._ready_pair()) is not None:
                await self._send_segment(pair)
            elif (until := self._pause()) is not None:
                self._state = "pausing"
                await self.clock.sleep_until(until)
                if number == self._run_number:
                    self._state = "sending"
            else:
                self._state = "idle"
                return

    def _ready_pair(self) -> QueuePair | None:
        """Take the next queue pair with its turn out of the queue; None if controls come first or all must
        pause."""
        for _ in range(len(self._turns)):
            pair = self._turns.popleft()
            if pair is None:
                self._turns.appendleft(None)
                return None  # the turn of controls
            queue = self.queues.get(pair)
            if queue is None or not queue.writes or queue.writes[0].next >= queue.writes[0].num_segments:
                if queue is not None:
                    queue.is_queued = False
            elif queue.ready_ns > self.clock.now:
                self._turns.append(pair)
            else:
                queue.is_queued = False
                return pair
        return None

    def _pause(self) -> int | None:
        """Return when the first queue pair may go on (virtual ns); now if controls have their turn."""
        if self._controls:
            return self.clock.now
        return min((self.queues[pair].ready_ns for pair in self._turns if pair is not None), default=None)

    async def _send_control(self) -> None:
        if not self.network.acks_first:
            self._turns.popleft()
        far, then = self._controls.popleft()
        if self._controls and not self.network.acks_first:
            self._turns.append(None)
        await self.clock.sleep(math.ceil(CONTROL_NBYTES * self.ns_per_byte))
        if not self.network.damages(self.node, far.node, b""):
            self.clock.detach(self._after(self.flight_ns, then), f"control of card {self.node}")

    async def _after(self, ns: int, then: Callable[[], None]) -> None:
        await self.clock.sleep(ns)
        then()

    async def _send_segment(self, pair: QueuePair) -> None:
        queue, links = self.queues[pair], self.network.fabric.links
        write = queue.writes[0]
        at, number = write.next * self.segment, write.next
        nbytes = min(self.segment, write.nbytes - at)
        counted, is_down = nbytes, False
        if links:
            try:
                counted, free_ns = links.passes(Plane.ROCE, self.node, pair.target, nbytes)
                queue.ready_ns = max(queue.ready_ns, free_ns)
            except LinkError:
                is_down = True
        if queue.ready_ns > self.clock.now:
            self._enqueue(pair)
            return
        data = bytes(self.network.fabric.memories[write.src.node].buffer[write.src.offset + at :][:nbytes])
        line_ns = (counted + CONTROL_NBYTES) * self.ns_per_byte
        start = self.clock.now
        queue.ready_ns = start + queue.rate.gap_ns(start, line_ns)
        write.next += 1
        if write.next < write.num_segments:
            self._enqueue(pair)
        await self.clock.sleep(math.ceil(line_ns))
        trace = self.network.fabric.trace
        trace.span(self.node, Plane.ROCE.name, "segment", start, self.clock.now, {"bytes": nbytes})
        trace.move(self.node, pair.target, nbytes, Plane.ROCE.name)
        if is_down or self.network.damages(self.node, pair.target, data):
            self._watch(pair, write)
        else:
            self._fly(pair, write, number, data)

    def _fly(self, pair: QueuePair, write: WriteUnderWay, number: int, data: bytes) -> None:
        """Send a segment on the way to the far card, which receives segments in turn."""
        far, arrival = pair.far, self.clock.now + self.flight_ns
        start = max(arrival, far._received_until)
        far._received_until = start + math.ceil((len(data) + CONTROL_NBYTES) * far.ns_per_byte)
        is_marked = start - arrival > self.network.control.mark_ns
        receive = far._receive(pair, write, number, data, far._received_until, is_marked)
        self.clock.detach(receive, f"segment to card {far.node}")

    # ---- receiving ------------------------------------------------------------------------------------

    async def _receive(
        self, pair: QueuePair, write: WriteUnderWay, number: int, data: bytes, end: int, is_marked: bool
    ) -> None:
        await self.clock.sleep_until(end)
        if write.is_over:
            return
        near = pair.card
        if is_marked and (queue := near.queues.get(pair)) and queue.rate.may_notice(self.clock.now):
            self.network.num_notices += 1
            self.control(near, lambda: queue.rate.notice(self.clock.now))
        if number > write.expected:  # one before it is missing: say so, once
            if not write.has_refused:
                write.has_refused = True
                expected = write.expected
                self._answer(pair, write, lambda: near._go_back(pair, write, expected))
            return
        if number == write.expected:
            self.network.land(write.dst.plus(number * near.segment), data)
            write.expected, write.has_refused = write.expected + 1, False
            if write.expected == write.num_segments:
                pair.complete(write)
        if write.expected == write.num_segments:
            self._answer(pair, write, lambda: near._acknowledged(pair, write))

    def _answer(self, pair: QueuePair, write: WriteUnderWay, then: Callable[[], None]) -> None:
        """Answer the sender. If the answer may be lost, the sender's timer is started."""
        before = self.network.num_lost
        self.control(pair.card, then)
        if self.network.is_lost is not None or self.network.fabric.links or self.network.num_lost > before:
            pair.card._watch(pair, write)

    # ---- what is sent again ---------------------------------------------------------------------------

    def _acknowledged(self, pair: QueuePair, write: WriteUnderWay, is_ok: bool = True) -> None:
        if write.is_over:
            return
        write.is_over = True
        queue = self.queues[pair]
        queue.writes.remove(write)
        pair.acknowledge(write, is_ok)
        if queue.writes:
            self._enqueue(pair)

    def _go_back(self, pair: QueuePair, write: WriteUnderWay, expected: int) -> None:
        """Send again from a segment on; after RETRIES without any progress the write has failed."""
        if write.is_over:
            return
        write.tries = 0 if expected > write.known else write.tries + 1
        write.known = max(write.known, expected)
        if write.tries > RETRIES:
            self._acknowledged(pair, write, is_ok=False)
        else:
            write.next = expected
            self._enqueue(pair)

    def _watch(self, pair: QueuePair, write: WriteUnderWay) -> None:
        """Start the sender's timer for a write. On hardware it runs for all writes; here only writes with a
        lost segment are watched, because the others end in time."""
        self.clock.detach(self._time_out(pair, write, write.tries, write.known), "timer of a write")

    async def _time_out(self, pair: QueuePair, write: WriteUnderWay, tries: int, known: int) -> None:
        await self.clock.sleep(self.retry_ns)
        if not write.is_over and (write.tries, write.known) == (tries, known):
            self._go_back(pair, write, write.known)


async def poll_writes(
    queue: CompletionQueue, count: int, die: int, deadline_ns: int, describe: Callable[[], Waiting]
) -> None:
    """Wait until `count` writes are acknowledged. Raises GlitchError with a link's code if the card gave one
    up."""
    for _ in range(count):
        entry = await queue.poll(deadline_ns, describe)
        if not entry.is_ok:
            raise GlitchError(
                die, "link-error", f"a write to node {entry.peer} was not acknowledged {RETRIES} times"
            )
