"""M2N's sender: sends a registered tensor to N receivers, in six steps (MegaScale-Infer 5, Figure 6).

1. wait for the event that says that earlier kernels are done; 2. the tensor is ready; 3. block the stream; 4.
a CPU thread posts a write with immediate for each receiver; 5. it polls the completion queue until all are
acknowledged, so that the tensor may be used again; 6. it unblocks the stream. No byte is copied to the CPU,
no group is set up, and the device is not asked to synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.comm.exchange.rows import Int64, Rows
from xdeepserve.comm.handle import Handle
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Region
from xdeepserve.hw.rdma import CompletionQueue, QueuePair, poll_writes
from xdeepserve.m2n.layout import STREAM_WORD, M2NLayout, immediate


class StreamWord:
    """A word of a die's own memory: a blocked stream continues when a CPU has written its event there."""

    def __init__(self, die: Die, layout: M2NLayout, number: int) -> None:
        self.die, self.number = die, number
        self._region = die.memory.metadata.regions[layout.region("stream")]

    async def block(self) -> None:
        """Block the stream from running further kernels."""
        await self.die.clock.sleep(_ns(self.die, "stream_flag"))

    async def unblock(self, event_id: int) -> None:
        """Unblock the stream: a CPU writes the event, and the stream reads it."""
        at = self._region.offset + self.number * STREAM_WORD
        self.die.memory.write(at, event_id.to_bytes(STREAM_WORD, "little"))
        await self.die.clock.sleep(_ns(self.die, "stream_flag"))


class RegisteredSend:
    """Sender of rows of a registered region, with a queue pair to each receiver.

    `pairs[i]` leads to receiver i, where this sender's block begins at `offsets[i]` of the memory. All
    completions come to `queue`. Each sender starts with another receiver (`first`), so that they do not all
    begin with the same.
    """

    def __init__(
        self,
        handle: Handle,
        region: Region,
        pairs: Sequence[QueuePair],
        offsets: Sequence[int],
        queue: CompletionQueue,
        stream: StreamWord,
        first: int,
    ) -> None:
        self.handle, self.region, self.pairs, self.offsets = handle, region, pairs, offsets
        self.queue, self.stream = queue, stream
        self._order = [(first + i) % len(pairs) for i in range(len(pairs))]

    def reset(self) -> None:
        """Drop all writes under way."""
        for pair in self.pairs:
            pair.reset()
        self.queue.entries.clear()

    async def send(self, op: str, event_id: int, rows: Rows, counts: Int64) -> None:
        """Send rows, uint8 [sum(counts), row], grouped by receivers; receivers of no rows get a write, too.

        Returns when all writes have been acknowledged. Raises DeadlineError, or GlitchError if a card has
        given up.
        """
        handle, die = self.handle, self.handle.die
        clock, steps = die.clock, handle.steps
        steps.begin()
        # Steps 1 and 2: kernels before have ended, and have left the rows in the registered tensor.
        die.memory.view(self.region, np.uint8, rows.shape)[:] = rows
        await handle.work(f"{op} 2 tensor ready", lambda: None, 0, 2 * rows.nbytes)
        await steps.passed(f"{op} send", 2)
        await self.stream.block()
        await steps.passed(f"{op} send", 3)
        row_nbytes, starts = rows.shape[1], np.cumsum(counts) - counts
        for i in self._order:
            await clock.sleep(_ns(die, "rdma_post"))
            src = self.region.address.plus(int(starts[i]) * row_nbytes)
            dst = self.pairs[i].at(self.offsets[i])
            count = int(counts[i])
            self.pairs[i].write(src, dst, count * row_nbytes, immediate(event_id, count))
        await steps.passed(f"{op} send", 4)
        deadline_ns = clock.now + handle.means.timeout_ns
        await poll_writes(
            self.queue, len(self.pairs), die.index, deadline_ns, lambda: self._waiting(op, event_id)
        )
        await steps.passed(f"{op} send", 5)
        await self.stream.unblock(event_id)
        await steps.passed(f"{op} send", 6)

    def _waiting(self, op: str, event_id: int) -> Waiting:
        late = [pair.target for pair in self.pairs if pair.is_busy]
        return Waiting(f"{op} send", self.handle.turns.rank, late, "acknowledgement", event_id, "none")


def _ns(die: Die, name: str) -> int:
    """Return a fixed cost of the spec's table in whole ns."""
    return round(1e9 * getattr(die.spec, name).value)
