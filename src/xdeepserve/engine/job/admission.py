"""Which side of the pair admits a request: prefill, or decode.

*Prefill first* (xDeepServe 5.1): a request goes to a prefill TE at once, and decode hears of it when it has
been prefilled. Decode that is full lets prefilled requests wait with all their blocks, until prefill is full.

*Decode first* (CloudMatrix 4.3.3): a process beside both sides (i) allocates the request's KV on a decode
TE, (ii) routes it to a prefill TE, and (iii) has its blocks sent there when they have been computed. One for
which decode has no room waits before anybody has computed anything for it, and nobody overtakes it. One with
several choices waits until there is room for all of them, or until nobody else has blocks that wait for
prefill: choices without blocks keep theirs at prefill until decode has room, and what others have booked
might be all that there is.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq

from xdeepserve.engine.dp.events import Booked, Events
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.te.te import TE
from xdeepserve.hw.clock import Clock

Dispatch = Callable[[Seq[Sequence]], None]


class PrefillFirst:
    """`dispatch` gives a request, the sequences of its choices, to a prefill TE."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    def admit(self, seqs: Seq[Sequence]) -> None:
        """A new request."""
        self._dispatch(seqs)

    def take(self, seq: Sequence) -> tuple[TE, DPGroup] | None:
        """The decode TE and the group that have blocks for a sequence, if any: the caller's from now on."""
        return None

    def leave(self, seq: Sequence) -> None:
        """It has ended, or is not wanted any more; blocks that nothing reads or writes are free soon."""

    def look(self, lost: TE | None = None) -> None:
        """There may be room. Blocks at a TE that is lost are nobody's."""

    @property
    def num_waiting(self) -> int:
        """Sequences that no TE has."""
        return 0

    def abandon(self) -> None:
        """The pod is lost."""


class DecodeFirst(PrefillFirst):
    """`tes` are the decode TEs that take new work, the best one first."""

    def __init__(self, clock: Clock, tell: Events, dispatch: Dispatch, tes: Callable[[], list[TE]]) -> None:
        super().__init__(dispatch)
        self._clock, self._tell, self._tes = clock, tell, tes
        self._waiting: list[list[Sequence]] = []  # requests, in order of (priority, arrival)
        self.booked: dict[int, tuple[Sequence, TE, DPGroup]] = {}  # by seq_id
        self._unbooked: set[int] = set()  # choices that were let in without blocks, until they are prefilled
        self._is_looking = False

    def admit(self, seqs: Seq[Sequence]) -> None:
        """A new request, behind all that wait."""
        insort(self._waiting, list(seqs), key=lambda each: each[0].rank)
        self._let_in()

    def _let_in(self) -> None:
        """Requests for whose choices there is room, one after the other."""
        while self._waiting and not self._unbooked and self._book(self._waiting[0]):
            self._dispatch(self._waiting.pop(0))

    def _book(self, seqs: Seq[Sequence]) -> bool:
        """Step (i) for the choices of a request; whether it may go to prefill."""
        booked: list[tuple[Sequence, TE, DPGroup]] = []
        without: set[int] = set()
        tes = self._tes()
        for seq in seqs:
            if seq.num_generated + 1 >= seq.max_tokens or not tes:
                continue  # it ends in prefill, or nobody is there who could decode it
            rooms = ((te, te.te_shell.reserve(seq, len(seq.token_ids))) for te in tes)
            room = next(((te, group) for te, group in rooms if group is not None), None)
            if room is None:
                without.add(seq.seq_id)
            else:
                booked.append((seq, *room))
        if without and (self.booked or not booked):
            for seq, _, group in booked:
                group.handover.drop(seq)
            return False
        for seq, te, group in booked:
            self.booked[seq.seq_id] = seq, te, group
            self._tell(Booked(seq.seq_id, group.id))
        self._unbooked |= without
        return True

    def take(self, seq: Sequence) -> tuple[TE, DPGroup] | None:
        booking = self.booked.pop(seq.seq_id, None)
        if seq.seq_id in self._unbooked:
            self._unbooked.remove(seq.seq_id)
            self.look()
        return None if booking is None else booking[1:]

    def leave(self, seq: Sequence) -> None:
        booking = self.take(seq)
        if booking is not None:
            te, group = booking
            group.handover.drop(seq)
            te.wake()  # it may have waited for this one before it leaves
        for seqs in [seqs for seqs in self._waiting if seq in seqs]:
            seq.is_finished = True
            seqs.remove(seq)
            if not seqs:
                self._waiting.remove(seqs)
        self.look()

    def look(self, lost: TE | None = None) -> None:
        self.booked = {seq_id: each for seq_id, each in self.booked.items() if each[1] is not lost}
        if self._waiting and not self._is_looking:
            self._is_looking = True
            self._clock.spawn(self._look(), name="decode-first admission")

    async def _look(self) -> None:
        """In a process of its own: whoever has ended frees its blocks before this one's turn."""
        self._is_looking = False
        self._let_in()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    def abandon(self) -> None:
        self._waiting.clear()
        self._unbooked.clear()
        self.booked.clear()
