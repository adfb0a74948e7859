"""The job executor (JE): makes a job of a request, one task or two, and sends tasks to TEs (DeepServe 3).

Where TEs do both, a job is one task. Where prefill and decode are apart it is two: `pd_transfer.py` numbers
the steps between them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from xdeepserve.comm.distflow import Completion, backend_between
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.job.journey import Journey
from xdeepserve.engine.job.links import Links, PDLink
from xdeepserve.engine.job.pd_transfer import PDTransfer
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.pod import Pod


class JobExecutor:
    """Routes requests between the TEs of one engine.

    `fabric` is what DistFlow's bytes travel on; each of them stands for `kv_weight` bytes. A link that has
    failed is avoided for `retry_ns`.
    """

    def __init__(
        self, pod: Pod, tes: Seq[TE], fabric: str = "ub", kv_weight: float = 1.0, retry_ns: int = 0
    ) -> None:
        self.tes = tes
        self._pod, self._fabric, self._kv_weight, self._retry_ns = pod, fabric, kv_weight, retry_ns
        self._first = [te for te in tes if te.sizes.role != "decode"]
        self._second = [te for te in tes if te.sizes.role == "decode"]
        self._te_of: dict[int, TE] = {}
        self.links = Links()
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
                nodes, others = ([d.index for g in te.groups for d in g.dies] for te in (prefill, decode))
                backend = backend_between(self._pod, nodes, others, self._fabric, self._kv_weight)
                self.links.add(PDLink(self._pod, prefill, decode, backend, self._retry_ns))
            for group in prefill.groups:
                group.scheduler.on_prefilled = partial(self._prefilled, prefill, group)
                group.scheduler.on_released = partial(self._released, prefill)
                group.scheduler.on_withdrawn = self._withdrawn
                group.begin_layers = partial(self._begin_layers, prefill, group)
        for te in self.tes:
            for group in te.groups:
                group.on_completion = self._completed
                for endpoint in group.endpoints:
                    endpoint.on_completion = te.wake

    def abandon(self) -> None:
        """The pod is lost, and so are all requests: end the links, and free what transfers still hold."""
        for link in self.links:
            link.close()
        for te in self.tes:
            for group in te.groups:
                group.scheduler.abandon()
        self._early.clear()
        self._transfers.clear()

    async def stop(self) -> None:
        """End every TE and every link; called when no request is left."""
        for link in self.links:
            link.close()
        for te in self.tes:
            await te.stop()

    def submit(self, seqs: Seq[Sequence]) -> None:
        """Step 1: a new request, the sequences of its choices."""
        self._ask_suspects(self._first)
        te = min(
            self._first,
            key=lambda te: (
                self.links.are_avoided(te),
                te.is_suspect,
                te.num_sequences,
                te.sizes.first_die,
            ),
        )
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
            self._te_of[seq.seq_id] = te
            te.wake()
        else:
            self._send(prefill, group, seq)

    def _send(self, prefill: TE, group: DPGroup, seq: Sequence) -> None:
        """Steps 3 to 5 by request. If no decode TE is left that it has not tried, the request ends."""
        link = self._choose_decode(prefill, seq)
        if link is None:
            error = self.links.error(prefill, seq.seq_id)
            group.scheduler.release(seq.seq_id)
            seq.on_failed(error)
            return
        link.take()
        te = link.tes[1]
        slots = group.scheduler.sending[seq.seq_id].slots[: group.rtc.blocks_for(seq.num_computed)]
        transfer = self._transfers[seq.seq_id] = PDTransfer(seq, group, slots, link)
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

    def _choose_decode(self, prefill: TE, seq: Sequence) -> PDLink | None:
        self._ask_suspects(self._second)
        return self.links.choose(prefill, seq.seq_id)

    def _begin_layers(
        self, prefill: TE, group: DPGroup, seq: Sequence, num_tokens: int
    ) -> Callable[[int], None] | None:
        """Steps 3 to 6 by layer, if a decode TE has room: who is to be told when a layer has ended."""
        link = self._choose_decode(prefill, seq)
        if link is None:
            return None
        te = link.tes[1]
        found = te.te_shell.reserve(seq, num_tokens)
        if found is None:
            return None
        link.take()
        slots = seq.holding.slots[: group.rtc.blocks_for(num_tokens)]
        transfer = self._transfers[seq.seq_id] = PDTransfer(seq, group, slots, link)
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
        self.links.forget(seq_id)
        prefill.wake()

    # ---- transfers that fail ------------------------------------------------------------------------

    def _completed(self, completion: Completion) -> None:
        """One side of a transfer has ended, well or not."""
        transfer = self._transfers.get(completion.tag)
        if transfer is None:
            return
        if completion.error is not None:
            self._failed(transfer, completion.error, completion.is_source)
        elif completion.is_source and not completion.is_revoked:
            transfer.link.recover()

    def _failed(self, transfer: PDTransfer, error: XDeepServeError, at_source: bool) -> None:
        """The link has failed. The source still has the blocks, so the sequence can go by another."""
        seq, group, seq_id = transfer.seq, transfer.source, transfer.seq.seq_id
        prefill, decode = transfer.link.tes
        self.links.fail(transfer.link, seq_id, error)
        has_arrived = not transfer.give_up(at_source)
        if has_arrived or seq.is_finished:
            group.scheduler.release(seq_id)
        elif self._early.pop(seq_id, None) is not None:  # `_prefilled` sends it by request
            del self._transfers[seq_id]
            group.scheduler.stop_early(seq_id)
        else:
            decode.te_shell.forget(seq)
            self._send(prefill, group, seq)
        self._lead_past(transfer.link)
        decode.wake()

    def _lead_past(self, link: PDLink) -> None:
        """Those that wait for room beyond a failed link go elsewhere, if there is a way that is well."""
        prefill, decode = link.tes
        for transfer in list(self._transfers.values()):
            if transfer.link is not link or transfer.seq.seq_id in self._early:
                continue
            other = self.links.choose(prefill, transfer.seq.seq_id)
            if other is None or other.is_avoided or not transfer.recall():
                continue
            decode.te_shell.turn_away(transfer)
            self._send(prefill, transfer.source, transfer.seq)

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence at whatever step it is. Blocks are free on return, or when their transfer ends."""
        self._journey.forget(seq.seq_id)
        te = self._te_of.pop(seq.seq_id, None)
        self.links.forget(seq.seq_id)
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
        self.links.forget(seq.seq_id)
        if te is not None:
            te.te_shell.forget(seq)

    def check_integrity(self) -> None:
        """Every block of every TE is accounted for, those of transfers by their source."""
        for te in self.tes:
            te.check_integrity()
