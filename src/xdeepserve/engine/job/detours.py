"""PD transfers that fail: other ways for their sequences, and what is to be known of links for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdeepserve.comm.distflow import Completion
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.job.links import PDLink
from xdeepserve.engine.job.pd_transfer import PDTransfer
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import XDeepServeError

if TYPE_CHECKING:
    from xdeepserve.engine.job.executor import JobExecutor


class Detours:
    """Of the transfers of a job executor."""

    def __init__(self, je: JobExecutor) -> None:
        self._je = je

    def completed(self, transfer: PDTransfer, completion: Completion) -> None:
        """One side of a transfer has ended, well or not."""
        if completion.error is not None:
            self.failed(transfer, completion.error, completion.is_source)
        elif completion.is_source and not completion.is_revoked:
            transfer.link.recover()

    def failed(self, transfer: PDTransfer, error: XDeepServeError, at_source: bool) -> None:
        """The link has failed. The source still has the blocks, so the sequence can go by another."""
        seq, group, seq_id = transfer.seq, transfer.source, transfer.seq.seq_id
        prefill, decode = transfer.link.tes
        self._je.links.fail(transfer.link, seq_id, error)
        stage = transfer.stage
        has_arrived = not transfer.give_up(at_source)
        if has_arrived or seq.is_finished:
            group.handover.release(seq_id)
        elif stage == "by layer":  # `_prefilled` sends it by request
            del self._je.transfers[seq_id]
            group.handover.stop_early(seq_id)
        else:
            decode.te_shell.forget(seq)
            self._je.send(seq, group, prefill)
        self.lead_past(transfer.link)
        decode.wake()

    def take_back(self, transfer: PDTransfer) -> None:
        """A sequence that still runs has lost its blocks while they left by layer: they leave anew."""
        seq_id, source = transfer.seq.seq_id, transfer.source
        assert transfer.offered_to is not None
        transfer.link.ends[source].abort_send(seq_id, transfer.link.ends[transfer.offered_to].name)
        transfer.give_up(failed_at_source=True)
        del self._je.transfers[seq_id]
        source.handover.stop_early(seq_id)
        transfer.link.tes[1].wake()

    def lose_target(self, transfer: PDTransfer, error: XDeepServeError) -> None:
        """The decode TE is lost. The source still has the blocks, if they had not left it."""
        if transfer.stage in ("moving", "by layer", "revoked"):
            self.failed(transfer, error, at_source=False)
        elif transfer.recall():
            transfer.link.tes[1].te_shell.turn_away(transfer.seq)
            self._je.send(transfer.seq, transfer.source, transfer.link.tes[0])

    def lose_source(self, transfer: PDTransfer) -> None:
        """The prefill TE is lost, and the blocks with it unless they have arrived."""
        seq, (prefill, decode) = transfer.seq, transfer.link.tes
        stage = transfer.stage
        if stage in ("registered", "offered"):
            transfer.recall()
            decode.te_shell.turn_away(seq)
        elif stage == "released" or not transfer.give_up(failed_at_source=True):
            # All bytes have come; whether anybody has looked or not, nobody looks into this link any more.
            if transfer.offered_to is not None:
                transfer.offered_to.take_arrived(seq)
            return
        del self._je.transfers[seq.seq_id]
        if stage != "by layer" and not seq.is_finished:  # else it is still running there, and moves out
            decode.te_shell.forget(seq)
            seq.leave_group()
            self._je.give([seq], self._je.tes.successors(prefill))
        decode.wake()  # it may have waited for this one before it leaves

    def lead_past(self, link: PDLink, is_shut: bool = False) -> None:
        """Sequences that wait for room beyond a link that has failed, or leads to a TE that leaves, go
        elsewhere: if there is a way that is well, or in any case if nobody gets through any more.
        """
        prefill, decode = link.tes
        for transfer in list(self._je.transfers.values()):
            if transfer.link is not link or transfer.stage == "by layer":
                continue
            other = self._je.links.choose(prefill, transfer.seq.seq_id)
            if (other is None or other.is_avoided) and not is_shut:
                continue
            if not transfer.recall():
                continue
            decode.te_shell.turn_away(transfer.seq)
            self._je.send(transfer.seq, transfer.source, prefill)

    async def find_way(self, seq: Sequence, group: DPGroup, prefill: TE) -> None:
        """A sequence has tried all links. It may try those once more that a dummy payload comes through; that
        shows, too, if a TE beyond one is lost. Without any, a TE that does both begins anew, or one that is
        to come; else the request ends.
        """
        je, seq_id = self._je, seq.seq_id
        for link in [link for link in je.links if link.tes[0] is prefill]:
            if link in je.links and await link.probe(group) in ("well", "delayed"):
                je.links.try_again(link, seq_id)
        if seq.is_finished:
            group.handover.release(seq_id)
        elif prefill not in je.tes:  # lost meanwhile, and its blocks with it
            seq.leave_group()
            je.give([seq], je.tes.successors(prefill))
        elif je.links.choose(prefill, seq_id) is not None:
            je.send(seq, group, prefill)
        else:
            error = je.links.error(prefill, seq_id)
            group.handover.release(seq_id)
            if je.tes.ready("both") or je.homeless.is_open:
                seq.leave_group()
                je.give([seq], je.tes.ready("both"))
            else:
                seq.on_failed(error)
