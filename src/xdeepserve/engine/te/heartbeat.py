"""Heartbeats: what a TE-shell knows of the health of its DP groups, in virtual time (xDeepServe 6.1).

This is the second tier; the first is who asks the shell (`engine/serving/control_plane.py`).

A die answers what it is asked: each step that it is launched with, by the report of its end, and where
nothing runs a probe. As in the paper, whoever hangs in the middle of a step cannot answer a probe either.
From how long the answers of a group take follows its state:

    healthy   it owes nothing, or has owed it for a short time only, and its last answer came soon
    suspect   it has owed an answer for `suspect_s`, or its last one took so long
    lost      it has owed an answer for `lost_s`

A suspect group is healthy again with its next answer in good time. Where exchanges are barriers, who is slow
silences all who wait for it: then all are suspect, and the shell has no better choice. Who stalls there is
named by those who wait for it, at the deadline of the exchange, which is a little before they are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdeepserve.engine.deploy.deployment import HealthConfig
from xdeepserve.engine.te.reports import Health, TEHealth
from xdeepserve.errors import DeadlineError


@dataclass
class _Pulse:
    """One group's answers. `since_ns`: when the oldest that it owes was asked for, or it last answered."""

    num_due: int = 0
    since_ns: int = 0
    took_ns: int = 0  # the last answer


class Heartbeats:
    """The pulses of the `num_groups` DP groups of a TE. `now` is the clock's."""

    def __init__(self, name: str, num_groups: int, config: HealthConfig, now: Callable[[], int]) -> None:
        self.name, self._now = name, now
        self.probe_ns, self.suspect_ns, self.lost_ns = (
            round(1e9 * seconds) for seconds in (config.probe_s, config.suspect_s, config.lost_s)
        )
        self._pulses = [_Pulse() for _ in range(num_groups)]
        self._given_up: set[int] = set()  # groups that nobody waits for any more
        self.shell: Health = "healthy"  # what the control plane knows of the shell itself

    def ask(self, rank: int, num_answers: int, delay_ns: int = 0) -> None:
        """So many dies of a group have been asked; the question reaches them after `delay_ns`."""
        pulse = self._pulses[rank]
        if not pulse.num_due:
            pulse.since_ns = self._now() + delay_ns
        pulse.num_due += num_answers

    def hear(self, rank: int) -> None:
        """One of a group's dies has answered, if only what is forgiven by now."""
        pulse, now = self._pulses[rank], self._now()
        pulse.num_due = max(0, pulse.num_due - 1)
        pulse.took_ns, pulse.since_ns = max(0, now - pulse.since_ns), now

    def give_up(self, rank: int) -> None:
        """A group is lost for ever, and its TE goes on without."""
        self._given_up.add(rank)
        self._pulses[rank] = _Pulse()

    def is_given_up(self, rank: int) -> bool:
        return rank in self._given_up

    def notice(self, rank: int) -> None:
        """A sign of life that nobody had asked for: it owes its answers still, but is there."""
        self._pulses[rank].since_ns = max(self._pulses[rank].since_ns, self._now())

    def forgive(self) -> None:
        """All groups have just been heard of, and owe nothing of what they were asked before."""
        for pulse in self._pulses:
            pulse.num_due, pulse.took_ns, pulse.since_ns = 0, 0, self._now()

    def is_due(self, rank: int) -> bool:
        """Whether a group owes an answer."""
        return self._pulses[rank].num_due > 0

    def silent_ns(self, rank: int) -> int:
        """How long a group has owed an answer; 0 if it owes none."""
        pulse = self._pulses[rank]
        return max(0, self._now() - pulse.since_ns) if pulse.num_due else 0

    def wants_probe(self, rank: int) -> bool:
        """A group that owes nothing has not been heard of for a while, or not in good time."""
        pulse = self._pulses[rank]
        if rank in self._given_up:
            return False
        return not pulse.num_due and self._now() - pulse.since_ns >= self.probe_ns

    def state(self, rank: int) -> Health:
        silent = self.silent_ns(rank)
        if rank in self._given_up or silent >= self.lost_ns:
            return "lost"
        return "suspect" if max(silent, self._pulses[rank].took_ns) >= self.suspect_ns else "healthy"

    def ranks(self, state: Health) -> tuple[int, ...]:
        """The groups in a state."""
        return tuple(rank for rank in range(len(self._pulses)) if self.state(rank) == state)

    @property
    def open_ranks(self) -> tuple[int, ...]:
        """The groups that may get work: the healthy ones; with none of them, those that are not lost."""
        return self.ranks("healthy") or self.ranks("suspect")

    @property
    def deadline_ns(self) -> int | None:
        """When the first of the groups that owe an answer will be lost; None if none owes any."""
        due = [pulse.since_ns for pulse in self._pulses if pulse.num_due]
        return min(due) + self.lost_ns if due else None

    def error(self) -> DeadlineError | None:
        """What to raise when groups are lost; None if none is."""
        lost = tuple(rank for rank in self.ranks("lost") if rank not in self._given_up)
        if not lost:
            return None
        names = ", ".join(f"DP group {rank}" for rank in lost[:4]) + (" ..." if len(lost) > 4 else "")
        silent = max(map(self.silent_ns, lost)) / 1e9
        return DeadlineError(
            op="heartbeat",
            rank=f"inbox of {self.name}",
            peer=names,
            field="reports",
            expected=f"an answer within {self.lost_ns / 1e9:g} s",
            seen=f"silence for {silent:g} s ({len(lost)} of {len(self._pulses)} DP groups lost)",
            at_ns=self._now(),
        )

    def report(self) -> TEHealth:
        return TEHealth(
            name=self.name,
            num_groups=len(self._pulses),
            shell=self.shell,
            suspect_groups=self.ranks("suspect"),
            lost_groups=self.ranks("lost"),
        )
