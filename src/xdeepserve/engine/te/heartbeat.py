"""Heartbeats and probes: the health of a TE's DP groups as its TE-shell knows it, in virtual time (XDS 6.1).

This is the second tier; in the first one the control plane asks the shell
(`engine/serving/control_plane.py`).

A die answers each step that it is launched with, by reporting the step's end; an idle die answers probes. As
in the paper, a die that hangs in the middle of a step cannot answer a probe either. The state of a DP group
follows from the time that its answers take:

    healthy   it owes nothing, or has owed it for a short time only, and its last answer came soon
    suspect   it has owed an answer for `suspect_s`, or its last one took so long
    lost      it has owed an answer for `lost_s`

A suspect group is healthy again with its next answer in good time. Where exchanges are barriers, a slow die
silences all dies that wait for it: then all groups are suspect, and the shell has no better choice. A die
that stalls there is named by the dies that wait for it, at the deadline of the exchange. That deadline comes
a little before the groups count as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xdeepserve.engine.deploy.deployment import HealthConfig
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.te.reports import Health, TEHealth
from xdeepserve.errors import DeadlineError


@dataclass
class _Pulse:
    """Answers owed by a DP group's dies.

    `since_ns`: when the oldest owed answer was asked for; if none is owed, when the last one came.
    """

    num_due: int = 0
    since_ns: int = 0
    took_ns: int = 0  # the last answer
    num_probes: int = (
        0  # answers to probes that are missing; an error code forgives them, and they still come
    )


class Heartbeats:
    """Tracks the health of a TE's DP groups, and probes those that are idle; `now` reads the clock in ns.

    `probes` has a function for each group, which asks all its dies for a sign of life and returns how many
    it has asked. `is_given_up` says which groups the TE goes on without, as its book of members has them.
    """

    def __init__(
        self,
        name: str,
        probes: Sequence[Callable[[], int]],
        config: HealthConfig,
        now: Callable[[], int],
        is_given_up: Callable[[GroupRank], bool],
    ) -> None:
        self.name, self._probes, self._now, self.is_given_up = name, probes, now, is_given_up
        self.probe_ns, self.suspect_ns, self.lost_ns = (
            round(1e9 * seconds) for seconds in (config.probe_s, config.suspect_s, config.lost_s)
        )
        self._ranks = tuple(map(GroupRank, range(len(probes))))
        self._pulses = [_Pulse() for _ in self._ranks]
        self.shell: Health = "healthy"  # what the control plane knows of the shell itself
        self.wake: Callable[[], None] = lambda: None  # the TE's loop has another deadline to look at
        self._answered: asyncio.Event | None = None  # set when no answer to a probe is missing
        self._is_over = False  # nobody answers any more

    # ---- questions and answers ----------------------------------------------------------------------

    def ask(self, group: GroupRank, num_answers: int, delay_ns: int = 0) -> None:
        """Note how many dies of a DP group were asked; the question reaches them after `delay_ns`."""
        pulse = self._pulses[group]
        if not pulse.num_due:
            pulse.since_ns = self._now() + delay_ns
        pulse.num_due += num_answers

    def hear(self, group: GroupRank) -> None:
        """Note an answer from a die of a DP group, even if the answer was forgiven meanwhile."""
        pulse, now = self._pulses[group], self._now()
        pulse.num_due = max(0, pulse.num_due - 1)
        pulse.took_ns, pulse.since_ns = max(0, now - pulse.since_ns), now

    def forget(self, group: GroupRank) -> None:
        """Expect no answers of a DP group that has been given up."""
        had_probes = self._pulses[group].num_probes > 0
        self._pulses[group] = _Pulse()
        if had_probes:
            self._release_if_answered()

    def notice(self, group: GroupRank) -> None:
        """Note an unasked sign of life: the group still owes its answers, but its silence starts anew."""
        self._pulses[group].since_ns = max(self._pulses[group].since_ns, self._now())

    def forgive(self) -> None:
        """Treat all groups as just heard of; answers to earlier questions are no longer owed."""
        for pulse in self._pulses:
            pulse.num_due, pulse.took_ns, pulse.since_ns = 0, 0, self._now()

    # ---- probes -------------------------------------------------------------------------------------

    def probe(self, group: GroupRank) -> None:
        """Send a probe to all dies of a DP group."""
        num_dies = self._probes[group]()
        self.ask(group, num_dies)
        self._pulses[group].num_probes += num_dies

    def hear_probe(self, group: GroupRank) -> None:
        """Note an answer to a probe from a die of a DP group."""
        self.hear(group)
        self._pulses[group].num_probes = max(0, self._pulses[group].num_probes - 1)
        self._release_if_answered()

    async def probe_all(self) -> None:
        """Probe all dies of an idle TE, and wait for the answers or for the TE's end.

        A TE that works hears of its dies anyway.
        """
        ranks = [rank for rank in self._ranks if not self.is_given_up(rank)]
        if self._is_over or any(map(self.is_due, ranks)):
            return
        self._answered = asyncio.Event()
        for rank in ranks:
            self.probe(rank)
        self.wake()
        await self._answered.wait()

    def probe_again(self) -> None:
        """Probe DP groups not heard of for a while, since they may be well again."""
        due = [rank for rank in self._ranks if self.wants_probe(rank)]
        if self._is_over or not due:
            return
        for rank in due:
            self.probe(rank)
        self.wake()

    def end_probes(self) -> None:
        """Release callers that wait for answers; nobody answers any more."""
        self._is_over = True
        self._release()

    def _release_if_answered(self) -> None:
        if not any(pulse.num_probes for pulse in self._pulses):
            self._release()

    def _release(self) -> None:
        if self._answered is not None:
            self._answered.set()
            self._answered = None

    # ---- states -------------------------------------------------------------------------------------

    def is_due(self, group: GroupRank) -> bool:
        """Whether a group owes an answer."""
        return self._pulses[group].num_due > 0

    def silent_ns(self, group: GroupRank) -> int:
        """How long a group has owed an answer; 0 if it owes none."""
        pulse = self._pulses[group]
        return max(0, self._now() - pulse.since_ns) if pulse.num_due else 0

    def wants_probe(self, group: GroupRank) -> bool:
        """Whether a DP group owes no answer and was last heard of at least `probe_ns` ago."""
        pulse = self._pulses[group]
        if self.is_given_up(group):
            return False
        return not pulse.num_due and self._now() - pulse.since_ns >= self.probe_ns

    def state(self, group: GroupRank) -> Health:
        silent = self.silent_ns(group)
        if self.is_given_up(group) or silent >= self.lost_ns:
            return "lost"
        return "suspect" if max(silent, self._pulses[group].took_ns) >= self.suspect_ns else "healthy"

    def ranks(self, state: Health) -> tuple[GroupRank, ...]:
        """Return the ranks of DP groups in a given state."""
        return tuple(group for group in self._ranks if self.state(group) == state)

    @property
    def has_healthy(self) -> bool:
        """Whether some group is healthy."""
        return any(self.state(group) == "healthy" for group in self._ranks)

    @property
    def open_ranks(self) -> tuple[GroupRank, ...]:
        """Ranks of DP groups for new work: the healthy ones, or if there are none, the suspect ones."""
        return self.ranks("healthy") or self.ranks("suspect")

    @property
    def deadline_ns(self) -> int | None:
        """Virtual time when the first DP group that owes an answer will be lost; None if none owes any."""
        due = [pulse.since_ns for pulse in self._pulses if pulse.num_due]
        return min(due) + self.lost_ns if due else None

    def error(self) -> DeadlineError | None:
        """Return the error to raise when DP groups are lost; None if all are there."""
        lost = tuple(group for group in self.ranks("lost") if not self.is_given_up(group))
        if not lost:
            return None
        names = ", ".join(f"DP group {group}" for group in lost[:4]) + (" ..." if len(lost) > 4 else "")
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
