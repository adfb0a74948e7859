"""What the host tells a die, and what the die tells the host. Plans are data: no closures, no arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.engine.numbers import DieNumber, DieRank, Epoch, GroupRank, StepNo
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.memory import Address
from xdeepserve.hw.queue import Queue

LOGPROB_SLOTS = 21  # the chosen token and up to 20 alternatives


class PoolPlace(NamedTuple):
    """KV block `block` of the `num_blocks` of a value in the memory pool, which begins at `address`."""

    address: Address
    block: int
    num_blocks: int


class BlockCopy(NamedTuple):
    """Move one block. A tier is "hbm", "host" or "pool"."""

    src_tier: str
    src: int | PoolPlace
    dst_tier: str
    dst: int | PoolPlace


class LogitEdits(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to a row of logits before its token is drawn, in the order of `sampling.edit`.

    The log probabilities that a step reports are those of the logits as they were. `fault` says why no token
    can be drawn at all: the row fails.
    """

    bias: dict[int, float] = {}
    repetition_penalty: float = 1.0
    seen: list[int] = []  # token ids of prompt and output; empty without that penalty
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    counts: dict[int, int] = {}  # of the output's token ids; empty without these penalties
    allowed: bytes | None = None  # a bit for each token id that may be drawn; None: all
    fault: str = ""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass of one DP group. Lists named per row have one entry per token row.

    Rows of a sequence are consecutive and ascend in position; its last row may be a draft. A group without
    work still gets an empty plan, `StepPlan(step=n)`, because dispatch and combine are barriers of all ranks.

    Of sequences that are carried over from the step before, the die fills in token ids and slots, and moves
    positions on by the number of drafts that were accepted there (engine/die/carried.py).
    """

    step: StepNo
    bucket: int = 0  # rows of the graph that the step is launched as; 0: none
    reports_layers: bool = False  # a LayerDone for each layer, since somebody waits for its KV
    # per row
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []  # where its KV goes: block * block_size + offset
    seq_of: list[int] = []  # index into block_tables
    next_token_ids: list[int] = []  # the token that follows, for MTP; -1: what this step samples
    # per sequence
    block_tables: list[list[int]] = []
    num_drafts: list[int] = []  # how many of its last rows are drafts
    token_after: list[int] = []  # the token after next_token_ids of its last row, if it is known; else -1
    carried_seq: list[int] = []  # it goes on from what this one of the step before sampled; -1: all is known
    carried_row: list[int] = []  # if so, the logit row there that sampled its first token
    # per row whose logits are wanted, ascending
    logit_rows: list[int] = []
    targets: list[int] = []  # the token to report the log probability of; -1: the sampled one
    num_logprobs: list[int] = []  # alternatives to report; -1: no log probabilities
    temperature: list[float] = []
    top_k: list[int] = []
    top_p: list[float] = []
    min_p: list[float] = []
    seed: list[int] = []
    choice: list[int] = []
    # by logit row, of those that have any
    edits: dict[int, LogitEdits] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class StepDone(msgspec.Struct, frozen=True):
    """A die has finished a step; its results lie in its output region.

    `faults` are those of single logit rows, which have no results: their sequences cannot go on, all others
    can.
    """

    rank: DieRank
    step: StepNo
    faults: dict[int, XDeepServeError] = {}


class LayerDone(msgspec.Struct, frozen=True):
    """A die has finished a layer of the main model in a step: the KV of the step's rows is in its cache."""

    rank: DieRank
    step: StepNo
    layer: int


class Probe(msgspec.Struct, frozen=True):
    """Are you there? A die answers between two commands."""


class ProbeDone(msgspec.Struct, frozen=True):
    """A die is there."""

    rank: DieRank


class StepFailed(msgspec.Struct, frozen=True):
    """A die's program raised; the die is lost."""

    die: DieNumber
    error: Exception


class CopyBlocks(msgspec.Struct, frozen=True):
    """Move KV blocks between tiers: (source tier, place, destination tier, place) each.

    Places are slots in "hbm" and "host", and parts of a value's place in the DRAM of the "pool".

    Without a ticket they are made before the next command; with one beside it, and CopyDone tells the end.
    """

    ticket: int | None
    copies: Sequence[BlockCopy]


class PoolReady(msgspec.Struct, frozen=True):
    """What was asked of the memory pool under a ticket of a DP group can be copied now, as far as ever."""

    group: GroupRank
    ticket: int


class CopyDone(msgspec.Struct, frozen=True):
    """A die has made the copies of a ticket."""

    rank: DieRank
    ticket: int


class SetExpertMap(msgspec.Struct, frozen=True):
    """From the next step on tokens find experts by this map: phy2log [layers with experts, physical
    experts], -1 for a slot that is not in use; and the same from the other side, as dies read it: log2phy
    int32 [layers, E, R] and logcnt int32 [layers, E]."""

    phy2log: Sequence[Sequence[int]]
    log2phy: npt.NDArray[np.int32]
    logcnt: npt.NDArray[np.int32]


class CollectLoad(msgspec.Struct, frozen=True):
    """Report how many tokens chose each expert since the last report; LoadCollected tells when it lies in
    the die's memory."""


class LoadCollected(msgspec.Struct, frozen=True):
    """A die has reported its experts' load."""

    rank: DieRank


class LoadExperts(msgspec.Struct, frozen=True):
    """Copy experts from the host's memory to redundant slots, beside the steps: (layer with experts, slot,
    expert) each. No step may use these slots until ExpertsLoaded."""

    loads: Sequence[tuple[int, int, int]]


class ExpertsLoaded(msgspec.Struct, frozen=True):
    """A die has made the copies of LoadExperts."""

    die: DieNumber


class RollBack(msgspec.Struct, frozen=True):
    """Epoch `epoch` has begun: no step from number `step` on has happened, and none is run until Resume.

    The dies' rollback fields say so, too (engine/recovery), to programs that are busy and read no commands.
    """

    epoch: Epoch
    step: StepNo


class RolledBack(msgspec.Struct, frozen=True):
    """Nothing of an earlier epoch runs on a die any more, nor will it write anything."""

    die: DieNumber
    epoch: Epoch


class Resume(msgspec.Struct, frozen=True):
    """All dies have rolled back to an epoch: the ends of exchanges are as if new, and plans follow."""

    epoch: Epoch


class Wake(msgspec.Struct, frozen=True):
    """To a host's loop: there is new work, or room for old work."""


class Beat(msgspec.Struct, frozen=True):
    """To a TE-shell: are you there? It says its `name` to who asks; that is on its way for `travel_ns`."""

    name: str
    answers: Queue[str]
    travel_ns: int


class Shutdown(msgspec.Struct, frozen=True):
    """The last command of a die program."""
