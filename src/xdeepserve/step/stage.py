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


OpWork: TypeAlias = Callable[["Model", Any, Counts], Work]


class Op(NamedTuple):
    """Operation of a pass, the smallest unit that parallelism moves.

    `cut` says how dies may share the operation. Each has its own rows; or its own heads (features, in an MLP)
    of all rows; or, in a product with inputs cut in this way, its own part of every sum. `work` gets the
    weights: a `Layer`, or the `Held` part of a layer on a die with only experts. The host launches as many
    `operators` for it in single-op mode: the kernels that it calls in the int8 recipe.
    """

    kernel: Callable[[Frame], None]
    work: OpWork
    cut: Cut = "rows"
    operators: int = 1


class Stage(NamedTuple):
    """Operations launched as a single kernel, by the paper's name.

    `rows` says which rows the stage treats: the die's own (`mine`), those of its whole DP group (`all`),
    those received by a dispatch or an A2E (`received`), those that need logits (`logits`), or those of all DP
    groups that share an output projection (`shared`). Without rows a stage is skipped. Only the cost of a
    stage that `attends` grows with `context` and `kv_tokens`.
    """

    name: str
    ops: tuple[Op, ...]
    core: Core = "aic"
    rows: Extent = "mine"
    attends: bool = False

    @property
    def operators(self) -> int:
        """Number of operators that the host launches for the stage in single-op mode."""
        return sum(op.operators for op in self.ops)

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
    """Work of small kernels that stand in FREE: nothing, because it is part of other kernels' costs."""
    return Work()


_LAYER = "one of a layer's small kernels, which small_kernels holds for all of them together"
_FUSED = "runs inside the kernel before or after it, on rows that this has in its buffers"

FREE: dict[str, str] = {
    "add_outputs": _LAYER,
    "add_sums": _LAYER,
    "add_answers": _LAYER,
    "add": _LAYER,
    "add_scaled": _LAYER,
    "find_maxima": _FUSED,
    "cut": _FUSED,
    "pack_latents": _FUSED,
    "unpack_latents": _FUSED,
    "take_own": "a view of the rows and their experts, where all experts are here",
    "take_received": "numbers of experts, which the dispatch could count from this die's first",
    "round_own": _FUSED,
    "round_shared": _FUSED,
    "compress": "runs once in some positions, and is billed with what these give to entries",
    "head_outputs": "a view: heads of grouped attention give their outputs themselves",
}
"""Operations without a cost of their own, by the kernel's name, and the reason."""
