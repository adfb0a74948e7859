"""Runs a Program on a die: launches its stages in order, and makes its exchanges where they stand.

The same walk serves dies that compute and dies in timing-only runs. Two things differ: the pace, which runs a
stage's kernel or only passes its time, and the other end of an exchange, which is a protocol or a formula.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from xdeepserve.engine.walk.ends import Exchange, GroupEnd, Trampoline
from xdeepserve.engine.walk.launcher import Launches
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core, Spec
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Held, Layer
from xdeepserve.step.frame import Frame, KVCache, Model
from xdeepserve.step.stage import Counts, Meet, Program, Stage

OF_A_GROUP = frozenset({"all_reduce", "all_gather", "all_to_all"})
"""Collectives of the dies of a single DP group."""
MAX_KEPT = 1 << 12  # prices that are kept: the same counts come again in layers and steps


class Pace(Protocol):
    """How a die's kernels take their virtual time: `computes` says whether stages have bytes to work on."""

    computes: bool

    def spend(
        self,
        name: str,
        core: Core,
        cores: int | None,
        duration_ns: float,
        kernel: Callable[[], None],
        args: dict[str, Any],
        hbm_ns: float,
    ) -> Awaitable[None]: ...

    async def settle(self) -> None:
        """Let the clock reach the end of all launched kernels."""

    def reset(self) -> None:
        """Forget all launched kernels, after a rollback."""


class Computing:
    """Pace of dies with kernels: a kernel runs at its launch, and then its virtual time passes.

    With `shares_hbm` more time passes while another stream uses HBM, too.
    """

    computes = True

    def __init__(self, die: Die, shares_hbm: bool = False) -> None:
        self.die, self.shares_hbm = die, shares_hbm

    def spend(
        self,
        name: str,
        core: Core,
        cores: int | None,
        duration_ns: float,
        kernel: Callable[[], None],
        args: dict[str, Any],
        hbm_ns: float,
    ) -> Awaitable[None]:
        run = self.die.run(name, kernel, round(duration_ns), core, cores, args)
        return self._share(run, round(duration_ns), hbm_ns) if self.shares_hbm else run

    async def _share(self, run: Awaitable[None], duration_ns: int, hbm_ns: float) -> None:
        draw = self.die.hbm.begin(duration_ns, hbm_ns)
        await run
        await self.die.hbm.end(draw)

    async def settle(self) -> None:
        """Do nothing: kernels have run when `spend` returns."""

    def reset(self) -> None:
        """Do nothing, since no kernel is ahead of the clock."""


def with_shared(topk_weights: Array) -> Array:
    """Append the shared expert's weight 1 to topk_weights: float32 [T, K + 1]."""
    return np.concatenate([topk_weights, np.ones((len(topk_weights), 1), np.float32)], axis=1)


def all_cores(core: Core) -> int | None:
    """Return None: a kernel uses every core of its kind."""
    return None


def _nothing() -> None:
    """Do nothing, in place of a kernel that only takes time."""


class Price(NamedTuple):
    """Cost of a stage in ns: its time alone, and the part in which its bytes keep HBM busy."""

    ns: float
    hbm_ns: float


def price(
    spec: Spec, model: Model, stage: Stage, weights: Layer | Held, counts: Counts, cores: int | None
) -> Price:
    """Price a stage of a layer, or of its experts, on `cores` cores of its kind (None: all)."""
    work = stage.work(model, weights, counts)
    return Price(spec.stage_ns(work, cores if stage.core == "aic" else None), spec.hbm_ns(work.nbytes))


class Runner:
    """Runs the rows of a frame through stages and exchanges on a die.

    Without `launcher` launches cost nothing. `shared_expert` is the physical expert that tokens take for the
    shared one, if it has dies of its own. `cores` returns the number of cores of a kind for the stages of the
    current half of a layer; None: all.
    """

    def __init__(self, die: Die, frame: Frame, pace: Pace) -> None:
        self.die, self.frame, self.pace = die, frame, pace
        self.exchange: Exchange | None = None
        self.group: GroupEnd | None = None
        self.trampoline: Trampoline | None = None
        self.shared_expert: int | None = None
        self.launcher: Launches | None = None
        self.cores: Callable[[Core], int | None] = all_cores
        self.home: dict[str, int] = {}  # the die's DP domain, if there are some: for traces
        self._prices: dict[tuple[Any, ...], Price] = {}

    # ---- where it is --------------------------------------------------------------------------------

    def at(self, **place: int) -> None:
        """Set the place in the model for later trace spans: a layer, maybe a microbatch, or none."""
        self.die.trace.at(**self.home, **place)

    def reset(self, epoch: int) -> None:
        """Forget work under way after a rollback, and reset the ends of exchanges."""
        for end in (self.exchange, self.group, self.trampoline):
            if end is not None:
                end.reset(epoch)
        self.pace.reset()

    def enter(self, layer: Layer, cache: KVCache, event: int) -> None:
        """Point the frame at a layer: its weights, its KV cache, and the event of its exchange."""
        self.frame.enter(layer, cache, event)

    # ---- programs -----------------------------------------------------------------------------------

    async def run(self, program: Program) -> None:
        """Run all stages and exchanges of a Program on this die."""
        for item in program:
            if isinstance(item, Stage):
                await self.stage(item)
            else:
                await self.meet(item)

    async def stage(self, stage: Stage) -> None:
        """Launch a stage; a stage without rows is still recorded in the step's graph."""
        f = self.frame
        f.h = f.whole if stage.rows == "all" else f.mine
        rows = self._rows(stage)
        if not rows:
            if self.launcher is not None:
                self.launcher.stage(stage.name)
            return
        copies = self._copies(stage, rows) if stage.name == "Experts" else (0, 0, 0)
        read = (f.batch.context, f.batch.kv_tokens) if stage.attends else (0, 0)
        ns, hbm_ns = self._price(stage, f.layer, Counts(rows, *read, *copies))
        await self.launch_stage(stage, ns, rows, hbm_ns)

    def _rows(self, stage: Stage) -> int:
        f = self.frame
        if stage.rows == "received":
            return len(f.expert_out)
        if stage.rows == "logits":
            return len(f.logit_rows)
        if stage.rows == "shared":
            return sum(f.shared_counts)
        return len(f.h)

    def price_of(self, stage: Stage, weights: Layer | Held, counts: Counts) -> float:
        """Return the time in ns that a stage of a layer, or of its experts, takes on this die."""
        if not stage.attends:
            counts = Counts(counts.rows, 0, 0, counts.copies, counts.touched, counts.shared)
        return self._price(stage, weights, counts).ns

    def _price(self, stage: Stage, weights: Layer | Held, counts: Counts) -> Price:
        """Return the price of a stage from its counts, cached.

        The counts have no lengths of KV unless the stage attends, so the same price serves the next step.
        """
        cores = self.cores(stage.core)
        key = id(stage), weights.kind, counts, cores  # stages live as long as the die program
        found = self._prices.get(key)
        if found is None:
            if len(self._prices) >= MAX_KEPT:
                self._prices.clear()
            found = self._prices[key] = price(self.die.spec, self.frame.model, stage, weights, counts, cores)
        return found

    def _copies(self, stage: Stage, rows: int) -> tuple[float, float, float]:
        """Return the experts' work to bill, from the exchange if the rows came by one."""
        f = self.frame
        if stage.rows == "received":
            assert self.exchange is not None
            return self.exchange.bill(rows)
        copies = rows * f.config.num_experts_per_tok
        return copies, min(copies, len(f.slots)), 0

    def launch_stage(
        self, stage: Stage, duration_ns: float, rows: int = 0, hbm_ns: float = 0.0
    ) -> Awaitable[None]:
        """Launch a stage's kernel on the frame, or only pass its time where the frame has no bytes."""
        kernel = partial(stage.run, self.frame) if self.pace.computes else _nothing
        operators = 0 if self.launcher is None else stage.operators
        return self.launch(stage.name, stage.core, duration_ns, kernel, rows, hbm_ns, operators)

    async def launch(
        self,
        name: str,
        core: Core,
        duration_ns: float,
        kernel: Callable[[], None] = _nothing,
        rows: int = 0,
        hbm_ns: float = 0.0,
        operators: int = 1,
    ) -> None:
        """Launch a kernel with a duration of `duration_ns`; for `hbm_ns` of them it would need all of HBM. In
        single-op mode the host launches it as so many `operators`."""
        if self.launcher is not None:
            self.launcher.stage(name)
            await self._launched(self.launcher, operators)
        args = self._trace_args(name, rows) if self.die.trace.is_on else {}
        await self.pace.spend(name, core, self.cores(core), duration_ns, kernel, args, hbm_ns)

    async def _launched(self, launcher: Launches, operators: int) -> None:
        """Wait until the host has launched so many operators, in single-op mode."""
        if launcher.is_eager:
            await self.pace.settle()
            await launcher.kernel(operators)

    def _trace_args(self, name: str, rows: int) -> dict[str, Any]:
        """Describe a kernel for the trace: its place, its rows, and for experts the rows of each physical
        expert."""
        place = self.die.trace.place | ({"rows": rows} if rows else {})
        known = vars(self.frame)  # rows from elsewhere, or else the die's own; neither in time-only runs
        chosen = known.get("expert_idx", known.get("topk_idx")) if name == "Experts" else None
        if chosen is None:
            return place
        experts, counts = np.unique(chosen, return_counts=True)
        return {**place, "experts": dict(zip(experts.tolist(), counts.tolist(), strict=True))}

    # ---- exchanges ----------------------------------------------------------------------------------

    async def meet(self, meet: Meet) -> None:
        """Take the die's part in an exchange, an operator, and put the result into the frame."""
        f = self.frame
        if meet.op in OF_A_GROUP and not len(f.whole):
            return  # a DP group without rows has none, and the host launches nothing
        if self.launcher is not None:
            await self._launched(self.launcher, 1)
        match meet.op:
            case "dispatch" | "fused_dispatch":
                await self._dispatch()
            case "combine":
                f.take_answers(await self._combine())
            case "fused_combine":
                f.reduced = await self._combine()
            case "a2e":
                await self._go_away()
            case "e2a":
                assert self.trampoline is not None
                f.reduced = await self.trampoline.e2a(f.event)
            case "spread" | "reduce_scatter":
                await self._among_groups(meet)
            case _:
                await self._collective(meet)

    async def _dispatch(self) -> None:
        f = self.frame
        assert self.exchange is not None
        received = await self.exchange.dispatch(f.take("x", *f.mine.shape), f.topk_idx, f.event)
        out = f.take("expert_sent", len(received), f.config.hidden_size)
        f.receive(received.payload, received.scale, received.expert_idx, out)

    async def _combine(self) -> Array:
        f = self.frame
        assert self.exchange is not None
        weights = f.topk_weights if f.shared_expert is None else with_shared(f.topk_weights)
        return await self.exchange.combine(f.expert_out, weights, f.event)

    async def _go_away(self) -> None:
        """Hand the tokens to the trampoline; the shared expert is added as an expert of weight 1."""
        f, count = self.frame, len(self.frame.mine)
        topk_idx, topk_weights = f.topk_idx, f.topk_weights
        if self.shared_expert is not None:
            own = np.full((count, 1), self.shared_expert, np.int32)
            topk_idx, topk_weights = np.concatenate([topk_idx, own], axis=1), with_shared(topk_weights)
        assert self.trampoline is not None
        await self.trampoline.a2e(f.take("x", *f.mine.shape), topk_idx, topk_weights, f.event)

    async def _collective(self, meet: Meet) -> None:
        f, group = self.frame, self.group
        assert group is not None
        assert meet.given is not None
        f.h = f.mine
        given = meet.given(f)
        match meet.op:
            case "all_reduce":
                f.reduced = await group.all_reduce(given, meet.reduction)
            case "all_gather":
                f.reduced = await group.all_gather(given, len(f.whole))
            case "all_to_all":
                slices = [given[f.slice_of(len(given), rank)] for rank in range(f.group_size)]
                f.parts = await group.to_slices(slices)
            case _:
                raise AssertionError(f"no collective of a DP group is called {meet.op}")

    async def _among_groups(self, meet: Meet) -> None:
        """Take part in a collective of DP groups of one die each, which may differ in rows."""
        f, group = self.frame, self.group
        assert group is not None
        assert meet.given is not None
        f.h = f.mine
        given = meet.given(f)
        if meet.op == "spread":
            f.parts = await group.spread(list(given))
            f.shared_counts = [len(part) for part in f.parts]
        else:
            f.reduced = await group.reduce_scatter(given, f.shared_counts)
