"""Chooses the kind of lockstep for the dies of a TE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from xdeepserve.engine.deploy.deployment import Exchange
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep.colocated import PULL, PUSH, AmongTwin, ColocatedLockstep
from xdeepserve.engine.run.lockstep.disaggregated import (
    PULL_APART,
    PUSH_APART,
    AwayTwin,
    DisaggregatedLockstep,
    LockstepExpertProgram,
)
from xdeepserve.engine.run.lockstep.kernels.sync import HAS_TEAMS
from xdeepserve.engine.run.lockstep.lockstep import Lockstep
from xdeepserve.engine.run.lockstep.met_exchanges import (
    has_stages_of_tasks,
    met_exchanges,
    use_met_exchanges,
)
from xdeepserve.engine.run.wiring import ByteWiring

TWINS: Final[Mapping[Exchange, tuple[AmongTwin, AwayTwin]]] = {  # the rows of `rules.LOCKSTEP` refuse others
    "pull": (PULL, PULL_APART),
    "push": (PUSH, PUSH_APART),
}


def lockstep_runs(
    wiring: ByteWiring, executors: Sequence[Executor], programs: Sequence[ExpertProgram], threads: int
) -> list[Lockstep]:
    """Create the lockstep runs of a TE's dies and make the dies meet there.

    Usually a single run has all layers. Dies whose stages stay tasks get one for each microbatch, which
    makes their exchanges only.
    """
    lockstep: Lockstep
    threads = threads if HAS_TEAMS else 1
    twin, twin_apart = TWINS[wiring.team.sizes.walk.exchange]
    exchanges = [(among.group, among.layout) for among in wiring.among]
    if not wiring.a2e and has_stages_of_tasks(executors[0]):
        use_met_exchanges(executors)
        return [
            met_exchanges(executors, exchange, threads, twin, part) for part, exchange in enumerate(exchanges)
        ]
    if wiring.a2e:
        shared = [wiring.team.shared_expert(rank) for rank in range(len(executors))]
        lockstep = apart = DisaggregatedLockstep(executors, programs, wiring.a2e, shared, threads, twin_apart)
        for index, program in enumerate(programs):
            assert isinstance(program, LockstepExpertProgram)
            program.lockstep, program.index = apart, index
    else:
        exchange = exchanges[0] if exchanges and len(executors) > 1 else None
        lockstep = ColocatedLockstep(executors, exchange, threads, twin)
    lockstep.join()
    return [lockstep]
