"""Chooses the kind of gang that runs a TE's dies in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep.colocated import ColocatedGang, MonolithicGang
from xdeepserve.engine.run.lockstep.disaggregated import DisaggregatedGang, LockstepExpertProgram
from xdeepserve.engine.run.lockstep.kernels.sync import HAS_TEAMS
from xdeepserve.engine.run.lockstep.lockstep import Gang
from xdeepserve.engine.run.lockstep.met_exchanges import (
    MetExchanges,
    PushedMetExchanges,
    has_stages_of_tasks,
    use_met_exchanges,
)
from xdeepserve.engine.run.lockstep.pushed import PushingExpertsGang, PushingGang
from xdeepserve.engine.run.wiring import ProtocolNet


def gangs_of(
    net: ProtocolNet, executors: Sequence[Executor], programs: Sequence[ExpertProgram], threads: int
) -> list[Gang]:
    """Create the gangs for a TE's dies and make the dies meet there.

    Usually a single gang runs all layers. Dies whose stages stay tasks get a gang for each microbatch, which
    makes their exchanges only.
    """
    gang: Gang
    threads = threads if HAS_TEAMS else 1
    pushes = net.team.sizes.walk.exchange == "push"
    if not net.a2e and has_stages_of_tasks(executors[0]):
        use_met_exchanges(executors)
        met = PushedMetExchanges if pushes else MetExchanges
        parts = [met(executors, exchange, threads, part) for part, exchange in enumerate(net.exchanges)]
        for part in parts:
            part.join()
        return [*parts]
    if net.a2e:
        shared = [net.team.shared_expert(rank) for rank in range(len(executors))]
        kind = PushingExpertsGang if pushes else DisaggregatedGang
        gang = apart = kind(executors, programs, net.a2e, shared, threads)
        for index, program in enumerate(programs):
            assert isinstance(program, LockstepExpertProgram)
            program.gang, program.index = apart, index
    elif len(executors) == 1:
        gang = MonolithicGang(executors, None, threads)
    else:
        exchange = net.exchanges[0] if net.exchanges else None
        gang = (PushingGang if pushes else ColocatedGang)(executors, exchange, threads)
    gang.join()
    return [gang]
