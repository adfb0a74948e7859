"""DP groups of several dies in a timing-only run: each die's share of a stage, and the group's collectives.

The programs are the engine's own (programs/tensor_parallel.py, sequence_parallel.py), so the stages and
collectives, their order and their shapes are those of a run that computes. A collective is a meeting of the
group's dies with the cost of `comm/collectives/cost.py`. Rows cross as the programs send them: sums and
hidden states in four bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.engine.programs.group_pipeline import (
    MicrobatchSPLayers,
    MicrobatchTPLayers,
    SPPipelineExecutor,
)
from xdeepserve.engine.programs.ops import Work
from xdeepserve.engine.programs.sequence_parallel import SPExecutor, SPLayers
from xdeepserve.engine.programs.tensor_parallel import TPLayers
from xdeepserve.engine.programs.tp_group import GroupExecutor, GroupLayers, TPGroup
from xdeepserve.engine.timing.exchange import TimingXCCL
from xdeepserve.engine.timing.meeting import Meeting
from xdeepserve.engine.timing.memory import shape_only
from xdeepserve.engine.timing.programs import TimingExecutor, TimingLayers, TimingPipelineExecutor
from xdeepserve.engine.timing.timeline import Timeline
from xdeepserve.hw.clock import Clock
from xdeepserve.model.canonical import Array


class CollectiveHub:
    """The collectives of one group: what they cost is settled when the last rank of `dies` has come."""

    def __init__(self, clock: Clock, cost: CollectiveCost, dies: Sequence[int]) -> None:
        self.clock, self.cost, self.dies = clock, cost, dies
        self._meetings: dict[int, Meeting[None]] = {}

    async def meet(self, op: str, rank: int, event: int, duration_ns: float) -> Meeting[None]:
        """One rank's part of a collective that takes so long; all ranks say the same. The meeting, ended."""

        def settle(meeting: Meeting[None]) -> tuple[float, None]:
            del self._meetings[meeting.event]
            return duration_ns, None

        meeting = self._meetings.get(event)
        if meeting is None:
            meeting = Meeting(self.clock, op, event, self.cost.num_ranks, settle)
            self._meetings[event] = meeting
        meeting.come(rank, 0)
        await meeting.wait(rank)
        return meeting


class TimingTPGroup(TPGroup):
    """A die's end of its group, with the operations of `TPGroup`: arrays are shapes."""

    def __init__(self, timeline: Timeline, rank: int, hub: CollectiveHub) -> None:
        self.timeline, self.rank, self.hub = timeline, rank, hub
        self.size, self._num_events = hub.cost.num_ranks, 0

    def at(self, place: dict[str, int]) -> None:
        """The timeline knows."""

    async def all_reduce(self, x: Array, reduction: Reduction = "sum") -> Array:
        await self._meet("all-reduce", self.hub.cost.all_reduce_ns(x.size, x.itemsize))
        return x

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        await self._meet("all-gather", self.hub.cost.all_gather_ns(part.nbytes))
        return shape_only(part.dtype, num_rows, *part.shape[1:])

    async def to_slices(self, x: Array) -> list[Array]:
        slices = [self.rows(len(x), rank) for rank in range(self.size)]
        counts, row_nbytes = [rows.stop - rows.start for rows in slices], math.prod(x.shape[1:]) * x.itemsize
        await self._meet(
            "all-to-all", self.hub.cost.all_to_all_ns([[n * row_nbytes for n in counts]] * self.size)
        )
        return [shape_only(x.dtype, counts[self.rank], *x.shape[1:]) for _ in slices]

    async def _meet(self, op: str, duration_ns: float) -> None:
        start = await self.timeline.catch_up()
        meeting = await self.hub.meet(op, self.rank, self._event(), duration_ns)
        self.timeline.waited("XCCL", op, start)
        meeting.draw(self.hub.dies, self.rank, self.timeline.die, "XCCL")


class TimingGroupLayers(TimingLayers, GroupLayers):
    """Layers of one rank of a group, whose stages take the time of its share."""

    def _stage_ns(self, name: str, work: Work) -> float:
        cost, tp = self.cost, self.group.size
        match name:
            case "MLA":
                return cost.attention_ns(self._row_context, self._kv_tokens, self.aic_cores(name), tp)
            case "Slice" | "Gather":
                return 0.0  # part of a layer's small kernels
        return super()._stage_ns(name, work)


class TimingTPLayers(TimingGroupLayers, TPLayers):
    """Tensor parallelism: heads and the dense layers' features are cut."""

    def _stage_ns(self, name: str, work: Work) -> float:
        cost, c, tp, cores = self.cost, self.config, self.group.size, self.aic_cores(name)
        dense = c.hidden_size * c.intermediate_size / tp
        match name:
            case "MLAProlog" | "OProj":
                return (cost.projection_ns(self._rows, cores, tp) + cost.small_kernels_ns()) / 2
            case "OProj inputs":
                return 0.0  # in the roofline of the projections
            case "MLP inputs":
                return cost.mlp_ns(self._rows, 2 * dense, cores=cores)
            case "MLP":
                return cost.mlp_ns(self._rows, dense, cores=cores)
        return super()._stage_ns(name, work)


class TimingSPLayers(TimingGroupLayers, SPLayers):
    """SP-TP-SP: tokens are cut, then heads, then tokens again."""

    def _stage_ns(self, name: str, work: Work) -> float:
        cost, c, tp, cores = self.cost, self.config, self.group.size, self.aic_cores(name)
        mine, every, small = self._rows, self._batch_rows, cost.small_kernels_ns() / 2
        match name:
            case "DownProj":
                return cost.linear_ns(mine, cost.down_projection, cores=cores) + small
            case "UpProj":
                absorbed = cost.absorbed(c.qk_nope_head_dim) / tp
                return cost.linear_ns(every, cost.up_projection / tp, absorbed, cores)
            case "HeadOutputs":
                return cost.linear_ns(every, 0, cost.absorbed(c.v_head_dim) / tp, cores)
            case "OProj":
                return cost.linear_ns(mine, cost.output_projection, cores=cores) + small
        return super()._stage_ns(name, work)


class TimingGroupExecutor(TimingExecutor, GroupExecutor):
    """One rank of a group; `group` is its end. All ranks take the random numbers of `first_die`."""

    kind: type[TimingGroupLayers]
    group: TimingTPGroup
    first_die: int

    @property
    def draws_as(self) -> int:
        return self.first_die

    def _make_layers(self) -> TimingLayers:
        old = self.layers
        return self.kind(self.die, self.mem, old.xccl, old.ops.threads, old.cos, old.sin, group=self.group)


class TimingTPExecutor(TimingGroupExecutor):
    """Of a group that is cut by heads and features."""

    kind = TimingTPLayers


class TimingSPExecutor(TimingGroupExecutor, SPExecutor):
    """Of a group that is cut by tokens, heads and tokens."""

    kind = TimingSPLayers


class TimingMicrobatchTPLayers(TimingTPLayers, MicrobatchTPLayers):
    """Tensor parallelism of one of the microbatches that overlap."""


class TimingMicrobatchSPLayers(TimingSPLayers, MicrobatchSPLayers):
    """SP-TP-SP of one of the microbatches that overlap."""


class TimingGroupPipelineExecutor(TimingGroupExecutor, TimingPipelineExecutor):
    """One rank of a group with two microbatches, whose collectives are those of `part_hubs`."""

    part_kind: type[TimingGroupLayers]
    part_hubs: Sequence[CollectiveHub]

    def _make_part(self, number: int, xccl: TimingXCCL | None, timeline: Timeline) -> TimingLayers:
        group = TimingTPGroup(timeline, self.group.rank, self.part_hubs[number])
        return self.part_kind(*self.part_arguments(number, xccl), group=group)


class TimingTPPipelineExecutor(TimingGroupPipelineExecutor):
    """Of a group that is cut by heads and features."""

    kind, part_kind = TimingTPLayers, TimingMicrobatchTPLayers


class TimingSPPipelineExecutor(TimingGroupPipelineExecutor, SPPipelineExecutor):
    """Of a group that is cut by tokens, heads and tokens."""

    kind, part_kind = TimingSPLayers, TimingMicrobatchSPLayers
