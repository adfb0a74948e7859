"""Prefill-decode disaggregation in eight steps (xDeepServe 5.1).

    1  a request arrives at the job executor, which assigns a prefill TE
    2  the prefill TE's shell schedules it onto a DP group
    3  when it is prefilled, its group registers a PD transfer: metadata and block addresses; no byte moves
    4  the job executor sends the request to a decode TE, by load
    5  the decode TE's shell picks a DP group
    6  the group checks its free blocks: too few, and the receive waits; else it asks DistFlow to receive
    7  DistFlow pairs the blocks of both sides and moves the bytes
    8  both learn of the end from their completion queues: prefill frees its blocks, decode goes on

Back-pressure needs no message of its own: while decode has no blocks, transfers stay registered, prefilled
requests keep their blocks, and a prefill TE without blocks admits nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.rtc import Holding
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.hw.memory import Address


@dataclass(eq=False)
class PDTransfer:
    """A prefilled sequence on its way. The source group keeps `holding` until step 8."""

    seq: Sequence
    source: DPGroup
    holding: Holding

    def pieces(self) -> list[tuple[Address, int]]:
        """Raw addresses and sizes of what must move, block by block in order of position."""
        num_blocks = self.source.rtc.blocks_for(self.seq.num_computed)
        return [
            piece
            for slot in self.holding.slots[:num_blocks]
            for piece in self.source.mem.block_pieces("hbm", slot)
        ]

    def release(self) -> None:
        """Step 8 on the prefill side, also of a transfer that will not happen. Harmless when repeated."""
        self.source.scheduler.release(self.seq)
