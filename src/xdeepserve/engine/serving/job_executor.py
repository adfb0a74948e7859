"""The job executor (JE): makes a job of a request, one task or two, and sends tasks to TEs (DeepServe 3).

Where TEs do both, a job is one task. Where prefill and decode are apart it is two: `disagg/pd.py` numbers the
steps between them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from xdeepserve.engine.disagg.pd import PDTransfer
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.serving.te import TE


class JobExecutor:
    """Routes requests between the TEs of one engine."""

    def __init__(self, tes: Seq[TE]) -> None:
        self.tes = tes
        self._first = [te for te in tes if te.sizes.role != "decode"]
        self._second = [te for te in tes if te.sizes.role == "decode"]
        self._te_of: dict[int, TE] = {}
        self._transfers: dict[int, PDTransfer] = {}
        for te in self._first:
            for group in te.groups:
                group.scheduler.on_prefilled = self._prefilled(group)
        for te in self._second:
            for group in te.groups:
                group.scheduler.on_received = self._received

    def submit(self, seqs: Seq[Sequence]) -> None:
        """Step 1: a new request, the sequences of its choices."""
        te = min(self._first, key=lambda te: (te.num_sequences, te.sizes.first_die))
        for seq in seqs:
            self._te_of[seq.seq_id] = te
        te.te_shell.dispatch(seqs)  # step 2
        te.wake()

    def _prefilled(self, group: DPGroup):  # type: ignore[no-untyped-def]
        def prefilled(seq: Sequence) -> None:
            """Steps 3 to 5: register the transfer, choose the decode TE, let its shell choose a group."""
            transfer = PDTransfer(seq, group, seq.holding)
            self._transfers[seq.seq_id] = transfer
            seq.leave_blocks()
            te = min(self._second, key=lambda te: (te.kv_load, te.num_sequences, te.sizes.first_die))
            self._te_of[seq.seq_id] = te
            te.te_shell.receive(transfer)
            te.wake()

        return prefilled

    def _received(self, seq: Sequence) -> None:
        """Step 8: the blocks have arrived, or are not wanted any more."""
        transfer = self._transfers.pop(seq.seq_id, None)
        if transfer is not None:
            transfer.release()
            for te in self._first:
                te.wake()  # there are free blocks

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence at whatever step it is. Blocks are free on return, or when their transfer ends."""
        te = self._te_of.pop(seq.seq_id, None)
        if te is None:
            return
        te.te_shell.remove(seq)
        transfer = self._transfers.get(seq.seq_id)
        if transfer is not None and not any(
            seq in group.scheduler.in_transit.values() for group in te.groups
        ):
            self._received(seq)

    def forget(self, seq: Sequence) -> None:
        """The sequence has finished by itself."""
        te = self._te_of.pop(seq.seq_id, None)
        if te is not None:
            te.te_shell.forget(seq)

    def check_integrity(self) -> None:
        """Every block of every TE is accounted for, those of transfers by their source."""
        for te in self.tes:
            te.check_integrity()
