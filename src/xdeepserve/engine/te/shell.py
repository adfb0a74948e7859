"""The TE-shell: the only part of a TE that sees all DP groups (xDeepServe 4.2, 4.3, 4.5, 6.1).

It dispatches requests to healthy groups, and triggers EPLB. A request goes to one group, with all its
choices, which share their prompt there. From then on the group alone handles it.

Prefilled sequences are dealt out at once, and new requests as soon as the groups' statuses are known. Where
statuses are gathered, an all-gather is the leader's only way to know the groups: it runs in the TE's loop and
takes virtual time. While the TE moves out no group gets anything.

"It updates the pending request count on dispatch and completion, and collects periodic KV cache stats" (4.3):
for the choice of a group to decode, the number of a group's sequences is known as it is, and the use of its
blocks as it was when the group last sent it. Groups send between steps, as soon as the setting's period has
passed. There is no timer, and a pod without work has nothing to do: the blocks of a group that has no
sequences are known to be free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Generic, Protocol, TypeVar

import msgspec

from xdeepserve.engine.balance.dp import Candidate, DecodePolicy, DispatchPolicy, GroupStatus
from xdeepserve.engine.balance.trigger import EPLBTrigger
from xdeepserve.engine.deploy.policies import DECODE, DISPATCH
from xdeepserve.engine.deploy.sizes import TESettings
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import EventLog
from xdeepserve.engine.dp.group_books import GroupBooks
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.status_gather import MAX_REQUESTS, Gathered, StatusGather

G = TypeVar("G", bound=GroupBooks)


class Openness(Protocol):
    """Health of DP groups, as far as it decides which of them get new work."""

    @property
    def open_ranks(self) -> tuple[GroupRank, ...]: ...


class TEShell(Generic[G]):
    """Dispatches requests to DP groups by the policies of `settings`, and prefilled requests, too.

    A policy deals requests out at the start of a step, or on arrival, then without a look at cached prefixes.
    New work goes to healthy groups; if there are none, to any that is not lost. `gather` learns the groups'
    statuses, if an all-gather is needed; `call` asks the TE's loop for one. `eplb` triggers new
    replicas of experts, where there are slots for them. `now` reads the clock in ns.
    """

    def __init__(
        self,
        groups: Seq[G],
        health: Openness,
        life: Lifetime,
        tell: EventLog,
        settings: TESettings,
        now: Callable[[], int],
        call: Callable[[], None],
        gather: StatusGather | None,
        eplb: EPLBTrigger | None,
    ) -> None:
        self.groups, self.health, self._life, self.tell, self.eplb = groups, health, life, tell, eplb
        self._now, self._call, self._gather = now, call, gather
        self._assign: DispatchPolicy = DISPATCH.function(settings.dispatch)
        self._is_on_arrival = DISPATCH.has(settings.dispatch, "on arrival")
        self._pick: DecodePolicy = DECODE.function(settings.decode)
        self._status_period_ns = settings.status_period_ns
        self._sent: dict[GroupRank, tuple[int, GroupStatus]] = {}  # when, and what; with a period alone
        self._next_sent_ns = 0  # before then no period has passed
        self.pending: deque[list[Sequence]] = deque()  # requests that no group has yet
        self.arrivals: deque[Sequence] = deque()  # prefilled ones that no group has yet
        self._group_of: dict[int, G] = {}
        self.returning: dict[int, G] = {}  # groups that have kept KV of sequences on their way here
        self._dispatch_turn = self._decode_turn = 0  # the rank after the one chosen last
        self.is_asked = False  # the TE's loop has been asked for an all-gather
        self.on_turn: Callable[[], None] = lambda: None  # told before each step: there may be room
        self.wake: Callable[[G], None] = lambda group: None  # the group has been given something

    # ---- requests -----------------------------------------------------------------------------------

    def dispatch(self, seqs: Seq[Sequence]) -> None:
        """Take a new request, given as the sequences of its choices, or one that goes on from its tokens."""
        group = self.returning.pop(seqs[0].seq_id, None)
        if group is not None and group.num_free_places >= len(seqs):
            self._give(list(seqs), group)
            return
        self.pending.append(list(seqs))
        if self._is_on_arrival:
            statuses = self._statuses() or [group.status() for group in self.groups]
            self._deal([*self.pending], [Gathered(status, (0,) * len(self.pending)) for status in statuses])

    def deal(self) -> bool:
        """Deal out waiting work after a group has ended a step or has something new; return whether requests
        wait for an all-gather."""
        return bool(self._deal_at_once()) and self._gather is not None

    def ask(self) -> None:
        """Ask the TE's loop for an all-gather, which serves all groups that ask before it begins."""
        if not self.is_asked:
            self.is_asked = True
            self._call()

    async def gather_and_deal(self, check: Callable[[], None]) -> None:
        """Deal out waiting work from the TE's loop, after an all-gather if requests wait for one.

        `check` then raises the error of lost memory, since the gathered statuses may have been in it.
        """
        self.is_asked = False
        requests = self._deal_at_once()[:MAX_REQUESTS]
        if requests and self._gather is not None:
            known = await self._gather.run(self.health.open_ranks, [seqs[0] for seqs in requests])
            check()
            if not self._life.moves_out:
                self._deal(requests, known)

    def _deal_at_once(self) -> list[list[Sequence]]:
        """Deal out whatever needs no all-gather; return the requests waiting for prefill, in order of
        arrival."""
        if self._life.moves_out:
            return []
        self._assign_arrivals()
        requests = self._waiting()
        if requests and self._gather is None:
            self._deal(requests, self._known(requests))
        return requests

    def _statuses(self) -> list[GroupStatus]:
        return [self.groups[rank].status() for rank in self.health.open_ranks]

    def _waiting(self) -> list[list[Sequence]]:
        """Return the requests waiting for prefill, in order of arrival."""
        return sorted(self.pending, key=lambda seqs: seqs[0].rank)

    def _known(self, requests: Seq[list[Sequence]]) -> list[Gathered]:
        """Return the groups' current statuses and cached tokens, for when asking them costs nothing."""
        firsts = [seqs[0] for seqs in requests]
        groups = [self.groups[rank] for rank in self.health.open_ranks]
        return [Gathered(group.status(), tuple(map(group.num_reusable, firsts))) for group in groups]

    def _deal(self, requests: Seq[list[Sequence]], known: Seq[Gathered]) -> None:
        """Deal waiting requests out to groups, at the start of a step, by the groups' known statuses.

        Requests that were aborted meanwhile have no sequences left.
        """
        cached = [[0] * len(self.groups) for _ in requests]
        for status, prompts in known:
            for row, num_tokens in zip(cached, prompts, strict=True):
                row[status.rank] = num_tokens
        candidates = [self._candidate(seqs, tuple(row)) for seqs, row in zip(requests, cached, strict=True)]
        statuses = [each.status for each in known]
        max_tokens = self.groups[0].steps.max_tokens
        pairs = self._assign(candidates, statuses, max_tokens, self._dispatch_turn)
        if pairs:
            self._dispatch_turn = pairs[-1][1] + 1
        for index, rank in pairs:
            self._give(requests[index], self.groups[rank])
        taken = {id(requests[index]) for index, _ in pairs}
        self.pending = deque(seqs for seqs in self._waiting() if id(seqs) not in taken)

    # ---- prefilled sequences ------------------------------------------------------------------------

    def receive(self, seq: Sequence) -> None:
        """Take over a prefilled sequence; a group is chosen for it at the start of a step."""
        self.arrivals.append(seq)

    def _assign_arrivals(self) -> None:
        """Give prefilled sequences to groups, in order of arrival, as long as a group has room (decode
        balance)."""
        self._collect_statuses()
        while self.arrivals:
            seq = self.arrivals[0]
            group = self._pick_decode(seq, seq.num_computed, self._sent_statuses())
            if group is None:
                return
            self.arrivals.popleft()
            self._group_of[seq.seq_id] = group
            self.tell(events.Given(seq.seq_id, group.id))
            self.wake(group)

    def _collect_statuses(self) -> None:
        """Take new statuses, between steps, from DP groups whose period has passed."""
        now = self._now()
        if not self._status_period_ns or now < self._next_sent_ns:
            return
        for group in self.groups:
            sent = self._sent.get(group.rank)
            if sent is None or now - sent[0] >= self._status_period_ns:
                self._sent[group.rank] = now, group.status()
        self._next_sent_ns = min(sent_ns for sent_ns, _ in self._sent.values()) + self._status_period_ns

    def _sent_statuses(self) -> list[GroupStatus]:
        """Return the groups' statuses: current numbers of sequences, and KV usage as last sent."""
        found = []
        for rank in self.health.open_ranks:
            status, sent = self.groups[rank].status(), self._sent.get(rank)
            if sent is not None and status.num_sequences:
                status = msgspec.structs.replace(
                    status,
                    num_used_blocks=sent[1].num_used_blocks,
                    num_reserved_blocks=sent[1].num_reserved_blocks,
                    num_promised_blocks=sent[1].num_promised_blocks,
                )
            found.append(status)
        return found

    def _pick_decode(self, seq: Sequence, num_tokens: int, statuses: Seq[GroupStatus]) -> G | None:
        """Choose the group to decode a sequence of `num_tokens` prefilled tokens; None if all are full."""
        blocks_for = self.groups[0].rtc.blocks_for
        needed, present = blocks_for(seq.num_prompt + seq.max_tokens), blocks_for(num_tokens)
        rank = self._pick(statuses, needed, present, self._decode_turn)
        if rank is None:
            return None
        self._decode_turn = rank + 1
        return self.groups[rank]

    def reserve(self, seq: Sequence, num_tokens: int) -> G | None:
        """Reserve KV blocks for `num_tokens` positions of a sequence in prefill (steps 5 and 6); return the
        group.

        None without room. A sequence never overtakes prefilled sequences that have arrived and wait.
        """
        turn = self._decode_turn
        group = None if self.arrivals else self._pick_decode(seq, num_tokens, self._statuses())
        if group is None or group.handover.reserve(seq, num_tokens) is None:
            self._decode_turn = turn  # no group got the sequence, so the turn is still open
            return None
        return group

    def take_over(self, seq: Sequence, group: G) -> None:
        """Hand a prefilled sequence to `group`, which has reserved KV blocks for it."""
        self._group_of[seq.seq_id] = group
        group.handover.take_over(seq)

    def _candidate(self, seqs: list[Sequence], cached: tuple[int, ...]) -> Candidate:
        """Return a request's size, and the number of its tokens that each group has cached.

        The request's choices prefill once, and then need KV blocks of their own.
        """
        blocks = [self.groups[0].rtc.blocks_for(seq.num_prompt + seq.max_tokens) for seq in seqs]
        num_tokens = len(seqs[0].token_ids) if seqs else 0
        return Candidate(num_tokens, sum(blocks), cached)

    def _give(self, seqs: list[Sequence], group: G) -> None:
        leader = None
        for seq in seqs:
            if seq.is_finished:
                continue
            self._group_of[seq.seq_id] = group
            self.tell(events.Given(seq.seq_id, group.id))
            group.scheduler.add(seq, leader)
            leader = leader or seq
        self.wake(group)

    def move_out(self) -> None:
        """Give up all sequences able to go on elsewhere from their tokens alone, between steps."""
        for group in self.groups:
            group.scheduler.move_out()
        pending, self.pending = self.pending, deque()
        for seq in [seq for seqs in pending for seq in seqs]:
            if not seq.is_finished:  # with another choice that could go nowhere
                seq.leave_group()
                self.tell(events.MovedOut(seq.seq_id, self.groups[0].id.te))

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is here or waits here, and no KV blocks are kept here."""
        return not (self.pending or self.arrivals) and all(group.is_empty for group in self.groups)

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence anywhere in the TE; its KV blocks are free on return."""
        group = self._group_of.pop(seq.seq_id, None)
        if group is not None:
            group.scheduler.remove(seq)
            return
        seq.is_finished = True
        for seqs in self.pending:
            if seq in seqs:
                seqs.remove(seq)
        self.pending = deque(seqs for seqs in self.pending if seqs)
        self.arrivals = deque(each for each in self.arrivals if each is not seq)

    def adopt(self, seq: Sequence, group: G) -> None:
        """Note a sequence that begins in a group, in the middle of its answer."""
        self._group_of[seq.seq_id] = group

    def group_of(self, seq: Sequence) -> G | None:
        """Return the group that a sequence was given to, or None while it waits here."""
        return self._group_of.get(seq.seq_id)

    def forget(self, seq: Sequence) -> None:
        """Forget a finished sequence, or one that has left for another TE."""
        self._group_of.pop(seq.seq_id, None)

    def turn_away(self, seq: Sequence) -> None:
        """Drop a prefilled sequence on its way here, which now goes elsewhere, or nowhere."""
        group = self._group_of.pop(seq.seq_id, None)
        if group is not None:
            group.handover.drop(seq)
        else:
            self.arrivals.remove(seq)

    @property
    def num_given(self) -> int:
        """Number of sequences assigned to a group."""
        return len(self._group_of)

    @property
    def num_pending(self) -> int:
        """Number of sequences not yet assigned to a group."""
        return sum(len(seqs) for seqs in self.pending) + len(self.arrivals)

    @property
    def pending_tokens(self) -> list[int]:
        """Number of tokens of each sequence not yet assigned to a group."""
        return [len(seq.token_ids) for seqs in (*self.pending, self.arrivals) for seq in seqs]

    @property
    def has_work(self) -> bool:
        return bool(self.pending or self.arrivals) or any(group.places.has_work for group in self.groups)
