"""M2N's receiver: blocks written to by M senders, in six steps (MegaScale-Infer 5, Figure 7).

1. wait for an event, by which 2. the registered tensor is no longer in use; 3. block the stream; 4. a CPU
thread polls the completion queue until each sender's write has come; 5. it flushes (GDRCopy), because only
then are a card's writes certain to be in device memory; 6. it unblocks the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.comm.arrivals import Arrivals
from xdeepserve.comm.exchange.rows import Int64, Rows
from xdeepserve.comm.handle import Handle
from xdeepserve.errors import FieldError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.memory import Region
from xdeepserve.hw.rdma import CompletionQueue, QueueEntry, RDMANetwork
from xdeepserve.m2n.layout import LOW, told
from xdeepserve.m2n.registered_send import StreamWord


class RegisteredReceive:
    """Receiver of a registered region with an equal block for each of `senders`, a list of dies."""

    def __init__(
        self,
        handle: Handle,
        network: RDMANetwork,
        region: Region,
        senders: Sequence[int],
        names: Sequence[str],
        queue: CompletionQueue,
        stream: StreamWord,
    ) -> None:
        self.handle, self.network, self.region = handle, network, region
        self.senders, self.names, self.queue, self.stream = list(senders), names, queue, stream
        self.block_nbytes = region.nbytes // len(self.senders)
        self._forgotten = 0  # what comes of events up to this is of an exchange that was given up

    def reset(self, event_id: int) -> None:
        """Drop writes of all events up to this one, because their exchange was given up."""
        self._forgotten = event_id
        self.queue.entries.clear()

    async def receive(self, op: str, event_id: int, row_nbytes: int) -> tuple[Rows, Int64]:
        """Receive the rows of all senders, uint8 [N, row] in the senders' order, and the number of rows of
        each.

        Raises DeadlineError with the names of late senders, ProtocolError for another event, and FieldError
        for more rows than a block has.
        """
        handle, die = self.handle, self.handle.die
        steps = handle.steps
        steps.begin()
        await self.stream.block()
        await steps.passed(f"{op} receive", 3)
        counts = await self._poll(op, event_id, row_nbytes)
        await steps.passed(f"{op} receive", 4)
        await die.clock.sleep(round(1e9 * die.spec.pcie_flush.value))
        self.network.flush(die.index)
        await steps.passed(f"{op} receive", 5)
        await self.stream.unblock(event_id)
        await steps.passed(f"{op} receive", 6)
        blocks = die.memory.view(self.region, np.uint8, (len(self.senders), self.block_nbytes))
        rows = [
            block[: count * row_nbytes].reshape(count, row_nbytes)
            for block, count in zip(blocks, counts.tolist(), strict=True)
        ]
        return np.concatenate(rows), counts

    async def _poll(self, op: str, event_id: int, row_nbytes: int) -> Int64:
        handle, num_senders = self.handle, len(self.senders)
        arrivals = Arrivals(f"{op} receive", handle.turns.rank, num_senders, event_id & LOW, names=self.names)
        counts = np.zeros(num_senders, np.int64)
        deadline_ns = handle.die.clock.now + handle.means.timeout_ns

        def describe() -> Waiting:
            late = [self.names[peer] for peer in arrivals.awaited]
            expected = f"event {event_id} of {num_senders}"
            seen = f"{num_senders - arrivals.num_awaited} completions"
            return Waiting(f"{op} receive", handle.turns.rank, late, "completion", expected, seen)

        while not arrivals.is_complete:
            entry = await self.queue.poll(deadline_ns, describe)
            event, count = told(entry.immediate or 0)
            if self._is_forgotten(event, event_id):
                continue
            peer = self.senders.index(entry.peer)
            arrivals.look(peer, event)
            self._check(op, entry, peer, count, row_nbytes)
            counts[peer] = count
        return counts

    def _is_forgotten(self, event: int, expected: int) -> bool:
        """Whether an immediate's 16 bits name an event before the last reset, not the expected event."""
        behind = (expected - event) & LOW
        return 0 < behind <= LOW // 2 and expected - behind <= self._forgotten

    def _check(self, op: str, entry: QueueEntry, peer: int, count: int, row_nbytes: int) -> None:
        if count * row_nbytes != entry.nbytes or entry.nbytes > self.block_nbytes:
            most = self.block_nbytes // row_nbytes
            raise FieldError(
                f"{op} receive: {self.names[peer]} tells of {count} rows and has written {entry.nbytes} B; "
                f"rows have {row_nbytes}, and its block holds {most}",
                op=op,
                rank=self.handle.turns.rank,
                peer=self.names[peer],
                field="immediate",
                expected=f"{entry.nbytes // row_nbytes} rows",
                seen=count,
            )
