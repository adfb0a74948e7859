"""Admission of requests where prefill and decode are apart: by prefill, or by decode.

*Prefill first* (xDeepServe 5.1): a request goes to a prefill TE at once, and decode hears of it when it has
been prefilled. When decode is full, prefilled requests wait at prefill with all their blocks, until prefill
is full, too.

*Decode first* (CloudMatrix 4.3.3): a process beside both sides (i) allocates the request's KV on a decode TE,
(ii) routes it to a prefill TE, and (iii) has its blocks sent there when they have been computed. A request
without room at decode waits before anything has been computed for it, and no other overtakes it. A request
with several choices waits until there is room for all of them, or until no other request holds blocks booked
at decode. Choices without booked blocks keep theirs at prefill until decode has room, which might never come
while others hold all of it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from xdeepserve.engine.deploy.policies import ADMISSION
from xdeepserve.engine.dp.events import Booked, EventLog
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.te.te import TE
from xdeepserve.hw.clock import Clock, Hears

Dispatch = Callable[[Seq[Sequence]], None]
# A policy, from the number of a request's choices with blocks at decode, of those without, and whether blocks
# are booked for other requests: whether the request goes to prefill now.
AdmissionPolicy: TypeAlias = Callable[[int, int, bool], bool]


def prefill_first(num_booked: int, num_without: int, others_hold: bool) -> bool:
    """Admit every request at once."""
    return True


def decode_first(num_booked: int, num_without: int, others_hold: bool) -> bool:
    """Admit a request with blocks for all its choices, or for some if no other request holds any."""
    return not num_without or (num_booked > 0 and not others_hold)


class AdmissionControl:
    """Admits requests by policy `admission`: `dispatch` gives the sequences of a request to a prefill TE.

    `tes` returns the decode TEs that take new work, the best one first; blocks are booked there before a
    policy with the trait "books" is asked. `hears` is told of an error in the process that admits.
    """

    def __init__(
        self,
        clock: Clock,
        tell: EventLog,
        dispatch: Dispatch,
        tes: Callable[[], list[TE]],
        admission: str = "prefill",
        hears: Hears | None = None,
    ) -> None:
        self._clock, self._tell, self._dispatch, self._tes, self._hears = clock, tell, dispatch, tes, hears
        self._books = ADMISSION.has(admission, "books")
        self._admits: AdmissionPolicy = ADMISSION.function(admission)
        self._waiting: list[list[Sequence]] = []  # requests, in order of (priority, arrival)
        self.booked: dict[int, tuple[Sequence, TE, DPGroup]] = {}  # by seq_id
        self._unbooked: set[int] = set()  # choices that were let in without blocks, until they are prefilled
        self._is_looking = False

    def admit(self, seqs: Seq[Sequence]) -> None:
        """Queue a new request, given as the sequences of its choices, by priority and arrival; admit all
        requests that may go now."""
        insort(self._waiting, list(seqs), key=lambda each: each[0].rank)
        self._let_in()

    def _let_in(self) -> None:
        """Dispatch waiting requests in order, until one has to wait."""
        while self._waiting and not self._unbooked and self._book(self._waiting[0]):
            self._dispatch(self._waiting.pop(0))

    def _book(self, seqs: Seq[Sequence]) -> bool:
        """Step (i): reserve decode blocks for the choices of a request; return whether it may go to
        prefill."""
        booked: list[tuple[Sequence, TE, DPGroup]] = []
        without: set[int] = set()
        tes = self._tes() if self._books else []
        for seq in seqs:
            if seq.num_generated + 1 >= seq.max_tokens or not tes:
                continue  # it ends in prefill, or nobody is asked for room
            rooms = ((te, te.te_shell.reserve(seq, len(seq.token_ids))) for te in tes)
            room = next(((te, group) for te, group in rooms if group is not None), None)
            if room is None:
                without.add(seq.seq_id)
            else:
                booked.append((seq, *room))
        if not self._admits(len(booked), len(without), bool(self.booked)):
            for seq, _, group in booked:
                group.handover.drop(seq)
            return False
        for seq, te, group in booked:
            self.booked[seq.seq_id] = seq, te, group
            self._tell(Booked(seq.seq_id, group.id))
        self._unbooked |= without
        return True

    def take(self, seq: Sequence) -> tuple[TE, DPGroup] | None:
        """Hand over the decode TE and DP group with reserved blocks for a sequence; None if there are
        none."""
        booking = self.booked.pop(seq.seq_id, None)
        if seq.seq_id in self._unbooked:
            self._unbooked.remove(seq.seq_id)
            self.look()
        return None if booking is None else booking[1:]

    def give_back(self, seq: Sequence) -> None:
        """Give back the blocks reserved at decode for a sequence, if there are any."""
        booking = self.take(seq)
        if booking is not None:
            te, group = booking
            group.handover.drop(seq)
            te.wake()  # it may have waited for this one before it leaves

    def leave(self, seq: Sequence) -> None:
        """Forget an ended or aborted sequence; blocks reserved for it are free once no transfer uses them."""
        self.give_back(seq)
        for seqs in [seqs for seqs in self._waiting if seq in seqs]:
            seq.is_finished = True
            seqs.remove(seq)
            if not seqs:
                self._waiting.remove(seqs)
        self.look()

    def look(self, lost: TE | None = None) -> None:
        """Look for waiting requests to admit now. Reservations at a `lost` TE are forgotten."""
        self.booked = {seq_id: each for seq_id, each in self.booked.items() if each[1] is not lost}
        if self._waiting and not self._is_looking:
            self._is_looking = True
            self._clock.detach(self._look(), "decode-first admission", self._hears)

    async def _look(self) -> None:
        """Admit waiting requests in a process of its own, because sequences that end now must free their
        blocks first."""
        self._is_looking = False
        self._let_in()

    @property
    def num_waiting(self) -> int:
        """Number of sequences not yet given to any TE."""
        return sum(map(len, self._waiting))

    def abandon(self) -> None:
        """Forget all requests and reservations, because the pod is lost."""
        self._waiting.clear()
        self._unbooked.clear()
        self.booked.clear()
