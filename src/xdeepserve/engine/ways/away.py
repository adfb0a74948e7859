"""Parts shared by the ways to experts on dies of their own."""

from __future__ import annotations

from typing import Any

from xdeepserve.engine.die.team import Team
from xdeepserve.engine.walk.ends import Trampoline
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.model.canonical import Array


def counted(side: Any, tally: Tally) -> Trampoline:
    """Make an attention die's end from a side of `comm` with `a2e`, `e2a` and `reset`, which also counts the
    tokens sent, for the bill."""

    def a2e(x: Array, topk_idx: Array, topk_weights: Array, event_id: int) -> Any:
        tally.come(event_id, len(x))
        return side.a2e(x, topk_idx, topk_weights, event_id)

    return Trampoline(a2e, side.e2a, lambda epoch: side.reset())


def row_sizes(team: Team) -> dict[str, Any]:
    """Return the properties of rows on their way to expert dies, as keyword arguments of a layout.

    A layout has room for the tokens of a microbatch. The shared expert counts as an expert more in `top_k`,
    if it has dies of its own.
    """
    return {
        "max_tokens": -(-team.sizes.steps.max_tokens // team.sizes.walk.num_microbatches),
        "top_k": team.num_copies,
        "hidden": team.config.hidden_size,
        "quantize": team.recipe == "int8",
        "int8_answers": team.config.int8_answers,
    }
