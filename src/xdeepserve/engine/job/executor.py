"""The job executor (JE) makes a job of each request, in one task or two, and sends tasks to TEs (DeepServe
3).

Where TEs do both, a job is one task. Where prefill and decode are apart it is two: `pd_transfer.py` numbers
the steps between them. `Roster` says which of the TEs may begin a request or go on with one, `Unplaced` keeps
the requests that none of them can serve yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from xdeepserve.comm.distflow import Completion
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import Event, EventLog, GroupId, Observed
from xdeepserve.engine.dp.group import DPGroup, Left, TransferEnded
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.job.admission import AdmissionControl
from xdeepserve.engine.job.journey import Journey
from xdeepserve.engine.job.links import Carriage, Links, PDLink, load_at
from xdeepserve.engine.job.pd_transfer import PDTransfer
from xdeepserve.engine.job.peer_prefixes import Peers
from xdeepserve.engine.job.router import Router
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.clock import Hears
from xdeepserve.hw.pod import Pod


class Roster(list[TE]):
    """The TEs that a job executor gives requests to, in the order in which they came."""

    def ready(self, *roles: Role) -> list[TE]:
        """List TEs of given roles that take new work."""
        return [te for te in self if te.life == "ready" and te.sizes.place.role in roles]

    @property
    def beginners(self) -> list[TE]:
        """List TEs for new requests; prefill TEs only if a decode TE takes new work."""
        return self.ready("both", "prefill") if self.ready("decode") else self.ready("both")

    def successors(self, role: Role, but: TE | None = None) -> list[TE]:
        """List TEs other than `but` able to continue sequences from a TE of this role, from their tokens:
        its own role first, else any that can begin."""
        able = [te for te in [*self.beginners, *self.ready("decode")] if te is not but]
        alike = [te for te in able if te.sizes.place.role == role]
        return alike or [te for te in able if te.sizes.place.role != "decode"]


def can_serve(tes: Iterable[TE | TEPlan]) -> bool:
    """Whether the given TEs could together serve a request."""
    roles = {te.sizes.place.role for te in tes}
    return "both" in roles or roles >= {"prefill", "decode"}


def ask_suspects(tes: Iterable[TE]) -> None:
    """Probe suspect TEs, because TEs without work show no sign of life by themselves."""
    for te in tes:
        if te.is_suspect:
            te.health.probe_again()


class Unplaced:
    """Requests, in order, that no TE can serve while another may come.

    One may while it `is_awaited`, in the place of a lost one, and where TEs come as load does, which
    `is_elastic`. With each request is the role of the TE that it comes from, or None.
    """

    def __init__(self) -> None:
        self.is_awaited = self.is_elastic = False
        self.on_take: list[Callable[[], None]] = []
        self._requests: list[tuple[list[Sequence], Role | None]] = []

    def take(self, seqs: Seq[Sequence], role: Role | None) -> None:
        """Queue the choices of a request, or its remaining ones."""
        self._requests.append((list(seqs), role))
        for tell in self.on_take:
            tell()

    @property
    def is_open(self) -> bool:
        """Whether a TE may come that could serve the requests."""
        return self.is_awaited or self.is_elastic

    def let_go(self) -> list[tuple[list[Sequence], Role | None]]:
        """Empty the queue and return the requests that waited."""
        requests, self._requests = self._requests, []
        return requests

    def leave(self, seq: Sequence) -> None:
        """Remove an ended or aborted sequence from the queue."""
        for seqs, _ in self._requests:
            if seq in seqs:
                seqs.remove(seq)
                seq.is_finished = True
        self._requests = [each for each in self._requests if each[0]]

    def __len__(self) -> int:
        return sum(len(seqs) for seqs, _ in self._requests)


class Job(NamedTuple):
    """An unfinished sequence, and the TE that has its task now."""

    seq: Sequence
    te: TE


class JobExecutor:
    """Routes requests between the TEs of one engine, which come and go.

    `carriage` is what KV goes by from one to another. A link that has failed is avoided for `retry_ns`.
    `hears` is told of an error in one of the executor's own processes. `peers` has the TEs read prefixes from
    each other.
    """

    def __init__(
        self,
        pod: Pod,
        tell: EventLog,
        carriage: Carriage,
        router: Router,
        retry_ns: int = 0,
        admission: str = "prefill",
        hears: Hears | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._hears, self.peers = hears, peers
        self.tes = Roster()
        self.tell = tell
        self.pod, self.carriage, self.router, self._retry_ns = pod, carriage, router, retry_ns
        self.links = Links()
        self._jobs: dict[int, Job] = {}  # by seq_id
        self.transfers: dict[int, PDTransfer] = {}  # by seq_id, until the source has its blocks back
        self.unplaced = Unplaced()
        self.admission = AdmissionControl(pod.clock, tell, self._dispatch, self._decode_tes, admission, hears)
        tell.act = self._act
        self._journey = Journey(pod) if pod.trace.is_on else None
        if self._journey is not None:
            tell.observers.insert(0, self._journey.see)

    def take(self, te: TE) -> None:
        """Take in a running TE: link it with the TEs that it prefills or decodes for, and give it work."""
        te.te_shell.on_turn, te.lifetime.is_open = self.admission.look, True
        if self._journey is not None:
            self._journey.join(te, is_alone=len(self.tes) == 1)
        self.admission.look()
        self.router.join(te)
        if self.peers is not None:
            self.peers.join(te)
        pair = {"prefill", "decode"}
        for other in [each for each in self.tes if each.is_running]:
            if {te.sizes.place.role, other.sizes.place.role} != pair:
                continue
            prefill, decode = (te, other) if te.sizes.place.role == "prefill" else (other, te)
            self.links.add(PDLink(self.pod, prefill, decode, self.carriage, self._retry_ns))
        self.place_waiting()

    def probe_links(self, period_ns: int) -> None:
        """Have all links probed beside their traffic, each `period_ns` of virtual time from now on."""
        self.pod.clock.at(self.pod.clock.now + period_ns, partial(self._probe_links, period_ns), self._hears)

    async def _probe_links(self, period_ns: int) -> None:
        if not any(te.is_running for te in self.tes):
            return
        self.probe_links(period_ns)
        for link in list(self.links):
            if link in self.links:  # its TEs may have gone meanwhile
                await link.look(2 * period_ns)

    def place_waiting(self) -> None:
        """Assign sequences waiting for a TE. Without a TE they keep waiting, or fail."""
        for seqs, role in self.unplaced.let_go():
            if role is None:
                self.admission.admit(seqs)
            else:
                self.give(seqs, self.tes.successors(role), role)

    async def part_with(self, te: TE) -> None:
        """Remove an ended TE, once its last transfers have ended."""
        for link in self.links.of(te):
            await link.settle()
        self.forget_te(te)

    def forget_te(self, te: TE) -> None:
        """Remove a TE, with all links, from the books."""
        self.links.remove(te)
        self.router.leave(te)
        if self.peers is not None:
            self.peers.leave(te)
        self.carriage.forget(te)
        self.tes.remove(te)
        self.admission.look(lost=te)

    def lose(self, te: TE, error: XDeepServeError) -> None:
        """Handle the loss of a TE and of all bytes on its dies: other TEs continue its sequences from their
        tokens."""
        for transfer in list(self.transfers.values()):
            if te is transfer.link.tes[1]:
                self._lose_target(transfer, error)
            elif te is transfer.link.tes[0]:
                self._lose_source(transfer)
        for group in te.groups:
            group.scheduler.abandon()
        te.te_shell.move_out()
        self.forget_te(te)
        for other in self.tes:  # what has ended, and nobody has looked at, goes another way by now
            for group in other.groups:
                group.leave_links()

    def lead_away(self, te: TE) -> None:
        """Send sequences waiting for room at a leaving decode TE to others, if possible; all of them if the
        TE admits none any more."""
        for link in [link for link in self.links if link.tes[1] is te]:
            self._lead_past(link, is_shut=te.moves_out)

    def _act(self, event: Observed) -> None:
        """Act on events of sequences from TEs and their DP groups."""
        if not isinstance(event, Event):
            return
        transfer = self.transfers.get(event.seq_id)
        if isinstance(event, events.Prefilled | events.MovedOut):
            self.router.forget(self._jobs[event.seq_id].seq)
        match event:
            case events.LastChunkLaunched():
                self._begin_layers(event)
            case events.LayerEnded(layer=layer) if transfer is not None and transfer.stage == "by layer":
                transfer.end_layer(layer)
            case events.Prefilled(group=group) if self._te(group).sizes.place.role == "prefill":
                self._prefilled(self._jobs[event.seq_id], group)
            case events.Given(group=group) if transfer is not None and transfer.stage == "registered":
                transfer.offer(self._group(group))
            case events.TransferBegan(is_source=False) if (
                transfer is not None and transfer.stage == "offered"
            ):
                transfer.step("receive")
            case TransferEnded(completion=completion) if transfer is not None:
                self._completed(transfer, completion)
            case events.Withdrawn() if transfer is not None:
                transfer.revoke()
            case events.Released(group=group):
                self._released(event.seq_id, self._te(group))
            case events.KVLost() if transfer is not None:
                self._take_back(transfer)
            case events.MovedOut():
                self._move(self._jobs[event.seq_id])

    def _te(self, group: GroupId) -> TE:
        return next(te for te in self.tes if te.sizes.place.name == group.te)

    def _group(self, group: GroupId) -> DPGroup:
        return self._te(group).groups[group.rank]

    def abandon(self) -> None:
        """End all links and free what transfers still hold, because the pod and all requests are lost."""
        self.transfers.clear()
        self.unplaced.let_go()
        self.admission.abandon()
        self._close_links()
        for te in self.tes:
            for group in te.groups:
                group.scheduler.abandon()

    def _close_links(self) -> None:
        for link in self.links:
            link.close()
        if self.peers is not None:
            self.peers.close()

    async def stop(self) -> None:
        """End every TE and every link; called when no request is left."""
        self._close_links()
        for te in self.tes:
            await te.stop()

    def submit(self, seqs: Seq[Sequence]) -> None:
        """Step 1: take a new request, given as the sequences of its choices."""
        self.admission.admit(seqs)

    def _dispatch(self, seqs: Seq[Sequence]) -> None:
        tes = self.tes.beginners
        if not tes:  # they are admitted anew when a TE has come, and hold no blocks at decode until then
            for seq in seqs:
                self.admission.give_back(seq)
        self.give(seqs, tes)

    def _decode_tes(self) -> list[TE]:
        """List the decode TEs taking new work, the one with the lowest load first."""
        tes = self.tes.ready("decode")
        ask_suspects(tes)
        return sorted(tes, key=load_at)

    @property
    def num_pending(self) -> int:
        """Number of sequences not yet given to any DP group."""
        pending = sum(te.te_shell.num_pending for te in self.tes)
        return self.admission.num_waiting + len(self.unplaced) + pending

    def num_ahead(self, role: Role) -> int:
        """Count the sequences at no TE of a role that will need one: they wait for TEs or, before decode,
        are at prefill TEs."""
        jobs = self._jobs.values() if role == "decode" else ()
        num_before = sum(job.te.sizes.place.role == "prefill" for job in jobs)
        return self.admission.num_waiting + len(self.unplaced) + num_before

    def give(self, seqs: Seq[Sequence], tes: Seq[TE], role: Role | None = None) -> None:
        """Have a TE out of `tes` compute sequences from their tokens. Without a TE they wait for one that is
        coming, or fail. `role` is that of the TE that they come from."""
        if not tes and self.unplaced.is_open:
            self.unplaced.take(seqs, role)
            return
        if not tes:
            for seq in seqs:
                seq.on_failed(XDeepServeError("no task executor is left that could serve this request"))
            return
        ask_suspects(tes)
        troubles = [((self.links.are_avoided(te), te.is_suspect), te) for te in tes]
        te = self.router.choose(seqs[0], troubles)
        for seq in seqs:
            self._jobs[seq.seq_id] = Job(seq, te)
            self.tell(events.Assigned(seq.seq_id, te.sizes.place.name))
        te.te_shell.dispatch(seqs)  # step 2
        te.wake()

    def _move(self, job: Job) -> None:
        """Give a moved-out sequence to another TE of the same role. If it left only a lost DP group, the same
        TE continues it."""
        job.te.te_shell.forget(job.seq)
        self._go_on(job.seq, job.te)

    def _go_on(self, seq: Sequence, te: TE) -> None:
        """Have a sequence of a TE go on from its tokens: at the same TE if this takes work, else at
        another."""
        role = te.sizes.place.role
        self.give([seq], [te] if te.life == "ready" else self.tes.successors(role, but=te), role)

    def _prefilled(self, job: Job, group_id: GroupId) -> None:
        """Steps 3 to 5: register the transfer, choose the decode TE, and let its shell choose a DP group.

        By layer, these steps were taken before, and step 7 now comes to its end.
        """
        seq, prefill = job
        prefill.te_shell.forget(seq)
        transfer = self.transfers.get(seq.seq_id)
        if transfer is None:
            group = self._group(group_id)
            target = self._reserved(seq, prefill)
            if target is None:
                self.send(seq, group, prefill)
                return
            transfer = self._begin(seq, group, seq.num_computed, *target)
        transfer.end()
        assert transfer.offered_to is not None
        te = transfer.link.tes[1]
        te.te_shell.take_over(seq, transfer.offered_to)
        self._jobs[seq.seq_id] = Job(seq, te)
        te.wake()

    def send(self, seq: Sequence, group: DPGroup, prefill: TE) -> None:
        """Steps 3 to 5 by request. If no untried decode TE is left, links are probed."""
        link = self._choose_decode(prefill, seq)
        if link is None:
            self.pod.clock.detach(self._find_way(seq, group, prefill), "search for a way", self._hears)
            return
        slots = group.handover.sending[seq.seq_id].slots[: group.rtc.blocks_for(seq.num_computed)]
        te = self._register(PDTransfer(seq, group, slots, link))
        te.te_shell.receive(seq)
        self._jobs[seq.seq_id] = Job(seq, te)
        te.wake()

    def _register(self, transfer: PDTransfer) -> TE:
        """Steps 3 and 4: register the transfer, and return the decode TE at the other end of its link."""
        seq_id, te = transfer.seq.seq_id, transfer.link.tes[1]
        transfer.link.take()
        self.transfers[seq_id] = transfer
        self.tell(events.Registered(seq_id, transfer.source.id, tuple(transfer.slots)))
        self.tell(events.Sent(seq_id, te.sizes.place.name))
        return te

    def _choose_decode(self, prefill: TE, seq: Sequence) -> PDLink | None:
        ask_suspects(self.tes.ready("decode"))
        return self.links.choose(prefill, seq.seq_id)

    def _begin_layers(self, event: events.LastChunkLaunched) -> None:
        """Steps 3 to 6 by layer, if a decode TE has room."""
        seq, prefill = self._jobs[event.seq_id]
        group = self._group(event.group)
        target = self._reserved(seq, prefill)
        if target is None:
            link = self._choose_decode(prefill, seq)
            found = None if link is None else link.tes[1].te_shell.reserve(seq, event.num_tokens)
            if link is None or found is None:
                return
            target = link, found
        self._begin(seq, group, event.num_tokens, *target)
        group.send_by_layer(seq, event.step, event.num_tokens)

    def _reserved(self, seq: Sequence, prefill: TE) -> tuple[PDLink, DPGroup] | None:
        """Return the link and DP group reserved by decode-first admission, if the link may be used."""
        target = self.admission.take(seq)
        if target is None:
            return None
        te, group = target
        link = self.links.between(prefill, te)
        if link is None:
            group.handover.drop(seq)
            te.wake()
            return None
        return link, group

    def _begin(
        self, seq: Sequence, source: DPGroup, num_tokens: int, link: PDLink, target: DPGroup
    ) -> PDTransfer:
        """Steps 3 to 6 at once, to a DP group that has reserved blocks for `num_tokens` positions."""
        kept = source.handover.sending.get(seq.seq_id, seq.holding)
        slots = kept.slots[: source.rtc.blocks_for(num_tokens)]
        transfer = PDTransfer(seq, source, slots, link, "by layer")
        self._register(transfer)
        self.tell(events.Given(seq.seq_id, target.id))
        transfer.offer_layers(target)
        return transfer

    def _released(self, seq_id: int, prefill: TE) -> None:
        """Step 8 on the prefill side: the source has its blocks back."""
        transfer = self.transfers.pop(seq_id, None)
        if transfer is not None:
            transfer.step("release")
        self.links.forget(seq_id)
        prefill.wake()

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence at any step. Its blocks are free on return, or when their transfer ends."""
        te = self._leave(seq)
        if te is None:
            return
        te.te_shell.remove(seq)
        transfer = self.transfers.get(seq.seq_id)
        if transfer is not None:
            transfer.withdraw()

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence, ended normally, and the books kept for it."""
        te = self._leave(seq)
        if te is not None:
            te.te_shell.forget(seq)

    def _leave(self, seq: Sequence) -> TE | None:
        """Forget the job of a finished or aborted sequence; return the TE that still had its task, if any."""
        job = self._jobs.pop(seq.seq_id, None)
        self.unplaced.leave(seq)
        self.links.forget(seq.seq_id)
        self.admission.leave(seq)
        if job is None:
            return None
        self.router.forget(seq)
        self.tell(events.Ended(seq.seq_id))
        return job.te

    def left(self) -> Left:
        """Count the entries of sequences in the books of the job executor and of the TE-shells."""
        given = sum(te.te_shell.num_given for te in self.tes)
        return Left(
            jobs=len(self._jobs),
            given=given,
            transfers=len(self.transfers),
            failures=self.links.num_failures,
        )

    def where(self, seq: Sequence) -> str:
        """Say in words which TE has the task of a sequence."""
        job = self._jobs.get(seq.seq_id)
        return "no task executor has it" if job is None else f"at {job.te.sizes.place.name}, {job.te.life}"

    def check_integrity(self) -> None:
        """Check the account of every block of every TE; blocks in transfers count at their source."""
        for te in self.tes:
            te.check_integrity()
        if not self.transfers:
            self.carriage.check_integrity()

    # ---- transfers that fail: other ways for their sequences ----------------------------------------------

    def _completed(self, transfer: PDTransfer, completion: Completion) -> None:
        """Handle the end of a transfer on one of its sides, with or without an error."""
        if completion.error is not None:
            self._failed(transfer, completion.error, completion.is_source)
        elif completion.is_source and not completion.is_revoked:
            transfer.link.recover()

    def _failed(self, transfer: PDTransfer, error: XDeepServeError, at_source: bool) -> None:
        """Handle a failed link: the source still has the blocks, so the sequence can go by another link."""
        seq, group, seq_id = transfer.seq, transfer.source, transfer.seq.seq_id
        prefill, decode = transfer.link.tes
        self.links.fail(transfer.link, seq_id, error)
        stage = transfer.stage
        has_arrived = not transfer.give_up(at_source)
        if has_arrived or seq.is_finished:
            group.handover.release(seq_id)
        elif stage == "by layer":  # `_prefilled` sends it by request
            del self.transfers[seq_id]
            group.handover.stop_early(seq_id)
        else:
            decode.te_shell.forget(seq)
            self.send(seq, group, prefill)
        self._lead_past(transfer.link)
        decode.wake()

    def _take_back(self, transfer: PDTransfer) -> None:
        """Take back a transfer by layer because the source lost some of the blocks; they will be sent
        anew."""
        seq_id, source = transfer.seq.seq_id, transfer.source
        assert transfer.offered_to is not None
        transfer.link.ends[source].abort_send(seq_id, transfer.link.ends[transfer.offered_to].name)
        transfer.give_up(failed_at_source=True)
        del self.transfers[seq_id]
        source.handover.stop_early(seq_id)
        transfer.link.tes[1].wake()

    def _lose_target(self, transfer: PDTransfer, error: XDeepServeError) -> None:
        """Handle the loss of the decode TE of a transfer: the sequence goes elsewhere if the source still has
        the blocks."""
        if transfer.stage in ("moving", "by layer", "revoked"):
            self._failed(transfer, error, at_source=False)
        elif transfer.recall():
            transfer.link.tes[1].te_shell.turn_away(transfer.seq)
            self.send(transfer.seq, transfer.source, transfer.link.tes[0])

    def _lose_source(self, transfer: PDTransfer) -> None:
        """Handle the loss of the prefill TE of a transfer: the blocks are lost, too, unless they have
        arrived."""
        seq, (prefill, decode) = transfer.seq, transfer.link.tes
        stage = transfer.stage
        if stage == "recalled":  # `_find_way` is at it, and goes on from the sequence's tokens
            del self.transfers[seq.seq_id]
            return
        if stage in ("registered", "offered"):
            transfer.recall()
            decode.te_shell.turn_away(seq)
        elif stage == "released" or not transfer.give_up(failed_at_source=True):
            # All bytes have come; whether anybody has looked or not, nobody looks into this link any more.
            if transfer.offered_to is not None:
                transfer.offered_to.take_arrived(seq)
            return
        del self.transfers[seq.seq_id]
        if stage != "by layer" and not seq.is_finished:  # else it is still running there, and moves out
            decode.te_shell.forget(seq)
            seq.leave_group()
            self._go_on(seq, prefill)
        decode.wake()  # it may have waited for this one before it leaves

    def _lead_past(self, link: PDLink, is_shut: bool = False) -> None:
        """Send sequences waiting beyond a failed link, or at a leaving TE, another way. They go if another
        link is well, or in any case if the TE is shut."""
        prefill, decode = link.tes
        for transfer in list(self.transfers.values()):
            if transfer.link is not link or transfer.stage == "by layer":
                continue
            other = self.links.choose(prefill, transfer.seq.seq_id)
            if (other is None or other.is_avoided) and not is_shut:
                continue
            if not transfer.recall():
                continue
            decode.te_shell.turn_away(transfer.seq)
            self.send(transfer.seq, transfer.source, prefill)

    async def _find_way(self, seq: Sequence, group: DPGroup, prefill: TE) -> None:
        """Find a way for a sequence that has tried all links: those that carry a dummy payload may be tried
        once more. The probe also shows whether the TE beyond a link is lost. If no link works, a TE that does
        both begins anew, or one that is to come; else the request ends."""
        seq_id = seq.seq_id
        for link in [link for link in self.links if link.tes[0] is prefill]:
            if link in self.links and await link.probe(group) in ("well", "delayed", "slow"):
                self.links.try_again(link, seq_id)
        if seq.is_finished:
            group.handover.release(seq_id)
        elif prefill not in self.tes:  # lost meanwhile, and its blocks with it
            seq.leave_group()
            self._go_on(seq, prefill)
        elif self.links.choose(prefill, seq_id) is not None:
            self.send(seq, group, prefill)
        else:
            error = self.links.error(prefill, seq_id)
            group.handover.release(seq_id)
            if self.tes.ready("both") or self.unplaced.is_open:
                seq.leave_group()
                self.give([seq], self.tes.ready("both"))
            else:
                seq.on_failed(error)
