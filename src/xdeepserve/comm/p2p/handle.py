"""Send and receive between any two ranks, in eight steps (XDS 3.1): the handle for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from xdeepserve.comm.checks import check_event_id, check_rank, integer
from xdeepserve.comm.p2p.layout import MAX_MESSAGE, Mode, RingLayout
from xdeepserve.comm.p2p.message_end import Ask, Cargo, Engine
from xdeepserve.comm.p2p.receive import Receiving
from xdeepserve.comm.p2p.ring_memory import PairOp, RingMemory
from xdeepserve.comm.p2p.rules import RECEIVE, SEND, PairEnd
from xdeepserve.comm.p2p.send import Sending
from xdeepserve.comm.steps import Observer, Steps
from xdeepserve.comm.wire import ROW_ALIGNMENT
from xdeepserve.errors import AddressError, DeploymentError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Region

DEFAULT_CORES = 2


class By(TypedDict, total=False):
    """Cores and engine for an end of a message."""

    cores: int  # AIV cores; DEFAULT_CORES if not given
    engine: Engine  # "mte" if not given


class PointToPoint:
    """Send and receive of a rank with all the ranks of a group.

    `layout.plan` must have been called on the plans of all `dies`; `places` is as in `RingMemory`.
    `timeout_ns` is how long, in virtual time, a transfer waits for its peer each time. `on_step(op, step)` is
    called when a step of the paper's eight is complete, for each chunk, for walkthroughs and fault tests.

    Between two ranks, and in each direction, one transfer is under way at a time; with different peers there
    may be many. All arguments are checked before a byte moves: AddressError for a buffer that is outside the
    app area, not aligned to 32 bytes, in use by another transfer, or too large; ProtocolError for a call that
    the state of the pair does not allow. After any other error the pair must be reset at both ends; all other
    pairs go on.
    """

    def __init__(
        self,
        die: Die,
        rank: int,
        dies: Sequence[int],
        layout: RingLayout,
        timeout_ns: int = 1_000_000_000,
        on_step: Observer | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        check_rank(die.index, rank, dies)
        if layout.num_ranks != len(dies) or len(set(dies)) != len(dies):
            raise DeploymentError(
                f"the ring layout is for {layout.num_ranks} different dies, not {list(dies)}"
            )
        if layout.num_cores > die.spec.num_cores("aiv"):
            raise DeploymentError(
                f"the ring layout is for {layout.num_cores} AIV cores, a die has {die.spec.num_cores('aiv')}"
            )
        self.die, self.rank, self.dies, self.layout = die, rank, tuple(dies), layout
        self.timeout_ns = integer("send and receive", "timeout_ns", timeout_ns)
        self.steps = Steps(die, on_step)
        self.memory = RingMemory(die, rank, dies, layout, places)
        self.sides = {
            op: {peer: PairEnd(table, op, rank, peer) for peer in range(len(dies)) if peer != rank}
            for op, table in (("send", SEND), ("receive", RECEIVE))
        }

    async def send(
        self, src: int, nbytes: int, peer: int, event_id: int, *, zero_copy: bool = False, **by: Unpack[By]
    ) -> None:
        """Send `nbytes` from offset `src` of the own app area; return when `peer` has acknowledged them.

        `event_id` is from 1, greater than any before to this peer, and the receiver's too. With the engine
        "mte" the bytes go through the unified buffers of `cores` AIV cores into the peer's ring; "dma" and
        "urma" move them without, at a higher startup for each filling of the ring: they pay with `zero_copy`,
        where the bytes stay where they are until the receiver takes them, in one piece.
        Raises DeadlineError if the peer does not free its ring, or does not acknowledge, in time.
        """
        sending = self._send(self._checked("send", src, nbytes, peer, event_id, **by), zero_copy)
        await sending.run(sending.write, sending.wait_for_ack)

    async def send_async(
        self, src: int, nbytes: int, peer: int, event_id: int, *, zero_copy: bool = False, **by: Unpack[By]
    ) -> Sending:
        """Send without polling for the ack: `await result.look()` tells whether it is there.

        The bytes must not change before. Raises AddressError for a message larger than the ring, because a
        kernel that does not poll cannot wait for room.
        """
        ask = self._checked("send", src, nbytes, peer, event_id, **by)
        if not zero_copy and self.layout.num_chunks(ask.cargo.nbytes) > self.layout.num_slots:
            ring = self.layout.ring_nbytes
            raise AddressError(
                f"send: {ask.cargo.nbytes} bytes do not fit the ring of {ring} bytes at once: "
                "an asynchronous send cannot wait for room"
            )
        sending = self._send(ask, zero_copy)
        await sending.run(sending.write)
        return sending

    async def receive(self, dst: int, nbytes: int, peer: int, event_id: int, **by: Unpack[By]) -> None:
        """Receive `nbytes` from `peer` to offset `dst` of the own app area.

        `event_id` and `nbytes` must be the sender's, or a ProtocolError names both; `cores` and `engine` need
        not. Raises DeadlineError if the peer does not send in time.
        """
        receiving = self._receive(self._checked("receive", dst, nbytes, peer, event_id, **by))
        await receiving.run(receiving.copy_all)

    async def receive_async(
        self, dst: int, nbytes: int, peer: int, event_id: int, **by: Unpack[By]
    ) -> Receiving:
        """Begin to receive and return at once: `await result.look()` copies the chunks that have arrived
        since."""
        receiving = self._receive(self._checked("receive", dst, nbytes, peer, event_id, **by))
        await receiving.run(receiving.stream.open)
        return receiving

    async def send_pieces(
        self, pieces: Sequence[tuple[int, int]], peer: int, event_id: int, **by: Unpack[By]
    ) -> None:
        """Send pieces of the app area (offset, size) as one message, such as the KV blocks of a sequence.

        The caller has shared them (`hw.claims`), so that nothing overwrites them meanwhile.
        """
        sending = self._send(self._checked_pieces("send", pieces, peer, event_id, **by), False)
        await sending.run(sending.write, sending.wait_for_ack)

    async def receive_pieces(
        self, pieces: Sequence[tuple[int, int]], peer: int, event_id: int, **by: Unpack[By]
    ) -> None:
        """Receive into pieces claimed by the caller; the sender's pieces may be cut differently."""
        receiving = self._receive(self._checked_pieces("receive", pieces, peer, event_id, **by))
        await receiving.run(receiving.copy_all)

    async def offer_pieces(
        self, pieces: Sequence[tuple[int, int]], peer: int, event_id: int, **by: Unpack[By]
    ) -> Sending:
        """Send pieces without copying them or polling for the ack: `peer` takes them from where they lie.

        They must not change before `await result.look()` says that the peer has them.
        """
        sending = self._send(self._checked_pieces("send", pieces, peer, event_id, **by), True)
        await sending.run(sending.write)
        return sending

    async def take_pieces(
        self,
        pieces: Sequence[tuple[int, int]],
        offered: Sequence[tuple[int, int]],
        peer: int,
        event_id: int,
        **by: Unpack[By],
    ) -> None:
        """Receive bytes that `peer` offers where they lie: in pieces of its app area, told by a handshake."""
        receiving = self._receive(self._checked_pieces("receive", pieces, peer, event_id, **by))
        receiving.offered = Cargo(self.dies[peer], offered, self.layout.weight)
        await receiving.run(receiving.copy_all)

    def reset(self, peer: int) -> None:
        """Forget failed or unfinished transfers with `peer`, which must do the same.

        A failed or cancelled call moves no more bytes, so it cannot harm the next. Neither rank may be in a
        call for the other; both go on with event IDs that none has used.
        """
        peer = self._check_peer("reset", peer)
        told_in: dict[PairOp, Region] = {"send": self.memory.acks, "receive": self.memory.tails}
        for op, area in told_in.items():
            fields = self.memory.fields(area.offset, peer, self.layout.num_cores)
            self.sides[op][peer].reset(max(field.event_id for field in fields))
            self.memory.release(op, peer)

    # ---- how a transfer begins ----------------------------------------------------------------------

    def _send(self, ask: Ask, zero_copy: bool) -> Sending:
        mode = Mode.ZERO_COPY if zero_copy else Mode.RING
        if mode is Mode.RING and not self.layout.has_rings:
            raise DeploymentError(f"ring layout '{self.layout.name}' has no rings: send with zero copy")
        return Sending(self.memory, self.steps, self.timeout_ns, self._begin("send", ask), ask, mode)

    def _receive(self, ask: Ask) -> Receiving:
        return Receiving(self.memory, self.steps, self.timeout_ns, self._begin("receive", ask), ask)

    def _begin(self, op: PairOp, ask: Ask) -> PairEnd:
        """Claim the buffer of a transfer, unless the caller has done so, and start the pair."""
        end = self.sides[op][ask.peer]
        buffer = (0, 0) if ask.is_claimed else ask.cargo.pieces[0]
        self.memory.claim(op, ask.peer, *buffer)
        try:
            end.start(ask.event_id)
        except ProtocolError:
            self.memory.unclaim(op, ask.peer, *buffer)
            raise
        self.memory.in_use[op, ask.peer] = buffer
        return end

    # ---- checks -------------------------------------------------------------------------------------

    def _checked(
        self,
        op: PairOp,
        offset: int,
        nbytes: int,
        peer: int,
        event_id: int,
        cores: int = DEFAULT_CORES,
        engine: Engine = "mte",
    ) -> Ask:
        offset, nbytes = integer(op, "offset", offset), integer(op, "bytes", nbytes)
        cores, peer, event_id = self._check_call(op, peer, event_id, cores, engine)
        self._check_place(op, offset, nbytes)
        for (other, _), (start, size) in self.memory.in_use.items():
            stop = start + size
            if start < offset + nbytes and offset < stop and "receive" in (op, other):
                raise AddressError(
                    f"{op}: [{offset}, {offset + nbytes}) overlaps [{start}, {stop}) of a {other} under way"
                )
        cargo = Cargo(self.die.index, ((offset, nbytes),), self.layout.weight)
        return Ask(cargo, peer, event_id, cores, engine, is_claimed=False)

    def _checked_pieces(
        self,
        op: PairOp,
        pieces: Sequence[tuple[int, int]],
        peer: int,
        event_id: int,
        cores: int = DEFAULT_CORES,
        engine: Engine = "mte",
    ) -> Ask:
        whole = [(integer(op, "offset", offset), integer(op, "bytes", nbytes)) for offset, nbytes in pieces]
        cores, peer, event_id = self._check_call(op, peer, event_id, cores, engine)
        if not whole:
            raise AddressError(f"{op}: a message of pieces has one at least")
        for offset, nbytes in whole:
            self._check_place(op, offset, nbytes)
        cargo = Cargo(self.die.index, whole, self.layout.weight)
        if cargo.nbytes > MAX_MESSAGE:
            raise AddressError(f"{op}: a message has 0..{MAX_MESSAGE} bytes, not {cargo.nbytes}")
        return Ask(cargo, peer, event_id, cores, engine, is_claimed=True)

    def _check_call(self, op: str, peer: int, event_id: int, cores: int, engine: str) -> tuple[int, int, int]:
        """Check a call's arguments; return cores, peer and event ID as Python's numbers."""
        cores, peer = integer(op, "cores", cores), self._check_peer(op, peer)
        event_id = check_event_id(op, self.rank, event_id)
        if not 1 <= cores <= self.layout.num_cores:
            raise AddressError(f"{op}: the layout is for 1..{self.layout.num_cores} AIV cores, not {cores}")
        if engine not in ("mte", "dma", "urma"):
            raise AddressError(f"{op}: the engine is mte, dma or urma, not {engine!r}")
        return cores, peer, event_id

    def _check_place(self, op: str, offset: int, nbytes: int) -> None:
        """Check a range of the app area: in bounds, aligned, not too large. Raises AddressError if not."""
        app = self.die.memory.app
        if not 0 <= nbytes <= MAX_MESSAGE:
            raise AddressError(f"{op}: a message has 0..{MAX_MESSAGE} bytes, not {nbytes}")
        if offset % ROW_ALIGNMENT:
            raise AddressError(f"{op}: offset {offset} is not a multiple of {ROW_ALIGNMENT}")
        if offset < app.base or offset + nbytes > app.end:
            raise AddressError(
                f"{op}: [{offset}, {offset + nbytes}) leaves the app area [{app.base}, {app.end})"
            )

    def _check_peer(self, op: str, peer: int) -> int:
        peer = integer(op, "peer", peer)
        if not 0 <= peer < len(self.dies) or peer == self.rank:
            raise ProtocolError(
                f"{op}: rank {self.rank} has peers 0..{len(self.dies) - 1} but itself, not {peer}"
            )
        return peer
