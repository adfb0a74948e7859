"""Prefill-decode disaggregation in eight steps (xDeepServe 5.1).

    1  a request arrives at the job executor, which assigns a prefill TE
    2  the prefill TE's shell schedules it onto a DP group
    3  when it is prefilled, its group registers a PD transfer: metadata and block addresses; no byte moves
    4  the job executor sends the request to a decode TE, by load
    5  the decode TE's shell picks a DP group; while all are full, the request waits there
    6  the group checks its free blocks: too few, and the receive waits; else it asks DistFlow to receive
    7  DistFlow pairs the blocks of both sides and moves the bytes
    8  both learn of the end from their completion queues: prefill frees its blocks, decode goes on

Back-pressure needs no message of its own: while decode has no blocks, transfers stay registered,
prefilled requests keep their blocks, and a prefill TE without blocks admits nobody.

Each pair of a prefill and a decode TE has a DistFlow instance of its own, so that its failures stay its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from xdeepserve.comm.distflow import DistFlow, Endpoint
from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod


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
    link: PDLink
    offered_to: DPGroup | None = None

    def pieces(self, group: DPGroup) -> list[tuple[Address, int]]:
        """Raw addresses and sizes of what must move, for one die of `group` after the other: on the die that
        it is connected with, block by block in order of position.
        """
        num_blocks = self.source.rtc.blocks_for(self.seq.num_computed)
        slots, prefill_tp = self.holding.slots[:num_blocks], len(self.source.dies)
        dp, tp = group.sizes.num_groups, group.sizes.tp
        return [
            piece
            for tp_rank in range(tp)
            for piece in self.source.block_pieces(
                slots, prefill_rank(group.rank, tp_rank, dp, tp, prefill_tp)
            )
        ]

    def offer(self, group: DPGroup) -> None:
        """Step 5 has chosen `group`: offer it the blocks. It receives them when it has room (step 6)."""
        self.offered_to = group
        source, target = self.link.ends[self.source], self.link.ends[group]
        source.send(self.seq.seq_id, target.name, self.pieces(group))
        self.source.note_transfer(self.seq.seq_id)
        group.arrive(self.seq, target, source.name)

    def withdraw(self) -> None:
        """The sequence is not wanted any more: free its blocks, now or when their transfer ends."""
        if self.offered_to is not None:
            if not self.offered_to.decline(self.seq):
                return  # it is being received: step 8 frees the blocks
            self.link.ends[self.source].cancel(self.seq.seq_id, self.link.ends[self.offered_to].name)
        self.source.scheduler.release(self.seq.seq_id)


class PDLink:
    """The DistFlow instance of one prefill and one decode TE: an endpoint for each of their DP groups."""

    def __init__(self, pod: Pod, teams: Mapping[str, Seq[DPGroup]], backend: str) -> None:
        self.flow = DistFlow(pod, backend)
        groups = {f"{name}/dp{group.rank}": group for name, team in teams.items() for group in team}
        nodes = {name: [die.index for die in group.dies] for name, group in groups.items()}
        endpoints = self.flow.link_cluster(nodes)
        self.ends: dict[DPGroup, Endpoint] = dict(zip(groups.values(), endpoints, strict=True))
        for group, endpoint in self.ends.items():
            group.endpoints.append(endpoint)

    def close(self) -> None:
        self.flow.close()
