"""Rules of send and receive as tables (XDS 3.1), without bytes, time or I/O.

`SEND` and `RECEIVE` are the two ends of an ordered pair of ranks, with the paper's eight steps. A transition
that is not in a table is a ProtocolError. `Progress` is what the AIV cores' fields say during a transfer.
"""

from __future__ import annotations

import enum

from xdeepserve.comm.checks import check_later
from xdeepserve.comm.p2p.layout import Mode, RingField
from xdeepserve.errors import FieldError
from xdeepserve.machine import Machine


class PairState(enum.IntEnum):
    IDLE = 0
    WRITING = 1  # sender: steps 1 to 3, chunk by chunk
    AWAITING_ACK = 2  # sender: step 4
    POLLING = 3  # receiver: step 5
    COPYING = 4  # receiver: steps 6 and 7, chunk by chunk
    FAILED = 5  # an error ended the transfer: both ends must be reset


class Move(enum.IntEnum):
    START = 0  # the engine calls
    WRITTEN = 1  # the last chunk and its tail are on their way
    ACKNOWLEDGED = 2  # step 8
    ARRIVED = 3  # a chunk that has not been copied is there
    DRAINED = 4  # all that is there has been copied, but more is to come
    COPIED = 5  # the last chunk is copied and acknowledged
    FAIL = 6
    RESET = 7


SEND = {
    (PairState.IDLE, Move.START): PairState.WRITING,
    (PairState.WRITING, Move.WRITTEN): PairState.AWAITING_ACK,
    (PairState.AWAITING_ACK, Move.ACKNOWLEDGED): PairState.IDLE,
    (PairState.WRITING, Move.FAIL): PairState.FAILED,
    (PairState.AWAITING_ACK, Move.FAIL): PairState.FAILED,
    (PairState.IDLE, Move.RESET): PairState.IDLE,
    (PairState.AWAITING_ACK, Move.RESET): PairState.IDLE,
    (PairState.FAILED, Move.RESET): PairState.IDLE,
}
RECEIVE = {
    (PairState.IDLE, Move.START): PairState.POLLING,
    (PairState.POLLING, Move.ARRIVED): PairState.COPYING,
    (PairState.COPYING, Move.DRAINED): PairState.POLLING,
    (PairState.COPYING, Move.COPIED): PairState.IDLE,
    (PairState.POLLING, Move.FAIL): PairState.FAILED,
    (PairState.COPYING, Move.FAIL): PairState.FAILED,
    (PairState.IDLE, Move.RESET): PairState.IDLE,
    (PairState.POLLING, Move.RESET): PairState.IDLE,
    (PairState.FAILED, Move.RESET): PairState.IDLE,
}


class PairEnd(Machine[PairState, Move]):
    """End of an ordered pair of ranks: state, newest event ID and the ring position that follows."""

    def __init__(self, table: dict[tuple[PairState, Move], PairState], op: str, rank: int, peer: int) -> None:
        wording = f"{{who}} cannot {{event}} with peer {peer} while {{state}}"
        super().__init__(table, PairState.IDLE, f"{op}: rank {rank}", wording)
        self.op, self.rank, self.peer = op, rank, peer
        self.last_event_id = 0
        self.event_before = 0  # the last one before the transfer's
        self.position = 0
        self.transfer = 0  # event ID of the transfer that is under way or was the last; 0 after a reset

    def start(self, event_id: int) -> None:
        """Begin a transfer under an event ID."""
        check_later(self.who, event_id, self.last_event_id, f" for peer {self.peer}")
        self.move(Move.START)
        self.event_before, self.last_event_id, self.transfer = self.last_event_id, event_id, event_id

    def reset(self, newest_event_id: int) -> None:
        """Forget a failed transfer. The ring starts again at position 0, on both ends."""
        self.move(Move.RESET)
        self.transfer = 0
        self.last_event_id = max(self.last_event_id, newest_event_id)
        self.position = 0


class Progress:
    """Progress of each of a peer's AIV cores in a transfer, according to their fields."""

    def __init__(
        self, side: PairEnd, event_id: int, event_before: int, num_chunks: int, nbytes: int, num_cores: int
    ) -> None:
        self.side, self.event_id, self.event_before = side, event_id, event_before
        self.num_chunks, self.nbytes, self.num_cores = num_chunks, nbytes, num_cores
        self.base = side.position
        self.done = [0] * num_cores  # chunk ID that each core has come to
        self.next = 0  # all chunks before this one are done

    def look(self, core: int, field: RingField) -> None:
        """Take note of a field. Raises FieldError, naming expected and found values, if it is impossible."""
        if field.event_id != self.event_id and field.event_id <= self.event_before:
            return  # left by an earlier transfer
        where = f"{self.side.op}: rank {self.side.rank} expects"
        says = f"of peer {self.side.peer}, core {core}"
        if field.event_id != self.event_id:
            message = f"{where} event {self.event_id}, but the field {says} says event {field.event_id}"
            raise self._error_in("event ID", core, self.event_id, field.event_id, message)
        if field.nbytes != self.nbytes:
            message = f"{where} {self.nbytes} bytes, but the field {says} says {field.nbytes}"
            raise self._error_in("bytes", core, self.nbytes, field.nbytes, message)
        if not self._is_in_turn(core, field):
            expected = f"one of {core + 1}, {core + 1 + self.num_cores}, ... up to {self.num_chunks}"
            message = (
                f"{where} chunk {expected} at ring position {self.base} + chunk, from {self.done[core]} on, "
                f"but the field {says} says chunk {field.chunk_id} at {field.pointer}"
            )
            raise self._error_in("chunk ID", core, expected, field.chunk_id, message)
        self.done[core] = field.chunk_id
        while self.next < self.num_chunks and self.done[self.next % self.num_cores] > self.next:
            self.next += 1

    def _error_in(self, field: str, core: int, expected: object, seen: object, message: str) -> FieldError:
        side, kind = self.side, "ack" if self.side.op == "send" else "tail"
        name = f"{kind} {field}, core {core}"
        return FieldError(
            message, op=side.op, rank=side.rank, peer=side.peer, field=name, expected=expected, seen=seen
        )

    def _is_in_turn(self, core: int, field: RingField) -> bool:
        return (
            self.done[core] <= field.chunk_id <= self.num_chunks
            and field.chunk_id > 0
            and (field.chunk_id - 1) % self.num_cores == core
            and field.mode in (Mode.RING, Mode.ZERO_COPY)
            and (field.mode == Mode.ZERO_COPY or field.pointer == self.base + field.chunk_id)
            and field.num_cores == self.num_cores
        )

    @property
    def is_complete(self) -> bool:
        return self.next == self.num_chunks
