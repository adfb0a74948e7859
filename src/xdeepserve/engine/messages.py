"""Messages between the host and the dies. They are data, as are the plans that they carry (`plans.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.engine.numbers import DieNumber, DieRank, Epoch, GroupRank, StepNo
from xdeepserve.engine.plans import BlockCopy
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.queue import Queue

LOGPROB_SLOTS = 21  # the chosen token and up to 20 alternatives


class StepDone(msgspec.Struct, frozen=True):
    """Reports the end of a step on a die; its results lie in the die's result buffers.

    `faults` are errors of single logit rows, which have no results. Their sequences cannot go on; all others
    can.
    """

    rank: DieRank
    step: StepNo
    faults: dict[int, XDeepServeError] = {}


class LayerDone(msgspec.Struct, frozen=True):
    """Reports the end of a layer of the main model: the KV of the step's rows is in the die's cache."""

    rank: DieRank
    step: StepNo
    layer: int


class Probe(msgspec.Struct, frozen=True):
    """Asks a die for a sign of life; it answers between two commands."""


class ProbeDone(msgspec.Struct, frozen=True):
    """Answers a probe: the die is alive."""

    rank: DieRank


class StepFailed(msgspec.Struct, frozen=True):
    """Reports an error of a die's program, of a transfer or of a prefetch.

    A GlitchError is rolled back if recovery allows it; any other error ends the TE.
    """

    die: DieNumber
    error: Exception


class CopyBlocks(msgspec.Struct, frozen=True):
    """Command to move KV blocks between tiers.

    Places are slots in "hbm" and "host", and parts of a value's place in the DRAM of the "pool". Without a
    ticket the copies are made before the next command. With a ticket they go on beside later commands, and
    CopyDone reports their end.
    """

    ticket: int | None
    copies: Sequence[BlockCopy]


class PoolReady(msgspec.Struct, frozen=True):
    """Reports blocks of the memory pool, asked for under a ticket, as ready to be copied.

    In place of a pool there may be other TEs: then the blocks are here, and nothing is left to copy.

    Blocks that are not ready by now will not come.
    """

    group: GroupRank
    ticket: int


class CopyDone(msgspec.Struct, frozen=True):
    """Reports the end of a ticket's copies on a die."""

    rank: DieRank
    ticket: int


class SetExpertMap(msgspec.Struct, frozen=True):
    """Command to find experts by this map from the next step on.

    phy2log [layers with experts, physical experts] has -1 for a slot that is not in use. log2phy int32
    [layers, E, R] and logcnt int32 [layers, E] are the same map from the other side, as dies read it.
    """

    phy2log: Sequence[Sequence[int]]
    log2phy: npt.NDArray[np.int32]
    logcnt: npt.NDArray[np.int32]


class CollectLoad(msgspec.Struct, frozen=True):
    """Command to report how many tokens chose each expert since the last report.

    LoadCollected tells when the counts lie in the die's memory.
    """


class LoadCollected(msgspec.Struct, frozen=True):
    """Reports load counts as ready in the memory of a die."""

    rank: DieRank


class LoadExperts(msgspec.Struct, frozen=True):
    """Command to copy experts from the host's memory to redundant slots, beside the steps.

    Each load is (layer with experts, slot, expert). No step may use these slots until ExpertsLoaded.
    """

    loads: Sequence[tuple[int, int, int]]


class ExpertsLoaded(msgspec.Struct, frozen=True):
    """Reports the end of a LoadExperts command on a die."""

    die: DieNumber


class RollBack(msgspec.Struct, frozen=True):
    """Command of a rollback: epoch `epoch` has begun, and steps from number `step` on count as not run.

    No step is run until Resume. The dies' rollback fields say so, too (engine/recovery), to programs that are
    busy and read no commands.
    """

    epoch: Epoch
    step: StepNo


class RolledBack(msgspec.Struct, frozen=True):
    """Reports the end of all work of earlier epochs on a die, which will write nothing more."""

    die: DieNumber
    epoch: Epoch


class Resume(msgspec.Struct, frozen=True):
    """Command to go on after a rollback: exchanges begin anew, and plans follow."""

    epoch: Epoch


class Wake(msgspec.Struct, frozen=True):
    """Tells a host's loop of new work, or of room for old work."""


class Beat(msgspec.Struct, frozen=True):
    """Asks a TE-shell for a sign of life.

    The shell puts its `name` into `answers`, where it arrives after `travel_ns`.
    """

    name: str
    answers: Queue[str]
    travel_ns: int


class Shutdown(msgspec.Struct, frozen=True):
    """Last command of a die program: end."""
