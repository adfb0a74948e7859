"""Parts of a Program: stages, which compute on a die, and meets, at which dies exchange bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from xdeepserve.hw.spec import Core, Work
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Held, Layer

if TYPE_CHECKING:
    from xdeepserve.step.frame import Frame, Model

Cut = Literal["rows", "heads", "sum"]
Extent = Literal["mine", "all", "received", "logits", "shared"]
MeetOp = Literal[
    "dispatch", "combine", "fused_dispatch", "fused_combine", "a2e", "e2a",
    "all_reduce", "all_gather", "all_to_all", "spread", "reduce_scatter",
]  # fmt: skip


class Counts(NamedTuple):
    """Numbers behind a stage's cost, besides the model.

    rows        token rows that it treats
    context     positions that these attend to, summed over rows
    kv_tokens   cached positions that are read: each sequence's once
    copies      token copies that the routed experts of this die are billed for
    touched     of these experts, those that have rows
    shared      rows that a copy of the shared expert here treats, of any dies
    """

    rows: float
    context: float = 0
    kv_tokens: float = 0
    copies: float = 0
    touched: float = 0
    shared: float = 0


class Op(NamedTuple):
    """Operation of a pass, the smallest unit that parallelism moves.

    `cut` is what of it dies may share: each has its own rows; or its own heads (features, in an MLP) of all
    rows; or, of a product whose inputs are cut so, its own part of every sum. `work` is told
    what it is an operation of: a `Layer`, or what a die has `Held` of one that has experts alone.
    """

    kernel: Callable[[Frame], None]
    work: Callable[[Model, Any, Counts], Work]
    cut: Cut = "rows"


class Stage(NamedTuple):
    """Operations launched as a single kernel, by the paper's name.

    `rows` says which rows it treats: the die's own (`mine`), those of its whole DP group (`all`), those that
    a dispatch or an A2E has brought (`received`), those that logits are wanted of (`logits`), or those of all
    DP groups that share an output projection (`shared`). Without rows it is skipped. Only what `attends`
    costs more with more `context` and `kv_tokens`.
    """

    name: str
    ops: tuple[Op, ...]
    core: Core = "aic"
    rows: Extent = "mine"
    attends: bool = False

    def run(self, frame: Frame) -> None:
        """Run the kernels of all operations."""
        for op in self.ops:
            op.kernel(frame)

    def work(self, model: Model, weights: Layer | Held, counts: Counts) -> Work:
        """Return the work of all operations, for their cost."""
        return sum((op.work(model, weights, counts) for op in self.ops if op.work is not free), Work())


class Meet(NamedTuple):
    """Exchange of dies. Exchanges of tokens with experts, and those between DP groups (`spread` and
    `reduce_scatter`), happen with rows or without. Collectives of a DP group happen only if it has rows.
    `given` views the input of this die to a collective."""

    op: MeetOp
    given: Callable[[Frame], Array] | None = None
    reduction: Literal["sum", "max"] = "sum"


Program: TypeAlias = tuple[Stage | Meet, ...]


class LayerProgram(NamedTuple):
    """Both halves of a decoder layer (stream 0 and stream 1 of CloudMatrix 4.2.3)."""

    attention: Program
    feed: Program


def stages(program: Program) -> list[Stage]:
    """List the stages of a program, without the meets."""
    return [item for item in program if isinstance(item, Stage)]


def free(model: Model, weights: Layer | Held, counts: Counts) -> Work:
    """Work of small kernels: nothing, because it is part of other kernels' costs."""
    return Work()
