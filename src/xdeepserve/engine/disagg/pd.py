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


def prefill_rank(
    decode_dp_rank: int, decode_tp_rank: int, decode_dp: int, decode_tp: int, prefill_tp: int
) -> int:
    """The prefill rank that a decode die pulls from (CloudMatrix 4.3.3): equally many for each.

    All ranks of a prefill group hold all latents, so any could serve. In the paper's terms

        ratio = prefill_tp / decode_tp         group_size = decode_dp / ratio
        group_id = floor(decode_dp_rank / group_size)
        prefill_rank = group_id * decode_tp + decode_tp_rank

    which is computed here in integers, so that decode_dp need not be a multiple of the ratio. Where the ranks
    of a decode group are more than those of a prefill group, which the paper does not do, they take turns.
    """
    group_id = decode_dp_rank * prefill_tp // (decode_tp * decode_dp)
    return (group_id * decode_tp + decode_tp_rank) % prefill_tp


@dataclass(eq=False)
class PDTransfer:
    """A prefilled sequence on its way. The source group keeps `holding` until step 8."""

    seq: Sequence
    source: DPGroup
    holding: Holding

    def sources(self, decode_dp_rank: int, decode_dp: int, decode_tp: int) -> list[list[tuple[Address, int]]]:
        """What each die of the decode group pulls, from the die that `prefill_rank` connects it with."""
        prefill_tp = len(self.source.mems)
        ranks = [
            prefill_rank(decode_dp_rank, rank, decode_dp, decode_tp, prefill_tp) for rank in range(decode_tp)
        ]
        return [self.pieces(rank) for rank in ranks]

    def pieces(self, rank: int) -> list[tuple[Address, int]]:
        """Raw addresses and sizes of what must move, block by block in order of position, on one die."""
        num_blocks = self.source.rtc.blocks_for(self.seq.num_computed)
        return [
            piece
            for slot in self.holding.slots[:num_blocks]
            for piece in self.source.mems[rank].block_pieces("hbm", slot)
        ]

    def release(self) -> None:
        """Step 8 on the prefill side, also of a transfer that will not happen. Harmless when repeated."""
        self.source.scheduler.release(self.seq)
