"""Table of a collective rank's states and moves, and the contents on which all ranks must agree in a
round."""

from __future__ import annotations

import enum
import zlib
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.comm.collectives.reduction import REDUCTIONS, TYPES
from xdeepserve.errors import ProtocolError


class CollectiveState(enum.Enum):
    """State of a rank: idle, in a collective, or failed."""

    IDLE = "idle"
    RUNNING = "in a collective"
    FAILED = "failed"


class CollectiveMove(enum.Enum):
    START = "start a collective"
    DONE = "complete a collective"
    FAIL = "fail"
    RESET = "be reset"


MOVES = {
    (CollectiveState.IDLE, CollectiveMove.START): CollectiveState.RUNNING,
    (CollectiveState.RUNNING, CollectiveMove.DONE): CollectiveState.IDLE,
    (CollectiveState.RUNNING, CollectiveMove.FAIL): CollectiveState.FAILED,
    (CollectiveState.IDLE, CollectiveMove.RESET): CollectiveState.IDLE,
    (CollectiveState.FAILED, CollectiveMove.RESET): CollectiveState.IDLE,
}


class Kind(enum.IntEnum):
    """Kind of a round, as told in its field. Peers with different kinds do not run the same program."""

    BARRIER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE_SCATTER = 5  # first round of all-reduce
    ALL_REDUCE_GATHER = 6  # second
    BROADCAST = 7


class Contents(NamedTuple):
    """Contents of a round. All ranks must agree on them, so each tells the others in its field."""

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
        """Compare a peer's field with these contents. Raises ProtocolError, naming both, if they differ."""
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
