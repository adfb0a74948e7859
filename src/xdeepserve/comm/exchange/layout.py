"""Layout of rows and buffers for dispatch and combine.

On each rank, with R ranks in the group:

    metadata   dispatch fields [R] | combine fields [R]      one 32-byte field per peer, written by that peer
    managed    dispatch blocks [R] | combine blocks [R]      rows *for* each peer, pulled by that peer
    app        received rows | returned rows                 where pulled rows land

A dispatch row is one (token, top-k slot):  expert i32 | token i32 | slot i32 | scale f32 | payload | padding
    The payload is H int8 (quantised) or H float32; expert is the physical expert's number.
A combine row is the expert's answer:  payload | padding.  H bfloat16 (quantised) or H float32; with
    `int8_answers` scale f32 | H int8 | padding (see `answers`).
Rows are padded to 32 bytes. A block holds as many rows as one rank can ever send another.

Why one set of buffers is enough, though ranks run at different speeds. On every rank dispatch and combine
alternate: D(1) C(1) D(2) C(2) ..., and each ends only when all ranks have posted their field for it, after
writing their blocks; a rank posts only after it has completed the operation before. Hence:
  - A rank that overwrites its dispatch blocks in D(n+1) has completed C(n). So all ranks had posted C(n), so
    all had completed D(n): nobody still pulls the rows of D(n), or has yet to read their field of D(n).
  - A rank that overwrites its combine blocks in C(n+1) has completed D(n+1). So all ranks had posted D(n+1),
    so all had completed C(n): nobody still pulls the rows of C(n).
  - Dispatch and combine must not share buffers: a rank may write C(n) while a slower one still pulls D(n).
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Self

import msgspec
import numpy as np

from xdeepserve.comm.cells import NO_HEADER, Cells, row_dtype
from xdeepserve.comm.checks import check_count
from xdeepserve.comm.exchange.answers import AnswerFormat
from xdeepserve.comm.wire import Blocks, padded
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import MemoryPlan

HEADER_DTYPE = np.dtype([("expert_idx", "<i4"), ("token_idx", "<i4"), ("slot", "<i4"), ("scale", "<f4")])


class Group(msgspec.Struct, frozen=True):
    """Ranks of an exchange of tokens: `dies[rank]` is a rank's die, `expert_rank[e]` the rank of physical
    expert e."""

    dies: tuple[int, ...]
    expert_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.dies or len(set(self.dies)) != len(self.dies):
            raise DeploymentError(f"a group needs one or more different dies, not {list(self.dies)}")
        wrong = [rank for rank in self.expert_rank if not 0 <= rank < len(self.dies)]
        if wrong:
            raise DeploymentError(f"experts on ranks {wrong}: the group has ranks 0..{len(self.dies) - 1}")

    @property
    def num_ranks(self) -> int:
        return len(self.dies)

    @property
    def max_experts_per_rank(self) -> int:
        return max(Counter(self.expert_rank).values(), default=0)


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Sizes (bytes) for groups of one shape. All ranks of a group must use equal layouts.

    `max_tokens` is per rank and dispatch; `name` keeps several groups on one die apart.
    """

    num_ranks: int
    max_tokens: int
    top_k: int
    hidden: int
    max_experts_per_rank: int
    quantize: bool = True
    name: str = "xccl"
    int8_answers: bool = False  # of layouts that quantise

    def __post_init__(self) -> None:
        for field in ("num_ranks", "max_tokens", "top_k", "hidden"):
            check_count("dispatch layout", field, getattr(self, field))

    @classmethod
    def for_group(
        cls,
        group: Group,
        max_tokens: int,
        *,
        top_k: int,
        hidden: int,
        quantize: bool = True,
        name: str = "xccl",
        int8_answers: bool = False,
    ) -> Self:
        most = group.max_experts_per_rank
        return cls(group.num_ranks, max_tokens, top_k, hidden, most, quantize, name, int8_answers)

    @property
    def rows_per_block(self) -> int:
        """Largest number of rows from a rank to another: a token has at most one copy per expert there."""
        return self.max_tokens * min(self.top_k, self.max_experts_per_rank)

    @property
    def dispatch_payload(self) -> np.dtype[np.generic]:
        return np.dtype(np.int8 if self.quantize else np.float32)

    @cached_property  # each combine of each die asks, several times
    def answers(self) -> AnswerFormat:
        """Format of combine rows, without their padding."""
        return AnswerFormat.of(self.hidden, self.quantize, self.int8_answers)

    @property
    def combine_payload(self) -> np.dtype[np.generic]:
        """Type of an element in a combine row; bfloat16 is kept as its 16 bits."""
        return self.answers.dtype

    @property
    def dispatch_nbytes(self) -> int:
        """Size of a dispatch row's payload (bytes)."""
        return self.hidden * self.dispatch_payload.itemsize

    @property
    def dispatch_row(self) -> int:
        return padded(HEADER_DTYPE.itemsize + self.dispatch_nbytes)

    @cached_property
    def combine_row(self) -> int:
        return padded(self.answers.nbytes)

    @property
    def dispatch_block(self) -> int:
        return self.rows_per_block * self.dispatch_row

    @property
    def combine_block(self) -> int:
        return self.rows_per_block * self.combine_row

    @property
    def dispatch(self) -> Blocks:
        """Blocks of dispatch: every rank writes, every rank reads."""
        ranks, rows = self.num_ranks, self.rows_per_block
        return Blocks(f"{self.name}.dispatch", ranks, ranks, rows, self.dispatch_row, ranks * rows)

    @property
    def combine(self) -> Blocks:
        """Blocks of combine: a rank gets at most one answer for each (token, slot)."""
        ranks, rows = self.num_ranks, self.rows_per_block
        max_answers = self.max_tokens * self.top_k
        return Blocks(f"{self.name}.combine", ranks, ranks, rows, self.combine_row, max_answers)

    def plan(self, memory: MemoryPlan) -> None:
        """Reserve a rank's regions. Raises OutOfMemoryError if the metadata area cannot take the fields."""
        for blocks in (self.dispatch, self.combine):
            blocks.plan_reader(memory)
            blocks.plan_writer(memory)

    def cells(self) -> dict[str, Cells]:
        """Map the regions to their cells: fields, blocks and rows of each operation."""
        row = row_dtype(HEADER_DTYPE, self.dispatch_payload, self.hidden, 0, self.dispatch_row)
        answer = row_dtype(NO_HEADER, self.combine_payload, self.hidden, 0, self.combine_row)
        return self.dispatch.cells(row, "peer") | self.combine.cells(answer, "peer")
