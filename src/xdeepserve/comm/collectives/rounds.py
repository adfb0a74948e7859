"""Rounds: what every collective is made of.

A round is pull-based, like dispatch, and a barrier:

    1  MTE copies what the rank contributes to its staging buffer in the managed area
    2  post to each peer where its part lies and how long it is
    3  wait until all have posted
    4  MTE pulls the rank's part from every peer, in rank order, to the app area
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.board import Board
from xdeepserve.comm.channel import Observer, Steps
from xdeepserve.comm.checks import check_event_id, integer
from xdeepserve.comm.collectives.layout import COLLECTIVE_FIELD, CollectiveLayout
from xdeepserve.comm.collectives.reduction import REDUCTIONS, TYPES
from xdeepserve.errors import DeploymentError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, Region

T = TypeVar("T")
Array = npt.NDArray[Any]


class Kind(enum.IntEnum):
    """What a round is, in its field. Peers whose kinds differ do not run the same program."""

    BARRIER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE_SCATTER = 5  # first round of all-reduce
    ALL_REDUCE_GATHER = 6  # second


class Contents(NamedTuple):
    """What a round is about. All ranks must mean the same, so each tells the others in its field."""

    event_id: int
    kind: Kind
    type: int = 0  # in `reduction.TYPES`; 0 too if nothing moves
    reduction: int = 0  # in `reduction.REDUCTIONS`; 0 too if nothing is reduced
    shape: tuple[int, ...] = ()  # of the array, or of a row if their numbers may differ

    @property
    def shape_digest(self) -> int:
        return zlib.crc32(np.array(self.shape, "<u8").tobytes())

    def check(self, op: str, rank: int, peer: int, field: Any) -> None:
        """ProtocolError, naming both, if a peer's field tells something else."""
        members: tuple[tuple[str, dict[int, str], str], ...] = (
            ("kind", {kind: kind.name for kind in Kind}, "runs"),
            ("type", dict(enumerate(TYPES)), "sends"),
            ("reduction", dict(enumerate(REDUCTIONS)), "takes the"),
        )
        for name, names, says in members:
            ours, theirs = getattr(self, name), int(field[name])
            if theirs != ours:
                raise ProtocolError(
                    f"{op}: rank {rank} {says} {names[ours]} in event {self.event_id}, "
                    f"but peer {peer} {names.get(theirs, theirs)}"
                )
        if (int(field["axes"]), int(field["shape"])) != (len(self.shape), self.shape_digest):
            raise ProtocolError(
                f"{op}: rank {rank} sends shape {list(self.shape)} in event {self.event_id}, "
                f"but peer {peer} another one of {field['axes']} axes"
            )


class State(enum.Enum):
    """What a rank does."""

    IDLE = "idle"
    RUNNING = "in a collective"
    FAILED = "failed"


class Move(enum.Enum):
    START = "start a collective"
    DONE = "complete a collective"
    FAIL = "fail"
    RESET = "be reset"


MOVES = {
    (State.IDLE, Move.START): State.RUNNING,
    (State.RUNNING, Move.DONE): State.IDLE,
    (State.RUNNING, Move.FAIL): State.FAILED,
    (State.IDLE, Move.RESET): State.IDLE,
    (State.FAILED, Move.RESET): State.IDLE,
}


def next_state(state: State, move: Move, rank: int) -> State:
    """ProtocolError if it cannot be."""
    try:
        return MOVES[state, move]
    except KeyError:
        raise ProtocolError(f"rank {rank} cannot {move.value} while {state.value}") from None


class Rounds:
    """One rank's end of the rounds of a group: `dies[rank]` is a rank's die.

    See `Collectives` for the arguments.
    """

    def __init__(
        self,
        die: Die,
        dies: tuple[int, ...],
        layout: CollectiveLayout,
        num_cores: int | None,
        timeout_ns: int,
        on_step: Observer | None,
    ) -> None:
        total = die.spec.num_cores("aiv")
        num_cores = None if num_cores is None else integer("collectives", "num_cores", num_cores)
        if num_cores is not None and not 1 <= num_cores <= total:
            raise DeploymentError(f"{num_cores} AIV cores asked for: a die has 1 to {total}")
        self.die, self.layout = die, layout
        self.num_cores, self.timeout_ns = num_cores or total, integer("collectives", "timeout_ns", timeout_ns)
        self._check_group(dies)
        self.board = Board(die, dies, layout.region("fields"), layout.board)
        self.steps = Steps(die, on_step)
        self.state = State.IDLE
        self._last_event_id = 0
        self._turn = 0

    def _check_group(self, dies: tuple[int, ...]) -> None:
        if len(set(dies)) != len(dies) or self.die.index not in dies or len(dies) > self.layout.num_ranks:
            raise DeploymentError(
                f"die {self.die.index} needs a group of up to {self.layout.num_ranks} different dies with "
                f"itself among them, not {list(dies)}"
            )

    @property
    def dies(self) -> tuple[int, ...]:
        return self.board.dies

    @property
    def rank(self) -> int:
        return self.board.rank

    @property
    def num_ranks(self) -> int:
        return len(self.board.dies)

    def reset(self, dies: tuple[int, ...] | None = None) -> None:
        """Forget a failed collective and go on, among fewer `dies` if given.

        All ranks that go on must do so when none is in a collective.
        """
        state = next_state(self.state, Move.RESET, self.rank)
        if dies is not None:
            self._check_group(dies)
        self.board.clear(self.dies if dies is None else dies)
        self.state, self._turn = state, 0

    async def run(self, event_id: int, operation: Coroutine[Any, Any, T]) -> T:
        """Run one collective, of one or more rounds, under an event ID."""
        try:
            state = next_state(self.state, Move.START, self.rank)
            check_event_id("collective", self.rank, event_id)
            if event_id <= self._last_event_id:
                raise ProtocolError(
                    f"rank {self.rank} was given event {event_id} after {self._last_event_id}: "
                    "event IDs must increase"
                )
        except ProtocolError:
            operation.close()
            raise
        self.state, self._last_event_id = state, event_id
        is_done = False
        try:
            result = await operation
            is_done = True
        finally:
            self.state = next_state(self.state, Move.DONE if is_done else Move.FAIL, self.rank)
        return result

    async def round(
        self,
        op: str,
        what: Contents,
        parts: list[Array] | None,
        expected: int | list[int] | None = None,
    ) -> list[npt.NDArray[np.uint8]]:
        """Contribute parts[p] for rank p; what each rank contributed for this one, as bytes.

        Parts may be one and the same array, which is then staged once. `expected` is the number of bytes that
        each peer must have for this rank; None if it may be any.
        """
        fields = np.zeros(self.num_ranks, COLLECTIVE_FIELD)
        fields["kind"], fields["type"], fields["reduction"] = what.kind, what.type, what.reduction
        fields["axes"], fields["shape"] = len(what.shape), what.shape_digest
        self.steps.begin()
        if what.kind is not Kind.ALL_REDUCE_GATHER:  # whose kernel is running already
            await self.die.clock.sleep(self.die.spec.kernel_ns(0, 0))

        # Step 1: copy to staging, in one of two buffers: a slow peer may still pull from the other.
        self._turn += 1
        if parts is not None:
            await self._stage(op, parts, fields)
        await self.steps.passed(op, 1)

        # Step 2: tell every rank.
        self.board.begin(what.event_id)
        await self.board.post(fields, f"{op} 2 post", self.num_cores)
        await self.steps.passed(op, 2)

        # Step 3: wait until all have told.
        def check(peer: int, field: Any) -> None:
            what.check(op, self.rank, peer, field)
            wanted = expected[peer] if isinstance(expected, list) else expected
            if wanted is not None and field["nbytes"] != wanted:
                raise ProtocolError(
                    f"{op}: rank {self.rank} expects {wanted} bytes of peer {peer}, not {field['nbytes']}"
                )

        fields = await self.board.wait(op, self.timeout_ns, check)
        await self.steps.passed(op, 3)

        # Step 4: pull.
        pulled = await self._pull(op, fields)
        await self.steps.passed(op, 4)
        return pulled

    async def _stage(self, op: str, parts: list[Array], fields: npt.NDArray[Any]) -> None:
        """Write the parts to staging, each array once, and where they lie to `fields`."""
        node, mte = self.die.index, self.die.mte
        offset = self.region("staging").offset + self.layout.staging_offset(self._turn)
        staged: dict[int, int] = {}
        pieces = []
        for peer, part in enumerate(parts):
            if id(part) not in staged:
                staged[id(part)] = offset
                if part.nbytes:
                    pieces.append((Address(node, offset), part.tobytes()))
                offset += part.nbytes
            fields["pointer"][peer], fields["nbytes"][peer] = staged[id(part)], part.nbytes
        if pieces:
            await mte.load_view(sum(len(data) for _, data in pieces), self.num_cores, f"{op} 1 load")
            await mte.store(pieces, self.num_cores, f"{op} 1 stage")

    async def _pull(self, op: str, fields: npt.NDArray[Any]) -> list[npt.NDArray[np.uint8]]:
        """Copy what the fields tell of, side by side, to the app area."""
        die, region, sizes = self.die, self.region("pulled"), fields["nbytes"].tolist()
        if sum(sizes) > region.nbytes:
            raise ProtocolError(
                f"{op}: rank {self.rank} has no room for the {sum(sizes)} bytes that its peers post"
            )
        offset, copies, result = region.offset, [], []
        for source, pointer, nbytes in zip(self.dies, fields["pointer"].tolist(), sizes, strict=True):
            if nbytes:
                copies.append(Copy(Address(source, pointer), Address(die.index, offset), nbytes))
            result.append(np.frombuffer(die.memory.buffer, np.uint8, nbytes, offset))
            offset += nbytes
        if copies:
            await die.mte.copy(copies, self.num_cores, f"{op} 4 pull")
        return result

    def region(self, part: str) -> Region:
        """One of this rank's regions: staging, pulled or result."""
        memory = self.die.memory
        area = memory.managed if part == "staging" else memory.app
        return area.regions[self.layout.region(part)]
