"""Plans: a DP group's decisions as data, without anything of the hardware.

A scheduler makes them from counts alone, and the group sends them to its dies in messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from xdeepserve.engine.numbers import StepNo

if TYPE_CHECKING:  # of places in a memory pool, which no scheduler reads
    from xdeepserve.hw.memory import Address


class PoolPlace(NamedTuple):
    """Place of KV block `block` in a pool value of `num_blocks` blocks, which begins at `address`."""

    address: Address
    block: int
    num_blocks: int


class BlockCopy(NamedTuple):
    """Copy of a KV block between tiers: "hbm", "host" or "pool"."""

    src_tier: str
    src: int | PoolPlace
    dst_tier: str
    dst: int | PoolPlace


class LogitEdits(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a row of logits before its token is drawn, in the order of `sampling.edit`.

    The log probabilities that a step reports are those of the unchanged logits. `fault` says why no token can
    be drawn at all: the row fails.
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
    """Plan of a forward pass of a DP group. Lists named per row have one entry per token row.

    Rows of a sequence are consecutive and ascend in position; its last rows may be drafts. Where dispatch and
    combine are barriers of all ranks, a group without work still gets an empty plan, `StepPlan(step=n)`.

    Sequences may be carried over from the previous step. For them the die fills in token ids and slots, and
    moves positions on by the number of accepted drafts (engine/die/carried.py).
    """

    step: StepNo
    bucket: int = 0  # rows of the graph that the step is launched as; 0: none
    num_parts: int = 1  # microbatches that it is cut into where they overlap on a die
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

    @property
    def num_looks(self) -> int:
        """Number of times that a row of logits is read or written, besides drawing its token: twice to edit
        the row, and twice to report log probabilities."""
        return 2 * len(self.edits) + 2 * sum(count >= 0 for count in self.num_logprobs)
