"""Way by A2E and E2A without barriers, with real bytes: no die waits for dies that its tokens do not go to
(xDeepServe 5.3)."""

from __future__ import annotations

import msgspec

from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.trampoline.token_flow import FlowExpertSide, FlowTrampoline
from xdeepserve.engine.die.dataflow import DataflowExpertProgram
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.engine.ways.trampolines.real import Trampolines
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


class Flows(Trampolines):
    """Way of tokens that flow: an expert die serves each attention die as its tokens come."""

    plan_expert = A2ELayout.plan_flow_expert

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, pace: Pace, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die in dataflow mode, which serves tokens in the order they come."""
        die = self.team.pod.dies[self.team.expert_dies[index]]
        flows, trampolines = (
            [side for by_domain in self.expert_sides(index, kind) for side in by_domain]
            for kind in (FlowExpertSide, FlowTrampoline)
        )
        return DataflowExpertProgram(
            die, mem, flows, trampolines, self._walk.num_domains, threads, pace, reports
        )
