"""Two microbatches that overlap on the dies of a DP group that spans several (CloudMatrix 4.3.1 with 4.3.2).

Each microbatch is cut between the dies on its own, by heads or by tokens, and has collectives with buffers of
its own. They belong to its turns, those of attention to stream 0's.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.pipeline import (
    Microbatch,
    MicrobatchLayers,
    PipelineExecutor,
    Stream,
    microbatch_cores,
)
from xdeepserve.engine.programs.sequence_parallel import SPLayers
from xdeepserve.engine.programs.tensor_parallel import TPLayers
from xdeepserve.engine.programs.tp_group import GroupExecutor
from xdeepserve.engine.sizes import Sizes
from xdeepserve.hw.die import Die
from xdeepserve.model.tensors import Layer


def collective_cores(die: Die, sizes: Sizes) -> int | None:
    """AIV cores of a group's collectives: the attention stream's, if it has a share; None: the usual ones."""
    if sizes.overlap != "cores":
        return None
    return microbatch_cores(die, sizes.attention_cores, True, "aiv")


class MicrobatchTPLayers(MicrobatchLayers, TPLayers):
    """Layers of a microbatch whose heads and dense layers are cut."""


class MicrobatchSPLayers(MicrobatchLayers, SPLayers):
    """Layers of a microbatch that is cut by tokens, heads and tokens."""


class GroupPipelineExecutor(GroupExecutor, PipelineExecutor):
    """One of the dies of a group that is cut by heads and features. `layers` run what is outside layers."""


class SPPipelineExecutor(GroupPipelineExecutor):
    """One of the dies of a group that cuts each microbatch by tokens, then heads, then tokens."""

    parts: Sequence[MicrobatchSPLayers]

    async def _run(
        self,
        mb: Microbatch,
        layers: Sequence[Layer],
        caches: Sequence[KVCache],
        event: int,
        streams: Sequence[Stream],
    ) -> None:
        part = self.parts[mb.number]
        mine = mb._replace(h=mb.h[part.group.rows(len(mb.h))])
        await super()._run(mine, layers, caches, event, streams)
        await part.gather(mb.h)
