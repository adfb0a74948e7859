"""The job executor (JE): makes a job of a request, one task or two, and sends tasks to TEs (DeepServe 3).

Where TEs do both, a job is one task. Where prefill and decode are apart it is two: `disagg/pd.py` numbers the
steps between them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from xdeepserve.comm.distflow import BACKENDS
from xdeepserve.engine.disagg.pd import PDLink, PDTransfer
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.serving.journey import Journey
from xdeepserve.engine.serving.te import TE
from xdeepserve.hw.pod import Pod


class JobExecutor:
    """Routes requests between the TEs of one engine.

    `fabric` is what DistFlow's bytes travel on; each of them stands for `kv_weight` bytes.
    """

    def __init__(self, pod: Pod, tes: Seq[TE], fabric: str = "ub", kv_weight: float = 1.0) -> None:
        self.tes = tes
        self._pod, self._fabric, self._kv_weight = pod, fabric, kv_weight
        self._first = [te for te in tes if te.sizes.role != "decode"]
        self._second = [te for te in tes if te.sizes.role == "decode"]
        self._te_of: dict[int, TE] = {}
        self._links: dict[tuple[TE, TE], PDLink] = {}
        self._transfers: dict[int, PDTransfer] = {}
        self._journey = Journey(pod, [te.sizes.name for te in tes])
        for te in tes:
            te.te_shell.on_given = partial(self._given, te)
            for group in te.groups:
                group.journey = self._journey
        self._early: dict[int, TE] = {}  # where those decode whose layers move while they are being prefilled

    def start(self) -> None:
        """Start the TEs, and link each prefill TE with each decode TE."""
        for te in self.tes:
            te.start()
        if not self._second:
            return
        for prefill in self._first:
            for decode in self._second:
                teams = {te.sizes.name: te.groups for te in (prefill, decode)}
                backend = BACKENDS[self._fabric](self._pod, self._kv_weight)
                self._links[prefill, decode] = PDLink(self._pod, teams, backend)
            for group in prefill.groups:
                group.scheduler.on_prefilled = partial(self._prefilled, prefill, group)
                group.scheduler.on_released = partial(self._released, prefill)
                group.scheduler.on_withdrawn = self._withdrawn
                group.begin_layers = partial(self._begin_layers, prefill, group)
        for te in self.tes:
            for group in te.groups:
                for endpoint in group.endpoints:
                    endpoint.on_completion = te.wake

    def abandon(self) -> None:
        """The pod is lost, and so are all requests: end the links, and free what transfers still hold."""
        for link in self._links.values():
            link.close()
        for te in self.tes:
            for group in te.groups:
                group.scheduler.abandon()
        self._early.clear()
        self._transfers.clear()

    async def stop(self) -> None:
        """End every TE and every link; called when no request is left."""
        for link in self._links.values():
            link.close()
        for te in self.tes:
            await te.stop()

    def submit(self, seqs: Seq[Sequence]) -> None:
        """Step 1: a new request, the sequences of its choices."""
        self._ask_suspects(self._first)
        te = min(self._first, key=lambda te: (te.is_suspect, te.num_sequences, te.sizes.first_die))
        for seq in seqs:
            self._te_of[seq.seq_id] = te
            self._journey.at_job_executor(1, seq.seq_id, te.sizes.name)
        te.te_shell.dispatch(seqs)  # step 2
        te.wake()

    def _given(self, te: TE, seq: Sequence, group: DPGroup) -> None:
        """A TE-shell has given a sequence to a DP group."""
        step = 5 if te.sizes.role == "decode" else 2
        self._journey.at_shell(step, seq.seq_id, te.sizes.name, group.rank)

    def _prefilled(self, prefill: TE, group: DPGroup, seq: Sequence) -> None:
        """Steps 3 to 5: register the transfer, choose the decode TE, let its shell choose a group.

        By layer all that has been done before, and step 7 comes to its end.
        """
        prefill.te_shell.forget(seq)
        if seq.seq_id in self._early:
            te = self._early.pop(seq.seq_id)
            transfer = self._transfers[seq.seq_id]
            transfer.end()
            assert transfer.offered_to is not None
            te.te_shell.take_over(seq, transfer.offered_to)
        else:
            te = self._choose_decode()
            slots = group.scheduler.sending[seq.seq_id].slots[: group.rtc.blocks_for(seq.num_computed)]
            transfer = self._transfers[seq.seq_id] = PDTransfer(seq, group, slots, self._links[prefill, te])
            self._journey.at_group(3, seq.seq_id, group.dies[0].index)
            self._journey.at_job_executor(4, seq.seq_id, te.sizes.name)
            te.te_shell.receive(transfer)
        self._te_of[seq.seq_id] = te
        te.wake()

    @staticmethod
    def _ask_suspects(tes: Seq[TE]) -> None:
        """TEs that get no work are not heard of by themselves."""
        for te in tes:
            if te.is_suspect:
                te.prober.ask_again()

    def _choose_decode(self) -> TE:
        self._ask_suspects(self._second)
        return min(
            self._second,
            key=lambda te: (te.is_suspect, te.kv_load, te.num_sequences, te.sizes.first_die),
        )

    def _begin_layers(
        self, prefill: TE, group: DPGroup, seq: Sequence, num_tokens: int
    ) -> Callable[[int], None] | None:
        """Steps 3 to 6 by layer, if a decode TE has room: who is to be told when a layer has ended."""
        te = self._choose_decode()
        found = te.te_shell.reserve(seq, num_tokens)
        if found is None:
            return None
        slots = seq.holding.slots[: group.rtc.blocks_for(num_tokens)]
        transfer = self._transfers[seq.seq_id] = PDTransfer(seq, group, slots, self._links[prefill, te])
        self._early[seq.seq_id] = te
        self._journey.at_group(3, seq.seq_id, group.dies[0].index)
        self._journey.at_job_executor(4, seq.seq_id, te.sizes.name)
        self._given(te, seq, found[0])
        transfer.offer_layers(*found)
        return transfer.end_layer

    def _withdrawn(self, seq_id: int) -> None:
        """A sequence has ended while its layers were on their way."""
        del self._early[seq_id]
        self._transfers[seq_id].revoke()

    def _released(self, prefill: TE, seq_id: int) -> None:
        """Step 8 on the prefill side: there are free blocks."""
        self._transfers.pop(seq_id, None)
        prefill.wake()

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence at whatever step it is. Blocks are free on return, or when their transfer ends."""
        self._journey.forget(seq.seq_id)
        te = self._te_of.pop(seq.seq_id, None)
        if te is None:
            return
        is_early = seq.seq_id in self._early  # if so, its group revokes what has been offered
        te.te_shell.remove(seq)
        transfer = self._transfers.get(seq.seq_id)
        if transfer is not None and not is_early:
            transfer.withdraw()

    def forget(self, seq: Sequence) -> None:
        """The sequence has finished by itself."""
        self._journey.forget(seq.seq_id)
        te = self._te_of.pop(seq.seq_id, None)
        if te is not None:
            te.te_shell.forget(seq)

    def check_integrity(self) -> None:
        """Every block of every TE is accounted for, those of transfers by their source."""
        for te in self.tes:
            te.check_integrity()
