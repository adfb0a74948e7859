"""What a Program is made of: stages, which compute on one die, and meets, where dies exchange bytes."""

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
    """What a stage's cost depends on, besides the model.

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
    """One operation of a pass, the smallest that parallelism moves about.

    `cut` is what of it dies may share: each has its own rows; or its own heads (features, in an MLP) of all
    rows; or, of a product whose inputs are cut so, its own part of every sum. `work` is told
    what it is an operation of: a `Layer`, or what a die has `Held` of one that has experts alone.
    """

    kernel: Callable[[Frame], None]
    work: Callable[[Model, Any, Counts], Work]
    cut: Cut = "rows"


class Stage(NamedTuple):
    """Operations that are launched as one kernel, by the paper's name.

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
        """All that it computes."""
        for op in self.ops:
            op.kernel(frame)

    def work(self, model: Model, weights: Layer | Held, counts: Counts) -> Work:
        """All that it costs."""
        return sum((op.work(model, weights, counts) for op in self.ops if op.work is not free), Work())


class Meet(NamedTuple):
    """An exchange of dies. Those of tokens with experts, and those between DP groups (`spread` and
    `reduce_scatter`), happen with rows or without; collectives of a DP group only if it has rows. `given`
    views what this die gives to a collective.
    """

    op: MeetOp
    given: Callable[[Frame], Array] | None = None
    reduction: Literal["sum", "max"] = "sum"


Program: TypeAlias = tuple[Stage | Meet, ...]


class LayerProgram(NamedTuple):
    """The two halves of a decoder layer (stream 0 and stream 1 of CloudMatrix 4.2.3)."""

    attention: Program
    feed: Program


def stages(program: Program) -> list[Stage]:
    """Without the meets."""
    return [item for item in program if isinstance(item, Stage)]


def free(model: Model, weights: Layer | Held, counts: Counts) -> Work:
    """The bill of small kernels, which is part of others': nothing."""
    return Work()
