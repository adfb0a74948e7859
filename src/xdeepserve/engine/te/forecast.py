"""Forecasts whether a step ends sooner whole or cut into two overlapping microbatches (xDeepServe 4).

Only what differs between the two is added up: the stages and exchanges of the layers, at the prices of every
run, for the rows of the fullest DP group. Routing is taken as even. Nothing here depends on the outcome of a
step, or on how the run moves its bytes, so every mode of a run decides alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.program import Executor, Traversal
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.walk.overlap import Halves, PricedItem, walk_ns
from xdeepserve.engine.walk.runner import price
from xdeepserve.engine.walk.schedule import microbatch_cores
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.spec import Spec
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import Layer
from xdeepserve.step.frame import Batch
from xdeepserve.step.stage import Counts, Meet, Program, Stage

MAX_KEPT = 1 << 12  # decisions that are kept: steps of decode come again with nearly the same counts
NUM_STEADY = 4  # equal layers in a row after which each takes as long as the one before it
BITS = 5  # leading bits of a length of KV that a forecast looks at
GAIN = 0.01  # least gain for which a step is cut: even routing flatters halves, whose loads vary more
ACTIVATION = 4  # bytes of an element that a collective carries


class PartCounts(NamedTuple):
    """Counts of a part of a step: rows, positions attended to and cached positions read, of the fullest DP
    group; and rows of all groups."""

    rows: int
    context: int
    kv_tokens: int
    all_rows: int


def parts_of(plans: Sequence[StepPlan]) -> tuple[PartCounts, ...]:
    """Count a step of all DP groups, and its first and second microbatch, by the plans of the groups."""
    found: list[list[tuple[int, int, int]]] = [[], [], []]
    for plan in plans:
        positions, seq_of = np.array(plan.positions, np.int32), np.array(plan.seq_of, np.int32)
        whole, cut = Batch.of(positions, positions, seq_of, positions[:0]), len(positions) // 2
        batches = whole, whole.part(slice(0, cut)), whole.part(slice(cut, None))
        for counts, batch in zip(found, batches, strict=True):
            counts.append((batch.num_tokens, _coarse(batch.context), _coarse(batch.kv_tokens)))
    parts = []
    for counts in found:
        rows, context, kv_tokens = (list(column) for column in zip(*counts, strict=True))
        parts.append(PartCounts(max(rows), max(context), max(kv_tokens), sum(rows)))
    return tuple(parts)


def _coarse(count: int) -> int:
    """Round a count to its leading bits."""
    unit = 1 << max(0, count.bit_length() - BITS)
    return -(-count // unit) * unit


class EvenLoads:
    """Loads of a TE's dies with experts where tokens go to all experts alike.

    In timing-only runs `timing` may say that the `num_here` dies are a sample of more.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertSizes, num_here: int, timing: TimingConfig | None
    ) -> None:
        self._top_k = config.num_experts_per_tok
        self.num_dies = (timing and timing.of_dies) or num_here
        self._scale = self.num_dies / num_here
        others = self.num_dies - config.n_routed_experts if config.n_shared_experts else 0
        self.num_shared = experts.num_shared_dies or (0 if experts.has_slots else max(0, others))
        self._num_routed = max(1, (timing and timing.routed_dies) or self.num_dies - self.num_shared)
        self.held = len(experts.slots_of[0]) if self._scale == 1 else config.n_routed_experts / self.num_dies

    def billed(self, all_rows: int, spec: Spec) -> tuple[float, float]:
        """Return the token copies billed to the busiest die for the rows of all DP groups here, and the
        number of its experts that get some."""
        total = all_rows * self._scale
        mean = total * self._top_k / self._num_routed
        shared = total / self.num_shared if self.num_shared else 0.0
        return max(spec.billed_copies(mean, mean), shared), min(mean, self.held)


class Forecast:
    """Decides for each step of a TE whether it is cut, from the programs of the TE's first die."""

    def __init__(self, executor: Executor, loads: EvenLoads, team: Team) -> None:
        self.walk, self.groups, self.config = executor.mem.walk, executor.mem.groups, team.config
        self._executor, self._spec, self._loads = executor, executor.die.spec, loads
        sizes = self.config.hidden_size, self.config.int8_answers
        self._cost = CommCost(self._spec, team.topology, *sizes, way=self.walk.exchange)
        self._collectives = CollectiveCost(team.sharing(DieRank(0)), self._spec, team.pod.topology)
        self._kept: dict[tuple[PartCounts, ...], int] = {}

    def num_parts(self, plans: Sequence[StepPlan]) -> int:
        """Return how many microbatches a step is cut into: as many as there are if it is predicted to end
        sooner so, by at least GAIN, and else 1."""
        parts = parts_of(plans)
        if parts not in self._kept:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            is_sooner = self.step_ns(parts[1:]) < (1 - GAIN) * self.step_ns(parts[:1])
            self._kept[parts] = self.walk.num_parts if is_sooner else 1
        return self._kept[parts]

    def step_ns(self, parts: Sequence[PartCounts]) -> float:
        """Predict the time of a step's layers in ns, whole or in two microbatches: the main model's, then
        those of MTP's passes."""
        executor, is_cut = self._executor, len(parts) > 1
        cut, *others = executor.traversal.ways
        way = cut if is_cut or not others else others[0]
        mtp = [] if executor.drafter is None else [each.layer for each in executor.drafter.layers]
        cores = self._attention_cores(way, parts) if is_cut and self.walk.overlap == "cores" else 0
        passes = [executor.weights.layers, *([layer] for layer in mtp)]
        return sum(self._pass_ns(way, layers, parts, cores) for layers in passes)

    def _pass_ns(
        self, way: Traversal, layers: Sequence[Layer], parts: Sequence[PartCounts], cores: int
    ) -> float:
        """Predict a pass through layers. Of many equal layers in a row only some are walked through."""
        walked: list[list[Halves]] = [[] for _ in parts]
        repeats: list[tuple[int, int]] = []  # the last layer that is walked of a row, and how often it recurs
        for program, run in groupby(layers, lambda each: way.programs[self._executor.layer_index[id(each)]]):
            row = list(run)
            num_walked = min(len(row), NUM_STEADY)
            for halves, part in zip(walked, parts, strict=True):
                attention, feed = (
                    [*self._items(half, row[0], part, cores, half is program.attention)] for half in program
                )
                halves += [Halves(attention, feed)] * num_walked
            repeats.append((len(walked[0]) - 1, len(row) - num_walked))
        launcher = self._executor.launcher
        is_eager = launcher is not None and launcher.config.mode == "op"
        ends = walk_ns(walked, bool(cores), self._spec.dispatch_ns("op") if is_eager else 0)
        # The last layer of all is shorter: nothing comes after it that could be ahead of its end.
        return ends[-1] + sum(count * (ends[last - 1] - ends[last - 2]) for last, count in repeats if count)

    def _attention_cores(self, way: Traversal, parts: Sequence[PartCounts]) -> int:
        """Return the AIC cores of the attention stream; where cores move, the number that they move to."""
        if not self.walk.moves_cores:
            return self.walk.attention_cores
        layer = self._executor.weights.layers[-1]
        program = way.programs[self._executor.layer_index[id(layer)]]

        def longest_ns(cores: int) -> float:
            sums = (
                sum(item.ns for part in parts for item in self._items(half, layer, part, cores, is_attention))
                for half, is_attention in ((program.attention, True), (program.feed, False))
            )
            return max(sums)

        return min(range(1, self._spec.num_cores("aic")), key=longest_ns)

    # ---- a half of a layer ------------------------------------------------------------------------------

    def _items(
        self, program: Program, layer: Layer, part: PartCounts, cores: int, is_attention: bool
    ) -> Iterator[PricedItem]:
        """Price the stages and exchanges of a half of a layer; the attention stream has `cores` AIC cores, or
        each kernel all of its kind if that is 0."""
        model, spec, die = self._executor.runner.frame.model, self._spec, self._executor.die
        mine = -(-part.rows // self.groups.tp)
        copies, touched = self._loads.billed(part.all_rows, self._spec)
        rows_of: dict[str, float] = {
            "mine": mine,
            "all": part.rows,
            "received": copies,
            "shared": mine * self.groups.o_proj_tp,
        }
        for item in program:
            if isinstance(item, Meet):
                if ns := self._meet_ns(item, part, mine):
                    yield PricedItem(None, ns, 0.0, 1)
            elif rows := rows_of[item.rows]:
                own = microbatch_cores(die, cores, is_attention, item.core) if cores else None
                counts = self._counts(item, rows, part, copies, touched)
                ns, hbm_ns = price(spec, model, item, layer, counts, own)
                if ns:
                    yield PricedItem(item.core, ns, hbm_ns, item.operators)

    def _counts(self, stage: Stage, rows: float, part: PartCounts, copies: float, touched: float) -> Counts:
        read = (part.context, part.kv_tokens) if stage.attends else (0, 0)
        if stage.name != "Experts":
            return Counts(rows, *read)
        if stage.rows != "received":
            copies = rows * self.config.num_experts_per_tok
            touched = min(copies, self._loads.held)
        return Counts(rows, *read, copies, touched)

    def _meet_ns(self, meet: Meet, part: PartCounts, mine: int) -> float:
        """Price an exchange of dies. A collective is taken to carry rows of the hidden size."""
        collectives, width = self._collectives, self.config.hidden_size
        if meet.op in ("dispatch", "fused_dispatch", "combine", "fused_combine"):
            copies = self.config.num_experts_per_tok + bool(self._loads.num_shared)
            op: Op = "dispatch" if "dispatch" in meet.op else "combine"
            stretch = self._spec.barrier_stretch.value
            return self._cost.exchange_ns(op, self._loads.num_dies, mine, copies, stretch)
        if not part.rows:
            return 0.0
        num = collectives.num_ranks
        match meet.op:
            case "all_reduce":
                return collectives.all_reduce_ns(part.rows * width, ACTIVATION)
            case "all_gather":
                return collectives.all_gather_ns(mine * width * ACTIVATION)
            case "reduce_scatter":
                return collectives.reduce_scatter_ns([mine * width] * num, ACTIVATION)
            case _:
                return collectives.all_to_all_ns([[-(-mine * width * ACTIVATION // num)] * num] * num)
