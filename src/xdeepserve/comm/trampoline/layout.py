"""Layout of rows and buffers for A2E and E2A (XDS 3.3): A attention dies, X expert dies, trampolines between
them.

    A2E    attention die -> its trampoline          every token once, with its routing
    A2E'   trampolines -> expert dies               dispatch among the X expert dies, a copy for each expert
    E2A    expert dies -> trampolines               combine among the X expert dies
    E2A'   trampoline -> its attention dies         one row for each token

The trampolines are the first min(A, X) expert dies; attention die a belongs to trampoline a mod X. So for
A <= X a trampoline serves one attention die, and for A > X up to ceil(A / X).

An A2E row is a token:  physical expert i32 [K] | weight f32 [K] | scale f32 | payload | padding
    The payload is H int8 (quantised) or H float32.
An E2A' row is a token's answer: the weighted sum of its experts' answers, H float32, so that it has the same
    bits as if the attention die had summed; or, without `reduce`, all K answers, bfloat16 or float32.

The loss of a die. Buffers are planned once, for the layout's `sides`; the sides in use may be smaller. With
fewer expert dies, though, those that are left may have more to do: where A = X each trampoline serves one
attention die, and with one expert die less one of them has to serve two, besides the experts that it takes
over. `check_sides` refuses that unless room was planned for it. To survive the loss of n expert dies, plan
for more attention dies than are used, so that ceil(A / X) is what ceil(A / (X - n)) will be, and for as many
experts on a die as will be there then.

Why one set of buffers is enough: an attention die's A2E and E2A alternate, and so do an expert die's.
  - An attention die overwrites its A2E block in A2E(n+1) after it has E2A(n), which its trampoline posted
    after pulling A2E(n).
  - A trampoline overwrites its E2A' blocks in E2A(n+1) after it has A2E(n+1) of all its attention dies, each
    of which posted that after pulling E2A'(n).
  - A2E' and E2A among the expert dies: see `exchange.layout`.
Operations that are to overlap (DP domains, microbatches) take a layout each, under different names.

With `pushes` the exchange among the expert dies is FusedDispatch and FusedCombine, whose buffers are those of
`fused.layout`. FusedCombine adds up where answers arrive, so that is for `reduce`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from xdeepserve.comm.cells import Cells, members
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.wire import Blocks, padded
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import MemoryPlan


class Sides(msgspec.Struct, frozen=True):
    """Attention dies by rank, and the group of the expert dies."""

    attention: tuple[int, ...]
    experts: Group

    def __post_init__(self) -> None:
        dies = self.attention + self.experts.dies
        if not self.attention or len(set(dies)) != len(dies):
            raise DeploymentError(
                f"attention and experts need different dies, one or more each, not {list(self.attention)} "
                f"and {list(self.experts.dies)}"
            )

    @property
    def num_trampolines(self) -> int:
        return min(len(self.attention), self.experts.num_ranks)

    @property
    def max_served(self) -> int:
        """Largest number of attention dies served by a trampoline."""
        return -(-len(self.attention) // self.experts.num_ranks)

    def trampoline(self, attention_rank: int) -> int:
        """Return the expert rank of an attention rank's trampoline."""
        return attention_rank % self.experts.num_ranks

    def served(self, expert_rank: int) -> list[int]:
        """List the attention ranks served by an expert rank; none if it is no trampoline."""
        return list(range(expert_rank, len(self.attention), self.experts.num_ranks))


class A2ELayout(msgspec.Struct, frozen=True):
    """Sizes (bytes) of A2E and E2A.

    All dies of both sides must use equal layouts; `max_tokens` is per attention die.
    """

    sides: Sides
    max_tokens: int
    top_k: int
    hidden: int
    quantize: bool = True
    reduce: bool = True
    name: str = "a2e"
    pushes: bool = False
    int8_answers: bool = False  # among the expert dies, of layouts that quantise

    def __post_init__(self) -> None:
        if self.pushes and not self.reduce:
            raise DeploymentError("the A2E layout: FusedCombine adds up answers: pushes=True is for reduce")
        if self.int8_answers and not self.reduce:
            raise DeploymentError(
                "the A2E layout: answers are INT8 up to their sum: int8_answers needs reduce"
            )

    def check_sides(self, sides: Sides) -> None:
        """Check the buffers' sizes for these dies, which may be fewer. Raises DeploymentError if a buffer is
        too small.

        Fewer expert dies may need more room each: see the head of this module.
        """
        mine, theirs = _extent(self.sides), _extent(sides)
        too_large = [name for name in mine if theirs[name] > mine[name]]
        if too_large:
            found = ", ".join(f"{theirs[name]} {name}, planned for {mine[name]}" for name in too_large)
            raise DeploymentError(f"the A2E layout cannot hold {found}")

    @property
    def experts(self) -> Layout:
        """Layout of A2E' and E2A: dispatch and combine among the expert dies."""
        return Layout.for_group(
            self.sides.experts,
            max_tokens=self.max_tokens * self.sides.max_served,
            top_k=self.top_k,
            hidden=self.hidden,
            quantize=self.quantize,
            name=f"{self.name}.experts",
            int8_answers=self.int8_answers,
        )

    @property
    def fused(self) -> FusedLayout:
        """Layout of A2E' and E2A by push: FusedDispatch and FusedCombine among the expert dies."""
        return FusedLayout.for_group(
            self.sides.experts,
            local_batch=self.max_tokens * self.sides.max_served,
            top_k=self.top_k,
            hidden=self.hidden,
            quantize=self.quantize,
            name=f"{self.name}.fused",
            int8_answers=self.int8_answers,
        )

    @property
    def token_dtype(self) -> np.dtype[np.void]:
        """Type of an A2E row up to its padding."""
        payload = np.dtype(np.int8 if self.quantize else np.float32)
        fields = [
            ("topk_idx", "<i4", (self.top_k,)),
            ("topk_weights", "<f4", (self.top_k,)),
            ("scale", "<f4"),
        ]
        return np.dtype([*fields, ("payload", payload, (self.hidden,))])

    @property
    def answer_dtype(self) -> np.dtype[np.void]:
        """Type of an E2A' row up to its padding."""
        if self.reduce:
            return np.dtype([("payload", "<f4", (self.hidden,))])
        payload = np.dtype("<u2" if self.quantize else "<f4")
        return np.dtype([("payload", payload, (self.top_k, self.hidden))])

    @property
    def tokens(self) -> Blocks:
        """Blocks of A2E: each attention die keeps one block, and its trampoline reads up to `max_served`."""
        served, row = self.sides.max_served, padded(self.token_dtype.itemsize)
        return Blocks(f"{self.name}.tokens", served, 1, self.max_tokens, row, served * self.max_tokens)

    @property
    def answers(self) -> Blocks:
        """Blocks of E2A': a trampoline keeps a block for each attention die it serves."""
        row = padded(self.answer_dtype.itemsize)
        return Blocks(f"{self.name}.answers", 1, self.sides.max_served, self.max_tokens, row, self.max_tokens)

    @property
    def naive_tokens(self) -> Blocks:
        """Blocks of the naive A2E: each attention die keeps a block for every expert die, which reads from
        all."""
        layout = self.naive
        num_attention, num_experts = len(self.sides.attention), self.sides.experts.num_ranks
        rows = layout.rows_per_block
        name = f"{self.name}.naive.tokens"
        return Blocks(name, num_attention, num_experts, rows, layout.dispatch_row, num_attention * rows)

    @property
    def naive_answers(self) -> Blocks:
        """Blocks of the naive E2A, from expert dies back to attention dies."""
        layout = self.naive
        num_attention, num_experts = len(self.sides.attention), self.sides.experts.num_ranks
        rows, name = layout.rows_per_block, f"{self.name}.naive.answers"
        max_answers = self.max_tokens * self.top_k
        return Blocks(name, num_experts, num_attention, rows, layout.combine_row, max_answers)

    @property
    def flow_blocks(self) -> int:
        """Number of blocks for all answers to an attention die's tokens, where tokens flow."""
        return -(-self.max_tokens * self.top_k // self.naive.rows_per_block)

    @property
    def flow_tokens(self) -> Blocks:
        """Blocks of A2E' where tokens flow: for each attention die, its trampoline has a block for each
        expert die."""
        layout, served = self.naive, self.sides.max_served
        num_attention, num_experts = len(self.sides.attention), self.sides.experts.num_ranks
        rows, name = layout.rows_per_block, f"{self.name}.flow.tokens"
        return Blocks(
            name, num_attention, num_experts * served, rows, layout.dispatch_row, num_attention * rows
        )

    @property
    def flow_answers(self) -> Blocks:
        """Blocks of E2A where tokens flow, back to the trampolines."""
        layout, served = self.naive, self.sides.max_served
        num_attention, num_experts = len(self.sides.attention), self.sides.experts.num_ranks
        rows, name = layout.rows_per_block, f"{self.name}.flow.answers"
        max_answers = served * self.flow_blocks * rows
        return Blocks(name, num_experts * served, num_attention, rows, layout.combine_row, max_answers)

    @property
    def naive(self) -> Layout:
        """Layout of dispatch and combine rows, in blocks for the tokens of one attention die."""
        return msgspec.structs.replace(self.experts, max_tokens=self.max_tokens)

    def plan_naive_attention(self, memory: MemoryPlan) -> None:
        """Reserve the regions of an attention die for the naive exchange."""
        self.naive_tokens.plan_writer(memory)
        self.naive_answers.plan_reader(memory)

    def plan_naive_expert(self, memory: MemoryPlan) -> None:
        """Reserve the regions of an expert die for the naive exchange."""
        self.naive_tokens.plan_reader(memory)
        self.naive_answers.plan_writer(memory)

    def plan_flow_expert(self, memory: MemoryPlan) -> None:
        """Reserve the regions of an expert die, trampoline or not, where tokens flow. Attention dies use
        `plan_attention`."""
        self.tokens.plan_reader(memory)
        self.answers.plan_writer(memory)
        for blocks in (self.flow_tokens, self.flow_answers):
            blocks.plan_writer(memory)
            blocks.plan_reader(memory)

    def plan_attention(self, memory: MemoryPlan) -> None:
        """Reserve the regions of an attention die."""
        self.tokens.plan_writer(memory)
        self.answers.plan_reader(memory)

    def plan_expert(self, memory: MemoryPlan) -> None:
        """Reserve the regions of an expert die, trampoline or not."""
        self.tokens.plan_reader(memory)
        self.answers.plan_writer(memory)
        (self.fused if self.pushes else self.experts).plan(memory)

    def cells(self) -> dict[str, Cells]:
        """Map the regions of A2E's first stage, E2A's second, and the exchange among expert dies to cells."""
        result = (self.fused if self.pushes else self.experts).cells()
        for blocks, row in ((self.tokens, self.token_dtype), (self.answers, self.answer_dtype)):
            inner = members(row)
            dtype: Any = {
                "names": list(inner),
                "formats": [this for this, _ in inner.values()],
                "offsets": [first for _, first in inner.values()],
                "itemsize": blocks.row_nbytes,
            }
            result |= blocks.cells(np.dtype(dtype))
        return result

    def naive_cells(self) -> dict[str, Cells]:
        """Map the regions of A2E and E2A without trampolines to cells: rows as in dispatch and combine."""
        layout = self.naive
        rows = layout.cells()
        tokens, answers = layout.dispatch.region("rows"), layout.combine.region("rows")
        return self.naive_tokens.cells(rows[tokens].dtype) | self.naive_answers.cells(rows[answers].dtype)


def _extent(sides: Sides) -> dict[str, int]:
    return {
        "attention dies": len(sides.attention),
        "expert dies": sides.experts.num_ranks,
        "attention dies on a trampoline": sides.max_served,
        "experts on a die": sides.experts.max_experts_per_rank,
    }
