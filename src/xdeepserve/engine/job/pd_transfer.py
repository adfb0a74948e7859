"""Prefill-decode disaggregation in eight steps (xDeepServe 5.1).

    1  a request arrives at the job executor, which assigns a prefill TE
    2  the prefill TE's shell schedules it onto a DP group
    3  when it is prefilled, its group registers a PD transfer: metadata and block addresses; no byte moves
    4  the job executor sends the request to a decode TE, by load
    5  the decode TE's shell picks a DP group; while all are full, the request waits there
    6  the group checks its free blocks: too few, and the receive waits; else it asks DistFlow to receive
    7  DistFlow pairs the blocks of both sides and moves the bytes
    8  both learn of the end from their completion queues: prefill frees its blocks, decode goes on

That is the transfer by request. By layer (DeepServe 4.4: "either by-req or by-layer") steps 3 to 6 are taken
when the last chunk of the prompt is launched, and step 7 goes on while its layers are computed:

    3  the source registers its blocks in parts: one for each layer, one for what MTP keeps
    4-6  a decode TE, a DP group; it reserves blocks, or has none: then the request goes by request, as above
    7  a layer has ended on all dies of the source's group: its part moves, the whole prompt's
    8  prefill has ended, the last part moves with the first token; one completion for all parts

Back-pressure needs no message of its own: while decode has no blocks, transfers stay registered,
prefilled requests keep their blocks, and a prefill TE without blocks admits nobody.

A transfer that fails concerns its sequence and its link alone (`links.py`). The source keeps the blocks until
step 8, so they go to another decode TE by another link, as they are: by request, even if they were to go by
layer. Where none is left the request ends, and its blocks are free on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.job.links import PDLink
from xdeepserve.hw.memory import Address
from xdeepserve.machine import follow

Stage: TypeAlias = Literal[
    "registered",  # step 3: at a decode TE, which has no group for it yet
    "offered",  # step 5: to a group, which has no room yet
    "moving",  # step 6: the group receives it
    "by layer",  # steps 3 to 6 at once: a group receives layers as they end
    "revoked",  # the request has ended; what moves of it comes to its end
    "recalled",  # nobody is to receive it: its blocks go by another link, or are released
    "released",  # step 8: the source has its blocks back
]
Cause: TypeAlias = Literal["give", "receive", "prefill", "withdraw", "recall", "fail", "release"]
TRANSFERS: dict[tuple[Stage, Cause], Stage] = {
    ("registered", "give"): "offered",
    ("offered", "receive"): "moving",
    ("by layer", "prefill"): "moving",  # what is left of it
    ("by layer", "withdraw"): "revoked",
    # Before step 6 nothing moves, so that it can be taken back.
    ("registered", "recall"): "recalled",
    ("offered", "recall"): "recalled",
    ("offered", "fail"): "recalled",
    ("moving", "fail"): "recalled",
    ("by layer", "fail"): "recalled",
    ("revoked", "fail"): "recalled",
    ("recalled", "release"): "released",
    ("moving", "release"): "released",
    ("revoked", "release"): "released",
}


def prefill_rank(
    decode_dp_rank: int, decode_tp_rank: int, decode_dp: int, decode_tp: int, prefill_tp: int
) -> int:
    """Choose the prefill rank for a decode die to pull from, with equal shares for all (CloudMatrix 4.3.3).

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
    """Transfer of a prefilled sequence from `slots` of the source group, which keeps them until step 8."""

    seq: Sequence
    source: DPGroup
    slots: list[int]
    link: PDLink
    stage: Stage = "registered"
    offered_to: DPGroup | None = None

    def step(self, cause: Cause) -> None:
        """Move to the next stage by a cause. Raises ProtocolError if the cause is impossible at this
        stage."""

        def refusal() -> str:
            return f"PD transfer of sequence {self.seq.seq_id} cannot {cause} while it is {self.stage}"

        self.stage = follow(TRANSFERS, self.stage, cause, refusal)

    def pieces(self, group: DPGroup) -> list[tuple[Address, int]]:
        """List addresses and sizes (bytes) to move, for one die of `group` after the other. Each die pulls
        from its source die, block by block in order of position."""
        return [
            piece
            for rank in self._source_ranks(group)
            for piece in self.source.block_pieces(self.slots, rank)
        ]

    def parts(self, group: DPGroup) -> list[list[tuple[Address, int]]]:
        """List addresses and sizes (bytes) to move, by layer; within a layer as in `pieces`."""
        by_rank = [self.source.layer_pieces(self.slots, rank) for rank in self._source_ranks(group)]
        return [[piece for pieces in part for piece in pieces] for part in zip(*by_rank, strict=True)]

    def _source_ranks(self, group: DPGroup) -> list[int]:
        """Return, for each die of `group`, the source rank from which it pulls."""
        dp, tp, prefill_tp = group.num_groups, len(group.dies), len(self.source.dies)
        return [prefill_rank(group.rank, tp_rank, dp, tp, prefill_tp) for tp_rank in range(tp)]

    def offer(self, group: DPGroup) -> None:
        """Offer the blocks to `group`, which step 5 has chosen. The group receives them when it has room
        (step 6)."""
        self.step("give")
        self.offered_to = group
        source, target, pieces = self.link.ends[self.source], self.link.ends[group], self.pieces(group)
        source.send(self.seq.seq_id, target.name, pieces)
        self._tell_offer(target.name, pieces)
        group.arrive(self.seq, target, source.name)

    def offer_layers(self, group: DPGroup) -> None:
        """Steps 3 to 6 by layer: offer the blocks to `group`, which has reserved room and receives parts as
        they get ready."""
        self.offered_to = group
        source, target, parts = self.link.ends[self.source], self.link.ends[group], self.parts(group)
        source.send_in_parts(self.seq.seq_id, target.name, parts)
        self._tell_offer(target.name, [piece for part in parts for piece in part])
        group.arrive_by_layer(self.seq, target, source.name)

    def _tell_offer(self, target: str, pieces: list[tuple[Address, int]]) -> None:
        nbytes = sum(size for _, size in pieces)
        source = self.source
        source.tell(events.TransferBegan(self.seq.seq_id, source.id, target, is_source=True, nbytes=nbytes))

    def end_layer(self, layer: int) -> None:
        """Step 7 by layer: the prompt's KV up to and including this layer may move."""
        self._ready(layer + 1)

    def end(self) -> None:
        """Step 7, the last part: the sequence has been prefilled."""
        self.step("prefill")
        self._ready(self.source.mem.kv.num_parts)

    def _ready(self, num_parts: int) -> None:
        assert self.offered_to is not None
        target = self.link.ends[self.offered_to]
        self.link.ends[self.source].ready(self.seq.seq_id, target.name, num_parts)

    def revoke(self) -> None:
        """End the transfer of a sequence that ended before its layers; both sides free its blocks when
        nothing moves."""
        self.step("withdraw")
        assert self.offered_to is not None
        self.link.ends[self.source].revoke(self.seq.seq_id, self.link.ends[self.offered_to].name)

    def withdraw(self) -> None:
        """End the transfer of an aborted sequence: free its blocks, now or when their transfer ends."""
        if self.recall():
            self.source.handover.release(self.seq.seq_id)

    def recall(self) -> bool:
        """Take back the offer of blocks. Returns False if they are on their way: then step 8 frees them."""
        if (self.stage, "recall") not in TRANSFERS:
            return False
        self.step("recall")
        if self.offered_to is not None:
            self.offered_to.decline(self.seq)
            self.link.ends[self.source].cancel(self.seq.seq_id, self.link.ends[self.offered_to].name)
        return True

    def give_up(self, failed_at_source: bool) -> bool:
        """End the other side of a transfer after one side failed, and free the blocks at the target.

        Returns False if all bytes have arrived, and only the word of it is missing. Then the failed side has
        not heard, or the sequence runs at the target and the source has not read its completion.
        """
        assert self.offered_to is not None
        tag, source, target = self.seq.seq_id, self.link.ends[self.source], self.link.ends[self.offered_to]
        if not failed_at_source:
            source.abort_send(tag, target.name)
            if not self.offered_to.handover.awaits(self.seq):
                return False
        elif not target.abort_receive(tag, source.name) and not self.offered_to.decline(self.seq):
            return False
        self.step("fail")
        self.offered_to.handover.drop(self.seq)
        return True
