"""Reads the inbox of a TE and passes each message to the part that it concerns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.balance.reconfigure import Prefetched, Reconfiguration
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import (
    Beat,
    CopyDone,
    ExpertsLoaded,
    LayerDone,
    LoadCollected,
    PoolReady,
    ProbeDone,
    RolledBack,
    Shutdown,
    StepDone,
    StepFailed,
)
from xdeepserve.engine.numbers import group_of
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.repairs import Repairs
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.queue import Queue


class Hearing:
    """Reads a TE's inbox and acts on its messages.

    Whether a step has ended on all dies is left to the callers, which count steps under way.
    """

    def __init__(
        self,
        inbox: Queue[msgspec.Struct],
        groups: Sequence[DPGroup],
        life: Lifetime,
        health: Heartbeats,
        recovery: Rollback,
        reconfiguration: Reconfiguration | None,
        repairs: Repairs,
    ) -> None:
        self.inbox, self.groups, self._life = inbox, groups, life
        self._health, self._recovery = health, recovery
        self._reconfiguration, self._repairs = reconfiguration, repairs
        self._tp = len(groups[0].dies)

    @property
    def may_collect(self) -> bool:
        """Whether results of steps may be taken: no rollback is running or about to begin."""
        return self._recovery.phase == "serving" and not self._repairs.pending

    @property
    def may_begin(self) -> bool:
        """Whether steps may begin, and expert servers come and leave: nothing of the TE is being restored."""
        return self.may_collect

    def check_reports(self) -> None:
        """Raise the report of a driver, unless a rollback is running: then it is being put right."""
        if self._recovery.phase == "serving":
            self._repairs.check()

    async def hear(self, deadline_ns: int | None) -> msgspec.Struct:
        """Wait for the next message, act on it and return it; DeadlineError names lost DP groups."""
        try:  # what the control plane asks says nothing of dies, and moves no deadline
            while isinstance(message := await self.inbox.get(deadline_ns), Beat):
                self.take(message)
        except DeadlineError as passed:
            raise self._health.error() or passed from None
        self.take(message)
        self.check_reports()
        return message

    def hear_now(self) -> msgspec.Struct | None:
        """Act on the next message and return it, if one has come; no virtual time passes.

        Hundreds of dies report the end of a step at one instant. Only the first report is waited for.
        """
        message = self.inbox.take_now()
        if message is not None:
            self.take(message)
            self.check_reports()
        return message

    def take(self, message: msgspec.Struct) -> None:
        """Act on a message, or note it; raise the error of a die that has failed."""
        match message:
            case StepFailed(error=error):
                raise error
            case RolledBack():
                self._recovery.hear(message)
            case CopyDone(rank=rank, ticket=ticket):
                self._health.notice(group_of(rank, self._tp))
                self.groups[group_of(rank, self._tp)].finish_copies(ticket)
            case PoolReady(group=group, ticket=ticket):
                self.groups[group].copy_pool(ticket)
            case StepDone(rank=rank, step=step_idx, faults=faults):
                self._health.hear(group_of(rank, self._tp))
                self.groups[group_of(rank, self._tp)].note_faults(step_idx, faults)
            case ProbeDone(rank=rank):
                self._health.hear_probe(group_of(rank, self._tp))
            case Beat(name=name, answers=answers, travel_ns=travel_ns):
                answers.put(name, travel_ns)
            case LoadCollected() | ExpertsLoaded() | Prefetched() if self._reconfiguration is not None:
                self._reconfiguration.take(message)
            case Shutdown():
                self._life.ends_idle = True
                if self._life.now == "ready":
                    self._life.follow("drain")


async def hear_layers(reports: Queue[msgspec.Struct], groups: Sequence[DPGroup]) -> None:
    """Let the KV of each layer go as soon as dies report its end, until Shutdown is in the queue.

    A process beside the TE's loop, which waits for the end of the step.
    """
    tp = len(groups[0].dies)
    while isinstance(done := await reports.get(), LayerDone):
        groups[group_of(done.rank, tp)].end_layer(done.step, done.layer)
