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
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.board import Board
from xdeepserve.comm.checks import check_event_id, check_later
from xdeepserve.comm.collectives.layout import COLLECTIVE_FIELD, CollectiveLayout
from xdeepserve.comm.collectives.reduction import REDUCTIONS, TYPES
from xdeepserve.comm.collectives.rules import MOVES, CollectiveMove, CollectiveState
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.steps import Observer, Steps
from xdeepserve.errors import DeploymentError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, Region
from xdeepserve.machine import Machine

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
    BROADCAST = 7


class Contents(NamedTuple):
    """What a round is about. All ranks must mean the same, so each tells the others in its field."""

    event_id: int
    kind: Kind
    type: int = 0  # in `reduction.TYPES`; 0 too if nothing moves
    reduction: int = 0  # in `reduction.REDUCTIONS`; 0 too if nothing is reduced
    shape: tuple[int, ...] = ()  # of the array, or of a row if their numbers may differ
    root: int | None = None  # of a broadcast

    @property
    def shape_digest(self) -> int:
        root = () if self.root is None else (self.root,)
        return zlib.crc32(np.array([*root, *self.shape], "<u8").tobytes())

    def check(self, op: str, rank: int, peer: int, field: Any, num_ranks: int) -> None:
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
            roots = range(num_ranks) if self.root is not None else ()
            meant = [root for root in roots if self._replace(root=root).shape_digest == field["shape"]]
            if meant and field["axes"] == len(self.shape):
                raise ProtocolError(
                    f"{op}: rank {rank} takes rank {self.root} for the root in event {self.event_id}, "
                    f"but peer {peer} rank {meant[0]}"
                )
            raise ProtocolError(
                f"{op}: rank {rank} sends shape {list(self.shape)} in event {self.event_id}, "
                f"but peer {peer} another one of {field['axes']} axes"
            )


class Rounds:
    """One rank's end of the rounds of a group: `dies[rank]` is a rank's die.

    See `Collectives` for the arguments.
    """

    def __init__(
        self,
        die: Die,
        dies: tuple[int, ...],
        layout: CollectiveLayout,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
    ) -> None:
        means = means.checked(die)
        self.die, self.layout = die, layout
        self.num_cores, self.timeout_ns = means.cores or die.spec.num_cores("aiv"), means.timeout_ns
        self._check_group(dies)
        self.board = Board(die, dies, layout.region("fields"), layout.board)
        self.steps = Steps(die, on_step, means.lane)
        self._machine = Machine(MOVES, CollectiveState.IDLE, f"rank {self.rank}")
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
        self._machine.after(CollectiveMove.RESET)
        if dies is not None:
            self._check_group(dies)
        self.board.clear(self.dies if dies is None else dies)
        self._machine.move(CollectiveMove.RESET)
        self._machine.who, self._turn = f"rank {self.rank}", 0

    async def run(self, event_id: int, operation: Callable[[], Awaitable[T]]) -> T:
        """Run one collective, of one or more rounds, under an event ID."""
        self._machine.after(CollectiveMove.START)
        check_event_id("collective", self.rank, event_id)
        check_later(f"rank {self.rank}", event_id, self._last_event_id)
        self._machine.move(CollectiveMove.START)
        self._last_event_id = event_id
        with self._machine.ending(CollectiveMove.DONE, CollectiveMove.FAIL):
            return await operation()

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
            what.check(op, self.rank, peer, field, self.num_ranks)
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
