"""Exchanges with experts in lockstep, between dies whose stages are tasks.

Dies that share a layer by collectives (TP, output projections), or cut a step into microbatches, meet each
other inside a layer. Their stages are launched one by one, as in any pod. The exchanges with experts, whose
work grows with the square of the number of dies, are made for all dies at once, by the twins of `colocated`:

    dispatch   the last die to come moves every row to its experts, and runs them
    combine    the last die to come moves every answer back, adds the shared expert's and the residual

The meeting has then run the kernels of some stages (experts, shared expert, sum). These stages are launched
all the same, and only take virtual time: so dies are as busy as they would be without lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from xdeepserve.comm.cost import Op
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange_choices import EXCHANGES
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.engine.die.program import Executor, Traversal
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.colocated import AmongTwin, ColocatedLockstep
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.walk.ends import Exchange
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.among.clock import AmongClock, RankLoad
from xdeepserve.engine.ways.among.real import ExchangeLayout
from xdeepserve.hw.die import Die
from xdeepserve.step.frame import Frame
from xdeepserve.step.shard import GATHER
from xdeepserve.step.stage import LayerProgram, Meet, Stage

DISPATCHES = "dispatch", "fused_dispatch"


def has_stages_of_tasks(executor: Executor) -> bool:
    """Whether a die meets other dies inside a layer, or runs several microbatches."""
    mem = executor.mem
    return mem.groups.num_sharing > 1 or mem.walk.turns == "overlap"


def use_met_exchanges(executors: Sequence[Executor]) -> None:
    """Make stages after a dispatch take virtual time only, on all these dies: the meeting computes them."""
    for executor in executors:
        met, *whole = [_met(way) for way in executor.traversal.ways]
        executor.traversal = met._replace(whole=whole[0]) if whole else met


def _met(way: Traversal) -> Traversal:
    known = {id(program): _without_experts(program) for program in way.programs}
    return way._replace(programs=[known[id(program)] for program in way.programs])


def _without_experts(program: LayerProgram) -> LayerProgram:
    """Return a layer without kernels in the stages after the dispatch.

    These stages end at the layer's end, or at the gathering of a DP group's rows. The meeting has computed
    them for all dies.
    """
    feed: list[Stage | Meet] = []
    is_met = False
    for item in program.feed:
        if isinstance(item, Meet):
            is_met |= item.op in DISPATCHES
        elif item is GATHER[0]:
            is_met = False
        elif is_met:
            item = item._replace(ops=tuple(op._replace(kernel=_nothing) for op in item.ops))
        feed.append(item)
    return program._replace(feed=tuple(feed))


def _nothing(f: Frame) -> None:
    """Do nothing, in place of a stage that the meeting has run for all dies."""


def met_exchanges(
    executors: Sequence[Executor],
    exchange: tuple[Group, ExchangeLayout],
    num_threads: int,
    twin: AmongTwin,
    part: int,
) -> ColocatedLockstep:
    """Make dispatch, experts and combine of the dies' microbatch number `part` meet in a lockstep."""
    lockstep, walk = ColocatedLockstep(executors, exchange, num_threads, twin), executors[0].mem.walk
    lane = "XCCL"
    if walk.turns == "overlap":
        lockstep.spaces = [executor.mem.layer_workspace(part) for executor in executors]
        lane = f"XCCL microbatch {part}"
    runners = [executor.traversal.runners[part] for executor in executors]
    settle, dies = partial(_settle, lockstep, [runner.frame for runner in runners]), lockstep.dies
    where = lockstep.clock, [die.index for die in dies], walk.timeout_ns
    top_k, traits = executors[0].config.num_experts_per_tok, EXCHANGES[walk.exchange]
    hub = AmongClock(*where, settle, top_k, lane, traits)
    for executor, runner in zip(executors, runners, strict=True):
        end = hub.end(executor.rank, Timeline(executor.die))
        runner.exchange = end._replace(reset=partial(_reset, end, executor.die, exchange[1]))
        whole = executor.traversal.whole
        if whole is not None and not part:  # it has the buffers of the first microbatch
            whole.runners[0].exchange = runner.exchange
    return lockstep


def _reset(end: Exchange, die: Die, layout: ExchangeLayout, epoch: int) -> None:
    """Forget all unfinished exchanges after a rollback, with the answers that were pushed to a die."""
    end.reset(epoch)
    if isinstance(layout, FusedLayout):
        flags = die.memory.metadata.regions[layout.region("token_flags")]
        die.memory.write(flags.offset, bytes(flags.nbytes))


def _settle(
    lockstep: ColocatedLockstep, frames: Sequence[Frame], op: Op, event: int, came: Mapping[int, float]
) -> tuple[float, Sequence[RankLoad]]:
    """Move all bytes when the last die has come; return the time in ns, and the dies' loads.

    Rows stay where `frames` have them, for kernels to find.
    """
    for die in lockstep.dies:  # one may have been lost since it came
        die.check_alive()
    lockstep.find_tables()
    at, rows = lockstep.pass_of(frames[0].cache), [frame.mine for frame in frames]
    lockstep.cuts = [np.array([(0, len(mine)) for mine in rows], np.int64)]
    lockstep.inputs = np.zeros((len(rows), a.NUM_INPUTS), np.int64)
    lockstep.inputs[:, a.H] = [tables.address(mine) for mine in rows]
    lockstep.exchange_rows(op, at, event)
    slowness, timetable = max(die.slowness for die in lockstep.dies), lockstep.timetable
    wait_ns = max(0, lockstep.free_ns() - lockstep.clock.now)
    price_ns = slowness * timetable.exchange_ns(op, int(lockstep.rows.max()))
    return wait_ns + price_ns, lockstep.loads(at) if op == "dispatch" else ()
