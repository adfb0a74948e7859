"""The job executor (JE): makes a job of a request, one task or two, and sends tasks to TEs (DeepServe 3).

Where TEs do both, a job is one task. Where prefill and decode are apart it is two: `disagg/pd.py` numbers the
steps between them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

from xdeepserve.engine.disagg.pd import PDLink, PDTransfer
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.serving.te import TE
from xdeepserve.hw.pod import Pod


class JobExecutor:
    """Routes requests between the TEs of one engine. `fabric` is what DistFlow's bytes travel on."""

    def __init__(self, pod: Pod, tes: Seq[TE], fabric: str = "ub") -> None:
        self.tes = tes
        self._pod, self._fabric = pod, fabric
        self._first = [te for te in tes if te.sizes.role != "decode"]
        self._second = [te for te in tes if te.sizes.role == "decode"]
        self._te_of: dict[int, TE] = {}
        self._links: dict[tuple[TE, TE], PDLink] = {}
        self._transfers: dict[int, PDTransfer] = {}

    def start(self) -> None:
        """Start the TEs, and link each prefill TE with each decode TE."""
        for te in self.tes:
            te.start()
        if not self._second:
            return
        for prefill in self._first:
            for decode in self._second:
                teams = {te.sizes.name: te.groups for te in (prefill, decode)}
                self._links[prefill, decode] = PDLink(self._pod, teams, self._fabric)
            for group in prefill.groups:
                group.scheduler.on_prefilled = partial(self._prefilled, prefill, group)
                group.scheduler.on_released = partial(self._released, prefill)
        for te in self.tes:
            for group in te.groups:
                for endpoint in group.endpoints:
                    endpoint.on_completion = te.wake

    async def stop(self) -> None:
        """End every TE and every link; called when no request is left."""
        for link in self._links.values():
            link.close()
        for te in self.tes:
            await te.stop()

    def submit(self, seqs: Seq[Sequence]) -> None:
        """Step 1: a new request, the sequences of its choices."""
        te = min(self._first, key=lambda te: (te.is_suspect, te.num_sequences, te.sizes.first_die))
        for seq in seqs:
            self._te_of[seq.seq_id] = te
        te.te_shell.dispatch(seqs)  # step 2
        te.wake()

    def _prefilled(self, prefill: TE, group: DPGroup, seq: Sequence) -> None:
        """Steps 3 to 5: register the transfer, choose the decode TE, let its shell choose a group."""
        te = min(
            self._second,
            key=lambda te: (te.is_suspect, te.kv_load, te.num_sequences, te.sizes.first_die),
        )
        transfer = PDTransfer(seq, group, seq.holding, self._links[prefill, te])
        self._transfers[seq.seq_id] = transfer
        seq.leave_blocks()
        self._te_of[seq.seq_id] = te
        te.te_shell.receive(transfer)
        te.wake()

    def _released(self, prefill: TE, seq_id: int) -> None:
        """Step 8 on the prefill side: there are free blocks."""
        self._transfers.pop(seq_id, None)
        prefill.wake()

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence at whatever step it is. Blocks are free on return, or when their transfer ends."""
        te = self._te_of.pop(seq.seq_id, None)
        if te is None:
            return
        te.te_shell.remove(seq)
        transfer = self._transfers.get(seq.seq_id)
        if transfer is not None:
            transfer.withdraw()

    def forget(self, seq: Sequence) -> None:
        """The sequence has finished by itself."""
        te = self._te_of.pop(seq.seq_id, None)
        if te is not None:
            te.te_shell.forget(seq)

    def check_integrity(self) -> None:
        """Every block of every TE is accounted for, those of transfers by their source."""
        for te in self.tes:
            te.check_integrity()
